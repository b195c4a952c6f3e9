"""Requests of fixed tokens through every kind of step, by hand.

Generated tokens are fixed too, so that every step's logits have a counterpart.  Steps go through
the runner with rows of padding, over blocks and state slots in random order.  NaN is in every slot
of the store that holds nothing, or what is behind a window, and in every state slot that nobody
needs.
"""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from tests.support.attention.oracle import slots_of
from tests.support.engine.poison import poison, poison_states
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, SegmentState
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.runner import runner
from vllm_metal_lite.runner.step_path import StepPath
from vllm_metal_lite.sampling.sampler import SamplerOutput
from vllm_metal_lite.scheduler.kv_groups import kv_groups

BLOCKS, BLOCK_SIZE = 32, 8
STATE_SLOTS = 8
PADDING = 3

# Three ragged requests, and one that begins like the last of them for two blocks.
PROMPT_LENGTHS = (5, 13, 30, 22)
SHARED, DONOR, HEIR = 2 * BLOCK_SIZE, 2, 3
_TOKENS = tiny.prompts(4, 33, 33, seed=1)
_TOKENS[HEIR][:SHARED] = _TOKENS[DONOR][:SHARED]
SEQUENCES = [tokens[: n + 3] for tokens, n in zip(_TOKENS, PROMPT_LENGTHS, strict=True)]


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
        """Give a request a seat, a state slot, and blocks for all of its tokens after the shared
        ones."""
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
        with patch.object(runner, "padded_rows", lambda rows: rows + PADDING):
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
                blocks = np.array(self.blocks[request][g])
                full[slots_of(blocks, np.arange(first, count), BLOCK_SIZE)] = True
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
    """The same, in the step that computes the blocks.  Not for states, which a step reads before it
    writes them."""
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


def modes_of(packed: PackedModel) -> set[str]:
    """The modes that a model can have."""
    return MODES.keys() - ({"same_step_hit"} if packed.layout.states else set())
