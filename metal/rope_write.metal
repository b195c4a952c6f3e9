// rope_write: a layer's queries and keys normalised and rotated, keys and values put into their
// slots of the paged store, in one launch.
//
//   q, k, v       (N, WIDTH) of T          this step's rows: heads side by side, from column START on;
//                                          one array may be all three (a joined projection)
//   q_weight, k_weight  (K_DIM,) floats    of the RMS norm over a head; not read unless *_WEIGHT
//   freqs         (DIMS / 2,) float32      not read unless FREQS
//   positions     (N,) int32               of each row in its sequence
//   slot_mapping  (N,) int32               slot = block * block_size + offset; negative: skip k and v
//   keys, values  (slots, KV_HEADS, DIM)   the store; written through, although they are inputs
//   token         float32 -> next_token (8,) what orders this write before the reads that follow
//   out           (N, Q_HEADS, K_DIM) of T queries, rotated
//   ROPE_SCALE, LOG2_BASE, Q_EPS, K_EPS  the bits of floats (a template value is an integer)
//
// rope.h says what is computed, and which lane holds which pair.
//
// Who does what.  Grid (simdgroups for the heads of a row, N).  The heads of a row are counted through
// q, k and v; the simdgroups of a row share them, and one takes its heads one after another.  One head
// each is the shortest way for a decode; a long prompt has rows enough, and there a sine serves several
// heads.
//
// Why it is correct.  Every element is read and written by one thread.  Slots of one step are distinct,
// so no two threads write the same element of the store, and the token orders the launch as it does
// that of kv_write (metal/kv_write.metal).  A head is the same for all lanes of a simdgroup, and so are
// the branches around what rope_head adds up.
//
// Cost.  Reads and writes each byte of q, k and v once.  What it saves is launches: two norms, two
// rotations and a write, and the copies that slice a joined projection, in one.
#include "rope.h"

// --- kernel body ---
constexpr int TURNS = (K_DIM / 2 + 31) / 32;  // pairs that a lane holds

const int row = int(threadgroup_position_in_grid.y);
const int lane = int(thread_index_in_simdgroup);
const int simdgroups = int(threadgroups_per_grid.x) * SIMDGROUPS;
const int heads = (Q_HEADS + 2 * KV_HEADS + simdgroups - 1) / simdgroups;
const int group = int(threadgroup_position_in_grid.x) * SIMDGROUPS;
const int first = (group + int(simdgroup_index_in_threadgroup)) * heads;
const int last = metal::min(first + heads, Q_HEADS + 2 * KV_HEADS);
const int slot = slot_mapping[row];

thread float cosine[TURNS];
thread float sine[TURNS];
rope_sines<TURNS, DIMS / 2, FREQS>(freqs, as_type<float>(LOG2_BASE), as_type<float>(ROPE_SCALE),
                                   positions[row], lane, cosine, sine);

for (int head = first; head < last; head++) {
  const int kv_head = (head - Q_HEADS) % KV_HEADS;
  const bool is_q = head < Q_HEADS;
  if (!is_q && slot < 0) {
    continue;
  }
  if (head >= Q_HEADS + KV_HEADS) {
    const device T* from = v + size_t(row) * V_WIDTH + V_START + kv_head * V_DIM;
    device T* to = const_cast<device T*>(values) + (size_t(slot) * KV_HEADS + kv_head) * V_DIM;
    for (int e = lane; e < V_DIM; e += 32) {
      to[e] = from[e];
    }
    continue;
  }
  const device T* from = is_q ? q + size_t(row) * Q_WIDTH + Q_START + head * K_DIM
                              : k + size_t(row) * K_WIDTH + K_START + kv_head * K_DIM;
  device T* to = is_q ? out + (size_t(row) * Q_HEADS + head) * K_DIM
                      : const_cast<device T*>(keys) + (size_t(slot) * KV_HEADS + kv_head) * K_DIM;
  if (is_q) {
    rope_head<T, Q_R, K_DIM, DIMS, TRADITIONAL, Q_NORM, Q_WEIGHT>(
        from, q_weight, as_type<float>(Q_EPS), cosine, sine, lane, to);
  } else {
    rope_head<T, K_R, K_DIM, DIMS, TRADITIONAL, K_NORM, K_WEIGHT>(
        from, k_weight, as_type<float>(K_EPS), cosine, sine, lane, to);
  }
}
if (row == 0 && first == 0 && lane < 8) {
  next_token[lane] = token[0];
}
