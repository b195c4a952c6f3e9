// Products of rows with rows, 32 elements deep: y (n, m) += the dot product of w's row n and x's row m.
//
// A dot product may take its elements in any order, if both sides take the same.  So a lane reads 16
// bytes of a row of w in one load, 8 elements that lie together, and gives elements i and 4 + i of them
// to matrix i: with lanes (row, col), matrix i holds of each row the elements
//
//   k = i, 4 + i | 8 + i, 12 + i | 16 + i, 20 + i | 24 + i, 28 + i        i = 0 .. 3
//   in col 0, 1  |    col 2, 3   |     col 4, 5   |     col 6, 7
//
// which is 8 rows of 64 bytes a simdgroup and load, where matrices as they lie would be rows of 16.
// What a lane needs of a row of x, transposed, lies together too: elements 4 row .. 4 row + 3.
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
  const uint2 near = *(const device uint2*)(x + metal::min(col, last) * STRIDE + row * 4);
  const uint2 far = *(const device uint2*)(x + metal::min(col + 1, last) * STRIDE + row * 4);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int shift = i % 2 * 16;
    to.part[i].thread_elements()[0] = as_type<T>(ushort((i < 2 ? near.x : near.y) >> shift));
    to.part[i].thread_elements()[1] = as_type<T>(ushort((i < 2 ? far.x : far.y) >> shift));
  }
}

// y[p] (8 x 8) += rows 8 p .. 8 p + 7 of w times those of x, p = 0 and 1.  w[p]: this lane's 8
// elements of row 8 p + row, from 4 col on.
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
