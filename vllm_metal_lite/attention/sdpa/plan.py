"""Cuts a step into calls of SDPA (on the host, numpy).

A segment's queries are cut into tiles; a tile sees the keys up to its own end.  Tiles of similar
shape run as one right-padded batch.  Earlier rows never see padding at the end, so for complete
prompts MLX's SDPA needs only "causal" and no mask array.  Short prompts of different lengths may
instead be concatenated under one block-diagonal causal mask ("packed").  The plan minimises the
cost of scores computed, keys gathered and calls.  Masks depend only on positions and segment
numbers, so one formula serves every call:
key visible = same segment and k_pos <= q_pos (and in the window).
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.config import MAX_PACKED_PREFILL_TOKENS
from vllm_metal_lite.devices import profile

NEVER = np.iinfo(np.int32).max  # position of a padding key: after every query
_ANY_NUMBER = np.iinfo(np.int64).max
# The fewest rows of a tile, however long its context.
_LEAST_TILE = 32

Lengths = TypeVar("Lengths", int, np.ndarray)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; n >= 1."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class SdpaCall:
    """One call of SDPA on the host: B rows of Lq queries over Lk keys.

    q_rows (B, Lq): rows of the packed batch; padding repeats the last.
    kv_slots (B, Lk): slots of the store; padding repeats the first.  mask: None (all keys visible),
    "causal" (lower right) or "array", which is made from q_pos (B, Lq), kv_pos (B, Lk) and, in a
    pack, segments (the same for rows and keys).  num_visible: leading keys that every row sees, or
    0 if these are fewer than half.  span: the segment and the first position of the keys, if the
    keys are consecutive keys of one segment.
    """

    q_rows: np.ndarray
    kv_slots: np.ndarray
    q_pos: np.ndarray
    kv_pos: np.ndarray
    mask: str | None
    num_visible: int = 0
    segments: np.ndarray | None = None
    span: tuple[int, int] | None = None


def cost(q_len: Lengths, kv_len: Lengths) -> Lengths:
    """Cost of attention of q_len queries to kv_len keys, in scores."""
    return (q_len + profile().key_cost) * kv_len


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query tiles, one entry each: segment, first row, number of rows, key range [start, end)."""

    segment: np.ndarray
    row: np.ndarray
    q_len: np.ndarray
    kv_start: np.ndarray
    kv_end: np.ndarray

    def __getitem__(self, index: np.ndarray) -> "Tiles":
        return Tiles(*(getattr(self, f)[index] for f in self.__slots__))

    def __len__(self) -> int:
        return len(self.segment)


def plan_calls(
    batch: ForwardBatch,
    window: int | None,
    *,
    attention_chunk: int | None = None,
    tile: int,
    call_cost: int,
    max_scores: int = _ANY_NUMBER,
    key_grain: int = 1,
    fused_rows: int = _ANY_NUMBER,
) -> list[SdpaCall]:
    """Cut a step into SDPA calls that together cover every row of the batch once, in the order of
    their first rows.

    attention_chunk: positions per chunk; rows see only the keys of their own chunk (Llama 4).
    tile: the most query rows in one tile; small tiles help a backend without fused causal SDPA.
    max_scores: the most scores of one head in a call that keeps all scores in memory.  A tile has
    at least _LEAST_TILE rows.
    key_grain: keys of a padded batch are padded to a multiple of it.
    fused_rows: without a window, a segment of at least this many rows is a causal call of its own;
    max_scores and key_grain do not apply.
    """
    if attention_chunk is not None:
        batch = split_at_chunks(batch, attention_chunk)
    q_lens = np.diff(batch.cu_seqlens_q)
    alone = (q_lens >= fused_rows) & (window is None)
    tiles = _tiles(batch, np.flatnonzero(alone), window, attention_chunk, tile)
    calls = [_padded(batch, tiles[np.array([i])], window) for i in range(len(tiles))]
    complete = (q_lens == batch.seq_lens) & (q_lens > 1) & ~alone
    loose: list[np.ndarray] = []
    for pack in split_packs(np.flatnonzero(complete), q_lens):
        rows, longest = int(q_lens[pack].sum()), int(q_lens[pack].max())
        packed = cost(rows, rows)
        # The cost of one padded batch is an upper bound, and cheap to compute.
        if rows * rows <= max_scores and packed < len(pack) * cost(longest, longest):
            tiles = _tiles(batch, pack, window, attention_chunk, tile, max_scores)
            padded, _ = _group_by_shape(tiles, call_cost, max_scores)
            if packed + call_cost < padded:
                calls.append(_packed(batch, pack))
                continue
        loose.append(pack)
    others = np.flatnonzero(~complete & ~alone)
    for segments in (*([np.concatenate(loose)] if loose else []), others):
        if len(segments):
            tiles = _tiles(batch, segments, window, attention_chunk, tile, max_scores)
            _, batches = _group_by_shape(tiles, call_cost, max_scores)
            calls += [_padded(batch, tiles[i], window, key_grain=key_grain) for i in batches]
    return sorted(calls, key=lambda call: int(call.q_rows[0, 0]))


def split_packs(
    segments: np.ndarray, q_lens: np.ndarray, cap: int = MAX_PACKED_PREFILL_TOKENS
) -> list[np.ndarray]:
    """Split segments, in order, into packs of at most `cap` rows; a longer one is its own pack."""
    packs: list[list[int]] = []
    rows = cap
    for s in segments.tolist():
        rows += int(q_lens[s])
        if rows > cap:
            packs.append([])
            rows = int(q_lens[s])
        packs[-1].append(s)
    return [np.array(p) for p in packs]


def split_at_chunks(batch: ForwardBatch, attention_chunk: int) -> ForwardBatch:
    """The same rows, with segments cut at positions that are multiples of `attention_chunk`."""
    starts = np.zeros(batch.num_tokens, bool)
    starts[batch.cu_seqlens_q[:-1]] = True
    starts |= batch.positions % attention_chunk == 0
    first = np.flatnonzero(starts)
    cu = np.append(first, batch.num_tokens).astype(np.int32)
    segment = np.searchsorted(batch.cu_seqlens_q, first, side="right") - 1
    return replace(
        batch,
        cu_seqlens_q=cu,
        seq_lens=batch.positions[cu[1:] - 1] + 1,
        block_tables=batch.block_tables[segment],
        other_tables=tuple(tables[segment] for tables in batch.other_tables),
        req_indices=batch.req_indices[segment],
    )


def _tiles(
    batch: ForwardBatch,
    segments: np.ndarray,
    window: int | None,
    attention_chunk: int | None,
    tile: int,
    max_scores: int = _ANY_NUMBER,
) -> Tiles:
    start = batch.cu_seqlens_q[segments]
    q_len = batch.cu_seqlens_q[segments + 1] - start
    most_keys = batch.seq_lens[segments].astype(np.int64)
    if window is not None:
        most_keys = np.minimum(most_keys, q_len - 1 + window)
    of_segment = max_scores // most_keys // _LEAST_TILE * _LEAST_TILE
    of_segment = np.minimum(np.maximum(of_segment, _LEAST_TILE), tile)
    count = -(-q_len // of_segment)
    index = np.repeat(np.arange(len(segments)), count)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    first = nth * of_segment[index]
    rows = np.minimum(q_len[index] - first, of_segment[index])
    context = batch.seq_lens[segments][index] - q_len[index]
    kv_end = context + first + rows
    kv_start = np.zeros_like(kv_end)
    if window is not None:
        kv_start = np.maximum(kv_end - rows + 1 - window, 0)
    if attention_chunk is not None:
        kv_start = np.maximum(kv_start, (kv_end - 1) // attention_chunk * attention_chunk)
    return Tiles(segments[index], start[index] + first, rows, kv_start, kv_end)


def _group_by_shape(tiles: Tiles, call_cost: int, max_scores: int) -> tuple[int, list[np.ndarray]]:
    """The cheapest split of tiles into padded batches: its cost, and the tiles of each batch.

    Dynamic programming: tiles in a batch are neighbours in the order from longest to shortest, so
    the cheapest split of the first n follows from the splits of fewer.
    """
    kv_len = tiles.kv_end - tiles.kv_start
    order = np.lexsort((-kv_len, -tiles.q_len))
    q_len, kv_len = tiles.q_len[order].astype(np.int64), kv_len[order].astype(np.int64)
    max_keys = profile().max_gathered_keys
    least = np.zeros(len(tiles) + 1, np.int64)  # cost of the first n
    begins = np.zeros(len(tiles) + 1, np.int64)  # where the last batch of the first n begins
    for end in range(1, len(tiles) + 1):
        most = max(1, max_keys // int(kv_len[end - 1]))
        first = max(0, end - most)
        longest = np.maximum.accumulate(kv_len[first:end][::-1])[::-1]
        count = np.arange(end - first, 0, -1)
        total = least[first:end] + count * cost(q_len[first:end], longest) + call_cost
        too_large = (count * longest > max_keys) | (count * longest * q_len[first:end] > max_scores)
        total[(count > 1) & too_large] = np.iinfo(np.int64).max
        at = int(total.argmin())
        begins[end], least[end] = first + at, total[at]
    batches, end = [], len(tiles)
    while end:
        batches.append(order[begins[end] : end])
        end = int(begins[end])
    return int(least[-1]), batches[::-1]


def _padded(batch: ForwardBatch, tiles: Tiles, window: int | None, key_grain: int = 1) -> SdpaCall:
    """Tiles as a batch, padded to the longest."""
    q_lens, kv_lens = tiles.q_len, tiles.kv_end - tiles.kv_start
    row = np.minimum(np.arange(q_lens.max()), q_lens[:, None] - 1)
    q_rows = tiles.row[:, None] + row
    key = np.arange(-(-kv_lens.max() // key_grain) * key_grain)
    real = key < kv_lens[:, None]
    position = np.where(real, tiles.kv_start[:, None] + key, tiles.kv_start[:, None])
    bs = batch.block_size
    blocks = batch.block_tables[tiles.segment[:, None], position // bs]
    in_window = window is None or bool((tiles.kv_end <= window).all())
    uniform = (q_lens == q_lens[0]).all() and (kv_lens == len(key)).all()
    square = (q_lens == kv_lens).all() and row.shape[1] == len(key)
    if uniform and q_lens[0] == 1:
        mask = None
    elif in_window and (uniform or square):
        mask = "causal"
    else:
        mask = "array"
    num_visible = int((kv_lens - q_lens).min()) + 1 if in_window else 0
    return SdpaCall(
        q_rows=q_rows.astype(np.int32),
        kv_slots=(blocks * bs + position % bs).astype(np.int32),
        q_pos=batch.positions[q_rows],
        kv_pos=np.where(real, position, NEVER).astype(np.int32),
        mask=mask,
        num_visible=num_visible if 2 * num_visible >= len(key) else 0,
        span=(int(tiles.segment[0]), int(tiles.kv_start[0])) if len(tiles) == 1 else None,
    )


def _packed(batch: ForwardBatch, pack: np.ndarray) -> SdpaCall:
    """Complete prompts concatenated: queries and keys are the same rows of the step."""
    cu = batch.cu_seqlens_q
    rows = np.concatenate([np.arange(cu[s], cu[s + 1]) for s in pack]).astype(np.int32)[None]
    segments = np.repeat(pack, cu[pack + 1] - cu[pack]).astype(np.int32)[None]
    positions = batch.positions[rows]
    slots = batch.slot_mapping[rows]
    return SdpaCall(rows, slots, positions, positions, "array", segments=segments)


def places(calls: list[SdpaCall], num_rows: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(T,) int32, all calls' q_rows concatenated, and (num_rows,) int32, each row's place there.

    Rows are None if they are the first T, in order.  Places are None if also T == num_rows.
    """
    rows = np.concatenate([g.q_rows.ravel() for g in calls])
    place = np.zeros(num_rows, np.int32)
    # Reversed, so that the first place of a row counts.  Its later places are padding, which sees
    # too many keys under a "causal" mask.
    place[rows[::-1]] = np.arange(len(rows), dtype=np.int32)[::-1]
    if not np.array_equal(rows, np.arange(len(rows))):
        return rows, place
    return None, None if len(rows) == num_rows else place
