// Rows of K and V in 8 or 4 bits a value: how a kernel reads them and makes them.
//
// A row of one head, in words of 32 bits, is DIM * BITS / 32 words of values and, behind them, two
// numbers of type T for each group of GROUP_SIZE values: its scale and its smallest value.
//
//   | q q q q | q q q q | ........ | scale low | scale low | ...     a value is scale * q + low
//     first value in the lowest bits   one pair a group: one word in 16 bits, two in float
//
// The pairs lie in the row itself, not in arrays of their own: a head of 128 values in 8 bits is one
// run of 136 bytes, where two pairs elsewhere would cost a fetch of 32 bytes for 8; and kernels take
// no further inputs.  kv/row_format.py defines the form; it differs from mx.quantize in that low is
// the smallest value itself and the scale is rounded before it is used, which errs less.
#include "words.h"

// Reads the scale (to[0]) and the low (to[1]) of a group from the sizeof(T) / 2 words that hold them, in
// any address space.
template <typename T, typename P>
METAL_FUNC void load_affine(P from, thread float* to) {
#pragma unroll
  for (int w = 0; w < int(sizeof(T)) / 2; w++) {
    unpack<T>(from[w], to + w);
  }
}

// The values of one word: of a quantised row (BITS 8 or 4), or of type T as they are.
template <typename T, int BITS>
METAL_FUNC void unpack_values(uint word, const thread float* affine, thread float* to) {
  if (BITS < 16) {
#pragma unroll
    for (int e = 0; e < 32 / BITS; e++) {
      to[e] = affine[0] * float((word >> (e * BITS)) & (0xffffffffu >> (32 - BITS))) + affine[1];
    }
  } else {
    unpack<T>(word, to);
  }
}

// Quantise a row of DIM values of T from quads of 16 bytes to words, both in any address space.  The lanes
// of a simdgroup take 8 values each, GROUP_SIZE / 8 lanes a group, and agree on its ends by shuffles, whose
// steps are constant where a group has a power of two of lanes: on Apple GPUs the others are slow.  All
// lanes call it together.
template <typename T, int BITS, int DIM, int GROUP_SIZE, typename P, typename Q>
METAL_FUNC void quantise_row(P from, int lane, Q to) {
  constexpr float TINY = 1e-30f;  // a flatter group is its low alone: 1 / scale must be finite
  constexpr float MOST = float(0xffffffffu >> (32 - BITS));
  constexpr int QUADS = int(sizeof(T)) / 2;  // that hold 8 values
  constexpr int PER_WORD = 4 / int(sizeof(T));
  constexpr int PARTS = DIM / 8;
  constexpr int WORDS = BITS / 4;  // of a part
  constexpr int MATES = GROUP_SIZE / 8;  // lanes of a group
  constexpr int AT_ONCE = 32 / MATES * MATES;
  constexpr int PAIR = int(sizeof(T)) / 2;  // words of a scale and low
  const int first_mate = lane / MATES * MATES;
#pragma unroll
  for (int first = 0; first < PARTS; first += AT_ONCE) {
    const int at = metal::min(first + lane, PARTS - 1);
    thread float x[8];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      const uint4 quad = from[at * QUADS + i];
      unpack<T>(quad.x, x + i * 4 * PER_WORD);
      unpack<T>(quad.y, x + (i * 4 + 1) * PER_WORD);
      unpack<T>(quad.z, x + (i * 4 + 2) * PER_WORD);
      unpack<T>(quad.w, x + (i * 4 + 3) * PER_WORD);
    }
    float own_low = x[0];
    float own_high = x[0];
#pragma unroll
    for (int e = 1; e < 8; e++) {
      own_low = metal::min(own_low, x[e]);
      own_high = metal::max(own_high, x[e]);
    }
    float low = own_low;
    float high = own_high;
    if ((MATES & (MATES - 1)) == 0) {
#pragma unroll
      for (int step = 1; step < MATES; step *= 2) {
        low = metal::min(low, metal::simd_shuffle_xor(low, ushort(step)));
        high = metal::max(high, metal::simd_shuffle_xor(high, ushort(step)));
      }
    } else {
#pragma unroll
      for (int j = 0; j < MATES; j++) {
        const ushort mate = ushort(metal::min(first_mate + j, 31));
        low = metal::min(low, metal::simd_shuffle(own_low, mate));
        high = metal::max(high, metal::simd_shuffle(own_high, mate));
      }
    }
    thread float kept[2];
    kept[0] = float(T((high - low) * (1.0f / MOST)));
    kept[1] = low;
    const float inverse = kept[0] > TINY ? 1.0f / kept[0] : 0.0f;
    // Lanes that are left over, and those past the row's end, have a group in part only.
    const bool mine = lane < AT_ONCE && first + lane < PARTS;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      uint word = 0;
#pragma unroll
      for (int e = 0; e < 32 / BITS; e++) {
        const float q = metal::rint((x[w * (32 / BITS) + e] - low) * inverse);
        word |= uint(metal::min(metal::max(q, 0.0f), MOST)) << (e * BITS);
      }
      if (mine) {
        to[at * WORDS + w] = word;
      }
    }
    if (mine && lane == first_mate) {
#pragma unroll
      for (int w = 0; w < PAIR; w++) {
        to[PARTS * WORDS + at / MATES * PAIR + w] = pack<T>(kept + w);
      }
    }
  }
}
