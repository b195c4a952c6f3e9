// Tiles of keys in threadgroup memory, and attention of 8 query rows to them by 8x8 matrices.
//
// varlen_prefill.metal says how rows, simdgroups and tiles are laid out.  A tile is KEYS rows of
// threadgroup memory, STRIDE elements from one to the next.
#include "matrix.h"

// Bring KEYS rows of one KV head from the store to a tile, by THREADS threads: `loads` of 16 bytes a
// row, `stride` of them from row to row of the tile.  A thread asks for 4 before it stores the first,
// since latency is what they cost.
template <int KEYS, int THREADS>
METAL_FUNC void fetch_rows(const device uint4* store, const threadgroup int* slots, int kv_heads,
                           int kv_head, int loads, int stride, int thread_index,
                           threadgroup uint4* tile) {
  for (int first = thread_index; first < KEYS * loads; first += 4 * THREADS) {
    thread uint4 part[4];
#pragma unroll
    for (int f = 0; f < 4; f++) {
      const int i = metal::min(first + f * THREADS, KEYS * loads - 1);
      part[f] = store[(size_t(slots[i / loads]) * kv_heads + kv_head) * loads + i % loads];
    }
#pragma unroll
    for (int f = 0; f < 4; f++) {
      const int i = first + f * THREADS;
      if (i < KEYS * loads) {
        tile[i / loads * stride + i % loads] = part[f];
      }
    }
  }
}

// The same in two steps, so that rows are under way while the tile before them is attended to.  A thread
// holds (KEYS * LOADS + THREADS - 1) / THREADS loads between them.
template <int KEYS, int THREADS, int LOADS>
METAL_FUNC void ask_rows(const device uint4* store, const threadgroup int* slots, int kv_heads,
                         int kv_head, int thread_index, thread uint4* part) {
#pragma unroll
  for (int f = 0; f < (KEYS * LOADS + THREADS - 1) / THREADS; f++) {
    const int i = metal::min(thread_index + f * THREADS, KEYS * LOADS - 1);
    part[f] = store[(size_t(slots[i / LOADS]) * kv_heads + kv_head) * LOADS + i % LOADS];
  }
}

template <int KEYS, int THREADS, int LOADS>
METAL_FUNC void put_rows(const thread uint4* part, int stride, int thread_index,
                         threadgroup uint4* tile) {
#pragma unroll
  for (int f = 0; f < (KEYS * LOADS + THREADS - 1) / THREADS; f++) {
    const int i = thread_index + f * THREADS;
    if (i < KEYS * LOADS) {
      tile[i / LOADS * stride + i % LOADS] = part[f];
    }
  }
}

// One step of the online softmax, in base 2: the tile k, v of keys `base` .. base + KEYS - 1, of which
// this lane's row sees those from `from` to `to` - 1.  m, l and o are of its row; a lane adds its own
// part to l.  A score is the product times `scale`; if CAPPED, `cap` times the tanh of that.  All lanes
// of a simdgroup call it together.
template <typename T, int K_DIM, int V_DIM, int KEYS, int K_STRIDE, int V_STRIDE, bool CAPPED>
METAL_FUNC void attend_tile(thread metal::simdgroup_matrix<T, 8, 8>* query, const threadgroup T* k,
                            const threadgroup T* v, int base, int from, int to, float scale,
                            float cap, int row, int col, thread float& m, thread float& l,
                            thread metal::simdgroup_matrix<float, 8, 8>* o) {
  constexpr float MASKED = -2e30f;  // twice LOWEST, where every maximum starts
  constexpr int K_PARTS = K_DIM / 8;
  constexpr int V_PARTS = V_DIM / 8;
  constexpr int KEY_PARTS = KEYS / 8;

  thread metal::simdgroup_matrix<float, 8, 8> score[KEY_PARTS];
#pragma unroll
  for (int j = 0; j < KEY_PARTS; j++) {
    score[j].thread_elements()[0] = 0.0f;
    score[j].thread_elements()[1] = 0.0f;
  }
#pragma unroll
  for (int d = 0; d < K_PARTS; d++) {
    multiply_each<KEY_PARTS, 8 * K_STRIDE, K_STRIDE, true>(score, query[d], k + d * 8, row, col);
  }

  float top = m;
#pragma unroll
  for (int j = 0; j < KEY_PARTS; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int key = base + j * 8 + col + e;
      float s = score[j].thread_elements()[e] * scale;
      if (CAPPED) {
        s = cap * metal::precise::tanh(s);
      }
      s = key >= from && key < to ? s : MASKED;
      score[j].thread_elements()[e] = s;
      top = metal::max(top, s);
    }
  }
  top = row_max(top);
  // Arguments are finite and not above 0, so the fast exp2 does, as in MLX's attention.
  const float fade = metal::fast::exp2(m - top);
  m = top;
  l *= fade;
#pragma unroll
  for (int d = 0; d < V_PARTS; d++) {
    o[d].thread_elements()[0] *= fade;
    o[d].thread_elements()[1] *= fade;
  }

#pragma unroll
  for (int j = 0; j < KEY_PARTS; j++) {
    metal::simdgroup_matrix<T, 8, 8> weight;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float w = metal::fast::exp2(score[j].thread_elements()[e] - m);
      l += w;
      weight.thread_elements()[e] = T(w);
    }
    multiply_each<V_PARTS, 8, V_STRIDE, false>(o, weight, v + j * 8 * V_STRIDE, row, col);
  }
}
