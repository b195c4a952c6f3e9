// expert_topk: a row's experts and their weights, from the logits of a router, in one launch.
//
//   logits    (rows, EXPERTS)         floats
//   bias      (EXPERTS,)              floats, with BIASED: added to the scores that choose, not to weights
//   indices   (rows, TOP_K) uint      the experts with the highest scores; TOP_K is at most 32
//   weights   (rows, TOP_K) of W
//   EPS, FACTOR   the bits of floats (template values are integers)
//
//   scores    SCORING 0: the logits; 1: their softmax; 2: their sigmoid
//   weights   WEIGHTS 0: the chosen scores; 1: divided by their sum plus EPS; 2: their softmax
//             then times FACTOR
//
// Layout.  A simdgroup has a row; PACK rows are a threadgroup.  Expert e is in lane e % 32, and choice c of
// the row in lane c.
//
//   lane        0    1    2  ...  31
//   keys[0]     0    1    2  ...  31      scores of these experts, as integers of the same order
//   keys[1]    32   33   34  ...  63
//
// TOP_K times, each lane offers its best expert, and five exchanges find the best of all lanes.  Its key
// becomes 0, which no expert has.
//
// Order.  MLX's sort puts the best first, and of equal scores the lower index.  LATE is for models that take
// the end of an ascending order: the best is last, and of equal scores the higher index.
//
// Rounding.  Scores, sums and weights are rounded to W wherever a model's own operations round, and scores
// with a bias to S.
//
// Why it is correct.  A key is as large as its score: the bits of a float are ordered like an integer once
// those of negative numbers are turned.  NaN is larger than all, as in MLX's sort, so there are always TOP_K
// different indices below EXPERTS, and no kernel reads an expert that does not exist.  Lanes agree on the best:
// keys are compared, then indices, so the order of exchanges does not matter.
//
// Cost.  One launch, for softmax, partition, gather, sum and quotient.
#include "activations.h"

// An integer for each float, in the order of floats.  Never 0.
METAL_FUNC uint key_of(float score) {
  const uint bits = as_type<uint>(score);
  const uint magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return 0xffffffffu;  // NaN
  }
  return bits == magnitude ? magnitude | 0x80000000u : 0x80000000u - magnitude;
}

// --- kernel body ---
constexpr int SLOTS = (EXPERTS + 31) / 32;
constexpr float LOWEST = -3.0e38f;

const int lane = int(thread_index_in_simdgroup);
const int row = int(threadgroup_position_in_grid.x) * PACK + int(simdgroup_index_in_threadgroup);
if (row >= logits_shape[0]) {
  return;  // the whole simdgroup
}

thread float scores[SLOTS];
thread uint keys[SLOTS];
#pragma unroll
for (int s = 0; s < SLOTS; s++) {
  const int expert = s * 32 + lane;
  scores[s] = expert < EXPERTS ? float(logits[size_t(row) * EXPERTS + expert]) : LOWEST;
}
if (SCORING == 1) {
  float top = scores[0];
#pragma unroll
  for (int s = 1; s < SLOTS; s++) {
    top = metal::max(top, scores[s]);
  }
  top = metal::simd_max(top);
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    scores[s] = s * 32 + lane < EXPERTS ? exponential(scores[s] - top) : 0.0f;
    sum += scores[s];
  }
  sum = metal::simd_sum(sum);
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    scores[s] = float(W(metal::precise::divide(scores[s], sum)));
  }
}
#pragma unroll
for (int s = 0; s < SLOTS; s++) {
  const int expert = s * 32 + lane;
  if (SCORING == 2) {
    scores[s] = float(W(sigmoid(scores[s])));
  }
  keys[s] = 0u;
  if (expert < EXPERTS) {
    keys[s] = key_of(BIASED ? float(S(scores[s] + float(bias[expert]))) : scores[s]);
  }
}

float weight = 0.0f;  // of choice `lane`
int chosen = 0;
for (int c = 0; c < TOP_K; c++) {
  uint key = keys[0];
  int best = lane;
#pragma unroll
  for (int s = 1; s < SLOTS; s++) {
    if (LATE ? keys[s] >= key : keys[s] > key) {
      key = keys[s];
      best = s * 32 + lane;
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint its_key = metal::simd_shuffle_xor(key, ushort(step));
    const int its_best = metal::simd_shuffle_xor(best, ushort(step));
    const bool first = LATE ? its_best > best : its_best < best;
    if (its_key > key || (its_key == key && first)) {
      key = its_key;
      best = its_best;
    }
  }
  float score = 0.0f;
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    if (s * 32 + lane == best) {
      score = scores[s];
      keys[s] = 0u;
    }
  }
  score = metal::simd_shuffle(score, ushort(best % 32));
  if (lane == c) {
    weight = score;
    chosen = best;
  }
}

if (WEIGHTS == 1) {
  const float sum = float(W(metal::simd_sum(weight)));
  const float divisor = float(W(sum + float(W(as_type<float>(EPS)))));
  weight = float(W(metal::precise::divide(weight, divisor)));
}
if (WEIGHTS == 2) {
  const float top = metal::simd_max(lane < TOP_K ? weight : LOWEST);
  const float e = lane < TOP_K ? exponential(weight - top) : 0.0f;
  weight = float(W(metal::precise::divide(e, metal::simd_sum(e))));
}
if (lane < TOP_K) {
  const size_t at = size_t(row) * TOP_K + (LATE ? TOP_K - 1 - lane : lane);
  indices[at] = uint(chosen);
  weights[at] = W(weight * float(W(as_type<float>(FACTOR))));
}
