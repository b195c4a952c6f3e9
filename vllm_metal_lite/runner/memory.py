"""How many blocks fit on the device beside the weights, the states and a step's peak memory."""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from vllm_metal_lite import backend
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.errors import ConfigError, Option, OutOfMemoryError, size_text
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.step_peak import estimated_step_peak, step_peak_bytes
from vllm_metal_lite.scheduler.kv_groups import KVGroup, kv_groups

logger = logging.getLogger(__name__)

# Assumed length of the average request, in windows.  Divides memory between windowed layers and
# full-attention layers.
_AVERAGE_WINDOWS = 4

# Windows of idle prefixes get this share of the store's memory before contexts grow beyond a given
# max_model_len.
_IDLE_SHARE = 1 / 16

# The largest share of usable memory that is set aside for the tower's work on one picture.
_PICTURE_SHARE = 1 / 8

# The share of the memory for store and checkpoints that checkpoints get.
_CHECKPOINT_SHARE = 0.25
# A conversation uses up to five: after the system prompt, where its last turn began, before the
# question, after the question, and after the answer.  Each running conversation may have two idle
# ones beside it.
_CHECKPOINTS_A_SEAT = 15

_ANY_LENGTH = 1 << 62

_gib = partial(size_text, digits=2)


def size_store(
    model: LoadedModel,
    config: EngineConfig,
    peak_of: Callable[[LoadedModel, EngineConfig, int], int] = step_peak_bytes,
    picture_peak: int = 0,
) -> tuple[list[KVGroup], int, int]:
    """Returns (KV groups with their blocks, max_model_len, number of state slots) for this device.

    peak_of: the bytes that a full step needs beyond weights, states and store.  picture_peak: the
    bytes that the largest picture needs while the tower runs, which may be beside a step.
    config.num_blocks, if given, sizes the first group; the other groups get the most that running
    requests can need, and the share of memory for windows of idle prefixes.
    Raises OutOfMemoryError, with the sum, if the device is too small.  Raises ConfigError if
    max_model_len exceeds the model's context or the blocks.  A guessed context length only causes a
    warning.
    """
    max_model_len, limit = _wanted_length(model, config), backend.memory_limit()
    sizing = _Sizing(model, config, max_model_len, picture_peak)
    if config.num_blocks is not None:
        groups, num_state_slots = sizing.given(config.num_blocks, limit)
    else:
        groups, num_state_slots = sizing.fitting(limit, peak_of(model, config, max_model_len))
    capacity, num_blocks = min((_capacity(g, config.block_size), g.num_blocks) for g in groups)
    if capacity < max_model_len and config.max_model_len is not None:
        more: tuple = ("; raise ", Option("memory_fraction"), " or lower ", Option("kv_bits"))
        raise ConfigError(
            Option("max_model_len"),
            f" must be at most the {capacity} tokens that {num_blocks} blocks of "
            f"{config.block_size} hold, got {max_model_len}",
            *(more if config.num_blocks is None else ()),
        )
    return groups, min(capacity, max_model_len), num_state_slots


def _wanted_length(model: LoadedModel, config: EngineConfig) -> int:
    """The context length that the user asks for, or else the model's."""
    wanted, longest = config.max_model_len, model.max_position
    if model.context_guess is not None and (wanted is None or wanted > longest):
        used = "max_model_len may be larger" if wanted is None else f"max_model_len is {wanted}"
        logger.warning(
            f"config.json does not say how long the context of {model.name} is; "
            f"{longest} tokens are a guess ({model.context_guess}), and {used}"
        )
    elif wanted is not None and wanted > longest:
        raise ConfigError(
            Option("max_model_len"),
            f" must be at most the model's context length, {longest}, got {wanted}",
        )
    return wanted or longest


def store_bytes(model: LoadedModel, groups: Sequence[KVGroup], block_size: int) -> int:
    """The bytes of K and V in these groups."""
    specs = model.kv_specs
    return sum(
        g.num_blocks * block_size * specs[layer].bytes_per_token
        for g in groups
        for layer in g.layers
    )


def _capacity(group: KVGroup, block_size: int) -> int:
    """The longest context that the group holds.  A group whose window fits holds any length."""
    size = group.num_blocks * block_size
    return size if group.most_blocks(2 * size, 1, block_size) > group.num_blocks else _ANY_LENGTH


@dataclass(frozen=True)
class _Sizing:
    """Sizes the KV groups and the state slots of a model for contexts of max_model_len, beside a
    picture that needs picture_peak bytes."""

    model: LoadedModel
    config: EngineConfig
    max_model_len: int
    picture_peak: int

    def given(self, num_blocks: int, limit: int) -> tuple[list[KVGroup], int]:
        """Sizes for a given num_blocks of the first group: (groups, state slots)."""
        first, *others = kv_groups(self.model.kv_specs)
        groups = [replace(first, num_blocks=num_blocks)]
        groups += [replace(g, num_blocks=min(num_blocks, self._most_owned(g))) for g in others]
        store = store_bytes(self.model, groups, self.config.block_size)
        left = limit - self.model.weight_bytes - store
        num_state_slots = self._state_slots(left, num_blocks)
        short = num_state_slots * self.model.state_bytes - left
        if short > 0:
            raise OutOfMemoryError(
                Option("num_blocks"),
                f"={num_blocks} needs {_gib(limit + short)} in all (weights "
                f"{_gib(self.model.weight_bytes)}{self._states(num_state_slots)} + KV "
                f"{_gib(store)}), and this device has {_gib(limit)}; lower it",
                *self._for_states(num_state_slots),
            )
        peak = estimated_step_peak(self.model, self.config, self.max_model_len) if others else 0
        peak += self._for_a_picture(limit)
        room = self._usable(limit) - (limit + short) - peak
        return self._with_idle_windows(groups, room), num_state_slots

    def fitting(self, limit: int, peak: int) -> tuple[list[KVGroup], int]:
        """The KV groups and the state slots that fit beside a step's peak memory."""
        model, config = self.model, self.config
        first, *others = kv_groups(model.kv_specs)

        def groups(num_blocks: int) -> list[KVGroup]:
            counts = [self._windowed_blocks(num_blocks, group) for group in others]
            pairs = zip((first, *others), (num_blocks, *counts), strict=True)
            return [replace(group, num_blocks=count) for group, count in pairs]

        def size(num_blocks: int) -> int:
            return store_bytes(model, groups(num_blocks), config.block_size)

        picture = self._for_a_picture(limit)
        peak += picture
        left = self._usable(limit) - model.weight_bytes - peak
        most = self._most_owned(first)
        if config.enable_prefix_caching:
            # Room for idle prefixes, also if each layer has a window.
            most = config.max_num_seqs * self._blocks(self.max_model_len)
        num_state_slots = self._state_slots(left, most)
        left -= num_state_slots * model.state_bytes
        if left < size(1):
            raise OutOfMemoryError(
                f"{model.name} does not fit: weights {_gib(model.weight_bytes)}"
                f"{self._states(num_state_slots)} + a step of "
                f"{config.max_num_batched_tokens} tokens{' and a picture' * (picture > 0)} "
                f"{_gib(peak)} + one block of KV "
                f"{_gib(size(1))}, and only {_gib(self._usable(limit))} of {_gib(limit)} may be "
                "used; lower ",
                Option("max_num_batched_tokens"),
                *self._for_states(num_state_slots),
                " or raise ",
                Option("memory_fraction"),
            )
        # Blocks of a purely recurrent model hold no data; they only count tokens.
        num_blocks = bisect_right(range(most + 1), left, key=size) - 1
        if self.config.enable_prefix_caching and any(
            self._most_owned(g) < self._share(g) * num_blocks for g in others
        ):
            asked = self._blocks(config.max_model_len or 0)
            fewer = bisect_right(range(most + 1), left * (1 - _IDLE_SHARE), key=size) - 1
            num_blocks = max(fewer, min(num_blocks, asked))
        return self._with_idle_windows(groups(num_blocks), left - size(num_blocks)), num_state_slots

    def _with_idle_windows(self, groups: list[KVGroup], room: float) -> list[KVGroup]:
        """Give the groups blocks for windows of idle prefixes, as far as `room` bytes hold them.
        There is at most one such window for each average request that the first group holds."""
        if not self.config.enable_prefix_caching or room <= 0:
            return groups
        num_blocks = groups[0].num_blocks
        most = [
            min(math.ceil(self._share(g) * num_blocks), num_blocks - g.num_blocks) for g in groups
        ]
        idle = [replace(g, num_blocks=count) for g, count in zip(groups, most, strict=True)]
        part = min(room / max(store_bytes(self.model, idle, self.config.block_size), 1), 1)
        pairs = zip(groups, most, strict=True)
        return [replace(g, num_blocks=g.num_blocks + int(part * count)) for g, count in pairs]

    def _state_slots(self, left: float, num_blocks: int) -> int:
        """The number of slots for recurrent states: one per seat, and those of checkpoints.

        left: the bytes that weights and a step leave; if the user gave `num_blocks`, the bytes that
        weights and store leave.  num_blocks: the most blocks of the first group.  Each checkpoint
        is at the end of a block, so there are no more checkpoints than blocks.
        Checkpoints are few and large, and a prefix needs its checkpoint as well as its blocks.  So
        they get _CHECKPOINT_SHARE of the bytes that the seats leave, and at most
        _CHECKPOINTS_A_SEAT slots a seat unless state_cache_gib is given.
        """
        config, seats, size = self.config, self.config.max_num_seqs, self.model.state_bytes
        if not size:
            return 0
        if not self.config.enable_prefix_caching:
            return seats
        if config.state_cache_gib is not None:
            return seats + int(min(config.state_cache_gib * 2**30 / size, num_blocks))
        fitting = max(int((left - seats * size) * _CHECKPOINT_SHARE / size), 0)
        return seats + min(_CHECKPOINTS_A_SEAT * seats, num_blocks, fitting)

    def _for_a_picture(self, limit: int) -> int:
        """The bytes that are set aside for the tower: those of the largest picture, but at most
        _PICTURE_SHARE.  Some models take pictures of 16 million pixels, which few people send."""
        most = int(self._usable(limit) * _PICTURE_SHARE)
        if self.picture_peak > most:
            logger.info(
                f"the largest picture needs {_gib(self.picture_peak)} while the model sees it; "
                f"{_gib(most)} are set aside for pictures"
            )
        return min(self.picture_peak, most)

    def _usable(self, limit: int) -> float:
        return limit * (self.config.memory_fraction or profile().memory_fraction)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _most_owned(self, group: KVGroup) -> int:
        """The largest number of blocks that all seats can own during a step."""
        seats, size = self.config.max_num_seqs, self.config.block_size
        # Each seat's new tokens may start in a partly filled block.
        new_blocks = seats + self._blocks(self.config.max_num_batched_tokens)
        owned = seats * group.most_blocks(self.max_model_len, 1, size) + new_blocks
        return min(seats * self._blocks(self.max_model_len), owned)

    def _windowed_blocks(self, num_blocks: int, group: KVGroup) -> int:
        """The number of blocks of a windowed group when the first group has num_blocks.

        The group gets the share that an average request needs, but no more than it can ever own.
        A larger share favours short requests, and a smaller share favours long contexts.  One
        request and a step of its tokens always fit.
        """
        config, longest = self.config, self.max_model_len
        least = group.most_blocks(longest, config.max_num_batched_tokens, config.block_size)
        most = min(num_blocks, self._most_owned(group))
        return min(most, max(math.ceil(self._share(group) * num_blocks), least))

    def _share(self, group: KVGroup) -> float:
        """How many blocks of a windowed group an average request needs for each of its blocks in
        the first group.  Such a request is some windows long, at most half of max_model_len."""
        longest = self.max_model_len
        average = min(_AVERAGE_WINDOWS * (group.window or longest), longest // 2)
        own = group.most_blocks(average, 1, self.config.block_size)
        return own / max(self._blocks(average), 1)

    def _states(self, num_slots: int) -> str:
        """The words about recurrent states in a message."""
        if not num_slots:
            return ""
        seats = self.config.max_num_seqs
        text = f" + recurrent states of {seats} requests"
        text += f" and {num_slots - seats} checkpoints" if num_slots > seats else ""
        return f"{text} {_gib(num_slots * self.model.state_bytes)}"

    def _for_states(self, num_slots: int) -> tuple:
        """The words in a message that name the options for fewer states."""
        text: tuple = (" or ", Option("max_num_seqs")) if num_slots else ()
        if num_slots > self.config.max_num_seqs:
            text += " or ", Option("state_cache_gib")
        return text
