// kv_gather_quantised: kv_gather from a store that keeps 8 or 4 bits a value.
//
//   keys, values  (slots, KV_HEADS, ROW) uint   the store; rows as in quantised.h
//   kv_slots      (N,) int32                    the slot of each key wanted; every one must be valid
//   ticket        float32 -> next_ticket (8,)    as in kv_gather
//   k, v          (KV_HEADS, N, DIM) of T       outputs, as in kv_gather
//
// Who does what.  Grid (N, threadgroups of THREADS for the words of the longer of the two rows).
// Thread (key, x) turns word x of the key's row of K into 4 or 8 values, and of V.
//
// Why it is correct.  Each output value has exactly one writer.
//
// Cost.  Reads 8 or 4 bits a value and writes sizeof(T) bytes; MLX's SDPA then reads those.
#include "quantised.h"

// Value word `at` of slot `slot`, as values of `key` in the output.
template <typename T, int BITS, int KV_HEADS, int DIM, int GROUP_SIZE>
METAL_FUNC void gather_word(const device uint* store, device uint* out, size_t slot, int key,
                            int num_keys, int at) {
  constexpr int VALUES = DIM * BITS / 32;
  constexpr int PAIR = int(sizeof(T)) / 2;  // words of a scale and low
  constexpr int ROW = VALUES + DIM / GROUP_SIZE * PAIR;
  constexpr int PER_WORD = 4 / int(sizeof(T));
  constexpr int WORDS = 32 / BITS / PER_WORD;  // of the output: 2, 4 or 8
  if (at < KV_HEADS * VALUES) {
    const int head = at / VALUES;
    const int word = at % VALUES;
    const device uint* from = store + (slot * KV_HEADS + head) * ROW;
    thread float affine[2];
    load_affine<T>(from + VALUES + word / (GROUP_SIZE * BITS / 32) * PAIR, affine);
    thread float x[32 / BITS];
    unpack_values<T, BITS>(from[word], affine, x);
    thread uint words[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      words[w] = pack<T>(x + w * PER_WORD);
    }
    const size_t row = size_t(head) * num_keys + key;
#pragma unroll
    for (int w = 0; w < WORDS; w += 2) {
      store_words<2>(out + row * (DIM / PER_WORD) + word * WORDS + w, words + w);
    }
  }
}

// --- kernel body ---
const int at = int(threadgroup_position_in_grid.y * THREADS + thread_position_in_threadgroup.x);
const int key = int(threadgroup_position_in_grid.x);
const int num_keys = int(threadgroups_per_grid.x);
const size_t slot = size_t(kv_slots[key]);

gather_word<T, BITS, KV_HEADS, K_DIM, K_GROUP>(keys, (device uint*)k, slot, key, num_keys, at);
gather_word<T, BITS, KV_HEADS, V_DIM, V_GROUP>(values, (device uint*)v, slot, key, num_keys, at);
if (threadgroup_position_in_grid.y == 0 && key == 0 && thread_position_in_threadgroup.x < 8) {
  next_ticket[thread_position_in_threadgroup.x] = ticket[0];
}
