// shared_prefix: attention of all rows of a step of decodes to the prefix that their sequences share,
// which is read once for all of them (cascade attention; as in Hydragen, Juravsky et al. 2024).
//
//   q             (B, KV_HEADS * GROUP, K_DIM)  one row a sequence; GROUP query heads share a KV head
//                 of T; if FUSED rows of Q_WIDTH columns, heads from Q_START on, still to be
//                 normalised and rotated
//   q_weight, freqs                             read if Q_WEIGHT, FREQS, as in rope_write
//   positions     (B,) int32                    read if FUSED: the position by which a row rotates
//   keys, values  (slots, KV_HEADS, DIM)        the store; slot = block * BLOCK_SIZE + offset
//                 a value has BITS bits: those of T, or 8 or 4 in rows of words as in quantised.h
//   block_tables  (B, max_blocks) int32         the blocks of each sequence, in order
//   leader        (1,) int32                    a sequence that has the prefix: its blocks are read
//   prefix_lens   (B,) int32                    prefix_lens[leader] is the prefix's length
//   ticket        float32                       read after the writes before it
//   SCALE, SOFTCAP  the bits of two floats (a template value is an integer); SOFTCAP 0 = none.
//                 So are ROPE_SCALE, LOG2_BASE, FACTOR and Q_EPS
//   partial       (B, heads, splits, V_DIM) float32  attention over each split, normalised in itself
//   lse           (B, heads, splits) float32    log2 of its sum of exponentials; LOWEST = it saw no key
//                 also the next ticket
//
// paged_decode takes partial and lse, and adds the keys that are a sequence's own.  Rows that do not
// have the prefix are computed like the others and are not used.
//
// Layout.  The query rows of one KV head are B * GROUP pairs (row, head), row by row.  A tile is ROWS
// of them, 8 a simdgroup, and all of a tile see the same keys: simdgroups, tiles of keys and products
// are those of varlen_prefill, which says the rest.  While a tile is attended to, the next is loaded
// into registers, because a step of few rows is bound by memory latency.
//
//   grid   x: KV head   y: tile of pairs   z: split of the prefix, at multiples of KEYS
//
// FUSED.  Each threadgroup normalises and rotates its own queries (rope.h), which costs less than a launch
// that does it once.  A simdgroup does so for HELD of its pairs at a time, by way of its rows of k_tile,
// which is not used yet.
//
// Why it is correct.
//   - A tile of keys that reaches past the split's end reads its last key again instead, and scores
//     MASKED there (key_tile.h).  No other slot than the prefix's is ever read.
//   - A split behind the prefix's end makes no turn of the loop, and gives zeros and LOWEST.
//   - A pair past the last repeats it and is not stored.
//   - Every lane takes the same path around barriers, every lane of a simdgroup around products.
//
// Cost.  Bytes: the prefix once a tile of pairs, then from the cache; B * heads *
// splits * V_DIM floats written, and read again by paged_decode.
#include "key_tile.h"
#include "rope.h"

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
constexpr int TURNS = (K_DIM / 2 + 31) / 32;  // pairs of elements of a head that a lane holds
constexpr int HELD = KEYS / SIMDGROUPS < 8 ? KEYS / SIMDGROUPS : 8;

threadgroup int slots[KEYS];
threadgroup uint4 k_tile[KEYS * K_STRIDE / PER_LOAD];
threadgroup uint4 v_tile[KEYS * V_STRIDE / PER_LOAD];
threadgroup float scores[PARTNERS > 1 ? ROWS * KEYS : 1];

const int thread_index = int(thread_position_in_threadgroup.x);
const int kv_head = int(threadgroup_position_in_grid.x);
const int split = int(threadgroup_position_in_grid.z);
const int splits = int(threadgroups_per_grid.z);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int row = matrix_row(lane);
const int col = matrix_col(lane);

const size_t table = size_t(leader[0]) * block_tables_shape[1];
const int prefix_len = prefix_lens[leader[0]];
const int per_split = ((prefix_len + splits - 1) / splits + KEYS - 1) / KEYS * KEYS;
const int begin = split * per_split;
const int end = metal::min(begin + per_split, prefix_len);

// This lane's row of every matrix.
const int pairs = q_shape[0] * GROUP;
const int sg_first = int(threadgroup_position_in_grid.y) * ROWS + simdgroup_index / PARTNERS * 8;
const int pair = metal::min(sg_first + row, pairs - 1);
const size_t q_row = size_t(pair / GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + pair % GROUP;

// Scores are wanted in base 2; under a softcap the factor comes after the tanh.
const float softcap = as_type<float>(SOFTCAP);
const float s_scale = as_type<float>(SCALE) * (SOFTCAP != 0 ? 1.0f / softcap : LOG2_E);

// The first tile is asked for before the queries are made.  Where rows lie is looked up a tile ahead.
constexpr int WORDS = RowPart<T, BITS>::WORDS;
constexpr int K_PARTS_HELD = (KEYS * K_DIM / RowPart<T, BITS>::VALUES + THREADS - 1) / THREADS;
constexpr int V_PARTS_HELD = (KEYS * V_DIM / RowPart<T, BITS>::VALUES + THREADS - 1) / THREADS;
thread uint k_held[K_PARTS_HELD * WORDS];
thread uint v_held[V_PARTS_HELD * WORDS];
int key = metal::max(metal::min(begin + thread_index, end - 1), 0);
int block = block_tables[table + key / BLOCK_SIZE];
if (thread_index < KEYS) {
  slots[thread_index] = block * BLOCK_SIZE + key % BLOCK_SIZE;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
ask_rows<T, BITS, K_DIM, K_GROUP, KEYS, THREADS, K_PARTS_HELD>(
    (const device uint*)keys, slots, KV_HEADS, kv_head, thread_index, k_held);
ask_rows<T, BITS, V_DIM, V_GROUP, KEYS, THREADS, V_PARTS_HELD>(
    (const device uint*)values, slots, KV_HEADS, kv_head, thread_index, v_held);
key = metal::max(metal::min(key + KEYS, end - 1), 0);
block = block_tables[table + key / BLOCK_SIZE];

thread metal::simdgroup_matrix<T, 8, 8> query[K_PARTS];
if (FUSED) {
  threadgroup T* held = (threadgroup T*)k_tile + simdgroup_index * HELD * K_STRIDE;
  for (int first = 0; first < 8; first += HELD) {
    thread float cosine[TURNS];
    thread float sine[TURNS];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int other = metal::min(sg_first + first + i, pairs - 1);
      const int seq = other / GROUP;
      if (i == 0 || other % GROUP == 0) {
        rope_sines<TURNS, DIMS / 2, FREQS>(freqs, as_type<float>(LOG2_BASE),
                                           as_type<float>(ROPE_SCALE), positions[seq], lane,
                                           cosine, sine);
      }
      const int head = kv_head * GROUP + other % GROUP;
      rope_head<T, Q_R, K_DIM, DIMS, TRADITIONAL, FACTOR, Q_NORM, Q_WEIGHT>(
          q + size_t(seq) * Q_WIDTH + Q_START + head * K_DIM, q_weight, as_type<float>(Q_EPS), cosine,
          sine, lane, held + i * K_STRIDE);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (row >= first && row < first + HELD) {
#pragma unroll
      for (int d = 0; d < K_PARTS; d++) {
        query[d].thread_elements()[0] = held[(row - first) * K_STRIDE + d * 8 + col];
        query[d].thread_elements()[1] = held[(row - first) * K_STRIDE + d * 8 + col + 1];
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
float m = LOWEST;
float l = 0.0f;

for (int base = begin; base < end; base += KEYS) {
  // All have used the tile before, and the slots.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  put_rows<T, BITS, K_DIM, K_STRIDE, KEYS, THREADS, K_PARTS_HELD>(k_held, thread_index, k_tile);
  put_rows<T, BITS, V_DIM, V_STRIDE, KEYS, THREADS, V_PARTS_HELD>(v_held, thread_index, v_tile);
  if (thread_index < KEYS) {
    slots[thread_index] = block * BLOCK_SIZE + key % BLOCK_SIZE;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (base + KEYS < end) {
    ask_rows<T, BITS, K_DIM, K_GROUP, KEYS, THREADS, K_PARTS_HELD>(
        (const device uint*)keys, slots, KV_HEADS, kv_head, thread_index, k_held);
    ask_rows<T, BITS, V_DIM, V_GROUP, KEYS, THREADS, V_PARTS_HELD>(
        (const device uint*)values, slots, KV_HEADS, kv_head, thread_index, v_held);
    key = metal::min(key + KEYS, end - 1);
    block = block_tables[table + key / BLOCK_SIZE];
  }

  // A simdgroup without pairs has nothing to do.
  attend_tile<T, K_DIM, V_DIM, KEYS, K_STRIDE, V_STRIDE, SOFTCAP != 0, PARTNERS>(
      query, (const threadgroup T*)k_tile, (const threadgroup T*)v_tile, sg_first < pairs,
      simdgroup_index, scores, base, begin, end, s_scale, softcap * LOG2_E, row, col, m, l, o);
}

l = row_sum(l);
const float inverse = l > 0.0f ? 1.0f / l : 0.0f;
if (sg_first + row < pairs) {
  const size_t out_row = q_row * splits + split;
  const size_t at = out_row * V_DIM + simdgroup_index % PARTNERS * V_PARTS * 8 + col;
#pragma unroll
  for (int d = 0; d < V_PARTS; d++) {
    partial[at + d * 8] = o[d].thread_elements()[0] * inverse;
    partial[at + d * 8 + 1] = o[d].thread_elements()[1] * inverse;
  }
  if (col == 0 && simdgroup_index % PARTNERS == 0) {
    lse[out_row] = l > 0.0f ? m + metal::log2(l) : LOWEST;
  }
}
