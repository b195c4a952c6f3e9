// expert_sum: the weighted sum of each row's experts.
//
//   x          (rows * TOP_K, columns) of T    results of expert_gemm; columns a multiple of 4
//   weights    (rows, TOP_K)                   float32 or 16-bit floats
//   y          (rows, columns) of Y
//
// A thread has 4 neighbours of a row of y.  Products are rounded to P, the type of x times weights,
// and summed in float32, in order; the sum is rounded to P, then to Y.
#include "words.h"
// --- kernel body ---
const int columns = x_shape[1];
const int from = int(thread_position_in_grid.x) * 4;
const int row = int(threadgroup_position_in_grid.y);
if (from >= columns) {
  return;
}
thread float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
for (int c = 0; c < TOP_K; c++) {
  const float by = float(weights[row * TOP_K + c]);
  thread float values[4];
  load_run<T, 4>(x + size_t(row * TOP_K + c) * columns + from, values);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sums[i] += float(P(values[i] * by));
  }
}
#pragma unroll
for (int i = 0; i < 4; i++) {
  y[size_t(row) * columns + from + i] = Y(float(P(sums[i])));
}
