// varlen_prefill: causal attention of packed query rows over their blocks of the paged store.
//
//   q             (N, KV_HEADS * GROUP, K_DIM)  packed rows; GROUP query heads share a KV head
//   keys, values  (slots, KV_HEADS, DIM)        the store; slot = block * BLOCK_SIZE + offset
//                 a value has BITS bits: those of T, or 8 or 4 in rows of words as in quantised.h
//   block_tables  (S, max_blocks) int32         the blocks of each segment, in order
//   cu_seqlens_q  (S + 1,) int32                segment s has rows cu_seqlens_q[s] .. [s + 1] - 1
//   seq_lens      (S,) int32                    the number of keys of segment s, those of its own rows included
//   tiles         (T, 2) int32                  segment, first (row, head) pair; see plan_tiles
//   spans         (N, 2) int32                  if SPANS: first key and end of the keys of a row's span
//   sinks         (KV_HEADS * GROUP,) of T      one logit a head; has a weight, but no value
//   ticket        float32 -> next_ticket (8,)    read after the writes before it
//   SCALE, SOFTCAP  the bits of two floats (a template value is an integer); SOFTCAP 0 = none
//   out           (N, KV_HEADS * GROUP, V_DIM)  of T; zeros in rows of no segment
//
// Row i of a segment with q_len rows sits at position seq_len - q_len + i and sees the keys up to
// there, the last WINDOW of them if WINDOW > 0.  K_DIM and V_DIM are multiples of 8.
//
// With SPANS a row also sees all keys of its span, which holds its position: rows of one picture see
// each other (Gemma 3 and 4).  The span of a row of text is its own key.
//
// Layout.  The query rows of one KV head in one segment are its q_len * GROUP pairs (row, head),
// row by row.  A tile is the next ROWS pairs, so a short segment fills it with heads (GQA), and
// each key that is fetched serves all of them.  Grid: x: KV head, y: tile.
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
// Why it is correct.
//   - A tile of keys that reaches outside [begin, end) reads the key at the border again instead:
//     only slots of this segment, inside its window, are ever read.  Any other may hold NaN.
//   - A key that a row must not see scores MASKED, so far below LOWEST, where every maximum starts,
//     that 2^(MASKED - m) is 0: for a row too that has seen nothing yet.  Both are finite.
//   - Where a tile of keys begins depends on nothing but KEYS, and one that a row does not see
//     changes none of its sums.  So a prompt in chunks gives the same bits as a whole one.
//   - Spans do not overlap.  So later rows see later first keys and later ends, and the first and the
//     last row of a tile know its `begin` and `end`.
//   - No row sees beyond seq_len, whatever its span: a tile of padding may repeat a real row.
//   - A pair past the segment's end repeats the last one and is not stored.
//   - A tile of padding is one of a segment with no keys over all the rows: no loop, l = 0, zeros.
//   - Every lane takes the same path around barriers, every lane of a simdgroup around products.
//
// Cost.  Bytes: a tile of pairs fetches each key from `begin` to `end` once, 1 / ROWS of the
// bytes of single pairs; keys that tiles share come from the cache.  Flops: 2 * (K_DIM + V_DIM) a pair and
// key, of tiles of keys that are seen in part too.  For 8 keys a lane issues (K_DIM + V_DIM) / 8
// products and 2 exp2.  Registers of a lane: K_DIM / 4 elements of T, V_DIM / 4 / PARTNERS + KEYS / 4 floats.
#include "key_tile.h"

// --- kernel body ---
constexpr float LOWEST = -1e30f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int ROWS = SIMDGROUPS / PARTNERS * 8;
constexpr int THREADS = SIMDGROUPS * 32;  // at least KEYS
constexpr int K_PARTS = K_DIM / 8;  // matrices side by side
constexpr int V_PARTS = V_DIM / 8 / PARTNERS;
constexpr int K_STRIDE = (K_PARTS | 1) * 8;  // elements from row to row of a tile
constexpr int V_STRIDE = (V_DIM / 8 | 1) * 8;
constexpr int PER_LOAD = 16 / int(sizeof(T));

threadgroup int slots[KEYS];
threadgroup uint4 k_tile[KEYS * K_STRIDE / PER_LOAD];
threadgroup uint4 v_tile[KEYS * V_STRIDE / PER_LOAD];
threadgroup float scores[PARTNERS > 1 ? ROWS * KEYS : 1];

const int thread_index = int(thread_position_in_threadgroup.x);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int kv_head = int(threadgroup_position_in_grid.x);
const int segment = tiles[threadgroup_position_in_grid.y * 2];
const int first = tiles[threadgroup_position_in_grid.y * 2 + 1];
const int row = matrix_row(int(thread_index_in_simdgroup));
const int col = matrix_col(int(thread_index_in_simdgroup));

const bool padding = segment < 0;
const int begin_row = padding ? 0 : cu_seqlens_q[segment];
const int q_len = (padding ? q_shape[0] : cu_seqlens_q[segment + 1]) - begin_row;
const int seq_len = padding ? 0 : seq_lens[segment];
const int pairs = q_len * GROUP;

// This lane's row of every matrix.
const int sg_first = first + simdgroup_index / PARTNERS * 8;
const int pair = metal::min(sg_first + row, pairs - 1);
const int head = kv_head * GROUP + pair % GROUP;
const int position = seq_len - q_len + pair / GROUP;
int from = WINDOW > 0 ? position - WINDOW + 1 : 0;  // the first key that it sees
int to = position + 1;                              // the key after the last one
const size_t q_row = size_t(begin_row + pair / GROUP) * (KV_HEADS * GROUP) + head;

const int first_position = seq_len - q_len + first / GROUP;
const int last_in_tile = (metal::min(first + ROWS, pairs) - 1) / GROUP;  // a row of the segment
int begin = WINDOW > 0 ? metal::max(first_position - WINDOW + 1, 0) : 0;
int end = seq_len - q_len + last_in_tile + 1;
if (SPANS) {
  const int own = (begin_row + pair / GROUP) * 2;
  const int first_in_tile = metal::min(first, pairs - 1) / GROUP;
  from = metal::min(from, int(spans[own]));
  to = metal::min(int(spans[own + 1]), seq_len);
  begin = metal::min(begin, int(spans[(begin_row + first_in_tile) * 2]));
  end = metal::min(int(spans[(begin_row + last_in_tile) * 2 + 1]), seq_len);
}

// Scores are wanted in base 2; under a softcap the factor comes after the tanh.
const float softcap = as_type<float>(SOFTCAP);
const float s_scale = as_type<float>(SCALE) * (SOFTCAP != 0 ? 1.0f / softcap : LOG2_E);

thread metal::simdgroup_matrix<T, 8, 8> query[K_PARTS];
#pragma unroll
for (int d = 0; d < K_PARTS; d++) {
  query[d].thread_elements()[0] = q[q_row * K_DIM + d * 8 + col];
  query[d].thread_elements()[1] = q[q_row * K_DIM + d * 8 + col + 1];
}
thread metal::simdgroup_matrix<float, 8, 8> o[V_PARTS];
#pragma unroll
for (int d = 0; d < V_PARTS; d++) {
  o[d].thread_elements()[0] = 0.0f;
  o[d].thread_elements()[1] = 0.0f;
}
// The sink is a key that comes before all others; one lane of the row counts it.
float m = SINKS ? metal::max(float(sinks[head]) * LOG2_E, LOWEST) : LOWEST;
float l = SINKS && col == 0 ? 1.0f : 0.0f;

for (int base = begin / KEYS * KEYS; base < end; base += KEYS) {
  if (thread_index < KEYS) {
    const int key = metal::min(metal::max(base + thread_index, begin), end - 1);
    const int block = block_tables[size_t(segment) * block_tables_shape[1] + key / BLOCK_SIZE];
    slots[thread_index] = block * BLOCK_SIZE + key % BLOCK_SIZE;
  }
  // The slots are there, and all have used the tile before.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  fetch_rows<T, BITS, K_DIM, K_GROUP, K_STRIDE, KEYS, THREADS>(
      (const device uint*)keys, slots, KV_HEADS, kv_head, thread_index, k_tile);
  fetch_rows<T, BITS, V_DIM, V_GROUP, V_STRIDE, KEYS, THREADS>(
      (const device uint*)values, slots, KV_HEADS, kv_head, thread_index, v_tile);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // A simdgroup without pairs has nothing to do: a segment may be short.
  attend_tile<T, K_DIM, V_DIM, KEYS, K_STRIDE, V_STRIDE, SOFTCAP != 0, PARTNERS>(
      query, (const threadgroup T*)k_tile, (const threadgroup T*)v_tile, sg_first < pairs,
      simdgroup_index, scores, base, from, to, s_scale, softcap * LOG2_E, row, col, m, l, o);
}

l = row_sum(l);
const float inverse = l > 0.0f ? 1.0f / l : 0.0f;
if (sg_first + row < pairs) {
  const size_t at = q_row * V_DIM + simdgroup_index % PARTNERS * V_PARTS * 8 + col;
#pragma unroll
  for (int d = 0; d < V_PARTS; d++) {
    out[at + d * 8] = T(o[d].thread_elements()[0] * inverse);
    out[at + d * 8 + 1] = T(o[d].thread_elements()[1] * inverse);
  }
}
if (kv_head == 0 && threadgroup_position_in_grid.y == 0 && thread_index < 8) {
  next_ticket[thread_index] = ticket[0];
}
