// kv_gather: copies rows of the paged store into contiguous K and V for MLX's SDPA, in any order.
//
//   keys, values  (slots, KV_HEADS, DIM)   the store; a head has K_WORDS and V_WORDS words
//   kv_slots      (N,) int32               the slot of each key wanted; every one must be valid
//   ticket        float32 -> next_ticket (8,) read after the writes before it, before those after it
//   k, v          (KV_HEADS, N, DIM)       outputs; each SDPA call takes views of them; the keys of a
//                                          head follow each other, as matrix products need them
//
// MLX cannot see that kernels write the store, so only kernels read the store.  This one reads for
// MLX's operations.
//
// Who does what.  Grid (N, threadgroups of THREADS for the longer of the two rows); CUDA allows no more
// than 65,535 of the latter.  Thread (key, x) copies W words of the key's row of K at x * W, and of V.
// W divides K_WORDS and V_WORDS, so that these are words of one head.
//
// Why it is correct.  Each output word has exactly one writer.
//
// Cost.  2 * N * KV_HEADS * (K_DIM + V_DIM) * sizeof(T) bytes; MLX's SDPA then reads them again.
#include "words.h"

// --- kernel body ---
const int at = int(threadgroup_position_in_grid.y * THREADS + thread_position_in_threadgroup.x) * W;
const int key = int(threadgroup_position_in_grid.x);
const size_t num_keys = size_t(threadgroups_per_grid.x);
const size_t slot = size_t(kv_slots[key]);

thread uint words[W];
if (at < KV_HEADS * K_WORDS) {
  load_words<W>((const device uint*)keys + slot * (KV_HEADS * K_WORDS) + at, words);
  const size_t row = size_t(at / K_WORDS) * num_keys + key;
  store_words<W>((device uint*)k + row * K_WORDS + at % K_WORDS, words);
}
if (at < KV_HEADS * V_WORDS) {
  load_words<W>((const device uint*)values + slot * (KV_HEADS * V_WORDS) + at, words);
  const size_t row = size_t(at / V_WORDS) * num_keys + key;
  store_words<W>((device uint*)v + row * V_WORDS + at % V_WORDS, words);
}
if (threadgroup_position_in_grid.y == 0 && key == 0 && thread_position_in_threadgroup.x < 8) {
  next_ticket[thread_position_in_threadgroup.x] = ticket[0];
}
