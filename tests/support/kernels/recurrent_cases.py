"""Steps of recurrent layers: segments of every kind, and what their kernels compute, in float64.

Pools hold NaN in every slot that no segment starts from.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.support.kernels.arrays import rounded
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT as EMPTY
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.kernels.recurrence import Gates
from vllm_metal_lite.recurrence.kernels import pack_segments

# (rtol, atol): results are rounded once to their type, and sums of some hundred terms of size 1 are
# in float32.
TOLERANCE = {mx.float32: (4e-6, 4e-6), mx.float16: (2**-11, 4e-6), mx.bfloat16: (2**-8, 4e-6)}


DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@dataclass
class Segments:
    """Segments of `lengths` rows (those in `fresh` start from zeros), and rows of padding.

    A segment has its own slot, drawn at random.  checkpoints: (segment, rows of it before).  moved:
    segments that leave their state in another slot than the one they start from.  in_place: the
    first checkpoint of each segment takes the slot that it starts from.
    """

    lengths: list[int]
    fresh: set[int] = field(default_factory=set)
    padding: int = 0
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    seed: int = 0
    in_place: bool = False

    def __post_init__(self) -> None:
        count = len(self.lengths)
        self.cu_seqlens = np.cumsum([0, *self.lengths])
        self.num_rows = int(self.cu_seqlens[-1]) + self.padding
        self.slots = 2 * count + len(self.checkpoints) + 2
        drawn = np.random.default_rng(self.seed).permutation(self.slots)
        self.final = drawn[:count]
        self.initial = np.array(
            [
                EMPTY if s in self.fresh else drawn[count + s] if s in self.moved else self.final[s]
                for s in range(count)
            ],
            np.int32,
        )
        self.taken = [
            (s, int(self.cu_seqlens[s]) + row, int(slot))
            for (s, row), slot in zip(self.checkpoints, drawn[2 * count :], strict=False)
        ]
        if self.in_place:
            first = {s: i for i, (s, _, _) in reversed([*enumerate(self.taken)])}
            for s, i in first.items():
                self.taken[i] = (*self.taken[i][:2], int(self.initial[s]))
        self.array = pack_segments(
            self.cu_seqlens, self.initial, self.final, self.num_rows, self.taken
        )
        self.max_seqlen = max(self.lengths, default=0)

    @classmethod
    def drawn(cls, parts: list[tuple[int, bool, bool]], padding: int, seed: int) -> "Segments":
        """Segments from (length, fresh, moved) each, with a checkpoint in the middle."""
        lengths, *marks = zip(*parts, strict=True)
        fresh, moved = ({s for s, is_so in enumerate(of) if is_so} for of in marks)
        half = [(s, n // 2) for s, n in enumerate(lengths)]
        return cls([*lengths], fresh, padding, half, moved, seed)

    @classmethod
    def drafted(cls, lengths: list[int], num_states: int) -> "Segments":
        """Segments that end with drafts: each leaves up to num_states states before its last rows,
        the first in the slot that it starts from, and one at its end."""
        rows = [
            (s, row)
            for s, length in enumerate(lengths)
            for row in range(max(length - num_states, 1), length)
        ]
        return cls(lengths, checkpoints=rows, moved={*range(len(lengths))}, in_place=True)

    def left(self) -> list[tuple[int, int]]:
        """The (row, slot) pairs of all states that the segments leave: before a row, or behind the
        last one of a segment."""
        ends = zip(self.cu_seqlens[1:].tolist(), self.final.tolist(), strict=True)
        return [*((row, slot) for _, row, slot in self.taken), *ends]

    def states(self, *shape: int, dtype: mx.Dtype = mx.float32) -> np.ndarray:
        """The states of all slots; NaN in slots where no segment starts."""
        states = np.full((self.slots, *shape), np.nan, np.float32)
        for slot in self.initial[self.initial >= 0]:
            rng = np.random.default_rng((self.seed, slot))
            states[slot] = rounded(rng.standard_normal(shape), dtype)
        return states

    def walk(self, states: np.ndarray, advance) -> tuple[np.ndarray, np.ndarray]:
        """Results of all rows and the states afterwards, in float64.

        advance(begin, end, state) -> (results of the rows, the state after them).
        """
        after = states.astype(np.float64)
        results = []
        for s, (begin, end) in enumerate(zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)):
            slot = self.initial[s]
            start = np.zeros(states.shape[1:]) if slot < 0 else states[slot].astype(np.float64)
            result, after[self.final[s]] = advance(begin, end, start)
            results.append(result)
            for segment, row, checkpoint in self.taken:
                if segment == s:
                    _, after[checkpoint] = advance(begin, row, start)
        return np.concatenate(results), after


# A request starts, one continues, one has no rows, one has a single row; chunks of 8 rows and tiles
# of 16 end within and at the end of segments; some states are copied; some rows are padding.
RAGGED = {
    "lengths": [1, 21, 0, 16, 1, 2, 0],
    "fresh": {1, 4, 6},
    "padding": 3,
    "moved": {2, 3},
    "checkpoints": [(1, 8), (1, 13), (3, 16), (3, 0), (0, 1)],
}


def given(gates: mx.array, beta: mx.array) -> Gates:
    """Gates as final values: (N, V) float32, or (N, V, K), one per state column; beta (N, V).

    No model passes such gates.  With them a test needs no tolerance for gates.
    """
    return Gates(Columns(gates.reshape(len(gates), -1), 0), Columns(beta, 0), gates.ndim == 3)


def conv_by_definition(
    segments: Segments,
    states: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    silu: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The convolution of rows (N, C) by weight (C, K), and the rows that are carried on."""
    size = weight.shape[1]

    def advance(begin, end, before):
        rows = np.concatenate([before, x[begin:end].astype(np.float64)])
        y = np.zeros((end - begin, x.shape[1])) + (0 if bias is None else bias)
        for j in range(size):
            y += rows[j : j + end - begin] * weight[:, j]
        y = y / (1 + np.exp(np.minimum(-y, 700))) if silu else y
        return y, rows[len(rows) - size + 1 :]

    return segments.walk(states, advance)


def recurrence_by_definition(
    segments: Segments,
    states: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    gates: np.ndarray,
    beta: np.ndarray,
    delta: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The results and states of the gated delta rule; without `delta`, of the state space
    update."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (np.repeat(a.astype(np.float64), repeats, axis=1) for a in (q, k))
    gates = gates[:, :, None, None] if gates.ndim == 2 else gates[:, :, None]

    def advance(begin, end, state):
        y = np.zeros((end - begin, *v.shape[1:]))
        for t in range(begin, end):
            state = state * gates[t]
            known = np.einsum("hvk,hk->hv", state, k[t]) if delta else 0
            state = state + np.einsum("hv,hk->hvk", beta[t][:, None] * (v[t] - known), k[t])
            y[t - begin] = np.einsum("hvk,hk->hv", state, q[t])
        return y, state

    return segments.walk(states, advance)
