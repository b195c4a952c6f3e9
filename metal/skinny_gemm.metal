// skinny_gemm: the product of a few rows with a weight, y = x w^T, whose cost is reading w.
//
//   x   (rows, DEPTH) of T       rows <= ROW_TILES * 8, FULL: just as many; DEPTH a multiple of 32
//   w   (outputs, DEPTH) of T    16-bit floats
//   y   (rows, outputs) of T     sums in float32
//
// Layout.  A threadgroup computes 16 columns of y, all rows.  w is the left side of the product and x
// the right, so that rows come in eights: 8 requests waste nothing.  Simdgroups share the depth, 32
// elements at a time, a chunk (row_products.h):
//
//               depth  0     32     64           32 SIMDGROUPS
//               16     |      |      |            |      |
//          rows of w   | sg 0 | sg 1 | sg 2 | ... | sg 0 | sg 1 | ...     8 rows a load, 16 bytes a lane
//                      |      |      |            |      |
//
// AT_ONCE chunks of w are asked for before the first is used: bytes under way are what a decode step
// is short of.  x is small and is read again by every threadgroup, from a cache.
//
// Why it is correct.  Each simdgroup sums other elements of the depth, in float32, and leaves its sums
// in threadgroup memory; after the barrier each thread adds those of one element of y, in order, so the
// result does not depend on who is first.  That memory holds HELD eights of rows, so it is done for so
// many at a time.  A row past the last one of w, or of x, repeats the last and is not stored.  All
// lanes of a simdgroup take the same turns.
//
// Cost.  w once; x once a threadgroup; one launch of three arrays, which is cheap for the host.
#include "row_products.h"

// y[2 j + p] += rows 8 p .. of w, from starts[p] on, times rows 8 j .. of x, over AT_ONCE chunks of the
// depth that are STEP elements apart, the first at k.
template <typename T, int DEPTH, int ROW_TILES, bool FULL, int AT_ONCE, int STEP>
METAL_FUNC void multiply_chunks(const device T* w, const thread size_t* starts, const device T* x,
                                int rows, int k, int row, int col,
                                thread metal::simdgroup_matrix<float, 8, 8>* y) {
  thread uint4 weights[AT_ONCE * 2];
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
    weights[c * 2] = *(const device uint4*)(w + starts[0] + k + c * STEP);
    weights[c * 2 + 1] = *(const device uint4*)(w + starts[1] + k + c * STEP);
  }
  // Compilers put a load off until it is used; then they come one after the other.
  simdgroup_barrier(mem_flags::mem_none);
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
    thread RowsAcross<T> across[ROW_TILES];
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++) {
      const int last = FULL ? 7 : rows - 1 - j * 8;
      load_across<T, DEPTH>(across[j], x + j * 8 * DEPTH + k + c * STEP, last, row, col);
    }
    simdgroup_barrier(mem_flags::mem_none);
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++) {
      multiply_rows(y + j * 2, weights + c * 2, across[j]);
    }
  }
}

// --- kernel body ---
constexpr int COLUMNS = 16;
constexpr int STRIDE = COLUMNS + 4;  // so that lanes of a simdgroup meet 32 banks
constexpr int STEP = SIMDGROUPS * 32;
constexpr int TURN = AT_ONCE * STEP;
constexpr int WHOLE = DEPTH / TURN * TURN;

threadgroup float sums[SIMDGROUPS * HELD * 8 * STRIDE];

const int rows = x_shape[0];
const int outputs = w_shape[0];
const int first = int(threadgroup_position_in_grid.x) * COLUMNS;
const int thread_index = int(thread_position_in_threadgroup.x);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int row = matrix_row(int(thread_index_in_simdgroup));
const int col = matrix_col(int(thread_index_in_simdgroup));

thread size_t starts[2];
#pragma unroll
for (int p = 0; p < 2; p++) {
  starts[p] = size_t(metal::min(first + p * 8 + row, outputs - 1)) * DEPTH + col * 4;
}
thread metal::simdgroup_matrix<float, 8, 8> part[ROW_TILES * 2];
#pragma unroll
for (int i = 0; i < ROW_TILES * 2; i++) {
  part[i].thread_elements()[0] = 0.0f;
  part[i].thread_elements()[1] = 0.0f;
}

int k = simdgroup_index * 32;
for (; k < WHOLE; k += TURN) {
  multiply_chunks<T, DEPTH, ROW_TILES, FULL, AT_ONCE, STEP>(w, starts, x, rows, k, row, col, part);
}
if (WHOLE < DEPTH) {
  for (; k < DEPTH; k += STEP) {
    multiply_chunks<T, DEPTH, ROW_TILES, FULL, 1, STEP>(w, starts, x, rows, k, row, col, part);
  }
}

#pragma unroll
for (int from = 0; from < ROW_TILES; from += HELD) {
  if (from > 0) {  // all have read the sums of the rows before
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma unroll
  for (int j = from; j < metal::min(from + HELD, ROW_TILES); j++) {
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const int m = (simdgroup_index * HELD + j - from) * 8 + col;
      const int at = m * STRIDE + p * 8 + row;
      sums[at] = part[j * 2 + p].thread_elements()[0];
      sums[at + STRIDE] = part[j * 2 + p].thread_elements()[1];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index; i < HELD * 8 * COLUMNS; i += SIMDGROUPS * 32) {
    const int m = i / COLUMNS;
    const int n = i % COLUMNS;
    if (from * 8 + m < rows && first + n < outputs) {
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < SIMDGROUPS; s++) {
        sum += sums[(s * HELD * 8 + m) * STRIDE + n];
      }
      y[(from * 8 + m) * outputs + first + n] = T(sum);
    }
  }
}
