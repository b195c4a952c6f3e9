// <metal_simdgroup_matrix> for CUDA: 8x8 matrices in the layout of mma.sync, whose lane holds
// (lane / 4, lane % 4 * 2) and the element after it.
#pragma once

namespace metal {

template <typename T, int COLS, int ROWS>
struct simdgroup_matrix {
  static_assert(COLS == 8 && ROWS == 8, "simdgroup_matrix: 8x8 only");
  METAL_FUNC T* thread_elements() { return elements; }
  T elements[2];
};

// By definition, for types without a matrix unit of their precision (float).
template <typename T>
METAL_FUNC void simdgroup_multiply_accumulate(
    simdgroup_matrix<float, 8, 8>& d, simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b,
    simdgroup_matrix<float, 8, 8> c) {
  const int lane = threadIdx.x % 32;
  for (int k = 0; k < 8; k++) {
    // Lane (row, k / 2) holds (row, k) of a, and lane (k, col / 2) holds (k, col) of b.
    const float x = __shfl_sync(0xffffffffu, float(a.elements[k % 2]), (lane & 28) | (k / 2));
    const float y0 = __shfl_sync(0xffffffffu, float(b.elements[0]), k * 4 + lane % 4);
    const float y1 = __shfl_sync(0xffffffffu, float(b.elements[1]), k * 4 + lane % 4);
    c.elements[0] += x * y0;
    c.elements[1] += x * y1;
  }
  d = c;
}

// On the tensor cores, which take 16 rows of a: the lower 8 are zeros.  They want b by columns, so
// it is transposed across the lanes first.
#define METAL_TENSOR_CORE_MULTIPLY(T, TYPE)                                                        \
  METAL_FUNC void simdgroup_multiply_accumulate(                                                   \
      simdgroup_matrix<float, 8, 8>& d, simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b,  \
      simdgroup_matrix<float, 8, 8> c) {                                                           \
    uint rows, cols;                                                                               \
    memcpy(&rows, a.elements, 4);                                                                  \
    memcpy(&cols, b.elements, 4);                                                                  \
    float none0 = 0.0f, none1 = 0.0f;                                                              \
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(cols));                    \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE                             \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                        \
                 : "+f"(c.elements[0]), "+f"(c.elements[1]), "+f"(none0), "+f"(none1)              \
                 : "r"(rows), "r"(0), "r"(cols));                                                  \
    d = c;                                                                                         \
  }
METAL_TENSOR_CORE_MULTIPLY(float16_t, "f16")
METAL_TENSOR_CORE_MULTIPLY(bfloat16_t, "bf16")
#undef METAL_TENSOR_CORE_MULTIPLY

}  // namespace metal

#define FAR_MATE 2

template <typename I>
METAL_FUNC I matrix_row(I lane) { return lane / 4; }

template <typename I>
METAL_FUNC I matrix_col(I lane) { return lane % 4 * 2; }
