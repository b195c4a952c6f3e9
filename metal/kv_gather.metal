// kv_gather: copy rows of the paged store, in any order, into contiguous K and V for MLX's SDPA.
//
//   keys, values  (slots, KV_HEADS, DIM)   the store; a slot has K_WORDS and V_WORDS words
//   kv_slots      (N,) int32               the slot of each key wanted; every one must be valid
//   token         float32 -> next_token (8,) read after the writes before it, before those after it
//   k, v          (N, KV_HEADS, DIM)       outputs, of which SDPA takes views, head by head
//
// Besides attention this is the only reader of the store: an MLX operation must not read it, for MLX
// cannot see that kernels write it.
//
// Who does what.  Grid (N, threadgroups of THREADS for the longer of the two rows); CUDA allows no more
// than 65,535 of the latter.  Thread (key, x) copies W words of the key's row of K at x * W, and of V.
//
// Why it is correct.  Each output word has exactly one writer.
//
// Cost.  2 * N * KV_HEADS * (K_DIM + V_DIM) * sizeof(T) bytes; MLX's SDPA then reads them again.
#include "words.h"

// --- kernel body ---
const int at = int(threadgroup_position_in_grid.y * THREADS + thread_position_in_threadgroup.x) * W;
const int key = int(threadgroup_position_in_grid.x);
const size_t slot = size_t(kv_slots[key]);

thread uint words[W];
if (at < K_WORDS) {
  load_words<W>((const device uint*)keys + slot * K_WORDS + at, words);
  store_words<W>((device uint*)k + size_t(key) * K_WORDS + at, words);
}
if (at < V_WORDS) {
  load_words<W>((const device uint*)values + slot * V_WORDS + at, words);
  store_words<W>((device uint*)v + size_t(key) * V_WORDS + at, words);
}
if (threadgroup_position_in_grid.y == 0 && key == 0 && thread_position_in_threadgroup.x < 8) {
  next_token[thread_position_in_threadgroup.x] = token[0];
}
