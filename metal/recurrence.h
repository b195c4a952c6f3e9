// A linear recurrence with a state of 8 rows in the registers of a simdgroup:
//
//   S = S gate_t + d_t k_t^T        y_t = S q_t        S (8 rows of V_DIM, K_DIM)
//   d_t = beta_t (v_t - S gate_t k_t)   with DELTA, the gated delta rule: k_t's old value is replaced
//   d_t = beta_t v_t                    without, as in Mamba 2
//
// gate_t scales S as a whole, or column by column (VECTOR).  gated_delta.metal says who does what.
//
// A lane has the row of S that it would have of a matrix (matrix.h), and of each 16 columns four that lie
// together, and move in one load of 16 bytes, 64 bytes a row and load:
//
//   column          0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15
//   matrix_col         0         2          4            6
//
// A product with k_t or q_t is a sum over a lane's elements, then over the 4 lanes of a row.  Both are of
// the same S, so that no sum waits for another:
//
//   S = S gate_t      d_t = beta_t (v_t - S k_t)      y_t = S q_t + d_t (k_t . q_t)      S = S + d_t k_t^T
//
// k_t . q_t belongs to the row, not to S: measure_row finds it before, for TILE rows at once, one in each
// row of lanes.  advance_row is the only way through a row, whether its inputs lie in threadgroup memory
// (TILED) or not, and its sums have one order.
//
// Why rows, not products of matrices over chunks of rows (the form of Yang et al. and of SSD): those need
// as many multiplications in float32, and simdgroup matrices have the ALU's throughput; besides, rows of
// a chunk depend on each other by a triangular system.  On an H200, 8 prompts of 512 rows took less time
// row by row, even when each row waited for device memory.
//
// With NORM, k_t and q_t above are the given rows times numbers of their own, of_k and of_q, that make
// their lengths 1 and q_scale.  S, k and q only meet in products, so no element is normalised: of_k and
// of_q go into d_t and y_t,
//
//   D_t = of_k_t beta_t (v_t - of_k_t (S k_t))      y_t = of_q_t (S q_t + D_t (k_t . q_t))      S = S + D_t k_t^T
#include "activations.h"
#include "matrix.h"
#include "words.h"

#define TILE 8  // rows: as many as lanes have in a matrix

// GATE: what `gates` holds.  Only finished gates may differ by column (VECTOR).
#define GATE_GIVEN 0     // the finished gate
#define GATE_SOFTPLUS 1  // a: gate = exp(-exp(a_log) softplus(a + bias))
#define GATE_BOUNDED 2   // a: gate = exp(-low sigmoid(exp(a_log) (a + bias)))
#define GATE_TIME 3      // dt: beta = softplus(dt + bias), limited to low ... high; gate = exp(-exp(a_log) beta)

// Turns what the inputs hold into gate and beta.  BETA: 0, beta is finished; else it is a logit, and BETA
// multiplies its sigmoid.  rate: exp(a_log).
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
    gate = exponential(-low * sigmoid(rate * (gate + bias)));
  }
  if (GATE == GATE_TIME) {
    beta = softplus(gate + bias);
    beta = beta < low ? low : beta > high ? high : beta;  // not min and max, which lose NaN
    gate = exponential(-rate * beta);
  }
}

// The first of a lane's elements i ... i + 3 of its row of S; col: its matrix_col.
METAL_FUNC int column_of(int i, int col) {
  return i * 4 + col * 2;
}

// Loads a lane's elements of 8 rows, from an array whose rows have HELD * 4 columns; store_state is the
// reverse.
template <int HELD>
METAL_FUNC void load_state(const device float* from, int row, int col, thread float* state) {
#pragma unroll
  for (int i = 0; i < HELD; i += 4) {
    load_run<float, 4>(from + row * HELD * 4 + column_of(i, col), state + i);
  }
}

template <int HELD>
METAL_FUNC void store_state(device float* to, int row, int col, const thread float* state) {
#pragma unroll
  for (int i = 0; i < HELD; i += 4) {
    store_run<float, 4>(to + row * HELD * 4 + column_of(i, col), state + i);
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

// Rows begin ... begin + TILE of a head into registers, row end - 1 in place of those behind it: thread i of
// THREADS has every THREADS-th four elements.  from: the head in row 0, of rows `width` elements apart.
template <typename T, int K_DIM, int VEC, int THREADS>
METAL_FUNC void fetch_tile(const device T* from, int width, int begin, int end, int thread_index,
                           thread float* to) {
  constexpr int FOURS = TILE * K_DIM / 4;
#pragma unroll
  for (int j = 0; j < (FOURS + THREADS - 1) / THREADS; j++) {
    const int i = thread_index + j * THREADS;
    const int t = metal::min(begin + i / (K_DIM / 4), end - 1);
    if (FOURS % THREADS == 0 || i < FOURS) {
      load_four<T, VEC>(from + size_t(t) * width + i % (K_DIM / 4) * 4, to + j * 4);
    }
  }
}

// From there into threadgroup memory, rows STRIDE apart: the first `count` rows.
template <int K_DIM, int STRIDE, int THREADS>
METAL_FUNC void put_tile(const thread float* from, int count, int thread_index,
                         threadgroup float* to) {
  constexpr int FOURS = TILE * K_DIM / 4;
#pragma unroll
  for (int j = 0; j < (FOURS + THREADS - 1) / THREADS; j++) {
    const int i = thread_index + j * THREADS;
    const int t = i / (K_DIM / 4);
    if (t < count) {
      *(threadgroup float4*)(to + t * STRIDE + i % (K_DIM / 4) * 4) =
          float4(from[j * 4], from[j * 4 + 1], from[j * 4 + 2], from[j * 4 + 3]);
    }
  }
}

// Four neighbours of a row: in a tile, or in device memory.
template <typename T, int VEC, bool TILED>
METAL_FUNC void read_four(const device T* from, const threadgroup float* tile, int at,
                          thread float* to) {
  if (TILED) {
    const float4 four = *(const threadgroup float4*)(tile + at);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  } else {
    load_four<T, VEC>(from + at, to);
  }
}

// k . q of a row, and of_k and of_q, for all lanes of a row of lanes.
template <typename T, int HELD, int VEC, bool NORM, bool TILED>
METAL_FUNC void measure_row(const device T* q, const device T* k, const threadgroup float* tile_q,
                            const threadgroup float* tile_k, float eps, float q_scale, int col,
                            thread float& both, thread float& of_k, thread float& of_q) {
  float square_k = 0.0f;
  float square_q = 0.0f;
  both = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; i += 4) {
    thread float key[4];
    thread float query[4];
    read_four<T, VEC, TILED>(k, tile_k, column_of(i, col), key);
    read_four<T, VEC, TILED>(q, tile_q, column_of(i, col), query);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      both += key[e] * query[e];
      square_k += NORM ? key[e] * key[e] : 0.0f;
      square_q += NORM ? query[e] * query[e] : 0.0f;
    }
  }
  both = row_sum(both);
  of_k = NORM ? metal::precise::rsqrt(row_sum(square_k) + eps) : 1.0f;
  of_q = NORM ? q_scale * metal::precise::rsqrt(row_sum(square_q) + eps) : 1.0f;
}

// One row advances HELD elements of the state.  v: the value for this lane's row of the state.
// beta: already multiplied by of_k.  both: k . q.  Returns S q after the row, not yet multiplied
// by of_q.
template <typename T, typename G, int HELD, int VEC, bool DELTA, bool VECTOR, bool TILED>
METAL_FUNC float advance_row(thread float* state, const device T* q,
                             const device T* k, const device G* gates,
                             const threadgroup float* tile_q, const threadgroup float* tile_k,
                             const threadgroup float* tile_gates, float gate, float beta, float v,
                             float of_k, float both, int col) {
  // Two sums each, so that fewer products wait for one another.
  thread float known[2] = {0.0f, 0.0f};
  thread float seen[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < HELD; i += 4) {
    // A compiler must not fetch the whole row before the first product: registers are few.
    if (TILED && i % 8 == 0) {
      simdgroup_barrier(mem_flags::mem_none);
    }
    const int at = column_of(i, col);
    thread float key[4];
    thread float query[4];
    thread float gate_of_columns[4];
    read_four<T, VEC, TILED>(k, tile_k, at, key);
    read_four<T, VEC, TILED>(q, tile_q, at, query);
    if (VECTOR) {
      read_four<G, VEC, TILED>(gates, tile_gates, at, gate_of_columns);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float own = state[i + e] * (VECTOR ? gate_of_columns[e] : gate);
      state[i + e] = own;
      known[e % 2] += DELTA ? own * key[e] : 0.0f;
      seen[e % 2] += own * query[e];
    }
  }
  const float y = row_sum(seen[0] + seen[1]);
  const float delta = beta * (DELTA ? v - of_k * row_sum(known[0] + known[1]) : v);
#pragma unroll
  for (int i = 0; i < HELD; i += 4) {
    thread float key[4];
    read_four<T, VEC, TILED>(k, tile_k, column_of(i, col), key);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      state[i + e] += delta * key[e];
    }
  }
  return y + delta * both;
}
