// kv_gather: copy rows of the paged store, in any order, into contiguous K and V for MLX's SDPA.
//
//   keys, values  (slots, KV_HEADS, DIM)   the store
//   kv_slots      (B, L) int32             the slot of each key wanted; every one must be valid
//   token         float32 -> next_token (1,) read after the writes before it, before those after it
//   k, v          (B, KV_HEADS, L, DIM)    outputs, head by head, as SDPA wants them
//
// Besides attention this is the only reader of the store: an MLX operation must not read it, for MLX
// cannot see that kernels write it.
//
// Who does what.  Grid (threads for the longer of the two rows, L, B).  Thread (x, key, b) copies W
// words of the key's row of K at x * W, and of V.  W divides a head's words, so that a run never
// crosses from one head to the next, which in the output lies L rows away.
//
// Why it is correct.  Each output word has exactly one writer.
//
// Cost.  2 * B * L * KV_HEADS * (K_DIM + V_DIM) * sizeof(T) bytes; MLX's SDPA then reads them again.
#include "words.h"

// --- kernel body ---
constexpr int K_HEAD = K_DIM * int(sizeof(T)) / 4;  // words of one head's row
constexpr int V_HEAD = V_DIM * int(sizeof(T)) / 4;
constexpr int K_WORDS = KV_HEADS * K_HEAD;
constexpr int V_WORDS = KV_HEADS * V_HEAD;

const int at = int(thread_position_in_grid.x) * W;
const int key = int(thread_position_in_grid.y);
const int b = int(thread_position_in_grid.z);
const int length = kv_slots_shape[1];
const size_t slot = size_t(kv_slots[b * length + key]);

thread uint words[W];
if (at < K_WORDS) {
  const size_t out_row = (size_t(b) * KV_HEADS + at / K_HEAD) * length + key;
  load_words<W>((const device uint*)keys + slot * K_WORDS + at, words);
  store_words<W>((device uint*)k + out_row * K_HEAD + at % K_HEAD, words);
}
if (at < V_WORDS) {
  const size_t out_row = (size_t(b) * KV_HEADS + at / V_HEAD) * length + key;
  load_words<W>((const device uint*)values + slot * V_WORDS + at, words);
  store_words<W>((device uint*)v + out_row * V_HEAD + at % V_HEAD, words);
}
if (at == 0 && key == 0 && b == 0) {
  next_token[0] = token[0];
}
