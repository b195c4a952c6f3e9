// rope_write: a layer's queries and keys normalised and rotated, keys and values put into their
// slots of the paged store, in one launch.
//
//   q, k, v       (N, WIDTH) of T          this step's rows: heads side by side, from column START on;
//                                          one array may be all three (a joined projection)
//   q_weight, k_weight  (K_DIM,) floats    of the RMS norm over a head; not read unless *_WEIGHT
//   freqs         (DIMS / 2,) float32      not read unless FREQS
//   positions     (N,) int32               of each row in its sequence
//   slot_mapping  (N,) int32               slot = block * block_size + offset; negative: skip k and v
//   keys, values  (slots, KV_HEADS, DIM)   the store; written through, although they are inputs
//   token         float32 -> next_token (1,) what orders this write before the reads that follow
//   out           (N, Q_HEADS, K_DIM) of T queries, rotated
//   SCALE, LOG2_BASE, Q_EPS, K_EPS  the bits of floats (a template value is an integer)
//
// What is computed (RoFormer, Su et al. 2021; rounded as mx.fast.rms_norm and mx.fast.rope round it).
// The first DIMS elements of a head are DIMS / 2 pairs, and pair i of a row turns by the angle
//
//   theta = SCALE * position * base^(-i / (DIMS / 2))        or  SCALE * position / freqs[i]
//
//   (a, b)  ->  (a cos - b sin, a sin + b cos)
//
// Layout.  A head is K_DIM / 2 pairs, and pair i belongs to lane i % 32, which so holds both elements
// that a rotation needs.  Elements from DIMS on are pairs too, of neighbours, that do not turn:
//
//   halves (DIMS 8 of 12)    0 1 2 3 0 1 2 3 4 4 5 5        the number is the pair
//   TRADITIONAL              0 0 1 1 2 2 3 3 4 4 5 5
//
// Who does what.  Grid (simdgroups for the heads of a row, N).  The heads of a row are counted through
// q, k and v; a simdgroup takes HEADS of them, one after another.  One head each is the shortest way
// for a decode; a long prompt has rows enough, and there a sine serves several heads.
//
// Why it is correct.  Every element is read and written by one thread.  Slots of one step are distinct,
// so no two threads write the same element of the store, and the token orders the launch as it does
// that of kv_write (metal/kv_write.metal).  Sines are the precise ones: at position 100,000 the angle
// of pair 0 is 100,000 radians, which a fast sine does not reduce.  A head is the same for all lanes of
// a simdgroup, and so are the branches around simd_sum.
//
// Cost.  Reads and writes each byte of q, k and v once.  What it saves is launches: two norms, two
// rotations and a write, and the copies that slice a joined projection, in one.
#include "rms_norm.h"

// Where the two elements of pair i lie in a head of which `rotated` pairs turn.
METAL_FUNC int first_of_pair(int i, int rotated, bool traditional) {
  return traditional || i >= rotated ? 2 * i : i;
}
METAL_FUNC int second_of_pair(int i, int rotated, bool traditional) {
  return traditional || i >= rotated ? 2 * i + 1 : i + rotated;
}

// --- kernel body ---
constexpr int PAIRS = K_DIM / 2;
constexpr int ROTATED = DIMS / 2;
constexpr int TURNS = (PAIRS + 31) / 32;  // pairs that a lane holds

const int row = int(threadgroup_position_in_grid.y);
const int lane = int(thread_index_in_simdgroup);
const int group = int(threadgroup_position_in_grid.x) * SIMDGROUPS;
const int first = (group + int(simdgroup_index_in_threadgroup)) * HEADS;
const int last = metal::min(first + HEADS, Q_HEADS + 2 * KV_HEADS);
const int slot = slot_mapping[row];

thread float cosine[TURNS];
thread float sine[TURNS];
for (int t = 0; t < TURNS; t++) {
  const int i = t * 32 + lane;
  cosine[t] = 1.0f;
  sine[t] = 0.0f;
  if (i < ROTATED) {
    const float share = metal::precise::divide(float(i), float(ROTATED));
    const float frequency = FREQS ? metal::precise::divide(1.0f, freqs[i])
                                  : metal::precise::exp2(-share * as_type<float>(LOG2_BASE));
    const float theta = as_type<float>(SCALE) * float(positions[row]) * frequency;
    cosine[t] = metal::precise::cos(theta);
    sine[t] = metal::precise::sin(theta);
  }
}

for (int head = first; head < last; head++) {
  const int kv_head = (head - Q_HEADS) % KV_HEADS;
  const bool is_q = head < Q_HEADS;
  if (!is_q && slot < 0) {
    continue;
  }
  if (head >= Q_HEADS + KV_HEADS) {
    const device T* from = v + size_t(row) * V_WIDTH + V_START + kv_head * V_DIM;
    device T* to = const_cast<device T*>(values) + (size_t(slot) * KV_HEADS + kv_head) * V_DIM;
    for (int e = lane; e < V_DIM; e += 32) {
      to[e] = from[e];
    }
    continue;
  }
  const device T* from = is_q ? q + size_t(row) * Q_WIDTH + Q_START + head * K_DIM
                              : k + size_t(row) * K_WIDTH + K_START + kv_head * K_DIM;
  device T* to = is_q ? out + (size_t(row) * Q_HEADS + head) * K_DIM
                      : const_cast<device T*>(keys) + (size_t(slot) * KV_HEADS + kv_head) * K_DIM;

  thread float a[TURNS];
  thread float b[TURNS];
  float square = 0.0f;
  for (int t = 0; t < TURNS; t++) {
    const int i = t * 32 + lane;
    a[t] = b[t] = 0.0f;
    if (i < PAIRS) {
      a[t] = float(from[first_of_pair(i, ROTATED, TRADITIONAL)]);
      b[t] = float(from[second_of_pair(i, ROTATED, TRADITIONAL)]);
    }
    square += a[t] * a[t] + b[t] * b[t];
  }
  if (is_q ? Q_NORM : K_NORM) {
    square = metal::simd_sum(square);
    const float eps = as_type<float>(is_q ? Q_EPS : K_EPS);
    const float inverse_rms = metal::precise::rsqrt(square / float(K_DIM) + eps);
    for (int t = 0; t < TURNS; t++) {
      const int i = t * 32 + lane;
      const int at_a = first_of_pair(i, ROTATED, TRADITIONAL);
      const int at_b = second_of_pair(i, ROTATED, TRADITIONAL);
      if (i < PAIRS && is_q) {
        a[t] = rms_normed<Q_R>(a[t], inverse_rms, Q_WEIGHT ? float(q_weight[at_a]) : 1.0f);
        b[t] = rms_normed<Q_R>(b[t], inverse_rms, Q_WEIGHT ? float(q_weight[at_b]) : 1.0f);
      } else if (i < PAIRS) {
        a[t] = rms_normed<K_R>(a[t], inverse_rms, K_WEIGHT ? float(k_weight[at_a]) : 1.0f);
        b[t] = rms_normed<K_R>(b[t], inverse_rms, K_WEIGHT ? float(k_weight[at_b]) : 1.0f);
      }
    }
  }
  for (int t = 0; t < TURNS; t++) {
    const int i = t * 32 + lane;
    float x = a[t];
    float y = b[t];
    if (i < ROTATED) {  // not all, for 0 times an infinity would be NaN
      x = a[t] * cosine[t] - b[t] * sine[t];
      y = a[t] * sine[t] + b[t] * cosine[t];
    }
    if (i < PAIRS) {
      to[first_of_pair(i, ROTATED, TRADITIONAL)] = T(x);
      to[second_of_pair(i, ROTATED, TRADITIONAL)] = T(y);
    }
  }
}
if (row == 0 && first == 0 && lane == 0) {
  next_token[0] = token[0];
}
