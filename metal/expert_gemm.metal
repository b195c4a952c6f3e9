// expert_gemm: products of rows with the experts that they chose, for pairs (row, choice) sorted by
// expert.  The cost is reading each used expert once.  Gate, up and the activation are one launch.
//
//   x          (rows, DEPTH) of T          pair p has row p / SHARE; DEPTH a multiple of 32
//   indices    (pairs,)                    the expert of each pair
//   plan       (pairs + 2 tiles,) int      order and tiles, by expert_plan
//   w          (experts, outputs, DEPTH)   16-bit floats T, or quantised, with scales and biases of
//   scales     (experts, outputs, groups)  groups (weights.h)
//   biases     as scales
//   bias       (experts, outputs) of T     BIAS: of the linear layer, is added to the product
//   up_w ..    as w ..                     GATED: of the second product; its result is
//   up_bias                                activation(x w^T) times x up_w^T; RELU2 has one product
//   y          (pairs, outputs) of T       in the order of pairs, not of the plan; sums in float32;
//                                          zero for pairs of padding rows
//
// Layout.  A threadgroup has a tile of up to ROW_TILES * 8 pairs of one expert, and 16 rows of its
// weight: 8 of w and 8 of up_w if GATED.  As in skinny_gemm the weight is the left side of the product,
// simdgroups share the depth, and a lane asks for AT_ONCE loads before it uses the first:
//
//   grid       x: 16 rows of w         y: tile of the plan
//
//   order      | expert 0 | expert 2     | 2 | expert 5  |      expert 2 has more pairs than a tile
//   tile       |    0     |      1       | 2 |     3     | 4    4: no such tile, ends at once
//   x                rows lie anywhere: each pair's offset is in threadgroup memory
//
// Why it is correct.  All of a threadgroup's branches on the plan go the same way for its threads.  A
// pair past the last one of a tile repeats the last and is not stored; a row of w likewise.  Each
// simdgroup leaves its sums in threadgroup memory, and each thread adds those of one element in order,
// so a pair's result depends on its row and its expert's weight only: not on the other pairs of its
// tile.  A value that would be an array between two launches is rounded to T there.
//
// Cost.  w of each used expert once, again for every ROW_TILES * 8 pairs of it; groups of 8 pairs that
// a tile lacks cost no product.  LANE_ROWS (1 or 4): at most that many pairs a tile, and products
// without matrix instructions (lane_products.h).
#include "activations.h"
#include "lane_products.h"

// Rows row and 8 + row of the tile's weight, AT_ONCE loads STEP elements apart, the first from k on.
template <int FORM, int BITS, int GROUP_SIZE, int SPREAD, int AT_ONCE, int STEP>
METAL_FUNC void load_pair(thread LaneWeights<BITS, GROUP_SIZE, SPREAD>* weights, const device uint* w,
                          const device uchar* scales, const device uchar* biases,
                          const device uint* up_w, const device uchar* up_scales,
                          const device uchar* up_biases, const thread size_t* starts, int k, int col) {
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
    const int at = k + c * STEP + col * 4 * SPREAD;
    load_weights<FORM, BITS, GROUP_SIZE, SPREAD>(weights[c * 2], w, scales, biases, starts[0] + at);
    load_weights<FORM, BITS, GROUP_SIZE, SPREAD>(weights[c * 2 + 1], up_w, up_scales, up_biases,
                                                 starts[1] + at);
  }
  // Compilers put a load off until it is used; then they come one after the other.
  simdgroup_barrier(mem_flags::mem_none);
}

// LANE_ROWS: lane_sums[2 m + p] += this lane's part of rows 8 p .. of the weight, times pair m of x.  All
// rows of x are loaded: loads in branches make Mesa's compiler spill in float16.
template <typename T, int FORM, int BITS, int GROUP_SIZE, int SPREAD, int LANE_ROWS, int AT_ONCE, int STEP>
METAL_FUNC void multiply_in_lanes(const thread LaneWeights<BITS, GROUP_SIZE, SPREAD>* weights,
                                  const device T* x, const threadgroup int* offsets, int count, int k,
                                  int col, thread float* lane_sums) {
#pragma unroll
  for (int c = 0; c < AT_ONCE * SPREAD; c++) {
    const int at = k + c / SPREAD * STEP + c % SPREAD * 8 + col * 4 * SPREAD;
    thread uint elements[LANE_ROWS > 0 ? LANE_ROWS * 4 : 1];
#pragma unroll
    for (int m = 0; m < LANE_ROWS; m++) {
      load_words<4>((const device uint*)(x + offsets[m] + at), elements + m * 4);
    }
    simdgroup_barrier(mem_flags::mem_none);
    thread float values[16];
    values_of<T, FORM>(weights[c / SPREAD * 2], c % SPREAD, values);
    values_of<T, FORM>(weights[c / SPREAD * 2 + 1], c % SPREAD, values + 8);
#pragma unroll
    for (int m = 0; m < LANE_ROWS; m++) {
      if (m < 2 || m < count) {
        thread float row_of_x[8];
        elements_of<T, false>(elements + m * 4, 0.0f, elements, row_of_x);
        lane_sums[m * 2] += dot_of_8(values, row_of_x);
        lane_sums[m * 2 + 1] += dot_of_8(values + 8, row_of_x);
      }
    }
  }
}

// y[2 j + p] += rows 8 p .. of the weight, loaded from k on, times pairs 8 j .. of x.
template <typename T, int FORM, int BITS, int GROUP_SIZE, int SPREAD, int ROW_TILES, int LANE_ROWS,
          int AT_ONCE, int STEP>
METAL_FUNC void multiply_pairs(const thread LaneWeights<BITS, GROUP_SIZE, SPREAD>* weights,
                               const device T* x, const threadgroup int* offsets, int count, int k,
                               int row, int col, thread metal::simdgroup_matrix<float, 8, 8>* y,
                               thread float* lane_sums) {
  if (LANE_ROWS > 1 && count == 1) {  // most tiles of so few rows
    multiply_in_lanes<T, FORM, BITS, GROUP_SIZE, SPREAD, 1, AT_ONCE, STEP>(
        weights, x, offsets, count, k, col, lane_sums);
    return;
  }
  if (LANE_ROWS > 0) {
    multiply_in_lanes<T, FORM, BITS, GROUP_SIZE, SPREAD, LANE_ROWS, AT_ONCE, STEP>(
        weights, x, offsets, count, k, col, lane_sums);
    return;
  }
#pragma unroll
  for (int c = 0; c < AT_ONCE * SPREAD; c++) {
    const int at = k + c / SPREAD * STEP + c % SPREAD * 8;
    thread RowsAcross<T> across[ROW_TILES];
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++) {
      if (j * 8 < count) {
        gather_across<T, SPREAD>(across[j], x + at, offsets + j * 8, row, col);
      }
    }
    simdgroup_barrier(mem_flags::mem_none);
    thread uint4 pair[2];
#pragma unroll
    for (int p = 0; p < 2; p++) {
      pair[p] = weights_of<T, FORM>(weights[c / SPREAD * 2 + p], c % SPREAD);
    }
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++) {
      if (j * 8 < count) {
        multiply_rows(y + j * 2, pair, across[j]);
      }
    }
  }
}

enum ExpertActivation { NO_ACTIVATION, SWIGLU, CLAMPED_SWIGLU, GEGLU, RELU2 };

// relu(x)^2.
template <typename T>
METAL_FUNC T squared_relu(T x) {
  const float active = float(x) < 0.0f ? 0.0f : float(x);  // not max, which loses NaN
  return T(active * active);
}

// activation(gate) * up, rounded as mlx-lm's operations round: silu(gate) up, or gpt-oss's
// g sigmoid(alpha g) (u + 1) with g = min(gate, limit) and u clamped to -limit .. limit; or
// gelu(gate) up, by tanh, rounded once.
template <typename T, int ACTIVATION>
METAL_FUNC T gated(T gate, T up, T alpha, T limit) {
  if (ACTIVATION == SWIGLU) {
    const T active = T(float(gate) * float(T(sigmoid(float(gate)))));
    return T(float(active) * float(up));
  }
  if (ACTIVATION == GEGLU) {
    return T(float(T(gelu(float(gate)))) * float(up));
  }
  const float most = float(limit);
  // Not min and max, which lose NaN.
  const float g = float(gate) > most ? most : float(gate);
  const float u = float(up) > most ? most : float(up) < -most ? -most : float(up);
  const T active = T(g * float(T(sigmoid(float(T(float(alpha) * g))))));
  return T(float(T(u + 1.0f)) * float(active));
}

// --- kernel body ---
constexpr int COLUMNS = 16;
constexpr bool GATED = ACTIVATION != NO_ACTIVATION && ACTIVATION != RELU2;
constexpr int OUT_COLUMNS = GATED ? COLUMNS / 2 : COLUMNS;
constexpr int STRIDE = COLUMNS + 4;  // so that lanes of a simdgroup meet 32 banks
constexpr int STEP = SIMDGROUPS * 32 * SPREAD;
constexpr int TURN = AT_ONCE * STEP;
constexpr int LOADS = DEPTH / (32 * SPREAD) * 32 * SPREAD;
constexpr int WHOLE = AT_ONCE == 1 ? LOADS : DEPTH / TURN * TURN;
// Behind WHOLE come single loads, and behind LOADS loads of REST chunks, fewer than SPREAD.
constexpr int REST = BITS % 4 == 0 ? 1 : BITS % 2 == 0 && SPREAD % 2 == 0 ? 2 : SPREAD;

threadgroup float sums[SIMDGROUPS * 8 * STRIDE];
threadgroup int offsets[ROW_TILES * 8];  // of each pair's row in x
threadgroup int members[ROW_TILES * 8];  // the pairs

const int pairs = indices_shape[0];
const int outputs = w_shape[1];
const int tile = pairs + 2 * int(threadgroup_position_in_grid.y);
const int start = plan[tile];
const int count = plan[tile + 1];
const int first = int(threadgroup_position_in_grid.x) * OUT_COLUMNS;
const int thread_index = int(thread_position_in_threadgroup.x);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int row = matrix_row(lane);
const int col = matrix_col(lane);
if (count <= 0) {  // no such tile, or pairs of padding, which read no weight
  for (int i = thread_index; i < -count * OUT_COLUMNS; i += SIMDGROUPS * 32) {
    const int n = first + i % OUT_COLUMNS;
    if (n < outputs) {
      y[size_t(plan[start + i / OUT_COLUMNS]) * outputs + n] = T(0.0f);
    }
  }
  return;
}

for (int m = thread_index; m < ROW_TILES * 8; m += SIMDGROUPS * 32) {
  const int pair = plan[start + metal::min(m, count - 1)];
  members[m] = pair;
  offsets[m] = pair / SHARE * DEPTH;
}
const int expert = int(indices[plan[start]]);
thread size_t starts[2];
#pragma unroll
for (int p = 0; p < 2; p++) {
  const int of = metal::min(first + row + (GATED ? 0 : p * 8), outputs - 1);
  starts[p] = (size_t(expert) * outputs + of) * DEPTH;
}
thread metal::simdgroup_matrix<float, 8, 8> part[ROW_TILES * 2];
#pragma unroll
for (int i = 0; i < ROW_TILES * 2; i++) {
  part[i].thread_elements()[0] = 0.0f;
  part[i].thread_elements()[1] = 0.0f;
}
thread float lane_sums[LANE_ROWS > 0 ? LANE_ROWS * 2 : 1];
#pragma unroll
for (int i = 0; i < LANE_ROWS * 2; i++) {
  lane_sums[i] = 0.0f;
}

const device uint* words = (const device uint*)w;
const device uchar* scale_bytes = (const device uchar*)scales;
const device uchar* bias_bytes = (const device uchar*)biases;
const device uint* up_words = GATED ? (const device uint*)up_w : words;
const device uchar* up_scale_bytes = GATED ? (const device uchar*)up_scales : scale_bytes;
const device uchar* up_bias_bytes = GATED ? (const device uchar*)up_biases : bias_bytes;
int k = simdgroup_index * 32 * SPREAD;
thread LaneWeights<BITS, GROUP_SIZE, SPREAD> weights[AT_ONCE * 2];
if (k < WHOLE) {
  load_pair<FORM, BITS, GROUP_SIZE, SPREAD, AT_ONCE, STEP>(
      weights, words, scale_bytes, bias_bytes, up_words, up_scale_bytes, up_bias_bytes, starts, k, col);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
while (k < WHOLE) {
  multiply_pairs<T, FORM, BITS, GROUP_SIZE, SPREAD, ROW_TILES, LANE_ROWS, AT_ONCE, STEP>(
      weights, x, offsets, count, k, row, col, part, lane_sums);
  k += TURN;
  if (k < WHOLE) {
    load_pair<FORM, BITS, GROUP_SIZE, SPREAD, AT_ONCE, STEP>(
        weights, words, scale_bytes, bias_bytes, up_words, up_scale_bytes, up_bias_bytes, starts, k,
        col);
  }
}
if (WHOLE < LOADS) {
  for (; k < LOADS; k += STEP) {
    load_pair<FORM, BITS, GROUP_SIZE, SPREAD, 1, STEP>(
        weights, words, scale_bytes, bias_bytes, up_words, up_scale_bytes, up_bias_bytes, starts, k,
        col);
    multiply_pairs<T, FORM, BITS, GROUP_SIZE, SPREAD, ROW_TILES, LANE_ROWS, 1, STEP>(
        weights, x, offsets, count, k, row, col, part, lane_sums);
  }
}
if (LOADS < DEPTH) {
  for (k = LOADS + simdgroup_index * 32 * REST; k < DEPTH; k += SIMDGROUPS * 32 * REST) {
    thread LaneWeights<BITS, GROUP_SIZE, REST> rest[2];
    load_pair<FORM, BITS, GROUP_SIZE, REST, 1, STEP>(
        rest, words, scale_bytes, bias_bytes, up_words, up_scale_bytes, up_bias_bytes, starts, k, col);
    multiply_pairs<T, FORM, BITS, GROUP_SIZE, REST, ROW_TILES, LANE_ROWS, 1, STEP>(
        rest, x, offsets, count, k, row, col, part, lane_sums);
  }
}

#pragma unroll
for (int j = 0; j < ROW_TILES; j++) {
  if (j * 8 < count) {
    if (j > 0) {  // all have read the sums of the pairs before
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (LANE_ROWS > 0) {
#pragma unroll
      for (int i = 0; i < LANE_ROWS * 2; i++) {
        const float sum = row_sum(lane_sums[i]);
        if (col == 0) {
          sums[(simdgroup_index * 8 + i / 2) * STRIDE + i % 2 * 8 + row] = sum;
        }
      }
    } else {
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const int at = (simdgroup_index * 8 + col) * STRIDE + p * 8 + row;
        sums[at] = part[j * 2 + p].thread_elements()[0];
        sums[at + STRIDE] = part[j * 2 + p].thread_elements()[1];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < 8 * OUT_COLUMNS; i += SIMDGROUPS * 32) {
      const int m = i / OUT_COLUMNS;
      const int n = i % OUT_COLUMNS;
      if (j * 8 + m < count && first + n < outputs) {
        float sum = 0.0f;
        float up = 0.0f;
#pragma unroll
        for (int s = 0; s < SIMDGROUPS; s++) {
          const int at = (s * 8 + m) * STRIDE + n;
          sum += sums[at];
          if (GATED) {
            up += sums[at + OUT_COLUMNS];
          }
        }
        const size_t from = size_t(expert) * outputs + first + n;
        T result = T(sum);
        if (BIAS) {
          result = T(float(result) + float(bias[from]));
        }
        if (GATED) {
          T other = T(up);
          if (BIAS) {
            other = T(float(other) + float(up_bias[from]));
          }
          result = gated<T, ACTIVATION>(result, other, T(as_type<float>(ALPHA)),
                                        T(as_type<float>(LIMIT)));
        } else if (ACTIVATION == RELU2) {
          result = squared_relu(result);
        }
        y[size_t(members[j * 8 + m]) * outputs + first + n] = result;
      }
    }
  }
}
