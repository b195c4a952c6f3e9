// skinny_gemm: the product of a few rows with a weight, y = x w^T, whose cost is reading w.
//
//   x   (rows, depth) of T       rows <= ROW_TILES * 8; depth a multiple of 32
//   w   (outputs, depth) of T    16-bit floats
//   y   (rows, outputs) of T     sums in float32
//
// Layout.  A threadgroup computes PARTS * 8 columns of y, all rows.  w is the left side of the product
// and x the right, so that rows come in eights: 8 requests waste nothing.  Simdgroups share the depth,
// 32 elements at a time:
//
//               depth   0        32       64       96
//   PARTS * 8 rows     | sg 0   | sg 1   | sg 2   | .. | sg 0  | ..       a chunk: 16 bytes a lane and
//   of w               |        |        |        |    |       |         8 rows (row_products.h)
//
// AT_ONCE chunks of w are asked for before the first is used: bytes under way are what a decode step
// is short of.  x is small and is read again by every threadgroup, from a cache.
//
// Why it is correct.  Each simdgroup sums other elements of the depth, in float32, and leaves its sums
// in threadgroup memory, KEPT simdgroups at a time (a divisor of SIMDGROUPS) for it is small; after the
// last barrier each thread adds those of one element of y.  All in order, so the result does not depend
// on who is first.  A row past the last one of w, or of x, repeats the last and
// is not stored.  The number of turns is the same for all lanes of a simdgroup.
//
// Cost.  w once; x once a threadgroup; one launch, whose host side is cheap: three arrays.
#include "row_products.h"

// y[j * PARTS + p] += rows 8 p .. of w, from starts[p] on, times rows 8 j .. of x, over AT_ONCE chunks
// of depth that are `step` elements apart.
template <typename T, int PARTS, int ROW_TILES, int AT_ONCE>
METAL_FUNC void multiply_chunks(const device T* w, const thread size_t* starts, const device T* x,
                                int rows, int depth, int k, int step, int row, int col,
                                thread metal::simdgroup_matrix<float, 8, 8>* y) {
  thread uint4 weights[AT_ONCE * PARTS];
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      weights[c * PARTS + p] = *(const device uint4*)(w + starts[p] + k + c * step);
    }
  }
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++) {
      thread RowsAcross<T> across;
      load_across(across, x + size_t(j) * 8 * depth + k + c * step, rows - 1 - j * 8, depth, row, col);
      multiply_rows<T, PARTS>(y + j * PARTS, weights + c * PARTS, across);
    }
  }
}

// --- kernel body ---
constexpr int COLUMNS = PARTS * 8;
constexpr int ROWS = ROW_TILES * 8;
constexpr int STEP = SIMDGROUPS * 32;

threadgroup float sums[KEPT * ROWS * COLUMNS];

const int rows = x_shape[0];
const int depth = x_shape[1];
const int outputs = w_shape[0];
const int first = int(threadgroup_position_in_grid.x) * COLUMNS;
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int row = matrix_row(int(thread_index_in_simdgroup));
const int col = matrix_col(int(thread_index_in_simdgroup));

thread size_t starts[PARTS];
#pragma unroll
for (int p = 0; p < PARTS; p++) {
  starts[p] = size_t(metal::min(first + p * 8 + row, outputs - 1)) * depth + col * 4;
}
thread metal::simdgroup_matrix<float, 8, 8> part[ROW_TILES * PARTS];
#pragma unroll
for (int i = 0; i < ROW_TILES * PARTS; i++) {
  part[i].thread_elements()[0] = 0.0f;
  part[i].thread_elements()[1] = 0.0f;
}

int k = simdgroup_index * 32;
for (; k + (AT_ONCE - 1) * STEP < depth; k += AT_ONCE * STEP) {
  multiply_chunks<T, PARTS, ROW_TILES, AT_ONCE>(w, starts, x, rows, depth, k, STEP, row, col, part);
}
for (; k < depth; k += STEP) {
  multiply_chunks<T, PARTS, ROW_TILES, 1>(w, starts, x, rows, depth, k, STEP, row, col, part);
}

// KEPT simdgroups leave their sums, the next KEPT add theirs to them, and so on.
for (int turn = 0; turn < SIMDGROUPS / KEPT; turn++) {
  if (simdgroup_index / KEPT == turn) {
#pragma unroll
    for (int i = 0; i < ROW_TILES * PARTS; i++) {
      const int m = simdgroup_index % KEPT * ROWS + i / PARTS * 8 + col;
      const int at = m * COLUMNS + i % PARTS * 8 + row;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float before = turn == 0 ? 0.0f : sums[at + e * COLUMNS];
        sums[at + e * COLUMNS] = before + part[i].thread_elements()[e];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

const int thread_index = int(thread_position_in_threadgroup.x);
for (int i = thread_index; i < ROWS * COLUMNS; i += SIMDGROUPS * 32) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < KEPT; s++) {
    sum += sums[s * ROWS * COLUMNS + i];
  }
  const int m = i / COLUMNS;
  const int n = first + i % COLUMNS;
  if (m < rows && n < outputs) {
    y[size_t(m) * outputs + n] = T(sum);
  }
}
