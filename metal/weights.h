// Rows of weights, in 16 bits or in MLX's quantised forms, as 8 elements of T at a time in registers.
//
//   FORM          a weight                words of 32 bits         a group of GROUP_SIZE weights has
//   WHOLE_VALUES  T itself                as they lie              nothing
//   AFFINE        scale * q + bias        q of 4, 6 or 8 bits      scale and bias of T
//   E8M0          scale * e               e2m1 (4), e4m3 (8 bits)  scale, a power of two, in 8 bits
//   E4M3          scale * e               e2m1                     scale, a small float, in 8 bits
//
// AFFINE is mx.quantize's "affine", E8M0 "mxfp4" and "mxfp8", E4M3 "nvfp4".  A row is a run of bits,
// its first weight in the lowest ones; w (rows, DEPTH), scales and biases (rows, DEPTH / GROUP_SIZE).
//
// A dot product may take its elements in any order.  So a lane reads 8 SPREAD weights that lie
// together, in loads of up to 16 bytes, and the four lanes of a row 32 SPREAD.  They are SPREAD chunks
// of 32: chunk j has of each lane the weights 8 j to 8 j + 7.  Rows of x are read to match
// (row_products.h).  4 bits, SPREAD 4:
//
//   a row of w    | 0 .. 7  8 .. 15  16 .. 23  24 .. 31 | 32 ..      | 64 ..      | 96 ..      |
//                   lane 0, 16 bytes                      lane 1       lane 2       lane 3
//   chunk            0       1        2         3         0  1  2  3   0  1  2  3   0  1  2  3
//
// Rounding.  A weight is computed in float32 and rounded once to T, as mx.dequantize does; in bfloat16
// ties round away from zero instead of to even, which takes one addition.
//
// Cost, in instructions a weight, where a half is an operand of a float32 operation (Apple).  4 and 8
// bits: a shift, an and, an or make two codes, 16 bits apart, into halves of known exponent, which
// are exact: 1.5.  The product and sum take their offset away again: 1.  Rounding: 1 in bfloat16.  So
// 3.5, once for all rows of x, beside 8 in the matrix products of 8 rows.  Other bits take a shift and
// an and each: 5.  The group's numbers: 2 a lane and group.  The alternative, exact codes in the
// products and each group's sums scaled, saves 2, but needs the sums of x by group: 1 for every 8 rows.
#include "words.h"

enum WeightFormat { WHOLE_VALUES, AFFINE, E8M0, E4M3 };

// 8 SPREAD weights of a row, and their groups' numbers, as they lie in memory.
template <int BITS, int GROUP_SIZE, int SPREAD>
struct LaneWeights {
  uint words[SPREAD * BITS / 4];
  uint scales[8 * SPREAD > GROUP_SIZE ? 8 * SPREAD / GROUP_SIZE : 1];
  uint biases[8 * SPREAD > GROUP_SIZE ? 8 * SPREAD / GROUP_SIZE : 1];
};

// Ask for the weights from element `at` of w on, a multiple of 8 SPREAD.
template <int FORM, int BITS, int GROUP_SIZE, int SPREAD>
METAL_FUNC void load_weights(thread LaneWeights<BITS, GROUP_SIZE, SPREAD>& to, const device uint* w,
                             const device uchar* scales, const device uchar* biases, size_t at) {
  constexpr int WORDS = SPREAD * BITS / 4;
  constexpr int WIDTH = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  static_assert(SPREAD * BITS % 4 == 0, "a lane reads whole words");
  const device uint* from = w + at / (8 * SPREAD) * WORDS;
#pragma unroll
  for (int i = 0; i < WORDS; i += WIDTH) {
    load_words<WIDTH>(from + i, to.words + i);
  }
  if (FORM != WHOLE_VALUES) {
    const size_t group = at / GROUP_SIZE;
#pragma unroll
    for (int g = 0; g < (8 * SPREAD > GROUP_SIZE ? 8 * SPREAD / GROUP_SIZE : 1); g++) {
      if (FORM == AFFINE) {
        to.scales[g] = ((const device ushort*)scales)[group + g];
        to.biases[g] = ((const device ushort*)biases)[group + g];
      } else {
        to.scales[g] = scales[group + g];
      }
    }
  }
}

METAL_FUNC uint shifted(uint word, int left) {
  return left < 0 ? word >> -left : word << left;
}

// Code i of a word and the one 16 bits behind it, as halves: 2^BITS + q, or e / e_unit<BITS>().
template <int FORM, int BITS>
METAL_FUNC uint code_pair(uint word, int i) {
  constexpr uint BOTH = 0x00010001u;
  if (FORM == AFFINE) {  // q at the upper end of the mantissa
    constexpr uint FIELD = ((1u << BITS) - 1u) << (10 - BITS);
    constexpr uint EXPONENT = uint(15 + BITS) << 10;
    return (shifted(word, 10 - BITS - i * BITS) & (FIELD * BOTH)) | (EXPONENT * BOTH);
  }
  // The sign, and exponent and mantissa where those of a half have as many bits as e2m1 and e4m3.
  constexpr int LOW = BITS == 4 ? 9 : 7;
  constexpr uint FIELD = ((1u << (BITS - 1)) - 1u) << LOW;
  return (shifted(word, LOW - i * BITS) & (FIELD * BOTH)) |
      (shifted(word, 16 - BITS - i * BITS) & (0x8000u * BOTH));
}

// The exponent bias of a half exceeds that of e2m1 by 15 - 1, and that of e4m3 by 15 - 7.
template <int BITS>
METAL_FUNC float e_unit() {
  return BITS == 4 ? 16384.0f : 256.0f;
}

// BITS bits from bit `at` of the words on, at the upper end of a half's mantissa.
template <int BITS>
METAL_FUNC uint code_at(const thread uint* words, int at) {
  constexpr int LOW = 10 - BITS;
  uint code = shifted(words[at / 32], LOW - at % 32);
  if (at % 32 + BITS > 32) {
    code |= words[at / 32 + 1] << (LOW + 32 - at % 32);
  }
  return code & (((1u << BITS) - 1u) << LOW);
}

// Chunk j's codes, as code_pair makes them.
template <int FORM, int BITS>
METAL_FUNC void unpack_codes(const thread uint* words, int j, thread float* to) {
  thread float two[2];
  if (BITS == 4 || BITS == 8) {
    constexpr int APART = 16 / BITS;
#pragma unroll
    for (int w = 0; w < BITS / 4; w++) {
#pragma unroll
      for (int i = 0; i < APART; i++) {
        unpack<float16_t>(code_pair<FORM, BITS>(words[j * BITS / 4 + w], i), two);
        to[w * 2 * APART + i] = two[0];
        to[w * 2 * APART + APART + i] = two[1];
      }
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const uint low = code_at<BITS>(words, (j * 8 + e) * BITS);
      const uint high = code_at<BITS>(words, (j * 8 + e + 1) * BITS);
      unpack<float16_t>((low | high << 16) | (uint(15 + BITS) << 10) * 0x00010001u, to + e);
    }
  }
}

// The scale of a group, to[0], and its low, to[1]: a weight is scale * code + low.
template <typename T, int FORM, int BITS>
METAL_FUNC void unpack_group(uint scale, uint bias, thread float* to) {
  to[1] = 0.0f;
  if (FORM == AFFINE) {
    to[0] = float(as_type<T>(ushort(scale)));
    to[1] = float(as_type<T>(ushort(bias))) - to[0] * float(1 << BITS);
  } else if (FORM == E8M0) {
    to[0] = as_type<float>(scale << 23) * e_unit<BITS>();
  } else {
    const uint half_bits = (scale & 127u) << 7 | (scale & 128u) << 8;
    to[0] = float(as_type<float16_t>(ushort(half_bits))) * (e_unit<8>() * e_unit<BITS>());
  }
}

// Two floats, rounded to T, in one word.
template <typename T>
METAL_FUNC uint rounded_pair(const thread float* from);

template <>
METAL_FUNC uint rounded_pair<float16_t>(const thread float* from) {
  return pack<float16_t>(from);
}

template <>
METAL_FUNC uint rounded_pair<bfloat16_t>(const thread float* from) {
  return (as_type<uint>(from[0]) + 0x8000u) >> 16 | ((as_type<uint>(from[1]) + 0x8000u) & 0xffff0000u);
}

// Chunk j of quantised weights: 8 of them, not rounded.
template <typename T, int FORM, int BITS, int GROUP_SIZE, int SPREAD>
METAL_FUNC void values_of(const thread LaneWeights<BITS, GROUP_SIZE, SPREAD>& from, int j,
                          thread float* to) {
  constexpr int CODE = FORM == WHOLE_VALUES ? 4 : BITS;  // a compiler reads this either way
  const int g = j * 8 / GROUP_SIZE;
  thread float group[2];
  unpack_group<T, FORM, CODE>(from.scales[g], from.biases[g], group);
  unpack_codes<FORM, CODE>(from.words, j, to);
#pragma unroll
  for (int e = 0; e < 8; e++) {
    to[e] = to[e] * group[0] + group[1];
  }
}

// Chunk j: 8 weights as elements of T, two a word.
template <typename T, int FORM, int BITS, int GROUP_SIZE, int SPREAD>
METAL_FUNC uint4 weights_of(const thread LaneWeights<BITS, GROUP_SIZE, SPREAD>& from, int j) {
  if (FORM == WHOLE_VALUES) {
    const thread uint* words = from.words + j * 4;
    return uint4(words[0], words[1], words[2], words[3]);
  }
  thread float values[8];
  values_of<T, FORM>(from, j, values);
  return uint4(rounded_pair<T>(values), rounded_pair<T>(values + 2), rounded_pair<T>(values + 4),
               rounded_pair<T>(values + 6));
}
