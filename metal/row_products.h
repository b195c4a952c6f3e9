// Products of rows with rows, 32 elements deep: y (n, m) += the dot product of w's row n and x's row m.
//
// A dot product may take its elements in any order, if both sides take the same.  So a lane reads 16
// bytes of a row in one load, 8 elements that lie together, and gives its pair of neighbours i to
// matrix i: with lanes (row, col), matrix i holds of each row the elements
//
//   k = 0 + 2i, 1 + 2i | 8 + 2i, 9 + 2i | 16 + 2i, 17 + 2i | 24 + 2i, 25 + 2i        i = 0 .. 3
//   in   col 0, 1      |     col 2, 3   |      col 4, 5    |      col 6, 7
//
// which is 8 rows of 64 bytes a simdgroup and load, where matrices as they lie would be rows of 16.
#include "matrix.h"

#ifndef MULTIPLY_ROWS
// 8 rows of x as the right side of a product: four matrices, each transposed.
template <typename T>
struct RowsAcross {
  metal::simdgroup_matrix<T, 8, 8> part[4];
};

// Rows 0 to `last` of x, which are STRIDE elements apart; what is past the last repeats it.
template <typename T, int STRIDE>
METAL_FUNC void load_across(thread RowsAcross<T>& to, const device T* x, int last, int row, int col) {
  const int k = row / 2 * 8 + row % 2;
  const device T* near = x + metal::min(col, last) * STRIDE + k;
  const device T* far = x + metal::min(col + 1, last) * STRIDE + k;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    to.part[i].thread_elements()[0] = near[i * 2];
    to.part[i].thread_elements()[1] = far[i * 2];
  }
}

// y[p] (8 x 8) += rows 8 p .. 8 p + 7 of w times those of x, p = 0 and 1.  w[p]: this lane's 8
// elements of row 8 p + row, from 4 col on.
template <typename T>
METAL_FUNC void multiply_rows(thread metal::simdgroup_matrix<float, 8, 8>* y, const thread uint4* w,
                              const thread RowsAcross<T>& x) {
#pragma unroll
  for (int p = 0; p < 2; p++) {
    const thread uint words[4] = {w[p].x, w[p].y, w[p].z, w[p].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      metal::simdgroup_matrix<T, 8, 8> rows;
      rows.thread_elements()[0] = as_type<T>(ushort(words[i] & 0xffffu));
      rows.thread_elements()[1] = as_type<T>(ushort(words[i] >> 16));
      metal::simdgroup_multiply_accumulate(y[p], rows, x.part[i], y[p]);
    }
  }
}
#endif
