// Which elements of an 8x8 simdgroup_matrix a lane holds.
//
// A lane has two neighbours of one row, (row, col) and (row, col + 1), as thread_elements()[0] and
// [1].  Apple does not document this; MLX's kernels assume it, on every chip so far:
//
//            col 0,1  2,3  4,5  6,7       row = bits 4 2 1 of the lane
//   row 0       0     1    8    9         col = bits 3 0, times 2
//   row 1       2     3   10   11
//   row 2       4     5   12   13         lanes that share a row differ in bits 0 and 3
//   row 3       6     7   14   15
//   row 4 - 7   the same + 16
//
// Nothing else in metal/ knows it.  Where matrices lie otherwise (CUDA), <metal_simdgroup_matrix>
// is a file of ours and defines FAR_MATE, matrix_row, matrix_col and matrix_lane, and has faster multiply_each.
#include <metal_simdgroup_matrix>

#ifndef FAR_MATE
#define FAR_MATE 8  // lanes that share a row differ in bit 0 and in this one

METAL_FUNC int matrix_row(int lane) {
  return ((lane >> 2) & 4) | ((lane >> 1) & 3);
}

METAL_FUNC int matrix_col(int lane) {
  return ((lane >> 1) & 4) | ((lane << 1) & 2);
}

// The lane that holds (row, col).
METAL_FUNC int matrix_lane(int row, int col) {
  return ((row & 4) << 2) | ((row & 3) << 1) | ((col & 4) << 1) | ((col >> 1) & 1);
}
#endif

// The largest x of the lanes that share a row.
METAL_FUNC float row_max(float x) {
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(1)));
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(FAR_MATE)));
  return x;
}

// Their sum.
METAL_FUNC float row_sum(float x) {
  x += metal::simd_shuffle_xor(x, ushort(1));
  x += metal::simd_shuffle_xor(x, ushort(FAR_MATE));
  return x;
}

// x of the lane of the same row that has column `of`; col: this lane's.  In two steps that each take one
// instruction, where a shuffle with a lane that varies takes more on Apple GPUs.
METAL_FUNC float from_col(float x, int col, int of) {
  const float near = metal::simd_shuffle_xor(x, ushort(1));
  x = ((col ^ of) & 2) != 0 ? near : x;
  const float far = metal::simd_shuffle_xor(x, ushort(FAR_MATE));
  return ((col ^ of) & 4) != 0 ? far : x;
}

// sums[i] += left * right[i], for COUNT matrices right[i] in threadgroup memory: the first at `from`, each
// NEXT elements behind the one before, their rows STRIDE elements apart (TRANSPOSED: their columns).
template <int COUNT, int NEXT, int STRIDE, bool TRANSPOSED, typename T>
METAL_FUNC void multiply_each(thread metal::simdgroup_matrix<float, 8, 8>* sums,
                              thread metal::simdgroup_matrix<T, 8, 8>& left,
                              const threadgroup T* from, int row, int col) {
  constexpr int DOWN = TRANSPOSED ? 1 : STRIDE;
  constexpr int ACROSS = TRANSPOSED ? STRIDE : 1;
  const threadgroup T* own = from + row * DOWN + col * ACROSS;
  // Apple's compiler must not fetch all of the matrices before the first product.
  simdgroup_barrier(mem_flags::mem_none);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    metal::simdgroup_matrix<T, 8, 8> right;
    right.thread_elements()[0] = own[i * NEXT];
    right.thread_elements()[1] = own[i * NEXT + ACROSS];
    metal::simdgroup_multiply_accumulate(sums[i], left, right, sums[i]);
  }
}

// The same with several left sides, the first `used`: sums[b * COUNT + i] is of left[b].  A matrix
// is fetched once for all of them.
template <int BLOCKS, int COUNT, int NEXT, int STRIDE, bool TRANSPOSED, typename T>
METAL_FUNC void multiply_blocks(thread metal::simdgroup_matrix<float, 8, 8>* sums,
                                thread metal::simdgroup_matrix<T, 8, 8>* left, int used,
                                const threadgroup T* from, int row, int col) {
  constexpr int DOWN = TRANSPOSED ? 1 : STRIDE;
  constexpr int ACROSS = TRANSPOSED ? STRIDE : 1;
  const threadgroup T* own = from + row * DOWN + col * ACROSS;
  simdgroup_barrier(mem_flags::mem_none);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    metal::simdgroup_matrix<T, 8, 8> right;
    right.thread_elements()[0] = own[i * NEXT];
    right.thread_elements()[1] = own[i * NEXT + ACROSS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      if (b < used) {
        metal::simdgroup_multiply_accumulate(sums[b * COUNT + i], left[b], right,
                                             sums[b * COUNT + i]);
      }
    }
  }
}
