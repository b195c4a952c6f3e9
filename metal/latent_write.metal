// latent_write: normalises latents and rotates rotary parts and puts latents and rotary keys into their
// slots, in one launch.  The rotary parts are those of a layer's keys and queries.
//
//   q             (N, Q_WIDTH) of T        this step's rows: the rotary part of head h are the ROPE
//                                          columns from Q_START + h * Q_STRIDE on
//   latent        (N, L_WIDTH) of T        LATENT_DIM columns from L_START on, not normalised yet
//   k_pe          (N, P_WIDTH) of T        ROPE columns from P_START on, not rotated yet
//   weight        (LATENT_DIM,) floats     of the RMS norm of a latent
//   freqs         (DIMS / 2,) float32      not read unless FREQS
//   positions     (N,) int32               of each row in its sequence
//   slot_mapping  (N,) int32               slot = block * block_size + offset; negative: write nothing
//   keys, values  (slots, 1, LATENT_DIM or ROPE) the store; declared as inputs, and written;
//                                          a value has BITS bits: those of T, or 8 or 4 as in quantised.h
//   ticket        float32 -> next_ticket (8,) orders this write before the reads that follow
//   out           (N, HEADS, ROPE) of T    rotary parts of queries, rotated
//   ROPE_SCALE, LOG2_BASE, FACTOR, EPS     the bits of floats (a template value is an integer)
//
// rope.h has the equations, and the lane of each pair.
//
// Who does what.  Grid (simdgroups for the parts of a row, N).  The parts of a row are its HEADS rotary
// queries, its latent and its rotary key; a simdgroup takes one.
//
// Why it is correct.  As rope_write: every element is read and written by one thread; slots of one step
// are distinct; a part is the same for all lanes of a simdgroup, and so are the branches.  Quantised
// rows lie in threadgroup memory first, rounded to T.
//
// Cost.  Reads and writes each byte of the three once.  It replaces the launches of a norm, two rotations and a
// write, and the copies that slice two products.
#include "quantised.h"
#include "rope.h"

// --- kernel body ---
constexpr int TURNS = (ROPE / 2 + 31) / 32;  // pairs that a lane holds
constexpr int NORM_TURNS = (LATENT_DIM / 2 + 31) / 32;
constexpr bool QUANTISED = BITS < 16;
constexpr int PAIR = int(QUANTISED) * int(sizeof(T)) / 2;  // words of a scale and low
constexpr int K_ROW = LATENT_DIM * BITS / 32 + LATENT_DIM / K_GROUP * PAIR;  // words
constexpr int V_ROW = ROPE * BITS / 32 + ROPE / V_GROUP * PAIR;
constexpr int QUADS = (LATENT_DIM > ROPE ? LATENT_DIM : ROPE) * int(sizeof(T)) / 16;

threadgroup uint4 held[QUANTISED ? SIMDGROUPS * QUADS : 1];

const int row = int(threadgroup_position_in_grid.y);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int part = int(threadgroup_position_in_grid.x) * SIMDGROUPS + simdgroup_index;
const int slot = slot_mapping[row];
// Of this simdgroup.
threadgroup uint4* quads = held + (QUANTISED ? simdgroup_index * QUADS : 0);
threadgroup T* fresh = (threadgroup T*)quads;

if (part == HEADS) {
  if (slot >= 0) {
    thread float still[NORM_TURNS];
    const device T* from = latent + size_t(row) * L_WIDTH + L_START;
    device uint* to = (device uint*)keys + size_t(slot) * K_ROW;
    if (QUANTISED) {
      rope_head<T, R, LATENT_DIM, 0, false, FACTOR, true, true>(
          from, weight, as_type<float>(EPS), still, still, lane, fresh);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      quantise_row<T, BITS, LATENT_DIM, K_GROUP>(quads, lane, to);
    } else {
      rope_head<T, R, LATENT_DIM, 0, false, FACTOR, true, true>(
          from, weight, as_type<float>(EPS), still, still, lane, (device T*)to);
    }
  }
} else if (part <= HEADS + 1) {
  thread float cosine[TURNS];
  thread float sine[TURNS];
  rope_sines<TURNS, DIMS / 2, FREQS>(freqs, as_type<float>(LOG2_BASE), as_type<float>(ROPE_SCALE),
                                     positions[row], lane, cosine, sine);
  if (part < HEADS) {
    rope_head<T, T, ROPE, DIMS, TRADITIONAL, FACTOR, false, false>(
        q + size_t(row) * Q_WIDTH + Q_START + part * Q_STRIDE, weight, 0.0f, cosine, sine, lane,
        out + (size_t(row) * HEADS + part) * ROPE);
  } else if (slot >= 0) {
    const device T* from = k_pe + size_t(row) * P_WIDTH + P_START;
    device uint* to = (device uint*)values + size_t(slot) * V_ROW;
    if (QUANTISED) {
      rope_head<T, T, ROPE, DIMS, TRADITIONAL, FACTOR, false, false>(from, weight, 0.0f, cosine, sine,
                                                                     lane, fresh);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      quantise_row<T, BITS, ROPE, V_GROUP>(quads, lane, to);
    } else {
      rope_head<T, T, ROPE, DIMS, TRADITIONAL, FACTOR, false, false>(from, weight, 0.0f, cosine, sine,
                                                                     lane, (device T*)to);
    }
  }
}
if (row == 0 && part == 0 && lane < 8) {
  next_ticket[lane] = ticket[0];
}
