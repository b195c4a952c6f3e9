// latent_attention: causal attention of packed query rows to latents in the paged store (multi-head
// latent attention in absorbed form: DeepSeek-V2, arXiv 2405.04434, section 2.1).
//
//   q             (HEADS, N, LATENT_DIM)  packed rows, of T: as a product per head makes them
//   q_pe          (N, HEADS, ROPE)        their rotary parts
//   keys          (slots, 1, LATENT_DIM)  the store: latents, which are keys and values at once
//   values        (slots, 1, ROPE)        the rotary keys; of BITS < 16: rows as in quantised.h
//   block_tables  (S, max_blocks) int32   the blocks of each segment, in order
//   cu_seqlens_q  (S + 1,) int32          segment s has rows cu_seqlens_q[s] .. [s + 1] - 1
//   seq_lens      (S,) int32              the number of keys of segment s, those of its own rows included
//   tiles         (T, 2) int32            segment, first (row, head) pair; see plan_tiles
//   ticket        float32                 read after the writes before it
//   SCALE         the bits of a float (a template value is an integer)
//   out           (N, HEADS, LATENT_DIM) of T; zeros in rows of no segment
//                 if PARTIAL (N, HEADS, splits, LATENT_DIM) float32, each split normalised
//   lse           if PARTIAL (N, HEADS, splits) float32, log2 of the sum of exponentials, LOWEST = no
//                 key seen; else 8 elements.  Also the next ticket: it has 8 elements or more
//
// A score is (q . latent + q_pe . rotary key) * scale, its value the latent.  Row i of a segment with
// q_len rows sits at position seq_len - q_len + i and sees the keys up to there.
//
// Layout.  All heads share one latent a token, so a segment's rows make q_len * HEADS pairs (row,
// head), row by row, and a tile is 32 of them, in BLOCKS of 8.  A decode is a segment of one row.
// Grid: x: tile, y: split of its keys.  For a tile of KEYS = 8 latents, with 8 simdgroups:
//
//   store --> threadgroup memory    | latent, LATENT_DIM      | rotary, ROPE |   8 rows
//                                     |     |     |     ...          |
//   scores   simdgroup s takes depth  0     1     2   (matrices s, s + 8, ...), all 32 pairs
//            its parts of the 32 x 8 scores --> threadgroup memory
//   softmax  thread t adds up the parts of score t: 8 lanes are a pair, one key each
//            weights (32 x 8 of T) and the factors that fade sums --> threadgroup memory
//   values   simdgroup s takes columns s * LATENT_DIM / 8 .. of the latents, all 32 pairs
//
// So each element of a latent is read once from the store for 32 pairs, and from threadgroup memory
// twice, as a key and as a value, each time for all blocks (multiply_blocks in matrix.h).  Blocks that
// no pair of the tile needs are left out: 20 heads cost 24 pairs.
//
// Online softmax in base 2, as in varlen_prefill; lanes of a pair agree on the maximum by shuffles.
//
// Why it is correct.
//   - A tile of keys that reaches past the last one seen reads that one again.  A key that a pair must
//     not see scores MASKED, so far below LOWEST, where every maximum starts, that its weight is 0.  No
//     slot that the tile's last pair does not see is read.  Any other may hold NaN.
//   - Tiles of keys begin at multiples of KEYS, and one that a pair does not see changes none of its
//     sums: in one split a prompt in chunks gives the same bits as a whole one.
//   - A pair past the segment's end repeats the last one and is not stored.
//   - A tile of padding is one of a segment with no keys over all the rows: no loop, l = 0, zeros.
//   - Every thread takes the same path around barriers, every lane of a simdgroup around products
//     and shuffles: a simdgroup's 32 scores lie in one block of pairs.
//
// Cost, at LATENT_DIM 512 and ROPE 64.  Bytes: 1,152 a key in 16 bits, once for 32 pairs; latents
// that tiles share come from the cache.  Flops: 2 * (576 + 512) a pair and key: 30 for each byte with 16 heads,
// so a decode of many heads is bound by arithmetic.  Threadgroup memory: 8 latents of 584 elements, 9.1 KB
// (18.3 KB in float32), 8 KB of scores, 0.6 KB of weights.  Registers of a lane: 64 floats of sums, 72
// elements of queries (36 registers in 16 bits; in float32 more than Apple's GPUs have, not measured);
// with 16 simdgroups half of both, and 16 KB of scores, which fits Metal's 32 KB.
// The next tile under way takes 12 more.  For 8 keys and 32 pairs a simdgroup has 36 products for scores
// and 32 for values, and 4 barriers.
#include "key_tile.h"

// The largest x of the 8 lanes of a pair, and their sum.
METAL_FUNC float pair_max(float x) {
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(1)));
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(2)));
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(4)));
  return x;
}

METAL_FUNC float pair_sum(float x) {
  x += metal::simd_shuffle_xor(x, ushort(1));
  x += metal::simd_shuffle_xor(x, ushort(2));
  x += metal::simd_shuffle_xor(x, ushort(4));
  return x;
}

// --- kernel body ---
constexpr float LOWEST = -1e30f;
constexpr float MASKED = -2e30f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int KEYS = 8;
constexpr int BLOCKS = 4;
constexpr int PAIRS = BLOCKS * 8;
constexpr int SCORES = PAIRS * KEYS;
constexpr int THREADS = SIMDGROUPS * 32;
constexpr int OWN = SCORES > THREADS ? SCORES / THREADS : 1;  // scores of a thread
constexpr int DEPTH = (LATENT_DIM + ROPE) / 8;  // matrices of a row of keys
constexpr int SHARE = (DEPTH + SIMDGROUPS - 1) / SIMDGROUPS;  // of a simdgroup, at most
constexpr int COLUMNS = LATENT_DIM / 8 / SIMDGROUPS;  // matrices of values of a simdgroup
constexpr int STRIDE = (DEPTH | 1) * 8;  // elements from row to row of the tile
constexpr int PER_LOAD = 16 / int(sizeof(T));
constexpr int K_PARTS = LATENT_DIM / RowPart<T, BITS>::VALUES;
constexpr int V_PARTS = ROPE / RowPart<T, BITS>::VALUES;
constexpr int K_COUNT = (KEYS * K_PARTS + THREADS - 1) / THREADS;
constexpr int V_COUNT = (KEYS * V_PARTS + THREADS - 1) / THREADS;

threadgroup int slots[KEYS];
threadgroup uint4 tile[KEYS * STRIDE / PER_LOAD];
threadgroup float parts[SIMDGROUPS * SCORES];
threadgroup T weights[SCORES];
threadgroup float fades[PAIRS];

const int thread_index = int(thread_position_in_threadgroup.x);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int row = matrix_row(lane);
const int col = matrix_col(lane);
const int split = int(threadgroup_position_in_grid.y);
const int splits = int(threadgroups_per_grid.y);
const int segment = tiles[threadgroup_position_in_grid.x * 2];
const int first = tiles[threadgroup_position_in_grid.x * 2 + 1];

const bool padding = segment < 0;
const int begin_row = padding ? 0 : cu_seqlens_q[segment];
const int q_len = (padding ? q_pe_shape[0] : cu_seqlens_q[segment + 1]) - begin_row;
const int seq_len = padding ? 0 : seq_lens[segment];
const int pairs = q_len * HEADS;
const int used = metal::min((pairs - first + 7) / 8, BLOCKS);  // blocks with a pair
// Pairs of packed rows follow one another, so this is the first of the tile among all.
const size_t first_pair = size_t(begin_row) * HEADS + first;

// The keys that a pair of the tile sees, and the split's.
const int seen = seq_len - q_len + (metal::min(first + PAIRS, pairs) - 1) / HEADS + 1;
const int per_split = ((seen + splits - 1) / splits + KEYS - 1) / KEYS * KEYS;
const int begin = split * per_split;
const int end = metal::min(begin + per_split, seen);

// The first tile is asked for before the queries.  Where rows lie is looked up a tile ahead.
thread uint k_held[K_COUNT * RowPart<T, BITS>::WORDS];
thread uint v_held[V_COUNT * RowPart<T, BITS>::WORDS];
const size_t table = size_t(metal::max(segment, 0)) * block_tables_shape[1];
int key = 0;
int block = 0;
if (begin < end) {
  key = metal::min(begin + thread_index, end - 1);
  if (thread_index < KEYS) {
    slots[thread_index] = block_tables[table + key / BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ask_rows<T, BITS, LATENT_DIM, K_GROUP, KEYS, THREADS, K_COUNT>(
      (const device uint*)keys, slots, 1, 0, thread_index, k_held);
  ask_rows<T, BITS, ROPE, V_GROUP, KEYS, THREADS, V_COUNT>(
      (const device uint*)values, slots, 1, 0, thread_index, v_held);
  key = metal::min(key + KEYS, end - 1);
  block = block_tables[table + key / BLOCK_SIZE];
}

thread metal::simdgroup_matrix<T, 8, 8> query[SHARE * BLOCKS];
#pragma unroll
for (int b = 0; b < BLOCKS; b++) {
  const int pair = metal::max(metal::min(b * 8 + row, pairs - 1 - first), 0);
  const size_t of = metal::min(first_pair + pair, size_t(q_pe_shape[0]) * HEADS - 1);
  const device T* latent = q + (of % HEADS * q_pe_shape[0] + of / HEADS) * LATENT_DIM;
  const device T* rotary = q_pe + of * ROPE;
#pragma unroll
  for (int j = 0; j < SHARE; j++) {
    const int at = (j * SIMDGROUPS + simdgroup_index) * 8 + col;
    thread metal::simdgroup_matrix<T, 8, 8>& to = query[j * BLOCKS + b];
    if ((j + 1) * SIMDGROUPS * 8 <= LATENT_DIM || at < LATENT_DIM) {
      to.thread_elements()[0] = latent[at];
      to.thread_elements()[1] = latent[at + 1];
    } else if ((j + 1) * SIMDGROUPS <= DEPTH || at < DEPTH * 8) {
      to.thread_elements()[0] = rotary[at - LATENT_DIM];
      to.thread_elements()[1] = rotary[at - LATENT_DIM + 1];
    } else {
      to.thread_elements()[0] = T(0.0f);
      to.thread_elements()[1] = T(0.0f);
    }
  }
}
thread metal::simdgroup_matrix<float, 8, 8> o[BLOCKS * COLUMNS];
#pragma unroll
for (int i = 0; i < BLOCKS * COLUMNS; i++) {
  o[i].thread_elements()[0] = 0.0f;
  o[i].thread_elements()[1] = 0.0f;
}
// Of the pairs to which this thread's scores belong: the maximum, this lane's part of the sum, and the
// first key that is not seen.
const float s_scale = as_type<float>(SCALE) * LOG2_E;
thread float m[OWN];
thread float l[OWN];
thread int to[OWN];
#pragma unroll
for (int i = 0; i < OWN; i++) {
  m[i] = LOWEST;
  l[i] = 0.0f;
  const int pair = metal::min(first + (i * THREADS + thread_index) / KEYS, pairs - 1);
  to[i] = seq_len - q_len + pair / HEADS + 1;
}

for (int base = begin; base < end; base += KEYS) {
  // All have used the tile before, and the slots.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  put_rows<T, BITS, LATENT_DIM, STRIDE, KEYS, THREADS, K_COUNT>(k_held, thread_index, tile);
  put_rows<T, BITS, ROPE, STRIDE, KEYS, THREADS, V_COUNT>(v_held, thread_index,
                                                          tile + LATENT_DIM / PER_LOAD);
  if (thread_index < KEYS) {
    slots[thread_index] = block * BLOCK_SIZE + key % BLOCK_SIZE;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (base + KEYS < end) {
    ask_rows<T, BITS, LATENT_DIM, K_GROUP, KEYS, THREADS, K_COUNT>(
        (const device uint*)keys, slots, 1, 0, thread_index, k_held);
    ask_rows<T, BITS, ROPE, V_GROUP, KEYS, THREADS, V_COUNT>(
        (const device uint*)values, slots, 1, 0, thread_index, v_held);
    key = metal::min(key + KEYS, end - 1);
    block = block_tables[table + key / BLOCK_SIZE];
  }

  thread metal::simdgroup_matrix<float, 8, 8> score[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    score[b].thread_elements()[0] = 0.0f;
    score[b].thread_elements()[1] = 0.0f;
  }
#pragma unroll
  for (int j = 0; j < SHARE; j++) {
    // A simdgroup with fewer of them than others has queries of zeros: a branch here costs registers.
    const int d = j * SIMDGROUPS + simdgroup_index;
    const int at = ((j + 1) * SIMDGROUPS <= DEPTH ? d : metal::min(d, DEPTH - 1)) * 8;
    multiply_blocks<BLOCKS, 1, 8, STRIDE, true>(score, query + j * BLOCKS, used,
                                                (const threadgroup T*)tile + at, row, col);
  }
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    const int at = simdgroup_index * SCORES + (b * 8 + row) * KEYS + col;
    parts[at] = score[b].thread_elements()[0];
    parts[at + 1] = score[b].thread_elements()[1];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int at = i * THREADS + thread_index;
    if (at < SCORES) {
      float s = 0.0f;
#pragma unroll
      for (int p = 0; p < SIMDGROUPS; p++) {
        s += parts[p * SCORES + at];
      }
      s = base + at % KEYS < to[i] ? s * s_scale : MASKED;
      const float top = metal::max(m[i], pair_max(s));
      // Arguments are finite and not above 0, so the fast exp2 does, as in MLX's attention.
      const float fade = metal::fast::exp2(m[i] - top);
      const float weight = metal::fast::exp2(s - top);
      m[i] = top;
      l[i] = l[i] * fade + weight;
      weights[at] = T(weight);
      if (at % KEYS == 0) {
        fades[at / KEYS] = fade;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  thread metal::simdgroup_matrix<T, 8, 8> weight[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    weight[b].thread_elements()[0] = weights[(b * 8 + row) * KEYS + col];
    weight[b].thread_elements()[1] = weights[(b * 8 + row) * KEYS + col + 1];
    const float fade = fades[b * 8 + row];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      o[b * COLUMNS + c].thread_elements()[0] *= fade;
      o[b * COLUMNS + c].thread_elements()[1] *= fade;
    }
  }
  multiply_blocks<BLOCKS, COLUMNS, 8, STRIDE, false>(
      o, weight, used, (const threadgroup T*)tile + simdgroup_index * COLUMNS * 8, row, col);
}

// All have used the fades; they become the divisors of each pair's sums.
threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
for (int i = 0; i < OWN; i++) {
  const int at = i * THREADS + thread_index;
  const float sum = pair_sum(l[i]);
  if (at < SCORES && at % KEYS == 0) {
    fades[at / KEYS] = sum > 0.0f ? 1.0f / sum : 0.0f;
    if (PARTIAL && first + at / KEYS < pairs) {
      lse[(first_pair + at / KEYS) * splits + split] = sum > 0.0f ? m[i] + metal::log2(sum) : LOWEST;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
for (int b = 0; b < BLOCKS; b++) {
  const float inverse = fades[b * 8 + row];
  if (first + b * 8 + row < pairs) {
    const size_t of = ((first_pair + b * 8 + row) * splits + split) * LATENT_DIM;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const size_t at = of + (simdgroup_index * COLUMNS + c) * 8 + col;
      out[at] = OUT_T(o[b * COLUMNS + c].thread_elements()[0] * inverse);
      out[at + 1] = OUT_T(o[b * COLUMNS + c].thread_elements()[1] * inverse);
    }
  }
}
// Elements of the ticket beyond the sums.
if (threadgroup_position_in_grid.x == 0 && split == 0 && thread_index < 8 &&
    (!PARTIAL || thread_index >= q_pe_shape[0] * HEADS * splits)) {
  lse[thread_index] = ticket[0];
}
