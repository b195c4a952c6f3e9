"""Cuts a step into calls of SDPA (on the host, numpy).

A segment's queries are cut into tiles; a tile sees the keys up to its own end.  Tiles of similar
shape run as one right-padded batch.  Earlier rows never see padding at the end, so for complete
prompts MLX's SDPA needs only "causal" and no mask array.  Short prompts of different lengths may
instead be concatenated under one block-diagonal causal mask ("packed").  The plan weighs the cost
of scores computed, keys gathered and calls.  Masks depend only on positions and segment
numbers, so one formula serves every call:
key visible = same segment and k_pos <= q_pos (and in the window).
"""

from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.attention.sdpa.fused import Unfused
from vllm_metal_lite.attention.step_arrays import split_at_chunks
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile

NEVER = np.iinfo(np.int32).max  # the position of a padding key, which is after every query
_UNLIMITED = np.iinfo(np.int64).max
# The fewest rows of a tile, however long its context.
_LEAST_TILE = 32
# The keys of a call that keeps its scores in memory are padded to a multiple of 16.  Each row of
# scores then begins at a multiple of 32 bytes, so that products and softmax read whole vectors.
_KEY_GRAIN = 16

# The most rows of prompts that share one block-diagonal mask, which grows with their square.
_LONGEST_PACK = 4096


@dataclass(frozen=True, slots=True)
class HostCall:
    """One call of SDPA on the host: B rows of Lq queries over Lk keys.

    q_rows (B, Lq): rows of the packed batch; padding repeats the last.
    kv_slots (B, Lk): slots of the store; padding repeats the first.  mask: None (all keys visible),
    "causal" (lower right) or "array", which is made from q_pos (B, Lq), kv_pos (B, Lk) and, in a
    pack, segments (the same for rows and keys).  num_visible: leading keys that every row sees, or
    0 if these are fewer than half.  span: the segment and the first position of the keys, if the
    keys are consecutive keys of one segment.  sees (B, Lq, 2): start and end of the keys that a row
    sees beside those that its position and the window allow; None: no others.
    """

    q_rows: np.ndarray
    kv_slots: np.ndarray
    q_pos: np.ndarray
    kv_pos: np.ndarray
    mask: str | None
    num_visible: int = 0
    segments: np.ndarray | None = None
    span: tuple[int, int] | None = None
    sees: np.ndarray | None = None


def cost(q_len: int, kv_len: int) -> int:
    """What attention of q_len queries to kv_len keys costs; the unit is one score."""
    return (q_len + profile().key_cost) * kv_len


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query tiles.  Each array has one entry per tile.

    row, q_len: the first row of the tile, and how many.  kv_start, kv_end: its keys, [start, end).
    """

    segment: np.ndarray
    row: np.ndarray
    q_len: np.ndarray
    kv_start: np.ndarray
    kv_end: np.ndarray

    def __getitem__(self, index: np.ndarray) -> "Tiles":
        return Tiles(*(getattr(self, f)[index] for f in self.__slots__))

    def __len__(self) -> int:
        return len(self.segment)


class CallPlanner:
    """Cuts a step into SDPA calls that together cover every row of the batch once.

    attention_chunk: positions per chunk; rows see only the keys of their own chunk (Llama 4).
    unfused: the calls of the layer that MLX does not fuse; None: MLX fuses all.

    tile: the most query rows in one tile; small tiles help a backend without fused causal SDPA.
    max_scores: the most scores of one head in a call that keeps all scores in memory.  A tile has
    at least _LEAST_TILE rows.
    key_grain: keys of a padded batch are padded to a multiple of it.
    fused_rows: without a window, a segment of at least this many rows is a causal call of its own;
    max_scores and key_grain do not apply.
    spans: (N, 2), PictureRows.spans; None if rows of this layer see only what comes before.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        kv_group: int,
        window: int | None,
        attention_chunk: int | None,
        unfused: Unfused | None,
        spans: np.ndarray | None = None,
    ) -> None:
        device = profile()
        self.batch = split_at_chunks(batch, attention_chunk) if attention_chunk else batch
        self.q_lens = np.diff(self.batch.cu_seqlens_q)
        self.kv_group, self.window, self.attention_chunk = kv_group, window, attention_chunk
        self.spans = spans
        self.tile, self.call_cost = device.sdpa_tile, device.sdpa_call_cost
        self.max_scores, self.key_grain, self.fused_rows = _UNLIMITED, 1, _UNLIMITED
        if unfused is not None:
            self.max_scores = device.max_scores // unfused.heads
            self.key_grain, self.fused_rows = _KEY_GRAIN, unfused.fused_rows

    def calls(self) -> list[HostCall]:
        """The calls, in the order of their first rows."""
        causal = self.window is None and self.spans is None
        own_call = (self.q_lens >= self.fused_rows) & causal
        tiles = self._tiles(np.flatnonzero(own_call), _UNLIMITED)
        calls = [self._padded(tiles[np.array([i])], 1) for i in range(len(tiles))]
        whole = (self.q_lens == self.batch.seq_lens) & (self.q_lens > 1) & ~own_call
        packed = np.zeros_like(whole)
        for pack in split_packs(np.flatnonzero(whole), self.q_lens, _LONGEST_PACK):
            if self._pays_packed(pack):
                packed[pack] = True
                calls.append(self._packed(pack))
        for segments in map(np.flatnonzero, (whole & ~packed, ~whole & ~own_call)):
            if len(segments):
                tiles = self._tiles(segments, self.max_scores)
                batches = self._group_by_shape(tiles)[1]
                calls += [self._padded(tiles[of_batch], self.key_grain) for of_batch in batches]
        return sorted(calls, key=lambda call: int(call.q_rows[0, 0]))

    def _pays_packed(self, pack: np.ndarray) -> bool:
        """Whether one call for all of these prompts costs less than padded batches."""
        rows, longest = int(self.q_lens[pack].sum()), int(self.q_lens[pack].max())
        packed = cost(rows, rows)
        # The cost of one padded batch is an upper bound, and cheap to compute.
        if rows * rows > self.max_scores or packed >= len(pack) * cost(longest, longest):
            return False
        padded, _ = self._group_by_shape(self._tiles(pack, self.max_scores))
        return packed + self.call_cost < padded

    def _tiles(self, segments: np.ndarray, max_scores: int) -> Tiles:
        batch, window, chunk = self.batch, self.window, self.attention_chunk
        start, q_len = batch.cu_seqlens_q[segments], self.q_lens[segments]
        most_keys = batch.seq_lens[segments].astype(np.int64)
        if window is not None:
            most_keys = np.minimum(most_keys, q_len - 1 + window)
        tile_rows = max_scores // most_keys // _LEAST_TILE * _LEAST_TILE
        tile_rows = np.minimum(np.maximum(tile_rows, _LEAST_TILE), self.tile)
        count = -(-q_len // tile_rows)
        index = np.repeat(np.arange(len(segments)), count)
        nth = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        first = nth * tile_rows[index]
        rows = np.minimum(q_len[index] - first, tile_rows[index])
        context = batch.seq_lens[segments][index] - q_len[index]
        kv_end = context + first + rows
        kv_start = np.zeros_like(kv_end)
        if window is not None:
            kv_start = np.maximum(kv_end - rows + 1 - window, 0)
        if chunk is not None:
            kv_start = np.maximum(kv_start, (kv_end - 1) // chunk * chunk)
        if self.spans is not None:
            begin = start[index] + first
            seen = [self.spans[a:b] for a, b in zip(begin, begin + rows, strict=True)]
            kv_start = np.minimum(kv_start, [part[:, 0].min() for part in seen])
            kv_end = np.maximum(kv_end, [part[:, 1].max() for part in seen])
        return Tiles(segments[index], start[index] + first, rows, kv_start, kv_end)

    def _group_by_shape(self, tiles: Tiles) -> tuple[int, list[np.ndarray]]:
        """Split tiles into padded batches; returns their cost, and the tiles of each batch.

        The longest tile comes first.  Each tile joins the batch of the tile before, unless its
        padding there costs more than a call of its own, or the batch becomes too large.
        """
        max_keys, kv_len = profile().max_gathered_keys, tiles.kv_end - tiles.kv_start
        order = np.lexsort((-kv_len, -tiles.q_len))
        lengths = zip(
            order.tolist(), tiles.q_len[order].tolist(), kv_len[order].tolist(), strict=True
        )
        batches: list[list[int]] = []
        total = rows = keys = 0  # rows, keys: the longest in the last batch
        for tile, q_len, own_keys in lengths:
            count = len(batches[-1]) + 1 if batches else 0
            padded, alone = max(keys, own_keys), cost(q_len, own_keys) + self.call_cost
            joined = count * cost(rows, padded) - (count - 1) * cost(rows, keys)
            size = count * padded
            if count and joined <= alone and size <= max_keys and size * rows <= self.max_scores:
                batches[-1].append(tile)
                total, keys = total + joined, padded
            else:
                batches.append([tile])
                total, rows, keys = total + alone, q_len, own_keys
        return total, [np.array(batch) for batch in batches]

    def _padded(self, tiles: Tiles, key_grain: int) -> HostCall:
        """Tiles as a batch, padded to the longest."""
        q_lens, kv_lens = tiles.q_len, tiles.kv_end - tiles.kv_start
        row = np.minimum(np.arange(q_lens.max()), q_lens[:, None] - 1)
        q_rows = tiles.row[:, None] + row
        key = np.arange(-(-kv_lens.max() // key_grain) * key_grain)
        real = key < kv_lens[:, None]
        position = np.where(real, tiles.kv_start[:, None] + key, tiles.kv_start[:, None])
        block, offset = np.divmod(position, self.batch.block_size)
        blocks = self.batch.block_tables[self.kv_group, tiles.segment[:, None], block]
        in_window = self.window is None or bool((tiles.kv_end <= self.window).all())
        in_window = in_window and self.spans is None
        uniform = (q_lens == q_lens[0]).all() and (kv_lens == len(key)).all()
        square = (q_lens == kv_lens).all() and row.shape[1] == len(key)
        if uniform and q_lens[0] == 1:
            mask = None
        elif in_window and (uniform or square):
            mask = "causal"
        else:
            mask = "array"
        num_visible = int((kv_lens - q_lens).min()) + 1 if in_window else 0
        return HostCall(
            q_rows=q_rows.astype(np.int32),
            kv_slots=(blocks * self.batch.block_size + offset).astype(np.int32),
            q_pos=self.batch.positions[q_rows],
            kv_pos=np.where(real, position, NEVER).astype(np.int32),
            mask=mask,
            num_visible=num_visible if 2 * num_visible >= len(key) else 0,
            span=(int(tiles.segment[0]), int(tiles.kv_start[0])) if len(tiles) == 1 else None,
            sees=None if self.spans is None else self.spans[q_rows],
        )

    def _packed(self, pack: np.ndarray) -> HostCall:
        """Complete prompts concatenated: queries and keys are the same rows of the step."""
        cu = self.batch.cu_seqlens_q
        rows = np.concatenate([np.arange(cu[s], cu[s + 1]) for s in pack]).astype(np.int32)[None]
        segments = np.repeat(pack, self.q_lens[pack]).astype(np.int32)[None]
        positions, slots = self.batch.positions[rows], self.batch.slot_mapping(self.kv_group)[rows]
        sees = None if self.spans is None else self.spans[rows]
        return HostCall(rows, slots, positions, positions, "array", segments=segments, sees=sees)


def split_packs(segments: np.ndarray, q_lens: np.ndarray, cap: int) -> list[np.ndarray]:
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


def places(calls: list[HostCall], num_rows: int) -> tuple[np.ndarray | None, np.ndarray | None]:
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
