// A linear recurrence with a state of 8 rows in the registers of a simdgroup:
//
//   S = S gate_t + d_t k_t^T        y_t = S q_t        S (8 rows of V_DIM, K_DIM)
//   d_t = beta_t (v_t - S gate_t k_t)   with DELTA, the gated delta rule: what k_t reads so far is replaced
//   d_t = beta_t v_t                    without, as in Mamba 2
//
// gate_t scales S as a whole, or column by column (VECTOR).  gated_delta.metal says who does what.
//
// S is K_DIM / 8 matrices side by side (matrix.h): a lane holds two neighbours of each, all in one row of
// S.  A product does not depend on the order of the K_DIM columns, so two matrices share 16 of them such
// that a lane's four lie together, and move in one load of 16 bytes, 64 bytes a row and load:
//
//   column     0 1 | 2 3 | 4 5 | 6 7 | 8 9 |10 11|12 13|14 15
//   matrix      0     1     0     1     0     1     0     1
//   its col    0 1   0 1   2 3   2 3   4 5   4 5   6 7   6 7
//
// Both forms below find S where they need it:
//
//   row by row   a product with k_t or q_t is a sum over a lane's elements, then over the 4 lanes of a row
//   a chunk      CHUNK rows at once, S as the left side of products with 8x8 matrices
//
// A chunk.  Let G(i, t) be gate_i+1 ... gate_t, and S0 the state before the chunk.  Written out,
//
//   S_t = S0 G(-1, t) + sum over i <= t of d_i (k_i G(i, t))^T
//   d_t = beta_t (v_t - S0 (k_t G(-1, t)) - sum over i < t of d_i (k_i G(i, t) . k_t))
//   y_t = S0 (q_t G(-1, t)) + sum over i <= t of d_i (k_i G(i, t) . q_t)
//
// So prepare_row leaves in threadgroup memory, for all simdgroups of a head,
//
//   q_in[t]  = q_t G(-1, t)     k_in[t] = k_t G(-1, t)     k_out[t] = k_t G(t, last)     decay = G(-1, last)
//   seen[t, i] = k_i G(i, t) . q_t  for i <= t        known[t, i] = beta_t k_i G(i, t) . k_t  for i < t
//
// and advance_chunk needs no gate.  The system for d is triangular and is solved from above, as the row
// by row form does, with 8 right sides in a simdgroup: a lane has two columns of a row, so d_t goes to
// all of them by row_sum.  G is a product of at most CHUNK gates and nothing is divided by one, so gates
// may be 0.  Yang, Kautz and Hatamizadeh (2024), Gated Delta Networks; Dao and Gu (2024), SSD.
//
// With NORM, k_t and q_t above are the given rows times numbers of their own, of_k and of_q, that make
// their lengths 1 and q_scale.  S, k and q only meet in products, so no element is normalised: of_k and
// of_q go into d_t and y_t,
//
//   D_t = of_k_t d_t = of_k_t beta_t (v_t - of_k_t (S k_t))      S = S gate_t + D_t k_t^T      y_t = of_q_t (S q_t)
#include "activations.h"
#include "matrix.h"
#include "words.h"

#define CHUNK 8  // a side of a matrix

// What is given instead of the gate and beta of a row.
#define GATE_GIVEN 0     // the gate; the same in the others is a gate a head
#define GATE_SOFTPLUS 1  // a: gate = exp(-exp(a_log) softplus(a + bias))
#define GATE_BOUNDED 2   // a: gate = exp(low sigmoid(exp(a_log) (a + bias)))
#define GATE_TIME 3      // dt: beta = softplus(dt + bias), limited to low ... high; gate = exp(-exp(a_log) beta)

// Makes gate and beta of what is given in their places.  BETA: 0, beta is given; else its logit, and
// BETA is what the sigmoid is multiplied by.  rate: exp(a_log).
template <int GATE, int BETA>
METAL_FUNC void make_gates(thread float& gate, thread float& beta, float rate, float bias, float low,
                           float high) {
  if (BETA > 0) {
    beta = float(BETA) * sigmoid(beta);
  }
  if (GATE == GATE_SOFTPLUS) {
    gate = exponential(-rate * softplus(gate + bias));
  }
  if (GATE == GATE_BOUNDED) {
    gate = exponential(low * sigmoid(rate * (gate + bias)));
  }
  if (GATE == GATE_TIME) {
    beta = metal::min(metal::max(softplus(gate + bias), low), high);
    gate = exponential(-rate * beta);
  }
}

// The column of S that lies in column c of matrix d, and the inverse: d * 8 + c of a column.
METAL_FUNC int column_of(int d, int c) {
  return d / 2 * 16 + c / 2 * 4 + d % 2 * 2 + c % 2;
}

METAL_FUNC int place_of(int column) {
  return column / 16 * 16 + column % 4 / 2 * 8 + column % 16 / 4 * 2 + column % 2;
}

// The 8 rows at `from`, in a pool of rows of K_PARTS matrices, and back.
template <int K_PARTS>
METAL_FUNC void load_state(const device float* from, int row, int col,
                           thread metal::simdgroup_matrix<float, 8, 8>* state) {
#pragma unroll
  for (int d = 0; d < K_PARTS; d += 2) {
    thread uint words[4];
    load_words<4>((const device uint*)(from + row * K_PARTS * 8 + column_of(d, col)), words);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      state[d].thread_elements()[e] = as_type<float>(words[e]);
      state[d + 1].thread_elements()[e] = as_type<float>(words[2 + e]);
    }
  }
}

template <int K_PARTS>
METAL_FUNC void store_state(device float* to, int row, int col,
                            thread metal::simdgroup_matrix<float, 8, 8>* state) {
#pragma unroll
  for (int d = 0; d < K_PARTS; d += 2) {
    thread uint words[4];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      words[e] = as_type<uint>(float(state[d].thread_elements()[e]));
      words[2 + e] = as_type<uint>(float(state[d + 1].thread_elements()[e]));
    }
    store_words<4>((device uint*)(to + row * K_PARTS * 8 + column_of(d, col)), words);
  }
}

// Four neighbours, in one load or, with VEC 1, in four.
template <typename T, int VEC>
METAL_FUNC void load_four(const device T* from, thread float* to) {
#pragma unroll
  for (int i = 0; i < 4; i += VEC) {
    load_run<T, VEC>(from + i, to + i);
  }
}

// One row: q and k of a head, its gate or, with VECTOR, its gates, and v of this lane's row of the state.
// Returns y of that row.
template <typename T, typename G, int K_PARTS, int VEC, bool DELTA, bool VECTOR, bool NORM>
METAL_FUNC float advance_row(thread metal::simdgroup_matrix<float, 8, 8>* state, const device T* q,
                             const device T* k, const device G* gates, float gate, float beta,
                             float v, float eps, float q_scale, int col) {
  float known = 0.0f;
  float square_k = 0.0f;
  float square_q = 0.0f;
  thread float of_columns[4];  // of S in matrices d and d + 1
  thread float gate_of_columns[4];
#pragma unroll
  for (int d = 0; d < K_PARTS; d += 2) {
    const int at = column_of(d, col);
    load_four<T, VEC>(k + at, of_columns);
    if (VECTOR) {
      load_four<G, VEC>(gates + at, gate_of_columns);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      state[d + e / 2].thread_elements()[e % 2] *= VECTOR ? gate_of_columns[e] : gate;
      if (DELTA) {
        known += state[d + e / 2].thread_elements()[e % 2] * of_columns[e];
      }
      square_k += NORM ? of_columns[e] * of_columns[e] : 0.0f;
    }
    if (NORM) {
      load_four<T, VEC>(q + at, of_columns);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        square_q += of_columns[e] * of_columns[e];
      }
    }
  }
  float of_k = 1.0f;
  float of_q = 1.0f;
  if (NORM) {
    of_k = metal::precise::rsqrt(row_sum(square_k) + eps);
    of_q = q_scale * metal::precise::rsqrt(row_sum(square_q) + eps);
  }
  const float delta = of_k * beta * (DELTA ? v - of_k * row_sum(known) : v);
  float y = 0.0f;
#pragma unroll
  for (int d = 0; d < K_PARTS; d += 2) {
    const int at = column_of(d, col);
    thread float of_query[4];
    load_four<T, VEC>(k + at, of_columns);
    load_four<T, VEC>(q + at, of_query);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      state[d + e / 2].thread_elements()[e % 2] += delta * of_columns[e];
      y += state[d + e / 2].thread_elements()[e % 2] * of_query[e];
    }
  }
  return of_q * row_sum(y);
}

// Row t of a chunk in threadgroup memory, by one simdgroup: a lane has every 32nd column.
// q, k, gates: row 0 of the chunk, rows q_step, k_step and gate_step elements apart.  gate, beta: lane i has
// those of row i; with VECTOR gates are read instead.  rows: q_in, k_out and, with DELTA, k_in behind one
// another, CHUNK rows STRIDE apart each.  seen and known: zeros above the diagonal.  norms: of_k and of_q of
// all rows, with NORM.
template <typename T, typename G, int K_DIM, int STRIDE, bool DELTA, bool VECTOR, bool NORM>
METAL_FUNC void prepare_row(const device T* q, const device T* k, const device G* gates, int q_step,
                            int k_step, int gate_step, int t, float gate_of_lane,
                            float beta_of_lane, float eps, float q_scale, int lane,
                            threadgroup float* rows, threadgroup float* decay,
                            threadgroup float* seen, threadgroup float* known,
                            threadgroup float* norms) {
  constexpr int TURNS = (K_DIM + 31) / 32;
  thread float own_q[TURNS];
  thread float own_k[TURNS];
  thread float gate[TURNS];  // G(i, t), then G(t, i)
#pragma unroll
  for (int j = 0; j < TURNS; j++) {
    const int d = lane + j * 32;
    own_q[j] = d < K_DIM ? float(q[t * q_step + d]) : 0.0f;
    own_k[j] = d < K_DIM ? float(k[t * k_step + d]) : 0.0f;
    gate[j] = 1.0f;
  }
  float beta = metal::simd_shuffle(beta_of_lane, ushort(t));
  if (NORM) {
    float square_k = 0.0f;
    float square_q = 0.0f;
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
      square_k += own_k[j] * own_k[j];
      square_q += own_q[j] * own_q[j];
    }
    square_k = metal::simd_sum(square_k);
    square_q = metal::simd_sum(square_q);
    const float of_k = metal::precise::rsqrt(square_k + eps);
    if (lane == 0) {
      norms[t] = of_k;
      norms[CHUNK + t] = q_scale * metal::precise::rsqrt(square_q + eps);
    }
    beta *= of_k * of_k;
  }
  for (int i = t; i >= 0; i--) {
    const float gate_of_row = metal::simd_shuffle(gate_of_lane, ushort(i));
    float of_q = 0.0f;
    float of_k = 0.0f;
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
      const int d = lane + j * 32;
      if (d < K_DIM) {
        const float other = float(k[i * k_step + d]) * gate[j];
        of_q += other * own_q[j];
        of_k += other * own_k[j];
        gate[j] *= VECTOR ? float(gates[i * gate_step + d]) : gate_of_row;
      }
    }
    of_q = metal::simd_sum(of_q);
    if (DELTA) {
      of_k = metal::simd_sum(of_k);
    }
    if (lane == 0) {
      seen[t * CHUNK + i] = of_q;
      known[t * CHUNK + i] = i < t ? beta * of_k : 0.0f;
    }
  }
  if (lane > t && lane < CHUNK) {
    seen[t * CHUNK + lane] = 0.0f;
    known[t * CHUNK + lane] = 0.0f;
  }
  float gate_behind = 1.0f;  // G(t, last)
  for (int i = t + 1; i < CHUNK; i++) {
    gate_behind *= metal::simd_shuffle(gate_of_lane, ushort(i));
  }
#pragma unroll
  for (int j = 0; j < TURNS; j++) {
    const int d = lane + j * 32;
    if (d < K_DIM) {
      const int place = place_of(d);
      rows[t * STRIDE + place] = own_q[j] * gate[j];
      if (DELTA) {
        rows[(2 * CHUNK + t) * STRIDE + place] = own_k[j] * gate[j];
      }
      if (t == CHUNK - 1) {
        decay[place] = gate[j];
      }
      float after = VECTOR ? own_k[j] : own_k[j] * gate_behind;
      for (int i = t + 1; VECTOR && i < CHUNK; i++) {
        after *= float(gates[i * gate_step + d]);
      }
      rows[(CHUNK + t) * STRIDE + place] = after;
    }
  }
}

// All rows of a chunk: v of rows col and col + 1 become y of them, for this lane's row of the state.  beta,
// of_k, of_q: of the same two rows.
template <int K_PARTS, int STRIDE, bool DELTA>
METAL_FUNC void advance_chunk(thread metal::simdgroup_matrix<float, 8, 8>* state,
                              const threadgroup float* rows, const threadgroup float* decay,
                              const threadgroup float* seen, const threadgroup float* known,
                              const thread float* beta, const thread float* of_k,
                              const thread float* of_q, thread float* v, int row, int col) {
  // S0 times q_in and k_in.
  thread metal::simdgroup_matrix<float, 8, 8> read[2];
  metal::simdgroup_matrix<float, 8, 8> delta;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    read[0].thread_elements()[e] = 0.0f;
    read[1].thread_elements()[e] = 0.0f;
  }
#pragma unroll
  for (int d = 0; d < K_PARTS; d++) {
    multiply_each<DELTA ? 2 : 1, 2 * CHUNK * STRIDE, STRIDE, true>(read, state[d], rows + d * 8, row,
                                                                   col);
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float reads = of_k[e] * read[1].thread_elements()[e];
    delta.thread_elements()[e] = of_k[e] * beta[e] * (DELTA ? v[e] - reads : v[e]);
  }
  if (DELTA) {
#pragma unroll
    for (int i = 0; i < CHUNK - 1; i++) {
      const float mine = delta.thread_elements()[i % 2];
      const float solved = row_sum(col == i - i % 2 ? mine : 0.0f);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        delta.thread_elements()[e] -= known[(col + e) * CHUNK + i] * solved;
      }
    }
  }
  multiply_each<1, 0, CHUNK, true>(read, delta, seen, row, col);
#pragma unroll
  for (int e = 0; e < 2; e++) {
    v[e] = of_q[e] * read[0].thread_elements()[e];
  }
#pragma unroll
  for (int d = 0; d < K_PARTS; d++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      state[d].thread_elements()[e] *= decay[d * 8 + col + e];
    }
  }
  multiply_each<K_PARTS, 8, STRIDE, false>(state, delta, rows + CHUNK * STRIDE, row, col);
}
