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

// The product as it is defined.  For 16-bit types the functions below are faster.
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

}  // namespace metal

#define FAR_MATE 2

METAL_FUNC int matrix_row(int lane) { return lane / 4; }
METAL_FUNC int matrix_col(int lane) { return lane % 4 * 2; }
METAL_FUNC int matrix_lane(int row, int col) { return row * 4 + col / 2; }

// For matrix.h, of 16-bit types.  `ldmatrix` loads four matrices at once; each lane names the address of
// one row.  Without .trans, rows in memory become columns, which the tensor cores want of the right side:
// a lane holds elements (lane % 4 * 2, lane / 4) and the one below it.
template <bool TRANSPOSED>
METAL_FUNC void load_four(uint* cols, uint at) {
  if (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(cols[0]), "=r"(cols[1]), "=r"(cols[2]), "=r"(cols[3])
                 : "r"(at));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(cols[0]), "=r"(cols[1]), "=r"(cols[2]), "=r"(cols[3])
                 : "r"(at));
  }
}

// The tensor cores take 16 rows of the left side: two matrices of `left`, or one and zeros.
template <int BLOCKS, int COUNT, int NEXT, int STRIDE, bool TRANSPOSED, typename T>
METAL_FUNC void multiply_pairs(metal::simdgroup_matrix<float, 8, 8>* sums,
                               metal::simdgroup_matrix<T, 8, 8>* left, int used, const T* from) {
  static_assert(BLOCKS == 1 || BLOCKS % 2 == 0, "multiply_pairs: blocks come in pairs");
  const int lane = threadIdx.x % 32;
  uint rows[BLOCKS + 1] = {};
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) memcpy(&rows[b], left[b].elements, 4);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    uint cols[4];
    const int of = metal::min(i + lane / 8, COUNT - 1);
    load_four<TRANSPOSED>(cols, uint(__cvta_generic_to_shared(from + of * NEXT + lane % 8 * STRIDE)));
#pragma unroll
    for (int n = i; n < metal::min(i + 4, COUNT); n++) {
#pragma unroll
      for (int b = 0; b < BLOCKS; b += 2) {
        if (b < used) {
          float zeros[2] = {0.0f, 0.0f};
          float* upper = sums[b * COUNT + n].elements;
          float* lower = BLOCKS == 1 ? zeros : sums[(b + 1) * COUNT + n].elements;
          multiply_8_deep(upper, lower, rows[b], rows[b + 1], cols[n - i], T());
        }
      }
    }
  }
}

// The instructions of one type, and its overloads of the functions in matrix.h.
#define METAL_TENSOR_CORES(T, TYPE)                                                                 \
  METAL_FUNC void multiply_8_deep(float* upper, float* lower, uint w0, uint w1, uint x, T) {        \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE                                       \
        ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                                  \
        : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])                            \
        : "r"(w0), "r"(w1), "r"(x));                                                                \
  }                                                                                                 \
  METAL_FUNC void multiply_16_deep(metal::simdgroup_matrix<float, 8, 8>* y, uint w0, uint w1,       \
                                   uint w2, uint w3, uint x0, uint x1, T) {                         \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                      \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
        : "+f"(y[0].elements[0]), "+f"(y[0].elements[1]), "+f"(y[1].elements[0]),                   \
          "+f"(y[1].elements[1])                                                                    \
        : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(x0), "r"(x1));                                    \
  }                                                                                                 \
  template <int COUNT, int NEXT, int STRIDE, bool TRANSPOSED>                                       \
  METAL_FUNC void multiply_each(metal::simdgroup_matrix<float, 8, 8>* sums,                         \
                                metal::simdgroup_matrix<T, 8, 8>& left, const T* from, int, int) {  \
    multiply_pairs<1, COUNT, NEXT, STRIDE, TRANSPOSED>(sums, &left, 1, from);                       \
  }                                                                                                 \
  template <int BLOCKS, int COUNT, int NEXT, int STRIDE, bool TRANSPOSED>                           \
  METAL_FUNC void multiply_blocks(metal::simdgroup_matrix<float, 8, 8>* sums,                       \
                                  metal::simdgroup_matrix<T, 8, 8>* left, int used, const T* from,  \
                                  int, int) {                                                       \
    multiply_pairs<BLOCKS, COUNT, NEXT, STRIDE, TRANSPOSED>(sums, left, used, from);                \
  }
METAL_TENSOR_CORES(float16_t, "f16")
METAL_TENSOR_CORES(bfloat16_t, "bf16")
#undef METAL_TENSOR_CORES

// For row_products.h.  The tensor cores take 16 rows of the left side at once, and want the right side
// by columns: 8 rows across are rows as they lie.
#define MULTIPLY_ROWS

template <typename T>
METAL_FUNC uint normed_pair(uint pair, float inverse_rms, uint gain);

template <typename T>
struct RowsAcross {
  uint4 part;
};

template <typename T, int STRIDE, int SPREAD, bool NORM>
METAL_FUNC void load_across(RowsAcross<T>& to, const T* x, int last, int row, int col,
                            const float* inverse_rms, const T* gain) {
  row = metal::min(row, last);
  to.part = *(const uint4*)(x + row * STRIDE + col * 4 * SPREAD);
  if (NORM) {
    const uint4 by = *(const uint4*)(gain + col * 4 * SPREAD);
    to.part.x = normed_pair<T>(to.part.x, inverse_rms[row], by.x);
    to.part.y = normed_pair<T>(to.part.y, inverse_rms[row], by.y);
    to.part.z = normed_pair<T>(to.part.z, inverse_rms[row], by.z);
    to.part.w = normed_pair<T>(to.part.w, inverse_rms[row], by.w);
  }
}

template <typename T, int SPREAD>
METAL_FUNC void gather_across(RowsAcross<T>& to, const T* x, const int* offsets, int row, int col) {
  to.part = *(const uint4*)(x + offsets[row] + col * 4 * SPREAD);
}

template <typename T>
METAL_FUNC void multiply_rows(metal::simdgroup_matrix<float, 8, 8>* y, const uint4* w,
                              const RowsAcross<T>& x) {
  multiply_16_deep(y, w[0].x, w[1].x, w[0].y, w[1].y, x.part.x, x.part.y, T());
  multiply_16_deep(y, w[0].z, w[1].z, w[0].w, w[1].w, x.part.z, x.part.w, T());
}
