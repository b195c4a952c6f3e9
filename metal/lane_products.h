// Products of 1 to 4 rows with quantised weights, without matrices.
//
// A matrix has 8 rows of x, however few there are, and 8 products a weight are as many instructions as an
// Apple GPU has for a weight of 4 bits.  So with few rows each lane multiplies for itself the 8 weights
// that it has of a row and chunk (weights.h) with the same 8 elements of each row of x:
//
//   chunk j of a row of w   | lane 0: 8 weights | lane 1 ..      | lane 2 ..      | lane 3 ..      |
//   a row of x              | its 8 elements    |                |                |                |
//
// and adds the products to one sum for each row of w and of x.  At the end the four lanes of a row of w
// add theirs (row_sum).  Weights are not rounded to T, as they are not in MLX's own such products.
//
// NORM: the 8 lanes (row, col) with one col need the same 8 elements.  Each normalises one of them and
// takes the others from its neighbours.
//
// Cost, in instructions a weight: unpacking 2.5, and for each row of x a product, and 1 / PARTS to unpack
// its elements; with NORM (10 + 8) / (8 PARTS) instead of these.
#include "row_products.h"

// 8 elements of a row of x as they lie; NORM: one of them.
template <bool NORM>
struct LaneElements {
  uint words[NORM ? 1 : 4];
};

template <typename T, bool NORM>
METAL_FUNC void load_elements(thread LaneElements<NORM>& to, const device T* x, int row) {
  if (NORM) {
    to.words[0] = as_type<ushort>(x[row]);
  } else {
    load_words<NORM ? 1 : 4>((const device uint*)x, to.words);
  }
}

// gain: of this lane's element, if NORM.
template <typename T, bool NORM>
METAL_FUNC void elements_of(const thread LaneElements<NORM>& from, float inverse_rms, float gain, int col,
                            thread float* to) {
  if (NORM) {
    const float x = float(as_type<T>(ushort(from.words[0])));
    const float own = rms_normed<T>(x, inverse_rms, gain);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      to[e] = metal::simd_shuffle(own, ushort(matrix_lane(e, col)));
    }
  } else {
#pragma unroll
    for (int i = 0; i < (NORM ? 1 : 4); i++) {
      unpack<T>(from.words[i], to + 2 * i);
    }
  }
}

// The dot product of 8 values with 8.
METAL_FUNC float dot_of_8(const thread float* a, const thread float* b) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; e++) {
    sum += a[e] * b[e];
  }
  return sum;
}
