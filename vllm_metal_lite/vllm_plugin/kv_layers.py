"""A model's layers for vLLM's block manager: the specs that it gets, and the groups it makes."""

from dataclasses import replace
from functools import cached_property
from itertools import chain

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)

from vllm_metal_lite import envs
from vllm_metal_lite.assembly import choose_attention
from vllm_metal_lite.backend import dtype_name, mx
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.scheduler.kv_groups import KVGroup, kv_groups
from vllm_metal_lite.vllm_plugin.state_slot_manager import (
    StateSlotSpec,
    has_own_pool,
    state_slot_spec,
)

_NAME = "layers.{}"
_STATES = "states.{}"

# A purely recurrent model stores nothing in blocks, but vLLM counts tokens in blocks.
_TOKEN_COUNTER = LayerSpec(1, 8, 8, mx.float32)


class KVLayers:
    """This rank's layers that keep K and V.  Sleep frees the model, so no model is kept here.

    specs: the specs of the layers that vLLM counts; one token counter if no layer keeps K and V.
    """

    def __init__(self, model: LoadedModel, ranks: RankGroup) -> None:
        self.specs = model.kv_specs or [_TOKEN_COUNTER]
        self._num_attention_layers = len(model.packed.layout.specs)
        self._ranks = ranks

    def kv_cache_specs(
        self, model: LoadedModel, block_size: int, num_state_slots: int | None
    ) -> dict[str, KVCacheSpec]:
        """vLLM's specs, by the layer's name.

        With several groups, windows are reported only if the groups' layers may share arrays.
        num_state_slots: None unless vLLM gives state slots to requests.  vLLM wants the same number
        of layers in each group, so the states count as that many layers.
        """
        specs = self.specs
        if self.has_several_groups and not self.may_share_arrays(model, block_size):
            specs = [replace(s, window=None) for s in specs]
        start = self._first_layer
        found: dict[str, KVCacheSpec] = {
            _NAME.format(start + i): _kv_cache_spec(s, block_size) for i, s in enumerate(specs)
        }
        if num_state_slots is not None:
            page = found[_NAME.format(start)].page_size_bytes
            spec = state_slot_spec(num_state_slots, block_size, page)
            found |= {_STATES.format(start + i): spec for i in range(len(specs))}
        return found

    def groups(
        self, kv_cache_config: KVCacheConfig, block_size: int
    ) -> tuple[list[KVGroup], int | None]:
        """Return (the groups of K and V that vLLM made, the index of its group of states or None).

        Raises ConfigError if a group has blocks of another size than block_size.
        """
        start = self._first_layer
        numbers = {_NAME.format(start + i): i for i in range(self._num_attention_layers)}
        groups, state_group = [], None
        for number, group in enumerate(kv_cache_config.kv_cache_groups):
            if group.kv_cache_spec.block_size != block_size:
                raise ConfigError(
                    f"vLLM made a group of layers with blocks of {group.kv_cache_spec.block_size} "
                    f"tokens beside others of {block_size}; vllm-metal-lite needs one size"
                )
            if isinstance(group.kv_cache_spec, StateSlotSpec):
                state_group = number
                continue
            layers = tuple(numbers[name] for name in group.layer_names if name in numbers)
            groups.append(KVGroup(layers, num_blocks=kv_cache_config.num_blocks))
        return groups, state_group

    def no_prefix_cache(self, model: LoadedModel, states_mode: str) -> str | None:
        """Why vLLM cannot cache prefixes of this model, or None.  states_mode: mamba_cache_mode."""
        if not model.state_bytes:
            return None
        if states_mode != "align":
            return "vLLM does not know that its layers keep states"
        if len(set(self.specs)) > 1:
            return "it has recurrent states and attention layers of several kinds"
        if not has_own_pool():
            return "this vLLM has one pool of blocks for K and V and for recurrent states"
        return None

    @cached_property
    def _first_layer(self) -> int:
        """The number of this rank's first layer that keeps K and V, counted through the stages."""
        if not self._ranks.stages:
            return 0
        return sum(self._ranks.gather(len(self.specs))[: self._ranks.rank])

    @cached_property
    def _windows(self) -> list[list[int | None]]:
        """The windows of the groups of layers, by stage."""
        stages = self._ranks if self._ranks.stages else ALONE
        return stages.gather([group.window for group in kv_groups(self.specs)])

    @property
    def has_several_groups(self) -> bool:
        """Whether the layers form several groups, here or in another stage."""
        return len(set(chain.from_iterable(self._windows))) > 1

    def may_share_arrays(self, model: LoadedModel, block_size: int) -> bool:
        """Whether layers of several groups may share arrays, each in its own blocks.

        The layers must have one shape, and kernels must write the arrays: MLX's own operations copy
        the whole array if one layer writes while another still reads.  Each stage needs layers of
        all groups.
        """
        if any(windows != self._windows[0] for windows in self._windows):
            return False
        shapes = {(s.num_kv_heads, s.k_head_dim, s.v_head_dim, s.dtype) for s in self.specs}
        if len(shapes) > 1:
            return False
        store = PagedStore(model.kv_specs, 1, block_size)
        return choose_attention(model, store, envs.attention()).uses_kernels


def _kv_cache_spec(spec: LayerSpec, block_size: int) -> KVCacheSpec:
    # vLLM only uses these to count bytes, so give the width and dtype of stored rows.
    kwargs = {
        "block_size": block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.k_row.width,
        "head_size_v": spec.v_row.width,
        "dtype": getattr(torch, dtype_name(spec.k_row.kept_dtype)),
    }
    if spec.window is None:
        return FullAttentionSpec(**kwargs)
    return SlidingWindowSpec(**kwargs, sliding_window=spec.window)
