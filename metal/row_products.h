// Products of rows with rows, 32 elements deep: y (n, m) += the dot product of w's row n and x's row m.
//
// A dot product may take its elements in any order, if both sides take the same.  So a lane reads 16
// bytes of a row of w in one load, 8 elements that lie together, and gives elements i and 4 + i of them
// to matrix i: with lanes (row, col), matrix i holds of each row the elements
//
//   k = i, 4 + i | 8 + i, 12 + i | 16 + i, 20 + i | 24 + i, 28 + i        i = 0 .. 3
//   in col 0, 1  |    col 2, 3   |     col 4, 5   |     col 6, 7
//
// So one load of a simdgroup takes 64 bytes of each of 8 rows.  Without this order it would take 16.
// The elements of a row of x that a lane needs, transposed, lie together too: 4 row .. 4 row + 3.
// Quantised weights lie SPREAD times as far apart in w (weights.h), and so do the pairs in x:
// elements 8 SPREAD (row / 2) + 4 (row % 2) and on, and 8 more for the next chunk.
//
// NORM: rows of x are RMS-normalised on their way, each by its inverse_rms, element by element of gain.
#include "matrix.h"
#include "rms_norm.h"
#include "weights.h"

// Two neighbours of a row, normalised.
template <typename T>
METAL_FUNC uint normed_pair(uint pair, float inverse_rms, uint gain) {
  thread float x[2];
  thread float weight[2];
  unpack<T>(pair, x);
  unpack<T>(gain, weight);
  x[0] = rms_normed<T>(x[0], inverse_rms, weight[0]);
  x[1] = rms_normed<T>(x[1], inverse_rms, weight[1]);
  return pack<T>(x);
}

#ifndef MULTIPLY_ROWS
// 8 rows of x as the right side of a product: four matrices, each transposed.
template <typename T>
struct RowsAcross {
  metal::simdgroup_matrix<T, 8, 8> part[4];
};

// A lane's 4 elements of rows col and col + 1.
template <typename T>
METAL_FUNC void spread_across(thread RowsAcross<T>& to, uint2 near, uint2 far) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int shift = i % 2 * 16;
    to.part[i].thread_elements()[0] = as_type<T>(ushort((i < 2 ? near.x : near.y) >> shift));
    to.part[i].thread_elements()[1] = as_type<T>(ushort((i < 2 ? far.x : far.y) >> shift));
  }
}

// Rows 0 to `last` of x, which are STRIDE elements apart; what is past the last repeats it.
template <typename T, int STRIDE, int SPREAD, bool NORM>
METAL_FUNC void load_across(thread RowsAcross<T>& to, const device T* x, int last, int row, int col,
                            const threadgroup float* inverse_rms, const device T* gain) {
  const int rows[2] = {metal::min(col, last), metal::min(col + 1, last)};
  const int from = row / 2 * (8 * SPREAD) + row % 2 * 4;
  uint2 near = *(const device uint2*)(x + rows[0] * STRIDE + from);
  uint2 far = *(const device uint2*)(x + rows[1] * STRIDE + from);
  if (NORM) {
    const uint2 by = *(const device uint2*)(gain + from);
    const float scales[2] = {inverse_rms[rows[0]], inverse_rms[rows[1]]};
    near.x = normed_pair<T>(near.x, scales[0], by.x);
    near.y = normed_pair<T>(near.y, scales[0], by.y);
    far.x = normed_pair<T>(far.x, scales[1], by.x);
    far.y = normed_pair<T>(far.y, scales[1], by.y);
  }
  spread_across(to, near, far);
}

// As load_across, without NORM, for 8 rows that lie anywhere: row i begins at x + offsets[i].
template <typename T, int SPREAD>
METAL_FUNC void gather_across(thread RowsAcross<T>& to, const device T* x,
                              const threadgroup int* offsets, int row, int col) {
  const int from = row / 2 * (8 * SPREAD) + row % 2 * 4;
  spread_across(to, *(const device uint2*)(x + offsets[col] + from),
                *(const device uint2*)(x + offsets[col + 1] + from));
}

// For p = 0 and 1: adds to y[p] (8 x 8) the product of rows 8 p to 8 p + 7 of w with x; the same x
// serves both.  w[p] holds the 8 elements that this lane keeps of row 8 p + row, from element 4 * col on.
template <typename T>
METAL_FUNC void multiply_rows(thread metal::simdgroup_matrix<float, 8, 8>* y, const thread uint4* w,
                              thread RowsAcross<T>& x) {
#pragma unroll
  for (int p = 0; p < 2; p++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int shift = i % 2 * 16;
      metal::simdgroup_matrix<T, 8, 8> rows;
      rows.thread_elements()[0] = as_type<T>(ushort((i < 2 ? w[p].x : w[p].y) >> shift));
      rows.thread_elements()[1] = as_type<T>(ushort((i < 2 ? w[p].z : w[p].w) >> shift));
      metal::simdgroup_multiply_accumulate(y[p], rows, x.part[i], y[p]);
    }
  }
}
#endif
