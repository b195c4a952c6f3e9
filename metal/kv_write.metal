// kv_write: puts the K and V rows of a step into their slots of the paged store, in place.
//
//   k, v          (N, KV_HEADS, DIM)       this step's rows, packed
//   slot_mapping  (N,) int32               slot = block * block_size + offset; negative: skip the row
//   keys, values  (slots, KV_HEADS, DIM)   the store; declared as inputs, and written
//   ticket        float32 -> next_ticket (8,) orders this write before the reads that follow
//
// Layout.  Both sides are row-contiguous, so a row of K is one run of K_WORDS words of 32 bits and a
// copy needs no head arithmetic and no element type: bytes go over as they are.
//
// Who does what.  Grid (threads for the longer of the two rows, N).  Thread (x, row) copies W words
// of K at x * W and W words of V at x * W, as far as each row reaches.
//
// Why it is correct.  Slots of one step are distinct, so no two threads write the same word.  MLX
// does not know that `keys` and `values` are written: it orders kernels by the buffers that they
// declare.  So `next_ticket` is our declared output, every kernel that reads the store takes it as an
// input, and gives a ticket of its own to the next write.
//
// Cost.  Reads and writes each byte of K and V once: 2 * N * KV_HEADS * (K_DIM + V_DIM) * sizeof(T).
#include "words.h"

// --- kernel body ---
constexpr int K_WORDS = KV_HEADS * K_DIM * int(sizeof(T)) / 4;
constexpr int V_WORDS = KV_HEADS * V_DIM * int(sizeof(T)) / 4;

const int row = int(thread_position_in_grid.y);
const int at = int(thread_position_in_grid.x) * W;
const int slot = slot_mapping[row];

thread uint words[W];
if (slot >= 0 && at < K_WORDS) {
  const device uint* from = (const device uint*)k + size_t(row) * K_WORDS + at;
  device uint* to = (device uint*)const_cast<device T*>(keys) + size_t(slot) * K_WORDS + at;
  load_words<W>(from, words);
  store_words<W>(to, words);
}
if (slot >= 0 && at < V_WORDS) {
  const device uint* from = (const device uint*)v + size_t(row) * V_WORDS + at;
  device uint* to = (device uint*)const_cast<device T*>(values) + size_t(slot) * V_WORDS + at;
  load_words<W>(from, words);
  store_words<W>(to, words);
}
if (row == 0 && thread_position_in_grid.x < 8) {
  next_ticket[thread_position_in_grid.x] = ticket[0];
}
