// merge_partitions: add up the splits of a context that paged_decode has attended to one by one.
//
//   partial  (rows, splits, V_DIM) float32   attention over each split, normalised in itself
//   lse      (rows, splits) float32          log2 of its sum of exponentials; LOWEST = it saw no key
//   out      (rows, V_DIM) of T              attention over all (rows = sequences x heads)
//
// Who does what.  A threadgroup a row; a thread takes elements x, x + threads, ... of the row.
//
// Why it is correct.  Attention over a union of key sets is the mean of the attentions over each,
// weighted by their sums of exponentials: out = sum_p 2^(lse_p - top) partial_p / sum_p 2^(lse_p - top)
// (flash-decoding).  An empty split has weight 0 by a comparison, never by arithmetic on infinities; a
// row of which every split is empty gives 0, never 0 / 0.
//
// Cost.  4 * rows * splits * V_DIM bytes, small beside the context that was read.

// --- kernel body ---
constexpr float LOWEST = -1e30f;

const size_t row = size_t(threadgroup_position_in_grid.x);
const int splits = lse_shape[1];

float top = LOWEST;
for (int p = 0; p < splits; p++) {
  top = metal::max(top, lse[row * splits + p]);
}
float sum = 0.0f;
for (int p = 0; p < splits; p++) {
  const float at = lse[row * splits + p];
  sum += at > LOWEST ? metal::exp2(at - top) : 0.0f;
}
for (int e = int(thread_position_in_threadgroup.x); e < V_DIM; e += THREADS) {
  float value = 0.0f;
  for (int p = 0; p < splits; p++) {
    const float at = lse[row * splits + p];
    const float weight = at > LOWEST ? metal::exp2(at - top) : 0.0f;
    value += weight * partial[(row * splits + p) * V_DIM + e];
  }
  out[row * V_DIM + e] = T(sum > 0.0f ? value / sum : 0.0f);
}
