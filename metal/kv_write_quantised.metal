// kv_write_quantised: kv_write for a store that keeps 8 or 4 bits a value.
//
//   k, v          (N, KV_HEADS, DIM) of T       this step's rows, packed
//   slot_mapping  (N,) int32                    negative: skip the row
//   keys, values  (slots, KV_HEADS, ROW) uint   the store; written through; rows as in quantised.h
//   ticket        float32 -> next_ticket (8,)    as in kv_write
//
// Who does what.  Grid (simdgroups for the heads of K and of V, N).  A simdgroup quantises one head's row
// (quantise_row), which it reads and writes in one run.
//
// Why it is correct.  Every word of a row has one writer, and no two simdgroups have the same row.
//
// Cost.  Reads K and V once; writes 8 or 4 bits a value, and 2 * sizeof(T) bytes a group.
#include "quantised.h"

// --- kernel body ---
constexpr int PAIR = int(sizeof(T)) / 2;  // words of a scale and low
constexpr int K_ROW = K_DIM * BITS / 32 + K_DIM / K_GROUP * PAIR;
constexpr int V_ROW = V_DIM * BITS / 32 + V_DIM / V_GROUP * PAIR;
constexpr int PER_QUAD = 16 / int(sizeof(T));

const int row = int(threadgroup_position_in_grid.y);
const int lane = int(thread_index_in_simdgroup);
const int head = int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup);
const int slot = slot_mapping[row];

if (slot >= 0 && head < KV_HEADS) {
  quantise_row<T, BITS, K_DIM, K_GROUP>(
      (const device uint4*)k + (size_t(row) * KV_HEADS + head) * (K_DIM / PER_QUAD), lane,
      const_cast<device uint*>(keys) + (size_t(slot) * KV_HEADS + head) * K_ROW);
} else if (slot >= 0 && head < 2 * KV_HEADS) {
  quantise_row<T, BITS, V_DIM, V_GROUP>(
      (const device uint4*)v + (size_t(row) * KV_HEADS + head - KV_HEADS) * (V_DIM / PER_QUAD), lane,
      const_cast<device uint*>(values) + (size_t(slot) * KV_HEADS + head - KV_HEADS) * V_ROW);
}
if (row == 0 && head == 0 && lane < 8) {
  next_ticket[lane] = ticket[0];
}
