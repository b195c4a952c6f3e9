// gated_rms_norm: the norm of a recurrent layer's result, and the gate beside it, in one launch.
//
//   x       (N, GROUPS, DIM) of T        results of the recurrence; each group is normalised by itself
//   z       (N, Z_WIDTH) of T            the gate: GROUPS * DIM columns from Z_START on
//   weight  (DIM,) or, with WIDE, (GROUPS, DIM) of T
//   y       (N, GROUPS, DIM) of T
//   EPS     the bits of a float (a template value is an integer)
//
//   y = norm(x) * weight * act(z)        act: SiLU, or with SIGMOID the sigmoid
//   y = norm(x * act(z)) * weight        with GATE_FIRST
//
// Layout.  A group of DIM elements belongs to THREADS threads.  A group of a head takes one simdgroup, and
// PACK of them are a threadgroup; a group of a whole row takes a threadgroup, with PACK 1.  Grid: x: groups
// of a row, y: rows.  A thread holds VEC elements a turn, as in add_rms_norm.metal.
//
//   PACK 4   | simdgroup 0 | simdgroup 1 | simdgroup 2 | simdgroup 3 |     four heads of 128
//   PACK 1   | simdgroup 0   1   2   3   ...                         |     one row of 4,096
//
// Rounding.  The normalised element, its product with the weight, x * act(z) with GATE_FIRST and the result
// are rounded to T, as mlx-lm's layers round them.  act(z) is in float32, as in Qwen3-Next; mlx-lm rounds
// SiLU to T in layers of Mamba 2.
//
// Why it is correct.  Elements stay in registers from the first pass to the second.  Squares of a
// simdgroup are added by simd_sum; those of several through threadgroup memory, behind one barrier, by every
// simdgroup in the same order.  A simdgroup past the last group (PACK) and threads past DIM neither read nor
// write, but take part in collectives.
//
// Cost.  Reads x and z and writes y once.  Apart they are two launches, and x is moved twice.
#include "activations.h"
#include "rms_norm.h"
#include "words.h"

// --- kernel body ---
constexpr int SIMDGROUPS = THREADS / 32;  // of a group
constexpr int TURNS = (DIM + THREADS * VEC - 1) / (THREADS * VEC);

threadgroup float squares[SIMDGROUPS];

const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int group = int(threadgroup_position_in_grid.x) * PACK + simdgroup / SIMDGROUPS;
const int limit = group < GROUPS ? DIM : 0;
const int first = (simdgroup % SIMDGROUPS * 32 + lane) * VEC;
const size_t row = size_t(threadgroup_position_in_grid.y);
const size_t own = (row * GROUPS + group) * DIM;
const size_t of_gate = row * Z_WIDTH + Z_START + group * DIM;

thread float held[TURNS * VEC];
thread float gate[TURNS * VEC];
float square = 0.0f;
#pragma unroll
for (int t = 0; t < TURNS; t++) {
  const int at = first + t * THREADS * VEC;
  if (at < limit) {
    load_run<T, VEC>(x + own + at, held + t * VEC);
    load_run<T, VEC>(z + of_gate + at, gate + t * VEC);
#pragma unroll
    for (int e = 0; e < VEC; e++) {
      const float act = SIGMOID ? sigmoid(gate[t * VEC + e]) : silu(gate[t * VEC + e]);
      gate[t * VEC + e] = act;
      if (GATE_FIRST) {
        held[t * VEC + e] = float(T(held[t * VEC + e] * act));
      }
      square += held[t * VEC + e] * held[t * VEC + e];
    }
  }
}

square = metal::simd_sum(square);
if (SIMDGROUPS > 1) {
  if (lane == 0) {
    squares[simdgroup % SIMDGROUPS] = square;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  square = lane < SIMDGROUPS ? squares[lane] : 0.0f;
  square = metal::simd_sum(square);
}
const float inverse_rms = metal::precise::rsqrt(square / float(DIM) + as_type<float>(EPS));

#pragma unroll
for (int t = 0; t < TURNS; t++) {
  const int at = first + t * THREADS * VEC;
  if (at < limit) {
#pragma unroll
    for (int e = 0; e < VEC; e++) {
      const float w = float(weight[(WIDE ? group * DIM : 0) + at + e]);
      const float normed = rms_normed<T>(held[t * VEC + e], inverse_rms, w);
      held[t * VEC + e] = GATE_FIRST ? normed : normed * gate[t * VEC + e];
    }
    store_run<T, VEC>(y + own + at, held + t * VEC);
  }
}
