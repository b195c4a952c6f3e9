"""One architecture through every kind of step, against mlx-lm running each request alone.

The requests are of fixed tokens, generated ones included, so that every step's logits have a
counterpart: mlx-lm's own path, the prompt in one go and then token by token, with its own caches.
At the end the engine serves all of them over too few blocks; its greedy tokens must be mlx-lm's.
Steps go through the runner with rows of padding, over blocks and state slots in random order.  NaN
is in every slot of the store that holds nothing, or what is behind a window, and in every state
slot that nobody needs.  Errors are relative to the scale of the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from tests.support.engine.poison import poison, poison_free_blocks, poison_states
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, SegmentState
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.layout import Node, StateLayer
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.runner import runner
from vllm_metal_lite.runner.step_path import StepPath
from vllm_metal_lite.sampling.sampler import SamplerOutput
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.kv_groups import kv_groups

TOLERANCE = 1e-4
BLOCKS, BLOCK_SIZE = 32, 8
STATE_SLOTS = 8
PADDING = 3

# Three ragged requests, and one that begins like the last of them for two blocks.
PROMPT_LENGTHS = (5, 13, 30, 22)
SHARED, DONOR, HEIR = 2 * BLOCK_SIZE, 2, 3
_TOKENS = tiny.prompts(4, 33, 33, seed=1)
_TOKENS[HEIR][:SHARED] = _TOKENS[DONOR][:SHARED]
SEQUENCES = [tokens[: n + 3] for tokens, n in zip(_TOKENS, PROMPT_LENGTHS, strict=True)]

PROMPTS = [s[:n] for s, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)]
GENERATED = 20  # tokens by the engine


class Bench:
    """Requests stepped by hand through one store; the runner's sampler, too."""

    state = None

    def __init__(self, model: LoadedModel, seed: int = 0) -> None:
        self.groups = [replace(g, num_blocks=BLOCKS) for g in kv_groups(model.kv_specs)]
        self.store = PagedStore(
            model.kv_specs, self.groups, BLOCK_SIZE, states=model.packed.state_store(STATE_SLOTS)
        )
        self.runner = runner.ModelRunner(
            model.packed, StepPath(ReferenceAttention(self.store)), self
        )
        self.inputs = InputBatch(6, 64, BLOCK_SIZE, len(self.groups))
        rng = np.random.default_rng(seed)
        self.free = [rng.permutation(BLOCKS).tolist() for _ in self.groups]
        self.seats: dict[int, int] = {}
        self.blocks: dict[int, list[list[int]]] = {}  # of each KV group
        self.computed: dict[int, int] = {}
        self.free_slots = rng.permutation(STATE_SLOTS).tolist()
        self.slots: dict[int, int] = {}  # each request's own state
        self.checkpoints: dict[int, int] = {}  # its state after SHARED tokens

    def admit(self, request: int, computed: int = 0, donor: int | None = None) -> None:
        """Give a request a seat, a state slot, and blocks for all it will ever be behind those it
        shares."""
        sequence, shared = SEQUENCES[request], computed // BLOCK_SIZE
        self.seats[request] = seat = self.inputs.add(sequence, PROMPT_LENGTHS[request])
        missing = -(-len(sequence) // BLOCK_SIZE) - shared
        self.blocks[request] = [
            [
                *(self.blocks[donor][g][:shared] if shared else ()),
                *(free.pop() for _ in range(missing)),
            ]
            for g, free in enumerate(self.free)
        ]
        self.inputs.append_blocks(seat, *self.blocks[request])
        self.computed[request] = computed
        self.slots[request] = self.free_slots.pop()

    def preempt(self, request: int) -> None:
        """Take everything back; the blocks are the next to be given away."""
        self.inputs.remove(self.seats.pop(request))
        for free, blocks in zip(self.free, self.blocks.pop(request), strict=True):
            free += blocks
        self.free_slots.append(self.slots.pop(request))
        del self.computed[request]

    def step(
        self, *segments: tuple[int, int], known: int = 0, checkpoint: bool = False
    ) -> dict[tuple[int, int], np.ndarray]:
        """Compute a number of tokens of each request, in this order; logits by (request, tokens).

        known: tokens that each request has at least; a segment that ends before reports nothing.
        checkpoint: the donor leaves its state after SHARED tokens.
        """
        requests, counts = (np.array(x) for x in zip(*segments, strict=True))
        rows = np.array([self.seats[r] for r in requests])
        start = np.array([self.computed[r] for r in requests])
        self.inputs.num_tokens[rows] = np.maximum(start + counts, known)
        self._poison()
        if checkpoint:
            self.checkpoints[DONOR] = self.free_slots.pop()
        states = [self._slots_of(request, count) for request, count in segments]
        has_states = self.store.states.num_slots > 0
        batch = self.inputs.pack(rows, start, counts, states if has_states else None)
        with patch.object(runner, "bucket", lambda rows: rows + PADDING):
            self.logits = None
            self.runner.execute(batch)
        for request, count in segments:
            self.computed[request] += count
        terminal = [int(requests[i]) for i in batch.sample_segments]
        logits = [] if self.logits is None else np.array(self.logits.astype(mx.float32))
        return {(r, self.computed[r]): x for r, x in zip(terminal, logits, strict=True)}

    def _slots_of(self, request: int, count: int) -> SegmentState:
        """The slots of a request's next segment.  The heir starts from the donor's checkpoint."""
        own, start = self.slots[request], self.computed[request]
        initial = own if start else EMPTY_SLOT
        if request == HEIR and start == SHARED:
            initial = self.checkpoints.get(DONOR, own)
        inside = request == DONOR and start < SHARED < start + count
        taken = ((SHARED, self.checkpoints[DONOR]),) if inside and self.checkpoints else ()
        return SegmentState(initial, own, taken)

    def __call__(self, logits: mx.array, *_: object) -> SamplerOutput:
        """As the runner's sampler: greedy, and notes the logits."""
        self.logits = logits
        token_ids = mx.argmax(logits, axis=-1)
        return SamplerOutput(token_ids, None, token_ids)

    def _poison(self) -> None:
        """NaN into every slot that holds nothing: free blocks, ends of blocks, the padding, and
        what is behind a window of all who share it."""
        keep = []
        for g, group in enumerate(self.groups):
            full = np.zeros((BLOCKS + 1) * BLOCK_SIZE, bool)
            for request, count in self.computed.items():
                first = 0 if group.window is None else max(count - group.window + 1, 0)
                at = np.arange(first, count)
                full[
                    np.array(self.blocks[request][g])[at // BLOCK_SIZE] * BLOCK_SIZE
                    + at % BLOCK_SIZE
                ] = True
            keep.append(full)
        poison(self.store, keep)
        started = {self.slots[request] for request, count in self.computed.items() if count}
        poison_states(self.store.states, started | {*self.checkpoints.values()})


Logits = dict[tuple[int, int], np.ndarray]


def packed(bench: Bench) -> Logits:
    """Three whole prompts in one step, then decodes together."""
    for r in range(3):
        bench.admit(r)
    out = bench.step((0, 5), (1, 13), (2, 30))
    for _ in range(2):
        out |= bench.step((0, 1), (1, 1), (2, 1))
    return out


def chunked(bench: Bench) -> Logits:
    """Prompts in chunks, across the edges of blocks and of windows; of like length and unlike
    position, too, which a recurrent layer may take together."""
    for r in (1, 2):
        bench.admit(r)
    out = bench.step((1, 4), (2, 4))
    for chunks in [((2, 3),), ((1, 8), (2, 8)), ((1, 1), (2, 14)), ((1, 1), (2, 1))]:
        out |= bench.step(*chunks)
    return out


def mixed(bench: Bench) -> Logits:
    """Whole prompts, chunks that report nothing, a chunk of one token, decodes: in one step."""
    for r in range(3):
        bench.admit(r)
    out = bench.step((0, 5), (1, 13))
    out |= bench.step((1, 1), (2, 12), known=14)
    out |= bench.step((0, 1), (1, 1), (2, 17))
    out |= bench.step((1, 1), (2, 1), (0, 1))
    return out


def preempted(bench: Bench) -> Logits:
    """One loses its blocks to another, which begins with a single token, and begins again."""
    for r in (1, 2):
        bench.admit(r)
    out = bench.step((1, 13), (2, 30))
    out |= bench.step((1, 1), (2, 1))
    bench.preempt(1)
    bench.admit(0)
    out |= bench.step((2, 1), (0, 1))
    bench.admit(1)
    out |= bench.step((0, 1), (1, 14))
    out |= bench.step((0, 1), (1, 1), (2, 1))
    return out


def prefix_hit(bench: Bench) -> Logits:
    """A request begins behind two blocks, and from the state there, that another has computed."""
    bench.admit(DONOR)
    out = bench.step((DONOR, 30), checkpoint=True)
    bench.admit(HEIR, SHARED, DONOR)
    out |= bench.step((DONOR, 1), (HEIR, 6))
    out |= bench.step((DONOR, 1), (HEIR, 1))
    return out


def same_step_hit(bench: Bench) -> Logits:
    """The same, in the step that computes the blocks, as vLLM grants it.  Not for states, nor for
    attention by segment: both are read before they are written."""
    bench.admit(DONOR)
    bench.admit(HEIR, SHARED, DONOR)
    out = bench.step((HEIR, 6), (DONOR, 30))
    out |= bench.step((DONOR, 1), (HEIR, 1))
    return out


def wrong_seat(bench: Bench) -> Logits:
    """The control, which must differ: a decode in another request's seat, its blocks and state."""
    for r in (1, 2):
        bench.admit(r)
    bench.step((1, 13), (2, 30))
    bench.seats[1], bench.blocks[1] = bench.seats[2], bench.blocks[2]
    bench.slots[1] = bench.slots[2]
    bench.inputs.token_ids[bench.seats[1], : len(SEQUENCES[1])] = SEQUENCES[1]
    return bench.step((1, 1))


MODES: dict[str, Callable[[Bench], Logits]] = {
    f.__name__: f for f in (packed, chunked, mixed, preempted, prefix_hit, same_step_hit)
}
HITS = {"prefix_hit", "same_step_hit"}


def modes_of(packed: PackedModel) -> set[str]:
    """The modes that a model can have."""
    if packed.no_prefix_cache:
        return MODES.keys() - HITS
    if packed.layout.states or packed.by_segment:
        return MODES.keys() - {"same_step_hit"}
    return {*MODES}


def serve(model: LoadedModel, kv_bits: int | None = None) -> tuple[list[list[int]], dict[str, int]]:
    """The engine's greedy tokens of each prompt, over too few blocks for all; its counters."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    options |= {"kv_bits": kv_bits, "speculate": "off"}
    engine = LLMEngine(model, EngineConfig(block_size=BLOCK_SIZE, num_blocks=10, **options))
    poison_free_blocks(engine)
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        named = [SHARED] if len(prompt) > SHARED else []
        engine.add_request(str(i), prompt, params, checkpoints=named)
    done = tiny.run(engine)
    return [done[str(i)].outputs[0].token_ids for i in range(len(PROMPTS))], engine.metrics()


@dataclass
class Result:
    """What one configuration showed.

    status: "passed", "failed", "refused" (by us, when loading), or "cannot run" (mlx-lm by itself).
    state: what its layers keep.  attention: "packed", or "by segment", which is slower.
    recurrent: "packed", "in sequences", which is slower, or "-" without recurrent layers.
    no_prefix_cache: why prefixes are not cached, or "".
    errors: the largest of each mode, relative; inf: it raised; of "engine", 1 if a token differs.
    control: the error of `wrong_seat`.
    early, order: how far, in standard deviations of the last logits, they move when the first half
    of the tokens changes, and when the order does.
    drift: mlx-lm decoding against mlx-lm reading the same tokens at once.
    """

    name: str
    status: str
    reason: str = ""
    state: str = ""
    attention: str = "packed"
    recurrent: str = "-"
    no_prefix_cache: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    control: float = 0.0
    early: float = 0.0
    order: float = 0.0
    drift: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)


@cache
def check(name: str) -> Result:
    """Run one configuration through everything; never raises."""
    result = Result(name, "cannot run")
    config = tiny.config_of(name)
    try:
        model = tiny.build(config)
        expected = [
            native_logits(model, s, n) for s, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)
        ]
        greedy = [
            [int(token) for token, _ in generate_step(mx.array(p), model, max_tokens=GENERATED)]
            for p in PROMPTS
        ]
        _sensitivity(model, result, expected)
    except (Exception, SystemExit) as e:
        result.reason = _one_line(e)
        return result
    try:
        loaded = loader.from_model(model, None, config, name)
    except ModelLoadError as e:
        result.status, result.reason = "refused", str(e)
        return result

    result.state = _state(loaded, config)
    if loaded.packed.by_segment:
        result.attention = "by segment"
    if loaded.packed.layout.states:
        result.recurrent = "in sequences" if loaded.packed.sees_sequences else "packed"
    result.no_prefix_cache = loaded.packed.no_prefix_cache or ""
    scale = float(np.abs(np.concatenate(expected)).max())
    runs = {
        mode: lambda run=run: _error(run(Bench(loaded)), expected, scale)
        for mode, run in MODES.items()
        if mode in modes_of(loaded.packed)
    }
    runs["engine"] = lambda: float(serve(loaded)[0] != greedy)
    for mode, run in runs.items():
        try:
            result.errors[mode] = run()
        except Exception as e:
            result.errors[mode] = float("inf")
            result.reason = result.reason or f"{mode}: {_one_line(e)}"
    again = native_logits(model, SEQUENCES[2], PROMPT_LENGTHS[2])
    result.errors["unpacked"] = _error({(2, 33): again[-1]}, expected, scale)
    result.control = _error(wrong_seat(Bench(loaded)), expected, scale)
    result.status = "passed" if result.worst < TOLERANCE else "failed"
    return result


def bfloat16_errors(name: str) -> tuple[float, float]:
    """How far bfloat16 is from float32 with the same (rounded) weights, root of the mean square,
    relative: packed by us, and run by mlx-lm itself."""
    config = tiny.config_of(name)
    models = [tiny.build(config) for _ in range(2)]
    for model in models:
        model.set_dtype(mx.bfloat16)
    models[1].set_dtype(mx.float32)
    own, exact = (
        [native_logits(m, s, n) for s, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)]
        for m in models
    )
    loaded = loader.from_model(models[0], None, config, name)
    scale = np.abs(np.concatenate(exact)).max()
    ours, theirs = [], []
    for run in (packed, chunked, mixed):
        for (r, n), x in run(Bench(loaded)).items():
            ours.append(x[: tiny.VOCAB] - exact[r][n - 1])
            theirs.append(own[r][n - 1] - exact[r][n - 1])
    return tuple(float(np.sqrt(np.mean(np.square(e))) / scale) for e in (ours, theirs))


def native_logits(
    model: nn.Module, tokens: list[int], prompt: int, make_caches: Callable = make_prompt_cache
) -> np.ndarray:
    """mlx-lm's logits (len(tokens), V): the prompt in one go, then token by token."""
    caches = make_caches(model)
    parts = [tokens[:prompt], *([t] for t in tokens[prompt:])]
    logits = [model(mx.array([part]), cache=caches)[0].astype(mx.float32) for part in parts]
    out = np.array(mx.concatenate(logits))[:, : tiny.VOCAB]
    if not np.isfinite(out).all():
        raise ValueError("its logits are not finite")
    return out


def _error(got: Logits, expected: list[np.ndarray], scale: float) -> float:
    """Largest error relative to scale; NaN counts as infinite."""
    worst = max(np.abs(x[: tiny.VOCAB] - expected[r][n - 1]).max() for (r, n), x in got.items())
    return float(worst / scale) if np.isfinite(worst) else float("inf")


def _sensitivity(model: nn.Module, result: Result, expected: list[np.ndarray]) -> None:
    tokens, prompt = SEQUENCES[2], PROMPT_LENGTHS[2]
    plain = native_logits(model, tokens, len(tokens))
    distant = [(t + 1) % tiny.VOCAB for t in tokens[: prompt // 2]]  # out of the windows' reach
    changed = native_logits(model, distant + tokens[prompt // 2 :], len(tokens))[-1]
    reordered = native_logits(model, [*tokens[-2::-1], tokens[-1]], len(tokens))[-1]
    scale = plain[-1].std()
    result.early = float(np.abs(changed - plain[-1]).std() / scale)
    result.order = float(np.abs(reordered - plain[-1]).std() / scale)
    result.drift = float(np.abs(plain - expected[2]).max() / np.abs(plain).max())


def _state(loaded: LoadedModel, config: dict[str, Any]) -> str:
    """What the layers keep, in their order, each kind once; "(a + b)" where one keeps both."""
    rank = (config.get("text_config") or config).get("kv_lora_rank")
    layout = loaded.packed.layout

    def kind(node: Node) -> str:
        if isinstance(node, tuple):
            return f"({' + '.join(map(kind, node))})"
        if isinstance(node, StateLayer):
            return "recurrent"
        if node is None:
            return "nothing"
        spec = layout.specs[node.index]
        is_latent = spec.num_kv_heads == 1 and rank in (spec.k_head_dim, spec.v_head_dim)
        kv = "latent" if is_latent else "KV"
        return "window" if spec.window else "chunk" if spec.attention_chunk else kv

    return ", ".join(dict.fromkeys(map(kind, layout.nodes)))


def _one_line(e: BaseException) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())}"[:200]
