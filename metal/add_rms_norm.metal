// add_rms_norm: a residual sum and its RMS norm, in one launch and one pass over memory; if Y_NORM with
// the norm of the addend (post norms, as Gemma's and OLMo's).
//
//   x, y       (rows, DIM) of T           the residual stream, and a layer's result
//   weight     (DIM,) of any float type   not read unless WEIGHT
//   y_weight   the same, of the norm of y; not read unless Y_WEIGHT
//   sum        (rows, DIM) of T           x + y; if Y_NORM x + y / sqrt(mean(y^2) + Y_EPS) * y_weight
//   normed     (rows, DIM) of R           sum / sqrt(mean(sum^2) + eps) * weight
//   EPS, Y_EPS  the bits of floats (a template value is an integer)
//
// Layout.  A threadgroup a row.  A thread holds VEC elements of the row a turn, read in one load (4,
// or 1 where 4 does not divide DIM); turns lie THREADS * VEC elements apart, so that 32 lanes read one
// coalesced run:
//
//   turn 0                                  turn 1
//   |thread 0|thread 1| ... |thread n - 1|thread 0|thread 1| ...        VEC elements each
//
// x and y are asked for before anything is computed.  The sum stays in registers from the first pass to
// the second, so that nothing is read twice.
//
// Why it is correct.  The norm is that of the sum as it was rounded to T, because the next layer reads
// the rounded sum too: the same bits as mx.fast.rms_norm(x + y), but for the order in which squares are
// added up, in float32.  Squares of a simdgroup are added by simd_sum, those of simdgroups through
// threadgroup memory; after the barrier every simdgroup adds them up for itself, in the same order, so
// that all threads hold the same mean and one barrier is enough: the norm of y has memory of its own.
// Where a turn reaches past the row, a thread neither reads nor writes, but takes part in collectives.
//
// Cost.  Reads x and y and writes sum and normed once, 4 * rows * DIM * sizeof(T) bytes.  Apart they
// are two launches, or three, and each but the first reads again the rows that the one before wrote.
#include "rms_norm.h"
#include "words.h"

// 1 / sqrt(mean + eps) of a row of DIM elements; `square`: the sum of this thread's squares.
template <int DIM, int SIMDGROUPS>
METAL_FUNC float inverse_rms_of(float square, float eps, threadgroup float* squares, int simdgroup,
                                int lane) {
  square = metal::simd_sum(square);
  if (lane == 0) {
    squares[simdgroup] = square;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  square = lane < SIMDGROUPS ? squares[lane] : 0.0f;
  square = metal::simd_sum(square);
  return metal::precise::rsqrt(square / float(DIM) + eps);
}

// Whether element `at`, of a turn of STEP elements, lies in the row.  For a whole turn this is a constant, so
// no branch costs registers.
template <int DIM, int STEP>
METAL_FUNC bool in_row(int turn, int at) {
  return (turn + 1) * STEP <= DIM || at < DIM;
}

// --- kernel body ---
constexpr int SIMDGROUPS = THREADS / 32;
constexpr int STEP = THREADS * VEC;
constexpr int TURNS = (DIM + STEP - 1) / STEP;

threadgroup float squares[SIMDGROUPS];
threadgroup float y_squares[Y_NORM ? SIMDGROUPS : 1];

const size_t row = size_t(threadgroup_position_in_grid.x) * DIM;
const int first = int(thread_position_in_threadgroup.x) * VEC;
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);

thread float held[TURNS * VEC];
thread float other[TURNS * VEC];
#pragma unroll
for (int t = 0; t < TURNS; t++) {
  const int at = first + t * STEP;
  if (in_row<DIM, STEP>(t, at)) {
    load_run<T, VEC>(x + row + at, held + t * VEC);
    load_run<T, VEC>(y + row + at, other + t * VEC);
  }
}

if (Y_NORM) {
  float square = 0.0f;
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    if (in_row<DIM, STEP>(t, first + t * STEP)) {
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        square += other[t * VEC + e] * other[t * VEC + e];
      }
    }
  }
  const float inverse_rms =
      inverse_rms_of<DIM, SIMDGROUPS>(square, as_type<float>(Y_EPS), y_squares, simdgroup, lane);
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    const int at = first + t * STEP;
    if (in_row<DIM, STEP>(t, at)) {
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        const float w = Y_WEIGHT ? float(y_weight[at + e]) : 1.0f;
        other[t * VEC + e] = rms_normed<T>(other[t * VEC + e], inverse_rms, w);
      }
    }
  }
}

float square = 0.0f;
#pragma unroll
for (int t = 0; t < TURNS; t++) {
  const int at = first + t * STEP;
  if (in_row<DIM, STEP>(t, at)) {
#pragma unroll
    for (int e = 0; e < VEC; e++) {
      const float rounded = float(T(held[t * VEC + e] + other[t * VEC + e]));
      held[t * VEC + e] = rounded;
      square += rounded * rounded;
    }
    store_run<T, VEC>(sum + row + at, held + t * VEC);
  }
}
const float inverse_rms =
    inverse_rms_of<DIM, SIMDGROUPS>(square, as_type<float>(EPS), squares, simdgroup, lane);

#pragma unroll
for (int t = 0; t < TURNS; t++) {
  const int at = first + t * STEP;
  if (in_row<DIM, STEP>(t, at)) {
#pragma unroll
    for (int e = 0; e < VEC; e++) {
      const float w = WEIGHT ? float(weight[at + e]) : 1.0f;
      held[t * VEC + e] = rms_normed<R>(held[t * VEC + e], inverse_rms, w);
    }
    store_run<R, VEC>(normed + row + at, held + t * VEC);
  }
}
