// rope_write: normalises and rotates heads and puts K and V into their slots of the paged store, in one
// launch.  The heads are those of a layer's queries and keys.
//
//   q, k, v       (N, WIDTH) of T          this step's rows: heads side by side, from column START on;
//                                          one array may be all three (a joined projection)
//   q_weight, k_weight  (K_DIM,) floats    of the RMS norm over a head; not read unless *_WEIGHT
//   freqs         (DIMS / 2,) float32      not read unless FREQS
//   positions     (N,) int32               the position by which a row rotates
//   slot_mapping  (N,) int32               slot = block * block_size + offset; negative: skip k and v
//   keys, values  (slots, KV_HEADS, DIM)   the store; declared as inputs, and written; a value
//                                          has BITS bits: those of T, or 8 or 4 as in quantised.h
//   ticket        float32 -> next_ticket (8,) orders this write before the reads that follow
//   out           (N, Q_HEADS, K_DIM) of T queries, rotated
//   ROPE_SCALE, LOG2_BASE, FACTOR, Q_EPS, K_EPS  the bits of floats (a template value is an integer)
//
// rope.h has the equations, and the lane of each pair.
//
// Who does what.  Grid (simdgroups for the heads of a row, N).  The heads of a row are counted through
// q, k and v; the simdgroups of a row share them, and one takes its heads one after another.  One head
// each is the shortest way for a decode; a long prompt has rows enough, and there a sine serves several
// heads.
//
// Quantised rows lie in threadgroup memory first, rounded to T: a lane of rope_head has pairs, which are
// far apart, and one of quantise_row has 8 neighbours.
//
// Why it is correct.  Every element is read and written by one thread.  Slots of one step are distinct,
// so no two threads write the same element of the store, and the ticket orders the launch as it does
// that of kv_write (metal/kv_write.metal).  A head is the same for all lanes of a simdgroup, and so are
// the branches around simd_sum in rope_head and shuffles in quantise_row.
//
// Cost.  Reads and writes each byte of q, k and v once.  It replaces the launches of two norms, two
// multiplications by a factor, two rotations and a write, and the copies that slice a joined projection.
#include "quantised.h"
#include "rope.h"

// --- kernel body ---
constexpr int TURNS = (K_DIM / 2 + 31) / 32;  // pairs that a lane holds
constexpr bool QUANTISED = BITS < 16;
constexpr int PAIR = int(QUANTISED) * int(sizeof(T)) / 2;  // words of a scale and low
constexpr int K_ROW = K_DIM * BITS / 32 + K_DIM / K_GROUP * PAIR;  // words
constexpr int V_ROW = V_DIM * BITS / 32 + V_DIM / V_GROUP * PAIR;
constexpr int QUADS = (K_DIM > V_DIM ? K_DIM : V_DIM) * int(sizeof(T)) / 16;

threadgroup uint4 held[QUANTISED ? SIMDGROUPS * QUADS : 1];

const int row = int(threadgroup_position_in_grid.y);
const int lane = int(thread_index_in_simdgroup);
const int simdgroups = int(threadgroups_per_grid.x) * SIMDGROUPS;
const int heads = (Q_HEADS + 2 * KV_HEADS + simdgroups - 1) / simdgroups;
const int group = int(threadgroup_position_in_grid.x) * SIMDGROUPS;
const int first = (group + int(simdgroup_index_in_threadgroup)) * heads;
const int last = metal::min(first + heads, Q_HEADS + 2 * KV_HEADS);
const int slot = slot_mapping[row];
// Of this simdgroup.
threadgroup uint4* quads = held + (QUANTISED ? int(simdgroup_index_in_threadgroup) * QUADS : 0);
threadgroup T* fresh = (threadgroup T*)quads;

thread float cosine[TURNS];
thread float sine[TURNS];
rope_sines<TURNS, DIMS / 2, FREQS>(freqs, as_type<float>(LOG2_BASE), as_type<float>(ROPE_SCALE),
                                   positions[row], lane, cosine, sine);

for (int head = first; head < last; head++) {
  if (head < Q_HEADS) {
    rope_head<T, Q_R, K_DIM, DIMS, TRADITIONAL, FACTOR, Q_NORM, Q_WEIGHT>(
        q + size_t(row) * Q_WIDTH + Q_START + head * K_DIM, q_weight, as_type<float>(Q_EPS), cosine,
        sine, lane, out + (size_t(row) * Q_HEADS + head) * K_DIM);
    continue;
  }
  if (slot < 0) {
    continue;
  }
  const int kv_head = (head - Q_HEADS) % KV_HEADS;
  const size_t at = size_t(slot) * KV_HEADS + kv_head;
  if (head < Q_HEADS + KV_HEADS) {
    const device T* from = k + size_t(row) * K_WIDTH + K_START + kv_head * K_DIM;
    device uint* to = (device uint*)keys + at * K_ROW;
    if (QUANTISED) {
      rope_head<T, K_R, K_DIM, DIMS, TRADITIONAL, FACTOR, K_NORM, K_WEIGHT>(
          from, k_weight, as_type<float>(K_EPS), cosine, sine, lane, fresh);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      quantise_row<T, BITS, K_DIM, K_GROUP>(quads, lane, to);
    } else {
      rope_head<T, K_R, K_DIM, DIMS, TRADITIONAL, FACTOR, K_NORM, K_WEIGHT>(
          from, k_weight, as_type<float>(K_EPS), cosine, sine, lane, (device T*)to);
    }
  } else {
    const device T* from = v + size_t(row) * V_WIDTH + V_START + kv_head * V_DIM;
    device uint* to = (device uint*)values + at * V_ROW;
    for (int e = lane; e < V_DIM; e += 32) {
      if (QUANTISED) {
        fresh[e] = from[e];
      } else {
        ((device T*)to)[e] = from[e];
      }
    }
    if (QUANTISED) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      quantise_row<T, BITS, V_DIM, V_GROUP>(quads, lane, to);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the next head takes the same memory
}
if (row == 0 && first == 0 && lane < 8) {
  next_ticket[lane] = ticket[0];
}
