// merge_partitions: adds up the splits of a context, as paged_decode or latent_attention leaves them.
//
//   partial  (rows, splits, V_DIM) float32   attention over each split, normalised in itself
//   lse      (rows, splits) float32          log2 of its sum of exponentials; LOWEST = it saw no key
//   out      (rows, V_DIM) of T              attention over all (rows = sequences x heads)
//
// Who does what.  A threadgroup a row.  Each simdgroup finds the largest lse for itself, its lanes
// looking at 32 splits at a time; then thread p computes the weight of split p for all, and a thread
// adds up elements x, x + THREADS, ... of the row.
//
// Why it is correct.  Attention over a union of key sets is the mean of the attentions over each,
// weighted by their sums of exponentials: out = sum_p 2^(lse_p - top) partial_p / sum_p 2^(lse_p - top)
// (flash-decoding).  An empty split has weight 0 by a comparison, never by arithmetic on infinities; a
// row whose splits are all empty gives 0, never 0 / 0.  The fast exp2 is enough: its arguments are finite
// and not above 0.
//
// Cost.  4 * rows * splits * V_DIM bytes, small beside the context that was read.

// --- kernel body ---
constexpr float LOWEST = -1e30f;

threadgroup float weights[MAX_SPLITS];

const size_t row = size_t(threadgroup_position_in_grid.x);
const int splits = lse_shape[1];
const int x = int(thread_position_in_threadgroup.x);

float top = LOWEST;
for (int p = int(thread_index_in_simdgroup); p < splits; p += 32) {
  top = metal::max(top, lse[row * splits + p]);
}
top = metal::simd_max(top);

for (int p = x; p < splits; p += THREADS) {
  const float at = lse[row * splits + p];
  weights[p] = at > LOWEST ? metal::fast::exp2(at - top) : 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float sum = 0.0f;
for (int p = 0; p < splits; p++) {
  sum += weights[p];
}
for (int e = x; e < V_DIM; e += THREADS) {
  float value = 0.0f;
  for (int p = 0; p < splits; p++) {
    value += weights[p] * partial[(row * splits + p) * V_DIM + e];
  }
  out[row * V_DIM + e] = T(sum > 0.0f ? value / sum : 0.0f);
}
