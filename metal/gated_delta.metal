// gated_delta: the linear recurrence of a layer over the packed rows of a step, with the states of all
// requests in a pool, in place: the gated delta rule (DELTA), or Mamba 2's state space update.
//
//   q, k, v   (N, WIDTH) of T                packed rows: heads side by side from column START on; one
//                                            array may be all three.  K_HEADS heads of K_DIM in q and
//                                            in k, V_HEADS of V_DIM in v: V_HEADS / K_HEADS share one of k
//   gates     (N, G_WIDTH) of G              V_HEADS columns from G_START on, with VECTOR V_HEADS * K_DIM:
//                                            what the state is multiplied by, or its logit (GATE)
//   beta      (N, B_WIDTH) of B              V_HEADS columns from B_START on: how much of a row goes into
//                                            the state, or its logit (BETA); not read if GATE is GATE_TIME
//   a_log, bias  (V_HEADS,) of float types   not read if GATE is GATE_GIVEN
//   LOW, HIGH, EPS, Q_SCALE                  the bits of floats: of gates (make_gates), of NORM
//   skip      (V_HEADS,) of a float type     SKIP: skip * v is added to the result
//   segments  (S, 2 + 2 M) int32             begin, initial slot, M pairs (end, slot); see
//                                            kernels/segments.py
//   states    (slots, V_HEADS, V_DIM, K_DIM) float32  the pool; written through, although it is an input
//   token     float32 -> next_token (8,)     orders this launch among those that use the pool
//   y         (N, V_HEADS, V_DIM) of T       zeros in rows of padding
//
// recurrence.h says what is computed.  Mamba 2 calls q, k, v, beta: C, B, x, dt.  K_DIM is a multiple of
// 16, V_DIM one of 8.
//
// Rounding.  Gates, beta and what NORM makes of q and k stay in float32.  mlx-lm, which has launches for
// each of them, rounds them to T on the way.
//
// Layout.  Grid: x: SIMDGROUPS * 8 rows of a state, y: head of v, z: segment.  A simdgroup owns 8 rows of
// the state of one head (8 elements of v) and goes through the whole segment with them in registers:
//
//   segment  |chunk of 8|chunk of 8|chunk of 8|row|row|row|     CHUNKS; otherwise row by row
//   state    slot -> registers ------------------------> slot
//                             \ slot                              a checkpoint: chunks begin anew behind it
//
// Rows of the state do not depend on each other, so simdgroups share nothing but what chunks prepare:
// each prepares one row of the chunk in threadgroup memory.
//
// Why it is correct.
//   - Where chunks begin depends on the segment's first row and its checkpoints.  So a prompt that is
//     cut at multiples of 8 rows gives, bit for bit, what it gives at once.
//   - Each element of a slot is read and written by one lane, which reads first.  No slot that one
//     segment writes is used by another in the same launch, and the token orders launches as it does
//     that of kv_write (metal/kv_write.metal).
//   - Barriers stand in loops whose bounds are those of the segment, equal for the whole threadgroup.
//     A simdgroup past V_DIM takes part in them and touches no state.
//   - The first barrier of a chunk: all have used the chunk before.  The second: all rows are prepared.
//
// Cost.  A segment moves its states in and out once, 8 * V_HEADS * V_DIM * K_DIM bytes: a decode is
// nothing else.  Flops a row and element of the state: 7 row by row, where each row waits for two sums
// over lanes; 6 in chunks, as products of matrices, and a twelfth of that for what 8 simdgroups prepare.
// Registers of a lane: K_DIM / 4 floats of state.  Threadgroup memory: 96 * (K_DIM + 8) bytes and a
// little, at most 27 KB, only with CHUNKS.
#include "recurrence.h"

// --- kernel body ---
constexpr int PADDING = -2;  // as an initial slot
constexpr int K_PARTS = K_DIM / 8;
constexpr int STRIDE = (K_PARTS | 1) * 8;  // rows of a tile do not meet in a bank
constexpr int GATES = VECTOR ? K_DIM : 1;  // of a head
// Elements of a row that a lane reads at once: 4 where heads begin at multiples of 4.
constexpr int ODD = Q_WIDTH | Q_START | K_WIDTH | K_START | (VECTOR ? G_WIDTH | G_START : 0);
constexpr int VEC = ODD % 4 == 0 ? 4 : 1;
const float low = as_type<float>(LOW);
const float high = as_type<float>(HIGH);
const float eps = as_type<float>(EPS);
const float q_scale = as_type<float>(Q_SCALE);

threadgroup float rows[CHUNKS ? (DELTA ? 3 : 2) * CHUNK * STRIDE : 1];
threadgroup float decay[CHUNKS ? K_DIM : 1];
threadgroup float seen[CHUNKS ? CHUNK * CHUNK : 1];
threadgroup float known[CHUNKS ? CHUNK * CHUNK : 1];
threadgroup float norms[CHUNKS && NORM ? 2 * CHUNK : 1];  // of_k, of_q

const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int head = int(threadgroup_position_in_grid.y);
const int k_head = head / (V_HEADS / K_HEADS);
const int row = matrix_row(lane);
const int col = matrix_col(lane);
const int v_row = (int(threadgroup_position_in_grid.x) * SIMDGROUPS + simdgroup) * 8;
const bool active = v_row < V_DIM;
const int q_start = Q_START + k_head * K_DIM;
const int k_start = K_START + k_head * K_DIM;
const int g_start = G_START + head * GATES;
const int b_start = B_START + head;
const float rate = GATE == GATE_GIVEN ? 0.0f : exponential(float(a_log[head]));
const float of_head = GATE == GATE_GIVEN ? 0.0f : float(bias[head]);
const int v_start = V_START + head * V_DIM + v_row + row;  // of this lane's row of the state

const int at = int(threadgroup_position_in_grid.z) * segments_shape[1];
const int last = at + segments_shape[1] - 2;  // the pair of the segment's own end
const int initial = segments[at + 1];
int t = segments[at];

thread metal::simdgroup_matrix<float, 8, 8> state[K_PARTS];
if (active && initial >= 0) {
  const device float* slot = states + (size_t(initial) * V_HEADS + head) * V_DIM * K_DIM;
  load_state<K_PARTS>(slot + v_row * K_DIM, row, col, state);
} else {
#pragma unroll
  for (int d = 0; d < K_PARTS; d++) {
    state[d].thread_elements()[0] = 0.0f;
    state[d].thread_elements()[1] = 0.0f;
  }
}

for (; initial == PADDING && t < segments[last]; t++) {
  if (active && lane < 8) {
    y[(size_t(t) * V_HEADS + head) * V_DIM + v_row + lane] = T(0.0f);
  }
}
for (int pair = at + 2; pair <= last; pair += 2) {
  const int end = segments[pair];
  if (CHUNKS) {
    for (; t + CHUNK <= end; t += CHUNK) {
      const size_t own = size_t(t + lane % CHUNK);
      float gate_of_lane = VECTOR ? 1.0f : float(gates[own * G_WIDTH + g_start]);
      float beta_of_lane = GATE == GATE_TIME ? 0.0f : float(beta[own * B_WIDTH + b_start]);
      make_gates<GATE, BETA>(gate_of_lane, beta_of_lane, rate, of_head, low, high);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = simdgroup; i < CHUNK; i += SIMDGROUPS) {
        prepare_row<T, G, K_DIM, STRIDE, DELTA, VECTOR, NORM>(
            q + size_t(t) * Q_WIDTH + q_start, k + size_t(t) * K_WIDTH + k_start,
            gates + size_t(t) * G_WIDTH + g_start, Q_WIDTH, K_WIDTH, G_WIDTH, i, gate_of_lane,
            beta_of_lane, eps, q_scale, lane, rows, decay, seen, known, norms);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (active) {
        thread float by[2];
        thread float of_k[2];
        thread float of_q[2];
        thread float values[2];
        thread float skipped[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          by[e] = metal::simd_shuffle(beta_of_lane, ushort(col + e));
          of_k[e] = NORM ? norms[col + e] : 1.0f;
          of_q[e] = NORM ? norms[CHUNK + col + e] : 1.0f;
          values[e] = float(v[size_t(t + col + e) * V_WIDTH + v_start]);
          skipped[e] = SKIP ? float(skip[head]) * values[e] : 0.0f;
        }
        advance_chunk<K_PARTS, STRIDE, DELTA>(state, rows, decay, seen, known, by, of_k, of_q, values,
                                              row, col);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const size_t of = size_t(t + col + e) * V_HEADS + head;
          y[of * V_DIM + v_row + row] = T(values[e] + skipped[e]);
        }
      }
    }
  }
  for (; t < end; t++) {
    if (active) {
      const size_t of = size_t(t) * V_HEADS + head;
      const float value = float(v[size_t(t) * V_WIDTH + v_start]);
      float gate = VECTOR ? 1.0f : float(gates[size_t(t) * G_WIDTH + g_start]);
      float by = GATE == GATE_TIME ? 0.0f : float(beta[size_t(t) * B_WIDTH + b_start]);
      make_gates<GATE, BETA>(gate, by, rate, of_head, low, high);
      const float result = advance_row<T, G, K_PARTS, VEC, DELTA, VECTOR, NORM>(
          state, q + size_t(t) * Q_WIDTH + q_start, k + size_t(t) * K_WIDTH + k_start,
          gates + size_t(t) * G_WIDTH + g_start, gate, by, value, eps, q_scale, col);
      if (col == 0) {
        y[of * V_DIM + v_row + row] = T(SKIP ? result + float(skip[head]) * value : result);
      }
    }
  }
  const int slot = segments[pair + 1];
  if (active && slot >= 0) {
    device float* to =
        const_cast<device float*>(states) + (size_t(slot) * V_HEADS + head) * V_DIM * K_DIM;
    store_state<K_PARTS>(to + v_row * K_DIM, row, col, state);
  }
}
if (threadgroup_position_in_grid.x == 0 && head == 0 && at == 0 && simdgroup == 0 && lane < 8) {
  next_token[lane] = token[0];
}
