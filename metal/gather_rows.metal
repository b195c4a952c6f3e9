// gather_rows: rows of a matrix in any order, copied byte for byte.
//
//   rows   (M, WIDTH words) of T   the matrix
//   index  (N,) int32              for each row of out, the row of the matrix; every one must be valid
//   out    (N, WIDTH words) of T
//
// Prompts of unlike length go to MLX's SDPA in padded batches: queries are gathered into them, and
// results out of them.  MLX's own gather does the same, element by element.
//
// Who does what.  Grid (N, threadgroups of THREADS for a row).  Thread (n, x) copies W words at x * W.
//
// Why it is correct.  Each output word has exactly one writer, and the input is only read.
//
// Cost.  2 * N rows of bytes.
#include "words.h"

// --- kernel body ---
const int at = int(threadgroup_position_in_grid.y * THREADS + thread_position_in_threadgroup.x) * W;
const int row = int(threadgroup_position_in_grid.x);
if (at < WIDTH) {
  thread uint words[W];
  load_words<W>((const device uint*)rows + size_t(index[row]) * WIDTH + at, words);
  store_words<W>((device uint*)out + size_t(row) * WIDTH + at, words);
}
