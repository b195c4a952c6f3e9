"""Temperature, min_p, top_k and top_p: which tokens a draw may take.

A new filter needs its value in `_OFF`, its array in `RowFilters`, and its line in `_threshold`.

The filters of a row become one threshold, so sorted rows are never unsorted: a token stays iff its
logit is not below the threshold.  Tokens that tie with the last token kept also stay (as in vLLM's
top-k; vLLM's top-p cuts ties in its own order).
"""

from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling import logits as ops
from vllm_metal_lite.sampling.processors import LARGE
from vllm_metal_lite.sampling_params import SamplingParams

# Parameters of a greedy row, which no filter changes.
_OFF = {"temperature": 0.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class RowFilters:
    """Filters of R rows whose thresholds need the same amount of sorting, on the device.

    rows: (R,) int32; None: every row.  num_sorted: how many of a row's largest logits must be
    sorted; 0: none.  The others are (R, 1), or None if no row needs them:
    temperature.
    min_p_offset: the threshold of min_p minus the best logit, temperature * log(min_p); -inf: off.
    kth_index: the index of the k-th largest in ascending logits, int32 -top_k; -V: off.
    tail_mass: the probability that top_p cuts off, 1 - top_p; -1: off.
    """

    rows: mx.array | None
    num_sorted: int
    temperature: mx.array
    min_p_offset: mx.array | None
    kth_index: mx.array
    tail_mass: mx.array | None


class Filters:
    """The temperature and the filters of each seat, as their requests gave them."""

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        self._values = {name: np.full(max_num_seqs, off) for name, off in _OFF.items()}

    def add(self, req_index: int, params: SamplingParams) -> None:
        if not params.greedy:
            for name, values in self._values.items():
                values[req_index] = min(getattr(params, name), LARGE)

    def remove(self, req_index: int) -> None:
        for name, values in self._values.items():
            values[req_index] = _OFF[name]

    def of_rows(self, req_indices: np.ndarray) -> tuple[mx.array | None, list[RowFilters]]:
        """The temperature (T, 1) of these rows, None if all are greedy, and their filters.

        Top-p without a small top-k may need a full sort; only the rows that need it are sorted.
        """
        vocab_size = self._vocab_size
        given = {name: values[req_indices] for name, values in self._values.items()}
        temperature, top_k = given["temperature"].astype(np.float32), given["top_k"]
        if not temperature.any():
            return None, []
        has_min_p, has_top_p = given["min_p"] > 0, given["top_p"] < 1
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        if not (has_min_p | has_top_p | has_top_k).any():
            return ops.column(temperature), []
        small = has_top_k & ops.is_small(top_k, vocab_size)
        large = ~small & (has_top_k | has_top_p)
        if small.any():  # greedy rows join as top-1: gathering the others would cost more
            is_greedy = temperature == 0
            small |= is_greedy
            top_k = np.where(is_greedy, 1, top_k)
            has_top_k |= small
        kth_index = -np.where(has_top_k, top_k, vocab_size).astype(np.int32)
        min_p_offset = np.full(len(temperature), -np.inf, np.float32)
        if has_min_p.any():
            scale = given["temperature"][has_min_p]
            min_p_offset[has_min_p] = scale * np.log(given["min_p"][has_min_p])
        tail_mass = np.where(has_top_p, 1 - given["top_p"], -1).astype(np.float32)
        filters = []
        for mine, num_sorted in (
            (has_min_p & ~small & ~large, 0),
            (small, -int(kth_index[small].min(initial=0))),
            (large, vocab_size),
        ):
            if mine.any():
                part = RowFilters(
                    rows=ops.row_numbers(np.flatnonzero(mine), len(mine)),
                    num_sorted=num_sorted,
                    temperature=ops.column(temperature[mine]),
                    min_p_offset=ops.column(min_p_offset[mine]) if has_min_p[mine].any() else None,
                    kth_index=ops.column(kth_index[mine]),
                    tail_mass=ops.column(tail_mass[mine]) if has_top_p[mine].any() else None,
                )
                filters.append(part)
        return ops.column(temperature), filters


def thresholds(x: mx.array, filters: list[RowFilters]) -> mx.array:
    """The lowest logit (T, 1) that may be drawn; -inf for a row without a filter.

    A row with a NaN or an infinite best logit may get NaN, which filters nothing.
    """
    if filters[0].rows is None:
        return _threshold(x, filters[0])
    floor = mx.full((len(x), 1), -mx.inf)
    for part in filters:
        floor[part.rows] = _threshold(x[part.rows], part)
    return floor


def _threshold(x: mx.array, f: RowFilters) -> mx.array:
    """Apply min-p, then top-k, then top-p to the remaining mass.  The best token always stays."""
    if not f.num_sorted:
        assert f.min_p_offset is not None, "a filter that sorts nothing filters by min-p alone"
        return x.max(-1, keepdims=True) + f.min_p_offset
    s = mx.sort(ops.candidates(x, f.num_sorted)[0], -1)
    size, best = s.shape[1], s[:, -1:]
    floor = mx.take_along_axis(s, f.kth_index, -1)
    if f.min_p_offset is not None:
        floor = mx.maximum(floor, best + f.min_p_offset)
    if f.tail_mass is not None:
        # Sum from the least likely token up: a sum near 1 would absorb small terms.
        order = mx.arange(-size, 0)[None]
        mass = _weights(s, best, order, f.kth_index, floor, f.temperature).cumsum(-1)
        cut = (mass <= f.tail_mass * mass[:, -1:]).sum(-1, keepdims=True)
        floor = mx.maximum(floor, mx.take_along_axis(s, mx.minimum(cut, size - 1), -1))
    return floor


@ops.fused
def _weights(
    s: mx.array,
    best: mx.array,
    order: mx.array,
    kth_index: mx.array,
    floor: mx.array,
    temperature: mx.array,
) -> mx.array:
    # Cut by order, not by value: other rows decide how many of the tokens that tie with the k-th
    # are among the candidates.
    out = (order < kth_index) | (s < floor)
    return mx.where(out, 0.0, mx.exp((s - best) / temperature))
