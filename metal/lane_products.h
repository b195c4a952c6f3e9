// Products of 1 to 4 rows with quantised weights, without matrix instructions.
//
// A matrix instruction always computes 8 rows of x.  Its 8 products a weight take all the time that an
// Apple GPU needs to read the 4 bits.  So with few rows each lane multiplies its own 8 weights
// of a row and chunk (weights.h) with the same 8 elements of each row of x:
//
//   chunk j of a row of w   | lane 0: 8 weights | lane 1 ..      | lane 2 ..      | lane 3 ..      |
//   a row of x              | its 8 elements    |                |                |                |
//
// and adds the products to one sum for each row of w and of x.  At the end the four lanes of a row of w
// add theirs (row_sum).  Weights are not rounded to T, as they are not in MLX's own such products.
//
// NORM: each lane normalises its elements for itself.  Lanes (row, col) with one col need the same, but on
// Apple GPUs a shuffle with a lane that varies takes more instructions than the norm of an element.
//
// Cost, in instructions a weight: unpacking 2.5, and for each row of x a product, and 1 / PARTS to unpack
// its elements; with NORM 6 / PARTS instead.
#include "row_products.h"

// 8 elements of a row of x from four words; NORM: normalised, with those of the norm's weight.
template <typename T, bool NORM>
METAL_FUNC void elements_of(const thread uint* words, float inverse_rms, const thread uint* gains,
                            thread float* to) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unpack<T>(words[i], to + 2 * i);
    if (NORM) {
      thread float gain[2];
      unpack<T>(gains[i], gain);
      to[2 * i] = rms_normed<T>(to[2 * i], inverse_rms, gain[0]);
      to[2 * i + 1] = rms_normed<T>(to[2 * i + 1], inverse_rms, gain[1]);
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
