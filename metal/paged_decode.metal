// paged_decode: attention of one query row a sequence over its blocks of the paged store; if FUSED
// with the work of rope_write before it (metal/rope_write.metal), for a step of decodes in one launch.
//
//   q             (B, KV_HEADS * GROUP, K_DIM)  one row a sequence; GROUP query heads share a KV head
//                 of T; if FUSED rows of *_WIDTH columns, as k and v are: heads from *_START on
//   k, v          (B, WIDTH) of T               read if FUSED: the newest key and value, not stored yet
//   q_weight, k_weight, freqs                   read if *_WEIGHT, FREQS, as in rope_write
//   positions     (B,) int32                    read if FUSED: the position by which a row rotates
//   keys, values  (slots, KV_HEADS, DIM)        the store; slot = block * BLOCK_SIZE + offset
//                 a value has BITS bits: those of T, or 8 or 4 in rows of words as in quantised.h
//   block_tables  (B, max_blocks) int32         the blocks of each sequence, in order
//   seq_lens      (B,) int32                    keys of each sequence, the newest is that of this step;
//                                               0 = a row of padding, gives 0, writes nothing
//   sinks         (KV_HEADS * GROUP,) of T      one logit a head; has a weight, but no value
//   prefix, prefix_lse, prefix_lens             read if PREFIX: the results of shared_prefix
//                 for each sequence's first prefix_lens[sequence] keys, by split; 0 = no such keys
//   ticket        float32                       read after the writes before it
//   out           (B, heads, splits, V_DIM) of OUT_T: T if there is one split; if there are more,
//                 float; merge_partitions merges the splits, weighted by lse
//   lse           (B, heads, splits) float32, log2 of the sum of exponentials, LOWEST = no key seen;
//                 also the next ticket: a later write takes it, and so comes after this read; a ticket
//                 has 8 elements or more, so where lse would have fewer, LOWEST follows
//   SCALE, SOFTCAP  the bits of two floats (a template value is an integer); SOFTCAP 0 = none.
//                 So are ROPE_SCALE, LOG2_BASE, FACTOR, Q_EPS and K_EPS
//
// Layout.  One threadgroup serves one sequence, one split of its context, and HEADS query heads of
// one KV head, so that a key is loaded once for all of them (GQA).  Groups of more than HEADS heads
// take several threadgroups.
//
//   grid   x: KV head and tile of its group   y: sequence   z: split of the context
//
//   split z owns keys [begin, end)            simdgroup s takes chunks s, s + SIMDGROUPS, ...
//   |c0|c1|c2|c3|c0|c1|c2|c3| ...             a chunk is UNROLL x (32 / LANES) keys
//
//   lanes   0 ........ LANES-1 | LANES ...    LANES lanes share a key: lane l holds the words
//           one key            | next key     (c * LANES + l) * W ... + W - 1, for each c
//
// With 16-byte loads, LANES lanes read a row of K in one coalesced run; UNROLL rows of K and of V are
// asked for before any is used, because a decode waits for memory latency, not for arithmetic.
//
// Registers.  A lane keeps its part of o for all heads, the words under way and the scores of a chunk.  Its
// part of the queries lies in threadgroup memory, scaled, and is read for PAIRED keys at a time: beside
// 4 heads of 128 it would not fit.
//
// A quantised row is read in the same way and turned into floats in registers, so half or a quarter
// of the bytes is all that is fetched.  A load of W words lies within one group of values: one scale
// and low a load (`affine`).
//
// FUSED.  The simdgroups share the HEADS queries and the new key among them: norm, factor and rotation as
// in rope.h, at positions[seq], then to threadgroup memory, rounded to T.  The last split makes the
// store's rows of the new key and value there, quantised or not, and attends to them as it does to rows of
// the store (its simdgroup with the fewest other keys does); its first tile puts them into the store.
//
// PREFIX.  The keys that sequences share are attended to by shared_prefix; here a sequence's
// keys begin behind them.  Not for layers with a window.
//
// Online softmax (Milakov and Gimelshein 2018; as in flash-attention): each group of LANES lanes
// keeps for each head its own maximum m, sum l and weighted values o, rescaled when m grows.  All is
// in base 2: scores are multiplied by log2(e) once.  exp2 is the fast one, as in MLX's attention: its
// arguments are differences of finite numbers, from a maximum, so not above 0.  At the end the lane
// groups of a simdgroup merge by shuffles, the simdgroups through threadgroup memory.
//
// Why it is correct.
//   - Keys outside [begin, end) are read at the last valid position instead (a slot that is free may
//     hold anything, NaN too) and their weight is set to 0.
//   - m starts at LOWEST, a finite number: a difference of two maxima is never inf - inf, and a
//     group that saw no key has l = 0 and adds nothing.
//   - FUSED: no threadgroup reads rows of the store that another one writes in this launch: it holds
//     its own newest row, and the caller guarantees that it needs no other (reads_new_rows).
//   - Loops around shuffles and barriers have the same trip count for every lane (simdgroup).
//
// Cost.  Bytes: each key and value once a tile of HEADS heads.  Per key, head and lane: K_DIM / LANES
// multiply-adds for the score, V_DIM / LANES for the value, log2(LANES) shuffles, one exp2.
#include "quantised.h"
#include "rope.h"

// A lane's part of a query, in RUNS runs of RUN elements that LANES lanes take in turns.
template <int RUNS, int RUN, int LANES>
METAL_FUNC void read_query(const threadgroup float* query, int part, thread float* to) {
  constexpr int VEC = RUN % 4 == 0 ? 4 : 1;
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
#pragma unroll
    for (int e = 0; e < RUN; e += VEC) {
      const threadgroup float* from = query + (r * LANES + part) * RUN + e;
      if (VEC == 1) {
        to[r * RUN + e] = from[0];
      } else {
        const float4 four = *(const threadgroup float4*)from;
        to[r * RUN + e] = four.x;
        to[r * RUN + e + 1] = four.y;
        to[r * RUN + e + 2] = four.z;
        to[r * RUN + e + 3] = four.w;
      }
    }
  }
}

// --- kernel body ---
constexpr float LOWEST = -1e30f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int PER_WORD = 32 / BITS;
constexpr bool QUANTISED = BITS < 16;
constexpr int TILES = (GROUP + HEADS - 1) / HEADS;
constexpr int KEYS = 32 / LANES;        // keys that a simdgroup looks at side by side
constexpr int CHUNK = UNROLL * KEYS;    // and between two updates of the maximum
constexpr int K_WORDS = K_DIM / PER_WORD;  // words of the values of one head's row
constexpr int V_WORDS = V_DIM / PER_WORD;
constexpr int PAIR = int(QUANTISED) * int(sizeof(T)) / 2;  // words of a scale and low
constexpr int K_ROW = K_WORDS + K_DIM / K_GROUP * PAIR;
constexpr int V_ROW = V_WORDS + V_DIM / V_GROUP * PAIR;
constexpr int K_RUNS = K_WORDS / (LANES * KW);  // loads a lane needs for its part of a row
constexpr int V_RUNS = V_WORDS / (LANES * VW);
constexpr int K_PART = K_RUNS * KW * PER_WORD;  // elements of a row that a lane holds
constexpr int V_PART = V_RUNS * VW * PER_WORD;
constexpr int K_RUN = KW * PER_WORD;  // elements of a load
constexpr int PAIRED = K_PART > 8 ? 1 : 2;  // keys for which a lane reads its part of a query once
constexpr int QUERIES = HEADS * K_DIM;
constexpr int PARTIALS = SIMDGROUPS * V_DIM;
constexpr int TURNS = (K_DIM / 2 + 31) / 32;  // pairs of a head that a lane holds

// FUSED: the queries, the new key and the new value; key and value as the store has them, if quantised.
constexpr int FRESH = FUSED ? (HEADS + 1) * K_DIM + V_DIM : 8;
threadgroup uint4 fresh_quads[FRESH * int(sizeof(T)) / 16];
threadgroup uint quantised_k[FUSED && QUANTISED ? K_ROW : 1];
threadgroup uint quantised_v[FUSED && QUANTISED ? V_ROW : 1];
threadgroup float shared_m[SIMDGROUPS];
threadgroup float shared_l[SIMDGROUPS];
// The scaled queries; after the loop the weighted values of each simdgroup.
threadgroup float4 shared_quads[(QUERIES > PARTIALS ? QUERIES : PARTIALS) / 4];
threadgroup float* queries = (threadgroup float*)shared_quads;
threadgroup float* shared_o = (threadgroup float*)shared_quads;

const int kv_head = int(threadgroup_position_in_grid.x) / TILES;
const int tile = int(threadgroup_position_in_grid.x) % TILES;
const int first_head = kv_head * GROUP + tile * HEADS;
const int last_head = kv_head * GROUP + GROUP - 1;
const int seq = int(threadgroup_position_in_grid.y);
const int split = int(threadgroup_position_in_grid.z);
const int splits = int(threadgroups_per_grid.z);
const int lane = int(thread_index_in_simdgroup);
const int sg = int(simdgroup_index_in_threadgroup);
const int part = lane % LANES;
const int sub = lane / LANES;

const int seq_len = seq_lens[seq];
const int prefix_len = PREFIX ? prefix_lens[seq] : 0;
const int first_key = WINDOW > 0 ? metal::max(seq_len - WINDOW, 0) : prefix_len;
const int stored = FUSED ? metal::max(seq_len - 1, 0) : seq_len;  // first_key is not behind it
const int per_split = ((stored - first_key + splits - 1) / splits + CHUNK - 1) / CHUNK * CHUNK;
const int begin = first_key + split * per_split;
const int end = metal::min(begin + per_split, stored);

// Where the rows of the next keys lie is looked up one turn ahead of reading them.
const size_t table = size_t(seq) * block_tables_shape[1];
thread int block[UNROLL];
#pragma unroll
for (int u = 0; u < UNROLL; u++) {
  const int key = metal::max(metal::min(begin + sg * CHUNK + u * KEYS + sub, end - 1), 0);
  block[u] = block_tables[table + key / BLOCK_SIZE];
}

// FUSED: the newest token, which goes to place `stored` of its sequence.
threadgroup T* fresh = (threadgroup T*)fresh_quads;
threadgroup T* new_key = fresh + (FUSED ? HEADS * K_DIM : 0);
threadgroup T* new_value = new_key + (FUSED ? K_DIM : 0);
const threadgroup uint* new_k_row = QUANTISED ? quantised_k : (const threadgroup uint*)new_key;
const threadgroup uint* new_v_row = QUANTISED ? quantised_v : (const threadgroup uint*)new_value;
const bool newest = FUSED && seq_len > 0 && split == splits - 1;
const size_t v_row = size_t(seq) * V_WIDTH + V_START + kv_head * V_DIM;
if (FUSED) {
  thread float cosine[TURNS];
  thread float sine[TURNS];
  if (sg <= HEADS) {
    rope_sines<TURNS, DIMS / 2, FREQS>(freqs, as_type<float>(LOG2_BASE), as_type<float>(ROPE_SCALE),
                                       positions[seq], lane, cosine, sine);
  }
  for (int h = sg; h < HEADS; h += SIMDGROUPS) {
    const int head = metal::min(first_head + h, last_head);
    rope_head<T, Q_R, K_DIM, DIMS, TRADITIONAL, FACTOR, Q_NORM, Q_WEIGHT>(
        q + size_t(seq) * Q_WIDTH + Q_START + head * K_DIM, q_weight, as_type<float>(Q_EPS), cosine,
        sine, lane, fresh + h * K_DIM);
  }
  if (sg == HEADS % SIMDGROUPS) {
    rope_head<T, K_R, K_DIM, DIMS, TRADITIONAL, FACTOR, K_NORM, K_WEIGHT>(
        k + size_t(seq) * K_WIDTH + K_START + kv_head * K_DIM, k_weight, as_type<float>(K_EPS), cosine,
        sine, lane, new_key);
    if (QUANTISED && newest) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      quantise_row<T, BITS, K_DIM, K_GROUP>((const threadgroup uint4*)new_key, lane, quantised_k);
    }
  }
  if (newest && sg == (HEADS + 1) % SIMDGROUPS) {
    for (int at = lane; at < V_DIM; at += 32) {
      new_value[at] = v[v_row + at];
    }
    if (QUANTISED) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      quantise_row<T, BITS, V_DIM, V_GROUP>((const threadgroup uint4*)new_value, lane, quantised_v);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (newest && tile == 0) {
    const size_t last_block = size_t(block_tables[table + stored / BLOCK_SIZE]);
    const size_t row = (last_block * BLOCK_SIZE + stored % BLOCK_SIZE) * KV_HEADS + kv_head;
    for (int at = int(thread_position_in_threadgroup.x); at < K_ROW; at += SIMDGROUPS * 32) {
      ((device uint*)keys)[row * K_ROW + at] = new_k_row[at];
    }
    for (int at = int(thread_position_in_threadgroup.x); at < V_ROW; at += SIMDGROUPS * 32) {
      ((device uint*)values)[row * V_ROW + at] = new_v_row[at];
    }
  }
}

// Scores are wanted in base 2; under a softcap the factor comes after the tanh.
const float softcap = as_type<float>(SOFTCAP);
const float q_scale = as_type<float>(SCALE) * (SOFTCAP != 0 ? 1.0f / softcap : LOG2_E);

for (int at = int(thread_position_in_threadgroup.x); at < QUERIES; at += SIMDGROUPS * 32) {
  const int head = metal::min(first_head + at / K_DIM, last_head);
  const size_t row = (size_t(seq) * (KV_HEADS * GROUP) + head) * K_DIM;
  queries[at] = q_scale * (FUSED ? float(fresh[at]) : float(q[row + at % K_DIM]));
}
threadgroup_barrier(mem_flags::mem_threadgroup);

thread float m[HEADS];
thread float l[HEADS];
thread float o[HEADS * V_PART];
#pragma unroll
for (int h = 0; h < HEADS; h++) {
  const int head = metal::min(first_head + h, last_head);
  // The sink is a key that the first split sees before all others.
  const bool sink = SINKS && split == 0 && sg == 0 && sub == 0;
  m[h] = sink ? float(sinks[head]) * LOG2_E : LOWEST;
  l[h] = sink ? 1.0f : 0.0f;
#pragma unroll
  for (int e = 0; e < V_PART; e++) {
    o[h * V_PART + e] = 0.0f;
  }
}

// The new key, by the first of the lane groups of a simdgroup: m, l and o after it, as below.
if (newest && sg == SIMDGROUPS - 1) {
  thread float x[K_PART > V_PART ? K_PART : V_PART];
  thread float affine[2];
  thread float weight[HEADS];
#pragma unroll
  for (int r = 0; r < K_RUNS; r++) {
    const int at = (r * LANES + part) * KW;
    if (QUANTISED) {
      load_affine<T>(new_k_row + K_WORDS + at * PER_WORD / K_GROUP * PAIR, affine);
    }
#pragma unroll
    for (int w = 0; w < KW; w++) {
      unpack_values<T, BITS>(new_k_row[at + w], affine, x + (r * KW + w) * PER_WORD);
    }
  }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    thread float query[K_PART];
    read_query<K_RUNS, K_RUN, LANES>(queries + h * K_DIM, part, query);
    float score = 0.0f;
#pragma unroll
    for (int e = 0; e < K_PART; e++) {
      score += query[e] * x[e];
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
      score += metal::simd_shuffle_xor(score, ushort(step));
    }
    if (SOFTCAP != 0) {
      score = softcap * LOG2_E * metal::precise::tanh(score);
    }
    const float top = sub == 0 ? metal::max(m[h], score) : m[h];
    weight[h] = sub == 0 ? metal::fast::exp2(score - top) : 0.0f;
    l[h] = l[h] * metal::fast::exp2(m[h] - top) + weight[h];
    m[h] = top;
  }
#pragma unroll
  for (int r = 0; r < V_RUNS; r++) {
    const int at = (r * LANES + part) * VW;
    if (QUANTISED) {
      load_affine<T>(new_v_row + V_WORDS + at * PER_WORD / V_GROUP * PAIR, affine);
    }
#pragma unroll
    for (int w = 0; w < VW; w++) {
      unpack_values<T, BITS>(new_v_row[at + w], affine, x + (r * VW + w) * PER_WORD);
    }
  }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
#pragma unroll
    for (int e = 0; e < V_PART; e++) {
      o[h * V_PART + e] = weight[h] * x[e];
    }
  }
}

// Each split of the prefix is added like one key: its lse is the key's score, its result the key's value.
if (prefix_len > 0) {
  const int prefix_splits = prefix_lse_shape[2];
  const int side_by_side = SIMDGROUPS * KEYS;
  for (int p = (split * SIMDGROUPS + sg) * KEYS + sub; p < prefix_splits; p += splits * side_by_side) {
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      const int head = metal::min(first_head + h, last_head);
      const size_t row = (size_t(seq) * (KV_HEADS * GROUP) + head) * prefix_splits + p;
      const float score = prefix_lse[row];
      const float top = metal::max(m[h], score);
      const float fade = metal::fast::exp2(m[h] - top);
      const float weight = score > LOWEST ? metal::fast::exp2(score - top) : 0.0f;
      m[h] = top;
      l[h] = l[h] * fade + weight;
#pragma unroll
      for (int r = 0; r < V_RUNS; r++) {
#pragma unroll
        for (int e = 0; e < VW * PER_WORD; e++) {
          const int at = (r * LANES + part) * VW * PER_WORD + e;
          const int i = h * V_PART + r * VW * PER_WORD + e;
          o[i] = o[i] * fade + weight * prefix[row * V_DIM + at];
        }
      }
    }
  }
}

for (int base = begin + sg * CHUNK; base < end; base += SIMDGROUPS * CHUNK) {
  thread uint k_words[UNROLL * K_RUNS * KW];
  thread uint v_words[UNROLL * V_RUNS * VW];
  thread float k_affine[UNROLL * K_RUNS * 2];
  thread float v_affine[UNROLL * V_RUNS * 2];
  thread size_t row[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const int key = metal::min(base + u * KEYS + sub, end - 1);
    row[u] = (size_t(block[u]) * BLOCK_SIZE + key % BLOCK_SIZE) * KV_HEADS + kv_head;
    const int later = metal::min(key + SIMDGROUPS * CHUNK, end - 1);
    block[u] = block_tables[table + later / BLOCK_SIZE];
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
#pragma unroll
    for (int r = 0; r < K_RUNS; r++) {
      const device uint* from = (const device uint*)keys + row[u] * K_ROW;
      const int at = (r * LANES + part) * KW;
      load_words<KW>(from + at, k_words + (u * K_RUNS + r) * KW);
      if (QUANTISED) {
        load_affine<T>(from + K_WORDS + at * PER_WORD / K_GROUP * PAIR,
                       k_affine + (u * K_RUNS + r) * 2);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
#pragma unroll
    for (int r = 0; r < V_RUNS; r++) {
      const device uint* from = (const device uint*)values + row[u] * V_ROW;
      const int at = (r * LANES + part) * VW;
      load_words<VW>(from + at, v_words + (u * V_RUNS + r) * VW);
      if (QUANTISED) {
        load_affine<T>(from + V_WORDS + at * PER_WORD / V_GROUP * PAIR,
                       v_affine + (u * V_RUNS + r) * 2);
      }
    }
  }

  thread float score[HEADS * UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u += PAIRED) {
    // A compiler must not keep all queries in registers, if there are many.
    if (HEADS * K_PART > 16) {
      simdgroup_barrier(mem_flags::mem_none);
    }
    thread float k[PAIRED * K_PART];
#pragma unroll
    for (int w = 0; w < PAIRED * K_RUNS * KW; w++) {
      const int at = u * K_RUNS * KW + w;
      unpack_values<T, BITS>(k_words[at], k_affine + at / KW * 2, k + w * PER_WORD);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      thread float query[K_PART];
      read_query<K_RUNS, K_RUN, LANES>(queries + h * K_DIM, part, query);
#pragma unroll
      for (int i = 0; i < PAIRED; i++) {
        float s = 0.0f;
#pragma unroll
        for (int e = 0; e < K_PART; e++) {
          s += query[e] * k[i * K_PART + e];
        }
        score[h * UNROLL + u + i] = s;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < HEADS * UNROLL; i++) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
      score[i] += metal::simd_shuffle_xor(score[i], ushort(step));
    }
    if (SOFTCAP != 0) {
      score[i] = softcap * LOG2_E * metal::precise::tanh(score[i]);
    }
  }

  // From here on `score` holds weights: 2^(score - m), 0 for a key outside the split.
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    float top = m[h];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const bool seen = base + u * KEYS + sub < end;
      score[h * UNROLL + u] = seen ? score[h * UNROLL + u] : LOWEST;
      top = metal::max(top, score[h * UNROLL + u]);
    }
    const float fade = metal::fast::exp2(m[h] - top);
    m[h] = top;
    l[h] *= fade;
#pragma unroll
    for (int e = 0; e < V_PART; e++) {
      o[h * V_PART + e] *= fade;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const bool seen = base + u * KEYS + sub < end;
      const float weight = seen ? metal::fast::exp2(score[h * UNROLL + u] - top) : 0.0f;
      score[h * UNROLL + u] = weight;
      l[h] += weight;
    }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    thread float v[V_PART];
#pragma unroll
    for (int w = 0; w < V_RUNS * VW; w++) {
      unpack_values<T, BITS>(v_words[u * V_RUNS * VW + w], v_affine + (u * V_RUNS + w / VW) * 2,
                             v + w * PER_WORD);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
      for (int e = 0; e < V_PART; e++) {
        o[h * V_PART + e] += score[h * UNROLL + u] * v[e];
      }
    }
  }
}

if (KV_HEADS * GROUP < 8) {
  const int written = int(threadgroups_per_grid.y) * KV_HEADS * GROUP * splits;
  const int at = int(thread_position_in_grid.x);
  if (seq == 0 && split == 0 && at >= written && at < 8) {
    lse[at] = LOWEST;
  }
}

#pragma unroll
for (int h = 0; h < HEADS; h++) {
  // All have read the queries, or shared_* of the head before.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // The lane groups of this simdgroup, then the simdgroups of this threadgroup.
#pragma unroll
  for (int step = LANES; step < 32; step *= 2) {
    const float other = metal::simd_shuffle_xor(m[h], ushort(step));
    const float top = metal::max(m[h], other);
    const float fade = metal::fast::exp2(m[h] - top);
    m[h] = top;
    l[h] *= fade;
    l[h] += metal::simd_shuffle_xor(l[h], ushort(step));
#pragma unroll
    for (int e = 0; e < V_PART; e++) {
      float value = o[h * V_PART + e] * fade;
      value += metal::simd_shuffle_xor(value, ushort(step));
      o[h * V_PART + e] = value;
    }
  }
  if (sub == 0) {
#pragma unroll
    for (int r = 0; r < V_RUNS; r++) {
#pragma unroll
      for (int e = 0; e < VW * PER_WORD; e++) {
        const int at = (r * LANES + part) * VW * PER_WORD + e;
        shared_o[sg * V_DIM + at] = o[h * V_PART + r * VW * PER_WORD + e];
      }
    }
    if (part == 0) {
      shared_m[sg] = m[h];
      shared_l[sg] = l[h];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int head = first_head + h;
  float top = shared_m[0];
  for (int s = 1; s < SIMDGROUPS; s++) {
    top = metal::max(top, shared_m[s]);
  }
  float sum = 0.0f;
  for (int s = 0; s < SIMDGROUPS; s++) {
    sum += shared_l[s] * metal::fast::exp2(shared_m[s] - top);
  }
  const size_t out_row = (size_t(seq) * (KV_HEADS * GROUP) + head) * splits + split;
  for (int at = int(thread_position_in_threadgroup.x); at < V_DIM; at += SIMDGROUPS * 32) {
    float value = 0.0f;
    for (int s = 0; s < SIMDGROUPS; s++) {
      value += shared_o[s * V_DIM + at] * metal::fast::exp2(shared_m[s] - top);
    }
    if (head <= last_head) {
      out[out_row * V_DIM + at] = OUT_T(sum > 0.0f ? value / sum : 0.0f);
    }
  }
  if (head <= last_head && thread_position_in_threadgroup.x == 0) {
    lse[out_row] = sum > 0.0f ? top + metal::log2(sum) : LOWEST;
  }
}
