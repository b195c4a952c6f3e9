// varlen_prefill: causal attention of packed query rows over their blocks of the paged store; if SPLIT, of few
// rows to long contexts in splits; if PREFIX, of all rows to the prefix that their sequences share, read once.
//
//   q             (N, KV_HEADS * GROUP, K_DIM)  packed rows; GROUP query heads share a KV head
//                 of T; if FUSED rows of Q_WIDTH columns, heads from Q_START on, still to be
//                 normalised and rotated
//   q_weight, freqs                             read if Q_WEIGHT, FREQS, as in rope_write
//   positions     (N,) int32                    read if FUSED: the position by which a row rotates
//   keys, values  (slots, KV_HEADS, DIM)        the store; slot = block * BLOCK_SIZE + offset
//                 a value has BITS bits: those of T, or 8 or 4 in rows of words as in quantised.h
//   block_tables  (S, max_blocks) int32         the blocks of each segment, in order
//   cu_seqlens_q  (S + 1,) int32                segment s has rows cu_seqlens_q[s] .. [s + 1] - 1
//   seq_lens      (S,) int32                    the number of keys of segment s, those of its own rows included
//                                               PREFIX: seq_lens[leader] is the prefix's length
//   tiles         (T, 2) int32                  segment, first (row, head) pair; see plan_tiles
//                 PREFIX: tiles[0] is the leader, a sequence that has the prefix
//   spans         (N, 2) int32                  if SPANS: first key and end of the keys of a row's span
//   sinks         (KV_HEADS * GROUP,) of T      one logit a head; has a weight, but no value
//   ticket        float32                       read after the writes before it
//   SCALE, SOFTCAP  the bits of two floats (a template value is an integer); SOFTCAP 0 = none.
//                 So are ROPE_SCALE, LOG2_BASE, FACTOR and Q_EPS
//   out           (N, KV_HEADS * GROUP, V_DIM) of OUT_T, which is T; zeros in rows of no segment
//                 SPLIT, PREFIX: (N, heads, splits, V_DIM) float32, each split normalised in itself
//   lse           SPLIT, PREFIX: (N, heads, splits) float32, log2 of the sum of exponentials, LOWEST = no
//                 key seen; also the next ticket, so unless PREFIX it has 8 elements or more.  Else (8,)
//
// Row i of a segment with q_len rows sits at position seq_len - q_len + i and sees the keys up to
// there, the last WINDOW of them if WINDOW > 0.  K_DIM and V_DIM are multiples of 8.
//
// With SPANS a row also sees all keys of its span, which holds its position: rows of one picture see
// each other (Gemma 3 and 4).  The span of a row of text is its own key.
//
// Layout.  The query rows of one KV head in one segment are its q_len * GROUP pairs (row, head),
// row by row.  A tile is the next ROWS pairs, so a short segment fills it with heads (GQA), and
// each key that is fetched serves all of them.  Grid: x: KV head, y: tile, z: split of the keys.
//
//                   begin                  end
//                     |     :       :       |      # keys that a pair sees, | : where tiles of keys
//   simdgroup 0       #######:######:       |        begin: at multiples of KEYS
//     8 pairs         |######:#######       |
//   simdgroup 1       | #####:#######:#     |      All simdgroups bring a tile of keys (K and V) to
//     8 pairs         |   ###:#######:###   |        threadgroup memory, then each computes with it
//   simdgroup 2 ...   |     #:#######:#######        the keys of its 8 pairs
//
// A simdgroup owns 8 pairs for the whole loop.  Their queries (8 x K_DIM of T) and their sums of
// values (8 x V_DIM float) stay in its registers as 8x8 matrices; S = Q K^T and O += P V are
// products of such matrices in T, added up in float.  Of each matrix a lane holds two neighbours in
// one row (matrix.h), always the same row: it keeps one maximum m and its part of the sum l, and
// the four lanes of a row agree on m by two shuffles.  Where heads are large, PARTNERS simdgroups own
// the same 8 pairs: each scores its share of a tile's keys, and has its share of V's columns.
//
// Threadgroup memory holds rows of an odd number of 8-element groups: then neither the rows of V
// that a matrix takes, nor the columns of K (K^T is read, never stored), meet in a bank.
//
// Quantised rows become T on the way to the tile, rounded as kv_gather_quantised rounds them: half or a
// quarter of the bytes is fetched, and the code that follows is the same.
//
// Online softmax as in paged_decode, in base 2 (FlashAttention-2, Dao 2023).
//
// SPLIT (flash decoding).  A request with drafts has a few rows behind a long context: one tile, and each key is
// read once for all rows and heads.  Splits begin at multiples of KEYS; merge_partitions adds them up.
// While a tile of keys is attended to, the next is loaded into registers, because a step of few rows is
// bound by memory latency.
//
// PREFIX (cascade attention; as in Hydragen, Juravsky et al. 2024).  All rows are one segment, whose
// pairs see the same keys.  paged_decode takes out and lse, and adds the keys that are a sequence's own.
// Rows that do not have the prefix are computed like the others and are not used.  FUSED: each threadgroup
// normalises and rotates its own queries (rope.h), which costs less than a launch that does it once.  A
// simdgroup does so for HELD of its pairs at a time, by way of its rows of k_tile, which is not used yet.
//
// Why it is correct.
//   - A tile of keys that reaches outside [begin, end) reads the key at the border again instead:
//     only slots of this segment, inside its window, are ever read.  Any other may hold NaN.
//   - A key that a row must not see scores MASKED, so far below LOWEST, where every maximum starts,
//     that 2^(MASKED - m) is 0: for a row too that has seen nothing yet.  Both are finite.
//   - Where a tile of keys begins depends on nothing but KEYS, and one that a row does not see
//     changes none of its sums.  So in one split a prompt in chunks gives the same bits as a whole one.
//   - Spans do not overlap.  So later rows see later first keys and later ends, and the first and the
//     last row of a tile know the first key and the end of all.
//   - No row sees beyond seq_len, whatever its span: a tile of padding may repeat a real row.
//   - A pair past the segment's end repeats the last one and is not stored.
//   - A tile of padding is one of a segment with no keys over all the rows: no loop, l = 0, zeros.  So is a
//     split behind the last key.
//   - Every lane takes the same path around barriers, every lane of a simdgroup around products.
//
// Cost.  Bytes: a tile of pairs fetches each key from `begin` to `end` once, 1 / ROWS of the
// bytes of single pairs; keys that tiles share come from the cache.  Flops: 2 * (K_DIM + V_DIM) a pair and
// key, of tiles of keys that are seen in part too.  For 8 keys a lane issues (K_DIM + V_DIM) / 8
// products and 2 exp2.  Registers of a lane: K_DIM / 4 elements of T, V_DIM / 4 / PARTNERS + KEYS / 4 floats;
// in splits the next tile, too.  Splits write 4 * N * heads * splits * V_DIM bytes, which are read again.
#include "key_tile.h"
#include "rope.h"

// --- kernel body ---
constexpr float LOWEST = -1e30f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr bool PARTIAL = SPLIT || PREFIX;
constexpr int ROWS = SIMDGROUPS / PARTNERS * 8;
constexpr int THREADS = SIMDGROUPS * 32;  // at least KEYS
constexpr int K_PARTS = K_DIM / 8;  // matrices side by side
constexpr int V_PARTS = V_DIM / 8 / PARTNERS;
constexpr int K_STRIDE = (K_PARTS | 1) * 8;  // elements from row to row of a tile
constexpr int V_STRIDE = (V_DIM / 8 | 1) * 8;
constexpr int PER_LOAD = 16 / int(sizeof(T));
constexpr int WORDS = RowPart<T, BITS>::WORDS;
constexpr int K_HELD = (KEYS * K_DIM / RowPart<T, BITS>::VALUES + THREADS - 1) / THREADS;
constexpr int V_HELD = (KEYS * V_DIM / RowPart<T, BITS>::VALUES + THREADS - 1) / THREADS;
constexpr int TURNS = (K_DIM / 2 + 31) / 32;  // pairs of elements of a head that a lane holds
constexpr int HELD = KEYS / SIMDGROUPS < 8 ? KEYS / SIMDGROUPS : 8;

threadgroup int slots[KEYS];
threadgroup uint4 k_tile[KEYS * K_STRIDE / PER_LOAD];
threadgroup uint4 v_tile[KEYS * V_STRIDE / PER_LOAD];
threadgroup float scores[PARTNERS > 1 ? ROWS * KEYS : 1];

const int thread_index = int(thread_position_in_threadgroup.x);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int kv_head = int(threadgroup_position_in_grid.x);
const int tile = int(threadgroup_position_in_grid.y);
const int split = int(threadgroup_position_in_grid.z);
const int splits = int(threadgroups_per_grid.z);
const int segment = tiles[PREFIX ? 0 : tile * 2];
const int first = PREFIX ? tile * ROWS : tiles[tile * 2 + 1];
const int row = matrix_row(lane);
const int col = matrix_col(lane);

const bool padding = segment < 0;
const int begin_row = PREFIX || padding ? 0 : cu_seqlens_q[segment];
const int q_len = (PREFIX || padding ? q_shape[0] : cu_seqlens_q[segment + 1]) - begin_row;
const int seq_len = padding ? 0 : seq_lens[segment];
const int pairs = q_len * GROUP;

// This lane's row of every matrix.
const int sg_first = first + simdgroup_index / PARTNERS * 8;
const int pair = metal::min(sg_first + row, pairs - 1);
const int head = kv_head * GROUP + pair % GROUP;
const int position = PREFIX ? seq_len - 1 : seq_len - q_len + pair / GROUP;
int from = WINDOW > 0 ? position - WINDOW + 1 : 0;  // the first key that it sees
int to = position + 1;                              // the key after the last one
const size_t q_row = size_t(begin_row + pair / GROUP) * (KV_HEADS * GROUP) + head;

// The keys that a pair of the tile sees, and those of the split; its tiles of keys begin at `start`.
const int first_position = seq_len - q_len + first / GROUP;
const int last_in_tile = (metal::min(first + ROWS, pairs) - 1) / GROUP;  // a row of the segment
int first_seen = WINDOW > 0 ? metal::max(first_position - WINDOW + 1, 0) : 0;
int seen = PREFIX ? seq_len : metal::max(seq_len - q_len + last_in_tile + 1, 0);
if (SPANS) {
  const int own = (begin_row + pair / GROUP) * 2;
  const int first_in_tile = metal::min(first, pairs - 1) / GROUP;
  from = metal::min(from, int(spans[own]));
  to = metal::min(int(spans[own + 1]), seq_len);
  first_seen = metal::min(first_seen, int(spans[(begin_row + first_in_tile) * 2]));
  seen = metal::min(int(spans[(begin_row + last_in_tile) * 2 + 1]), seq_len);
}
const int all_from = first_seen / KEYS * KEYS;
const int per_split = PARTIAL ? ((seen - all_from + splits - 1) / splits + KEYS - 1) / KEYS * KEYS : 0;
const int start = all_from + split * per_split;
const int begin = metal::max(start, first_seen);
const int end = PARTIAL ? metal::min(start + per_split, seen) : seen;

// Scores are wanted in base 2; under a softcap the factor comes after the tanh.
const float softcap = as_type<float>(SOFTCAP);
const float s_scale = as_type<float>(SCALE) * (SOFTCAP != 0 ? 1.0f / softcap : LOG2_E);

// PARTIAL: the first tile is loaded before the queries are made, and slots are looked up one tile ahead.
const size_t table = size_t(metal::max(segment, 0)) * block_tables_shape[1];
thread uint k_held[PARTIAL ? K_HELD * WORDS : 1];
thread uint v_held[PARTIAL ? V_HELD * WORDS : 1];
int key = 0;
int block = 0;
if (PARTIAL && begin < end) {
  key = metal::min(metal::max(start + thread_index, begin), end - 1);
  if (thread_index < KEYS) {
    slots[thread_index] = block_tables[table + key / BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ask_rows<T, BITS, K_DIM, K_GROUP, KEYS, THREADS, K_HELD>(
      (const device uint*)keys, slots, KV_HEADS, kv_head, thread_index, k_held);
  ask_rows<T, BITS, V_DIM, V_GROUP, KEYS, THREADS, V_HELD>(
      (const device uint*)values, slots, KV_HEADS, kv_head, thread_index, v_held);
  key = metal::min(start + KEYS + thread_index, end - 1);
  block = block_tables[table + key / BLOCK_SIZE];
}

thread metal::simdgroup_matrix<T, 8, 8> query[K_PARTS];
if (FUSED) {
  threadgroup T* held = (threadgroup T*)k_tile + simdgroup_index * HELD * K_STRIDE;
  for (int one = 0; one < 8; one += HELD) {
    thread float cosine[TURNS];
    thread float sine[TURNS];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int other = metal::min(sg_first + one + i, pairs - 1);
      const int seq = other / GROUP;
      if (i == 0 || other % GROUP == 0) {
        rope_sines<TURNS, DIMS / 2, FREQS>(freqs, as_type<float>(LOG2_BASE),
                                           as_type<float>(ROPE_SCALE), positions[seq], lane,
                                           cosine, sine);
      }
      const int of = kv_head * GROUP + other % GROUP;
      rope_head<T, Q_R, K_DIM, DIMS, TRADITIONAL, FACTOR, Q_NORM, Q_WEIGHT>(
          q + size_t(seq) * Q_WIDTH + Q_START + of * K_DIM, q_weight, as_type<float>(Q_EPS), cosine,
          sine, lane, held + i * K_STRIDE);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (row >= one && row < one + HELD) {
#pragma unroll
      for (int d = 0; d < K_PARTS; d++) {
        query[d].thread_elements()[0] = held[(row - one) * K_STRIDE + d * 8 + col];
        query[d].thread_elements()[1] = held[(row - one) * K_STRIDE + d * 8 + col + 1];
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
} else {
#pragma unroll
  for (int d = 0; d < K_PARTS; d++) {
    query[d].thread_elements()[0] = q[q_row * K_DIM + d * 8 + col];
    query[d].thread_elements()[1] = q[q_row * K_DIM + d * 8 + col + 1];
  }
}
thread metal::simdgroup_matrix<float, 8, 8> o[V_PARTS];
#pragma unroll
for (int d = 0; d < V_PARTS; d++) {
  o[d].thread_elements()[0] = 0.0f;
  o[d].thread_elements()[1] = 0.0f;
}
// The sink is a key that the first split sees before all others; one lane of the row counts it.
const bool sink = SINKS && split == 0;
float m = sink ? metal::max(float(sinks[head]) * LOG2_E, LOWEST) : LOWEST;
float l = sink && col == 0 ? 1.0f : 0.0f;

for (int base = start; base < end; base += KEYS) {
  if (!PARTIAL && thread_index < KEYS) {
    key = metal::min(metal::max(base + thread_index, begin), end - 1);
    slots[thread_index] = block_tables[table + key / BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE;
  }
  // The slots are there, and all have used the tile before.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (PARTIAL) {
    put_rows<T, BITS, K_DIM, K_STRIDE, KEYS, THREADS, K_HELD>(k_held, thread_index, k_tile);
    put_rows<T, BITS, V_DIM, V_STRIDE, KEYS, THREADS, V_HELD>(v_held, thread_index, v_tile);
    if (thread_index < KEYS) {
      slots[thread_index] = block * BLOCK_SIZE + key % BLOCK_SIZE;
    }
  } else {
    fetch_rows<T, BITS, K_DIM, K_GROUP, K_STRIDE, KEYS, THREADS>(
        (const device uint*)keys, slots, KV_HEADS, kv_head, thread_index, k_tile);
    fetch_rows<T, BITS, V_DIM, V_GROUP, V_STRIDE, KEYS, THREADS>(
        (const device uint*)values, slots, KV_HEADS, kv_head, thread_index, v_tile);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (PARTIAL && base + KEYS < end) {
    ask_rows<T, BITS, K_DIM, K_GROUP, KEYS, THREADS, K_HELD>(
        (const device uint*)keys, slots, KV_HEADS, kv_head, thread_index, k_held);
    ask_rows<T, BITS, V_DIM, V_GROUP, KEYS, THREADS, V_HELD>(
        (const device uint*)values, slots, KV_HEADS, kv_head, thread_index, v_held);
    key = metal::min(base + 2 * KEYS + thread_index, end - 1);
    block = block_tables[table + key / BLOCK_SIZE];
  }

  // A simdgroup without pairs has nothing to do: a segment may be short.
  attend_tile<T, K_DIM, V_DIM, KEYS, K_STRIDE, V_STRIDE, SOFTCAP != 0, PARTNERS>(
      query, (const threadgroup T*)k_tile, (const threadgroup T*)v_tile, sg_first < pairs,
      simdgroup_index, scores, base, from, to, s_scale, softcap * LOG2_E, row, col, m, l, o);
}

l = row_sum(l);
const float inverse = l > 0.0f ? 1.0f / l : 0.0f;
if (sg_first + row < pairs) {
  const size_t out_row = q_row * splits + split;
  const size_t at = out_row * V_DIM + simdgroup_index % PARTNERS * V_PARTS * 8 + col;
#pragma unroll
  for (int d = 0; d < V_PARTS; d++) {
    out[at + d * 8] = OUT_T(o[d].thread_elements()[0] * inverse);
    out[at + d * 8 + 1] = OUT_T(o[d].thread_elements()[1] * inverse);
  }
  if (PARTIAL && col == 0 && simdgroup_index % PARTNERS == 0) {
    lse[out_row] = l > 0.0f ? m + metal::log2(l) : LOWEST;
  }
}
// Elements of the ticket beyond the sums.
const bool beyond = !PARTIAL || (!PREFIX && thread_index >= q_shape[0] * KV_HEADS * GROUP * splits);
if (beyond && kv_head == 0 && tile == 0 && split == 0 && thread_index < 8) {
  lse[thread_index] = ticket[0];
}
