// A head normalised and rotated by one simdgroup, in registers.
//
// (RoFormer, Su et al. 2021; rounded as mx.fast.rms_norm and mx.fast.rope round it.)  The first DIMS
// elements of a head are DIMS / 2 pairs, and pair i of a row rotates by the angle
//
//   theta = ROPE_SCALE * position * base^(-i / (DIMS / 2))      or  ROPE_SCALE * position / freqs[i]
//
//   (a, b)  ->  (a cos - b sin, a sin + b cos)
//
// FACTOR, the bits of a float, multiplies a and b before they rotate (YaRN, LongRoPE); elements from DIMS
// on keep their size.  Factor and product are rounded as a multiplication of MLX rounds them, to the
// type of a head before it rotates: R of its norm, or T.  A FACTOR of 1 changes nothing.
//
// Layout.  A head is DIM / 2 pairs, and pair i belongs to lane i % 32, which so holds both elements
// that a rotation needs.  Elements from DIMS on are pairs too, of neighbours, that do not rotate:
//
//   halves (DIMS 8 of 12)    0 1 2 3 0 1 2 3 4 4 5 5        the number is the pair
//   TRADITIONAL              0 0 1 1 2 2 3 3 4 4 5 5
//
// Sines are the precise ones: at position 100,000 the angle of pair 0 is 100,000 radians, which a fast
// sine does not reduce.
#include "rms_norm.h"

// Where the two elements of pair i lie in a head; `rotated`: the pairs that rotate.
METAL_FUNC int first_of_pair(int i, int rotated, bool traditional) {
  return traditional || i >= rotated ? 2 * i : i;
}
METAL_FUNC int second_of_pair(int i, int rotated, bool traditional) {
  return traditional || i >= rotated ? 2 * i + 1 : i + rotated;
}

// The cosine and sine of this lane's pairs; cosine[t] and sine[t] belong to pair t * 32 + lane.  freqs
// lies in any address space, and is not read unless FREQS.
template <int TURNS, int ROTATED, bool FREQS, typename P>
METAL_FUNC void rope_sines(P freqs, float log2_base, float scale, int position, int lane,
                           thread float* cosine, thread float* sine) {
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    const int i = t * 32 + lane;
    cosine[t] = 1.0f;
    sine[t] = 0.0f;
    if (i < ROTATED) {
      const float share = metal::precise::divide(float(i), float(ROTATED));
      const float frequency = FREQS ? metal::precise::divide(1.0f, float(freqs[i]))
                                    : metal::precise::exp2(-share * log2_base);
      const float theta = scale * float(position) * frequency;
      cosine[t] = metal::precise::cos(theta);
      sine[t] = metal::precise::sin(theta);
    }
  }
}

// x times FACTOR.
template <typename R, int FACTOR>
METAL_FUNC float rope_scaled(float x) {
  const float factor = as_type<float>(FACTOR);
  return factor == 1.0f ? x : float(R(float(R(factor)) * x));
}

// Copy a head of DIM elements of T from `from` to `to`, in any address space: normalised if NORM, its
// first DIMS elements multiplied and rotated.  R is T without a norm.  All lanes of a simdgroup call it
// together.  A rotation that all lanes take has no branch: compilers do not know that a lane is below 32.
template <typename T, typename R, int DIM, int DIMS, bool TRADITIONAL, int FACTOR, bool NORM,
          bool WEIGHT, typename W, typename P>
METAL_FUNC void rope_head(const device T* from, const device W* weight, float eps,
                          const thread float* cosine, const thread float* sine, int lane, P to) {
  constexpr int PAIRS = DIM / 2;
  constexpr int ROTATED = DIMS / 2;
  constexpr int TURNS = (PAIRS + 31) / 32;
  thread float a[TURNS];
  thread float b[TURNS];
  float square = 0.0f;
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    const int i = t * 32 + lane;
    a[t] = b[t] = 0.0f;
    if (t * 32 + 32 <= PAIRS || i < PAIRS) {
      a[t] = float(from[first_of_pair(i, ROTATED, TRADITIONAL)]);
      b[t] = float(from[second_of_pair(i, ROTATED, TRADITIONAL)]);
    }
    square += a[t] * a[t] + b[t] * b[t];
  }
  if (NORM) {
    square = metal::simd_sum(square);
    const float inverse_rms = metal::precise::rsqrt(square / float(DIM) + eps);
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
      const int i = t * 32 + lane;
      const int at_a = first_of_pair(i, ROTATED, TRADITIONAL);
      const int at_b = second_of_pair(i, ROTATED, TRADITIONAL);
      if (t * 32 + 32 <= PAIRS || i < PAIRS) {
        a[t] = rms_normed<R>(a[t], inverse_rms, WEIGHT ? float(weight[at_a]) : 1.0f);
        b[t] = rms_normed<R>(b[t], inverse_rms, WEIGHT ? float(weight[at_b]) : 1.0f);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    const int i = t * 32 + lane;
    float x = a[t];
    float y = b[t];
    if (t * 32 + 32 <= ROTATED || i < ROTATED) {  // not all, for 0 times an infinity would be NaN
      const float first = rope_scaled<R, FACTOR>(a[t]);
      const float second = rope_scaled<R, FACTOR>(b[t]);
      x = first * cosine[t] - second * sine[t];
      y = first * sine[t] + second * cosine[t];
    }
    if (t * 32 + 32 <= PAIRS || i < PAIRS) {
      to[first_of_pair(i, ROTATED, TRADITIONAL)] = T(x);
      to[second_of_pair(i, ROTATED, TRADITIONAL)] = T(y);
    }
  }
}
