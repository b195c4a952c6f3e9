// gated_delta: the linear recurrence of a layer over the packed rows of a step, with the states of all
// requests in a state store, in place: the gated delta rule (DELTA), or Mamba 2's state space update.
//
//   q, k, v   (N, WIDTH) of T                packed rows: heads side by side from column START on; one
//                                            array may be all three.  K_HEADS heads of K_DIM in q and
//                                            in k, V_HEADS of V_DIM in v: V_HEADS / K_HEADS share one of k
//   gates     (N, G_WIDTH) of G              V_HEADS columns from G_START on, with VECTOR V_HEADS * K_DIM:
//                                            the state's factor, or its logit (GATE)
//   beta      (N, B_WIDTH) of B              V_HEADS columns from B_START on: how much of a row goes into
//                                            the state, or its logit (BETA); not read if GATE is GATE_TIME
//   a_log, bias  (V_HEADS,) of float types   not read if GATE is GATE_GIVEN
//   LOW, HIGH, EPS, Q_SCALE                  the bits of floats: of gates (make_gates), of NORM
//   skip      (V_HEADS,) of a float type     SKIP: skip * v is added to the result
//   segments  (S, 2 + 2 M) int32             begin, initial slot, M pairs (end, slot); see
//                                            recurrence/kernels.py
//   states    (slots, V_HEADS, V_DIM, K_DIM) float32  the store; declared as an input, and written
//   ticket     float32 -> next_ticket (8,)     orders this launch among those that use the store
//   y         (N, V_HEADS, V_DIM) of T       zeros in rows of padding
//
// recurrence.h has the equations.  Mamba 2 calls q, k, v, beta: C, B, x, dt.  K_DIM is a multiple of
// 16, V_DIM one of 8.
//
// Rounding.  Gates, beta and, with NORM, q and k stay in float32.  mlx-lm, which has launches for
// each of them, rounds them to T on the way.
//
// Layout.  Grid: x: SIMDGROUPS * 8 rows of a state, y: head of v, z: segment.  A simdgroup owns 8 rows of
// the state of one head (8 elements of v) and goes through the whole segment with them in registers:
//
//   segment  |tile of 8 rows|tile of 8 rows|rows|     TILES; a segment of one row needs none
//   state    slot -> registers ---------------> slot
//                                \ slot                a checkpoint: tiles begin anew behind it
//
// Rows of the state do not depend on each other: simdgroups share nothing but the tile, q, k and gates of
// up to 8 rows in threadgroup memory.
//
//   barrier | registers -> tile | barrier | ask for the next tile | row | row | ... | row |
//                                           device memory -> registers
//
// Gates, beta, v and the numbers of measure_row are made for 8 rows at once, one in each row of lanes.
//
// Why it is correct.
//   - Every row goes through advance_row, in one order of sums.  So neither y nor a state depends on where
//     a prompt is cut, on checkpoints, or on other segments of the step.  One exception: a compiler may
//     fuse a product and a sum with TILED and not without.
//   - Each element of a slot is read and written by one lane, which reads first.  No slot that one
//     segment writes is used by another in the same launch, and the ticket orders launches as it does
//     that of kv_write (metal/kv_write.metal).
//   - Barriers stand in loops whose bounds are those of the segment, equal for the whole threadgroup.
//     A simdgroup past V_DIM takes part in them and touches no state.
//   - The first barrier of a tile: all have used the tile before.  The second: the tile is whole.
//
// Cost.  A segment moves its states in and out once, 8 * V_HEADS * V_DIM * K_DIM bytes: a decode is
// nothing else.  Flops a row and element of the state: 7.  Each row waits for two sums over lanes, which run
// side by side.  Registers of a lane: K_DIM / 4 floats of state, and with TILES K_DIM / 8 of the
// next tile (K_DIM * 3 / 16 with VECTOR; half as many beyond K_DIM 128).  Threadgroup memory: 64 *
// (K_DIM + 16) bytes, 96 * (K_DIM + 16) with VECTOR, at most 26 KB, only with TILES.
#include "recurrence.h"

// --- kernel body ---
constexpr int PADDING = -2;  // as an initial slot
constexpr int HELD = K_DIM / 4;  // elements of the state in a lane
constexpr int STRIDE = (K_DIM / 16 | 1) * 16;  // two neighbouring rows do not meet in a bank
constexpr int THREADS = SIMDGROUPS * 32;
constexpr int OWN = (TILE * K_DIM / 4 + THREADS - 1) / THREADS * 4;  // elements of a tile in a thread
constexpr int GATES = VECTOR ? K_DIM : 1;  // of a head
// Elements of a row that a lane reads at once: 4 where heads begin at multiples of 4.
constexpr int ODD = Q_WIDTH | Q_START | K_WIDTH | K_START | (VECTOR ? G_WIDTH | G_START : 0);
constexpr int VEC = ODD % 4 == 0 ? 4 : 1;
const float low = as_type<float>(LOW);
const float high = as_type<float>(HIGH);
const float eps = as_type<float>(EPS);
const float q_scale = as_type<float>(Q_SCALE);

threadgroup float4 tile[TILES ? (VECTOR ? 3 : 2) * TILE * STRIDE / 4 : 1];
threadgroup float* tile_q = (threadgroup float*)tile;
threadgroup float* tile_k = tile_q + (TILES ? TILE * STRIDE : 0);
threadgroup float* tile_gates = tile_q + (TILES && VECTOR ? 2 * TILE * STRIDE : 0);

const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int head = int(threadgroup_position_in_grid.y);
const int k_head = head / (V_HEADS / K_HEADS);
const int row = matrix_row(lane);
const int col = matrix_col(lane);
const int v_row = (int(threadgroup_position_in_grid.x) * SIMDGROUPS + simdgroup) * 8;
const bool active = V_DIM % (SIMDGROUPS * 8) == 0 || v_row < V_DIM;
const int q_start = Q_START + k_head * K_DIM;
const int k_start = K_START + k_head * K_DIM;
const int g_start = G_START + head * GATES;
const int b_start = B_START + head;
const float rate = GATE == GATE_GIVEN ? 0.0f : exponential(float(a_log[head]));
const float of_head = GATE == GATE_GIVEN ? 0.0f : float(bias[head]);
const int v_start = V_START + head * V_DIM + metal::min(v_row + row, V_DIM - 1);  // of this lane's row of the state

const int at = int(threadgroup_position_in_grid.z) * segments_shape[1];
const int last = at + segments_shape[1] - 2;  // the pair of the segment's own end
const int last_end = segments[last];
const int initial = segments[at + 1];
int t = segments[at];

thread float state[HELD];
if (active && initial >= 0) {
  const device float* slot = states + (size_t(initial) * V_HEADS + head) * V_DIM * K_DIM;
  load_state<HELD>(slot + v_row * K_DIM, row, col, state);
} else {
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    state[i] = 0.0f;
  }
}

for (; initial == PADDING && t < last_end; t++) {
  if (active && lane < 8) {
    y[(size_t(t) * V_HEADS + head) * V_DIM + v_row + lane] = T(0.0f);
  }
}

// Of the next tile: the four neighbours of fetch_tile, and of each row of lanes one row's gate and beta,
// and v of this lane's row of the state for two rows.
const int thread_index = simdgroup * 32 + lane;
thread float next_q[TILES ? OWN : 1];
thread float next_k[TILES ? OWN : 1];
thread float next_gates[TILES && VECTOR ? OWN : 1];
thread float next_v[2];
float next_gate = 1.0f;
float next_beta = 0.0f;
bool asked = false;
const bool tiled = TILES && last_end - t > 1;
for (int pair = at + 2; pair <= last; pair += 2) {
  const int end = segments[pair];
  while (tiled && t < end) {
    const int count = asked ? metal::min(TILE, end - t) : 0;
    asked = true;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    put_tile<K_DIM, STRIDE, THREADS>(next_q, count, thread_index, tile_q);
    put_tile<K_DIM, STRIDE, THREADS>(next_k, count, thread_index, tile_k);
    if (VECTOR) {
      put_tile<K_DIM, STRIDE, THREADS>(next_gates, count, thread_index, tile_gates);
    }
    float gate_of_lane = next_gate;
    float beta_of_lane = next_beta;
    const float v_of_lane[2] = {next_v[0], next_v[1]};
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int next = t + count;
    fetch_tile<T, K_DIM, VEC, THREADS>(q + q_start, Q_WIDTH, next, last_end, thread_index, next_q);
    fetch_tile<T, K_DIM, VEC, THREADS>(k + k_start, K_WIDTH, next, last_end, thread_index, next_k);
    if (VECTOR) {
      fetch_tile<G, K_DIM, VEC, THREADS>(gates + g_start, G_WIDTH, next, last_end, thread_index,
                                         next_gates);
    }
    const size_t of_lane = size_t(metal::min(next + row, last_end - 1));
    next_gate = VECTOR ? 1.0f : float(gates[of_lane * G_WIDTH + g_start]);
    next_beta = GATE == GATE_TIME ? 0.0f : float(beta[of_lane * B_WIDTH + b_start]);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      next_v[e] = float(v[size_t(metal::min(next + col + e, last_end - 1)) * V_WIDTH + v_start]);
    }
    if (active && count > 0) {
      float both;
      float of_k;
      float of_q;
      const int own = metal::min(row, count - 1) * STRIDE;
      measure_row<T, HELD, VEC, NORM, true>(q, k, tile_q + own, tile_k + own, eps, q_scale, col,
                                            both, of_k, of_q);
      make_gates<GATE, BETA>(gate_of_lane, beta_of_lane, rate, of_head, low, high);
      beta_of_lane *= of_k;
      for (int i = 0; i < count; i++) {
        const ushort lane_of_row = ushort(matrix_lane(i, 0));
        const float value = from_col(i % 2 == 0 ? v_of_lane[0] : v_of_lane[1], col, i);
        const float result = advance_row<T, G, HELD, VEC, DELTA, VECTOR, true>(
            state, q, k, gates, tile_q + i * STRIDE, tile_k + i * STRIDE, tile_gates + i * STRIDE,
            metal::simd_broadcast(gate_of_lane, lane_of_row),
            metal::simd_broadcast(beta_of_lane, lane_of_row), value,
            metal::simd_broadcast(of_k, lane_of_row), metal::simd_broadcast(both, lane_of_row), col);
        const float scaled = metal::simd_broadcast(of_q, lane_of_row) * result;
        if (col == 0) {
          const size_t of = size_t(t + i) * V_HEADS + head;
          y[of * V_DIM + v_row + row] = T(SKIP ? scaled + float(skip[head]) * value : scaled);
        }
      }
    }
    t += count;
  }
  for (; t < end; t++) {
    if (active) {
      const device T* query = q + size_t(t) * Q_WIDTH + q_start;
      const device T* key = k + size_t(t) * K_WIDTH + k_start;
      const float value = float(v[size_t(t) * V_WIDTH + v_start]);
      float gate = VECTOR ? 1.0f : float(gates[size_t(t) * G_WIDTH + g_start]);
      float by = GATE == GATE_TIME ? 0.0f : float(beta[size_t(t) * B_WIDTH + b_start]);
      float both;
      float of_k;
      float of_q;
      measure_row<T, HELD, VEC, NORM, false>(query, key, tile_q, tile_k, eps, q_scale, col, both,
                                             of_k, of_q);
      make_gates<GATE, BETA>(gate, by, rate, of_head, low, high);
      const float scaled = of_q * advance_row<T, G, HELD, VEC, DELTA, VECTOR, false>(
          state, query, key, gates + size_t(t) * G_WIDTH + g_start, tile_q, tile_k, tile_gates,
          gate, of_k * by, value, of_k, both, col);
      if (col == 0) {
        const size_t of = size_t(t) * V_HEADS + head;
        y[of * V_DIM + v_row + row] = T(SKIP ? scaled + float(skip[head]) * value : scaled);
      }
    }
  }
  const int slot = segments[pair + 1];
  if (active && slot >= 0) {
    device float* to =
        const_cast<device float*>(states) + (size_t(slot) * V_HEADS + head) * V_DIM * K_DIM;
    store_state<HELD>(to + v_row * K_DIM, row, col, state);
  }
}
if (threadgroup_position_in_grid.x == 0 && head == 0 && at == 0 && simdgroup == 0 && lane < 8) {
  next_ticket[lane] = ticket[0];
}
