// skinny_gemm: the product of a few rows with a weight, y = x w^T, whose cost is reading w; and the
// operations of a decode step before it and after it, which would be launches of their own.
//
//   x          (rows, DEPTH) of T     rows <= ROW_TILES * 8, FULL: just as many; DEPTH a multiple of 32
//   w          (weights, DEPTH)       16-bit floats T, or quantised: words of BITS a weight, with
//   scales     (weights, groups)      a scale, AFFINE also a bias, for each group of GROUP_SIZE weights
//   biases     (weights, groups)      (weights.h)
//   gain       (DEPTH,) of T          NORM: x is RMS-normalised first, and multiplied by this
//   bias       (weights,) of T        BIAS: of the linear layer, is added to the product
//   residual   as y                   RESIDUAL: is added last
//   y          (rows, outputs) of T   sums in float32; outputs = weights
//                                     GATE: outputs = weights / 2, silu (SILU) or gelu (GELU) of the
//                                     columns of the first half of w, times those of the second
//
// Layout.  A threadgroup computes the products with COLUMNS (16 or 32) rows of w, of all rows of x.
// w is the left side of the product and x the right, so that rows come in eights: 8 requests waste
// nothing.  Simdgroups share the depth, 32 elements at a time, a chunk (row_products.h):
//
//               depth  0     32     64           32 SIMDGROUPS
//          COLUMNS     |      |      |            |      |
//          rows of w   | sg 0 | sg 1 | sg 2 | ... | sg 0 | sg 1 | ...     8 rows a load, 16 bytes a lane
//                      |      |      |            |      |
//
// Of quantised weights a load of 16 bytes a lane brings SPREAD chunks, which go to one simdgroup.
// AT_ONCE loads of w, with their scales, are asked for before the first is used: a decode step is
// limited by the bytes in flight.  x is small and is read again by every threadgroup, from a cache.  So
// each threadgroup can find the norm of every row for itself, while its first chunks of w are under
// way, without another's result.  With GATE half of the rows are of the first half of w and half of
// the second, so that gate and up of an output meet in one threadgroup.
//
// Why it is correct.  Each simdgroup sums other elements of the depth, in float32, and leaves its
// sums in threadgroup memory; after the barrier each thread adds those of one element of y, in
// order, so the result does not depend on their order of arrival.  That memory holds HELD eights of
// rows, so the rows are added HELD eights at a time.  A row past the last one of w, or of x, repeats the
// last and is not stored.  All lanes of a simdgroup take the same turns.  A value that would be
// an array between two launches is rounded to T there: the weight, the normalised row, the
// product, gate, its activation and up.
//
// Cost.  w once; x once a threadgroup, twice with NORM; one launch of few arrays, which is cheap for
// the host.  Instructions a weight, for each 8 rows of x, by count: 8 in the products; with NORM about
// 80 / COLUMNS for the normalised x.  Once a weight: unpacking (weights.h), 3.5 for 4 bits.  An Apple
// GPU has 7 to 10 for each weight of 4 bits that its memory brings, and 30 or more for one of 16 bits.  So in
// 4 bits matrix products of 1 to 8 rows are bound by instructions rather than by bytes, at about 1.5 times
// the time that the bytes take.  LANE_ROWS (1, or 4 for 2 to 4 rows): products without matrix instructions
// (lane_products.h), of 4 instructions a weight for one row, and 1.5 more for each other row.
#include "activations.h"
#include "lane_products.h"

// AT_ONCE loads of rows 8 p + row of w, p < PARTS, STEP elements apart, the first from k on.
template <int FORM, int BITS, int GROUP_SIZE, int SPREAD, int PARTS, int AT_ONCE, int STEP>
METAL_FUNC void load_chunks(thread LaneWeights<BITS, GROUP_SIZE, SPREAD>* weights, const device uint* w,
                            const device uchar* scales, const device uchar* biases,
                            const thread size_t* starts, int k, int col) {
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      load_weights<FORM, BITS, GROUP_SIZE, SPREAD>(weights[c * PARTS + p], w, scales, biases,
                                                   starts[p] + (k + c * STEP + col * 4 * SPREAD));
    }
  }
  // Compilers put a load off until it is used; then they come one after the other.
  simdgroup_barrier(mem_flags::mem_none);
}

// LANE_ROWS: lane_sums[PARTS m + p] += this lane's part of rows 8 p .. of w, times row m of x.
template <typename T, int FORM, int BITS, int GROUP_SIZE, int SPREAD, int PARTS, int DEPTH,
          int LANE_ROWS, int AT_ONCE, int STEP, bool NORM>
METAL_FUNC void multiply_in_lanes(const thread LaneWeights<BITS, GROUP_SIZE, SPREAD>* weights,
                                  const device T* x, int rows, int k, int col,
                                  const threadgroup float* inverse_rms, const device T* gain,
                                  thread float* lane_sums) {
#pragma unroll
  for (int c = 0; c < AT_ONCE * SPREAD; c++) {
    const int at = k + c / SPREAD * STEP + c % SPREAD * 8 + col * 4 * SPREAD;
    thread uint elements[LANE_ROWS > 0 ? LANE_ROWS * 4 : 1];
    thread uint gains[4];
#pragma unroll
    for (int m = 0; m < LANE_ROWS; m++) {
      if (m < 2 || m < rows) {
        load_words<4>((const device uint*)(x + m * DEPTH + at), elements + m * 4);
      }
    }
    if (NORM) {
      load_words<4>((const device uint*)(gain + at), gains);
    }
    simdgroup_barrier(mem_flags::mem_none);
    thread float values[PARTS * 8];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      values_of<T, FORM>(weights[c / SPREAD * PARTS + p], c % SPREAD, values + p * 8);
    }
#pragma unroll
    for (int m = 0; m < LANE_ROWS; m++) {
      if (m < 2 || m < rows) {
        thread float row_of_x[8];
        elements_of<T, NORM>(elements + m * 4, NORM ? inverse_rms[m] : 0.0f, gains, row_of_x);
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          lane_sums[m * PARTS + p] += dot_of_8(values + p * 8, row_of_x);
        }
      }
    }
  }
}

// y[PARTS j + p] += rows 8 p .. of w, loaded from k on, times rows 8 j .. of x.
template <typename T, int FORM, int BITS, int GROUP_SIZE, int SPREAD, int PARTS, int DEPTH,
          int ROW_TILES, bool FULL, int LANE_ROWS, int AT_ONCE, int STEP, bool NORM>
METAL_FUNC void multiply_chunks(const thread LaneWeights<BITS, GROUP_SIZE, SPREAD>* weights,
                                const device T* x, int rows, int k, int row, int col,
                                const threadgroup float* inverse_rms, const device T* gain,
                                thread metal::simdgroup_matrix<float, 8, 8>* y,
                                thread float* lane_sums) {
  if (LANE_ROWS > 0) {
    multiply_in_lanes<T, FORM, BITS, GROUP_SIZE, SPREAD, PARTS, DEPTH, LANE_ROWS, AT_ONCE, STEP, NORM>(
        weights, x, rows, k, col, inverse_rms, gain, lane_sums);
    return;
  }
#pragma unroll
  for (int c = 0; c < AT_ONCE * SPREAD; c++) {
    const int at = k + c / SPREAD * STEP + c % SPREAD * 8;
    thread RowsAcross<T> across[ROW_TILES];
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++) {
      const int last = FULL ? 7 : rows - 1 - j * 8;
      load_across<T, DEPTH, SPREAD, NORM>(across[j], x + j * 8 * DEPTH + at, last, row, col,
                                          inverse_rms + j * 8, gain + at);
    }
    simdgroup_barrier(mem_flags::mem_none);
#pragma unroll
    for (int p = 0; p < PARTS; p += 2) {
      thread uint4 pair[2];
      pair[0] = weights_of<T, FORM>(weights[c / SPREAD * PARTS + p], c % SPREAD);
      pair[1] = weights_of<T, FORM>(weights[c / SPREAD * PARTS + p + 1], c % SPREAD);
#pragma unroll
      for (int j = 0; j < ROW_TILES; j++) {
        multiply_rows(y + j * PARTS + p, pair, across[j]);
      }
    }
  }
}

// The sum of squares of DEPTH elements of a row, for all lanes; 8 elements a lane and turn.
template <typename T, int DEPTH>
METAL_FUNC float sum_of_squares(const device T* x, int lane) {
  float sum = 0.0f;
  for (int at = lane * 8; at < DEPTH; at += 32 * 8) {
    thread uint words[4];
    load_words<4>((const device uint*)(x + at), words);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      thread float pair[2];
      unpack<T>(words[i], pair);
      sum += pair[0] * pair[0] + pair[1] * pair[1];
    }
  }
  return metal::simd_sum(sum);
}

enum GateActivation { NO_GATE, SILU, GELU };

// The activation of gate times up.  silu is rounded as its two operations are, gelu once.
template <typename T, int GATE>
METAL_FUNC T gated(T gate, T up) {
  const float x = float(gate);
  const T active = T(GATE == GELU ? gelu(x) : x * float(T(sigmoid(x))));
  return T(float(active) * float(up));
}

// --- kernel body ---
constexpr int PARTS = COLUMNS / 8;
constexpr bool GATED = GATE != NO_GATE;
constexpr int OUT_COLUMNS = GATED ? COLUMNS / 2 : COLUMNS;
constexpr int STRIDE = COLUMNS + 4;  // so that lanes of a simdgroup meet 32 banks
constexpr int STEP = SIMDGROUPS * 32 * SPREAD;
constexpr int TURN = AT_ONCE * STEP;
constexpr int LOADS = DEPTH / (32 * SPREAD) * 32 * SPREAD;
constexpr int WHOLE = AT_ONCE == 1 ? LOADS : DEPTH / TURN * TURN;
// Behind WHOLE come single loads, and behind LOADS loads of REST chunks, fewer than SPREAD.
constexpr int REST = BITS % 4 == 0 ? 1 : BITS % 2 == 0 && SPREAD % 2 == 0 ? 2 : SPREAD;

threadgroup float sums[SIMDGROUPS * HELD * 8 * STRIDE];
threadgroup float inverse_rms[NORM ? ROW_TILES * 8 : 1];

const int rows = x_shape[0];
const int outputs = GATED ? w_shape[0] / 2 : w_shape[0];
const int first = int(threadgroup_position_in_grid.x) * OUT_COLUMNS;
const int thread_index = int(thread_position_in_threadgroup.x);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int row = matrix_row(lane);
const int col = matrix_col(lane);

thread size_t starts[PARTS];
#pragma unroll
for (int p = 0; p < PARTS; p++) {  // GATED: those of up behind those of gate
  const int of = metal::min(first + row + p * 8 % OUT_COLUMNS, outputs - 1);
  starts[p] = size_t(of + p * 8 / OUT_COLUMNS * outputs) * DEPTH;
}
thread metal::simdgroup_matrix<float, 8, 8> part[ROW_TILES * PARTS];
#pragma unroll
for (int i = 0; i < ROW_TILES * PARTS; i++) {
  part[i].thread_elements()[0] = 0.0f;
  part[i].thread_elements()[1] = 0.0f;
}
thread float lane_sums[LANE_ROWS > 0 ? LANE_ROWS * PARTS : 1];
#pragma unroll
for (int i = 0; i < LANE_ROWS * PARTS; i++) {
  lane_sums[i] = 0.0f;
}

const device uint* words = (const device uint*)w;
const device uchar* scale_bytes = (const device uchar*)scales;
const device uchar* bias_bytes = (const device uchar*)biases;
int k = simdgroup_index * 32 * SPREAD;
thread LaneWeights<BITS, GROUP_SIZE, SPREAD> weights[AT_ONCE * PARTS];
if (k < WHOLE) {
  load_chunks<FORM, BITS, GROUP_SIZE, SPREAD, PARTS, AT_ONCE, STEP>(
      weights, words, scale_bytes, bias_bytes, starts, k, col);
}
if (NORM) {
  for (int m = simdgroup_index; m < rows; m += SIMDGROUPS) {
    const float square = sum_of_squares<T, DEPTH>(x + m * DEPTH, lane);
    if (lane == 0) {
      inverse_rms[m] = metal::precise::rsqrt(square / float(DEPTH) + as_type<float>(EPS));
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
while (k < WHOLE) {
  multiply_chunks<T, FORM, BITS, GROUP_SIZE, SPREAD, PARTS, DEPTH, ROW_TILES, FULL, LANE_ROWS,
                  AT_ONCE, STEP, NORM>(
      weights, x, rows, k, row, col, inverse_rms, (const device T*)gain, part, lane_sums);
  k += TURN;
  if (k < WHOLE) {
    load_chunks<FORM, BITS, GROUP_SIZE, SPREAD, PARTS, AT_ONCE, STEP>(
        weights, words, scale_bytes, bias_bytes, starts, k, col);
  }
}
if (WHOLE < LOADS) {
  for (; k < LOADS; k += STEP) {
    load_chunks<FORM, BITS, GROUP_SIZE, SPREAD, PARTS, 1, STEP>(
        weights, words, scale_bytes, bias_bytes, starts, k, col);
    multiply_chunks<T, FORM, BITS, GROUP_SIZE, SPREAD, PARTS, DEPTH, ROW_TILES, FULL, LANE_ROWS,
                    1, STEP, NORM>(
        weights, x, rows, k, row, col, inverse_rms, (const device T*)gain, part, lane_sums);
  }
}
if (LOADS < DEPTH) {
  for (k = LOADS + simdgroup_index * 32 * REST; k < DEPTH; k += SIMDGROUPS * 32 * REST) {
    thread LaneWeights<BITS, GROUP_SIZE, REST> rest[PARTS];
    load_chunks<FORM, BITS, GROUP_SIZE, REST, PARTS, 1, STEP>(
        rest, words, scale_bytes, bias_bytes, starts, k, col);
    multiply_chunks<T, FORM, BITS, GROUP_SIZE, REST, PARTS, DEPTH, ROW_TILES, FULL, LANE_ROWS,
                    1, STEP, NORM>(
        rest, x, rows, k, row, col, inverse_rms, (const device T*)gain, part, lane_sums);
  }
}

#pragma unroll
for (int from = 0; from < ROW_TILES; from += HELD) {
  if (from > 0) {  // all have read the sums of the rows before
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (LANE_ROWS > 0) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS * PARTS; i++) {
      const float sum = row_sum(lane_sums[i]);
      if (col == 0) {
        sums[(simdgroup_index * 8 + i / PARTS) * STRIDE + i % PARTS * 8 + row] = sum;
      }
    }
  } else {
#pragma unroll
    for (int j = from; j < (from + HELD < ROW_TILES ? from + HELD : ROW_TILES); j++) {
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const int m = (simdgroup_index * HELD + j - from) * 8 + col;
        const int at = m * STRIDE + p * 8 + row;
        sums[at] = part[j * PARTS + p].thread_elements()[0];
        sums[at + STRIDE] = part[j * PARTS + p].thread_elements()[1];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index; i < HELD * 8 * OUT_COLUMNS; i += SIMDGROUPS * 32) {
    const int m = i / OUT_COLUMNS;
    const int n = i % OUT_COLUMNS;
    if (from * 8 + m < rows && first + n < outputs) {
      float sum = 0.0f;
      float up = 0.0f;
#pragma unroll
      for (int s = 0; s < SIMDGROUPS; s++) {
        const int at = (s * HELD * 8 + m) * STRIDE + n;
        sum += sums[at];
        if (GATED) {
          up += sums[at + OUT_COLUMNS];
        }
      }
      const int to = (from * 8 + m) * outputs + first + n;
      T result = T(sum);
      if (BIAS) {
        result = T(float(result) + float(bias[first + n]));
      }
      if (GATED) {
        T other = T(up);
        if (BIAS) {
          other = T(float(other) + float(bias[outputs + first + n]));
        }
        result = gated<T, GATE>(result, other);
      }
      if (RESIDUAL) {
        result = T(float(residual[to]) + float(result));
      }
      y[to] = result;
    }
  }
}
