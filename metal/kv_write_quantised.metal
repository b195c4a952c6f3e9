// kv_write_quantised: kv_write for a store that keeps 8 or 4 bits a value.
//
//   k, v          (N, KV_HEADS, DIM) of T       this step's rows, packed
//   slot_mapping  (N,) int32                    negative: skip the row
//   keys, values  (slots, KV_HEADS, ROW) uint   the store; written through; rows as in quantised.h
//   token         float32 -> next_token (8,)    as in kv_write
//
// Who does what.  Grid (threads for the groups of the longer of the two rows, N).  Thread (x, row)
// quantises group x of K and group x of V, as far as each row reaches: it reads the group once, 16
// bytes at a time, keeps it in registers, and needs no other thread to know its smallest and largest
// value.  Lanes read 128 bytes apart, which costs little: a step writes one row where it reads
// thousands.
//
// Why it is correct.  Every group has words of its own, so no two threads write the same word.
//
// Cost.  Reads K and V once; writes 8 or 4 bits a value, and 2 * sizeof(T) bytes a group.
#include "quantised.h"

// Quantise group `at` of row `row` to slot `slot`, if there are so many groups.
template <typename T, int BITS, int KV_HEADS, int DIM, int GROUP_SIZE>
METAL_FUNC void write_group(const device uint* rows, device uint* store, int row, int slot, int at) {
  constexpr int GROUPS = DIM / GROUP_SIZE;
  constexpr int VALUES = DIM * BITS / 32;
  constexpr int PAIR = int(sizeof(T)) / 2;  // words of a scale and low
  constexpr int ROW = VALUES + GROUPS * PAIR;
  if (at < KV_HEADS * GROUPS) {
    const int group = at % GROUPS;
    device uint* to = store + (size_t(slot) * KV_HEADS + at / GROUPS) * ROW;
    quantise<T, BITS, GROUP_SIZE>(
        rows + (size_t(row) * KV_HEADS * GROUPS + at) * (GROUP_SIZE * int(sizeof(T)) / 4),
        to + group * (GROUP_SIZE * BITS / 32), to + VALUES + group * PAIR);
  }
}

// --- kernel body ---
const int row = int(thread_position_in_grid.y);
const int at = int(thread_position_in_grid.x);
const int slot = slot_mapping[row];

if (slot >= 0) {
  write_group<T, BITS, KV_HEADS, K_DIM, K_GROUP>(
      (const device uint*)k, const_cast<device uint*>(keys), row, slot, at);
  write_group<T, BITS, KV_HEADS, V_DIM, V_GROUP>(
      (const device uint*)v, const_cast<device uint*>(values), row, slot, at);
}
if (row == 0 && at < 8) {
  next_token[at] = token[0];
}
