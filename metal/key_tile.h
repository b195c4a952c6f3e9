// Tiles of keys in threadgroup memory, and attention of 8 query rows to them by 8x8 matrices.
//
// varlen_prefill.metal says how rows, simdgroups and tiles are laid out.  A tile is KEYS rows of
// threadgroup memory, STRIDE elements from one to the next.
#include "matrix.h"
#include "quantised.h"

// A thread fetches a row in parts of 16 bytes.  Of a quantised row (quantised.h), a part is 8 values with
// their scale and low, converted to T on the way to the tile.

// Words that a thread holds of a part of a row, and elements of T in a part.
template <typename T, int BITS>
struct RowPart {
  enum {
    WORDS = BITS < 16 ? BITS / 4 + int(sizeof(T)) / 2 : 4,
    VALUES = BITS < 16 ? 8 : 16 / int(sizeof(T)),
  };
};

// Part `at` of the row of DIM values at `row`.
template <typename T, int BITS, int DIM, int GROUP_SIZE>
METAL_FUNC void ask_part(const device uint* row, int at, thread uint* held) {
  if (BITS >= 16) {
    load_words<4>(row + at * 4, held);
    return;
  }
  constexpr int PAIR = int(sizeof(T)) / 2;  // words of a scale and low
  constexpr int VALUES = DIM * BITS / 32;
  constexpr int COUNT = BITS / 4;
  // Two at once, if rows begin at multiples of two words.
  constexpr int W = BITS == 8 && DIM / GROUP_SIZE * PAIR % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int w = 0; w < COUNT; w += W) {
    load_words<W>(row + at * COUNT + w, held + w);
  }
  const device uint* affine = row + VALUES + at * 8 / GROUP_SIZE * PAIR;
#pragma unroll
  for (int w = 0; w < PAIR; w++) {
    held[COUNT + w] = affine[w];
  }
}

// The words that were asked for, as elements of T.
template <typename T, int BITS>
METAL_FUNC void put_part(const thread uint* held, threadgroup uint4* to) {
  if (BITS >= 16) {
    to[0] = uint4(held[0], held[1], held[2], held[3]);
    return;
  }
  constexpr int COUNT = BITS / 4;
  constexpr int QUADS = int(sizeof(T)) / 2;  // 16 bytes each
  constexpr int PER_WORD = 4 / int(sizeof(T));
  thread float affine[2];
  load_affine<T>(held + COUNT, affine);
  thread float x[8];
#pragma unroll
  for (int w = 0; w < COUNT; w++) {
    unpack_values<T, BITS>(held[w], affine, x + w * (32 / BITS));
  }
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    const thread float* from = x + i * 4 * PER_WORD;
    to[i] = uint4(pack<T>(from), pack<T>(from + PER_WORD), pack<T>(from + 2 * PER_WORD),
                  pack<T>(from + 3 * PER_WORD));
  }
}

// Which parts of KEYS rows of PARTS parts are a thread's, if it takes COUNT at a time, those of all THREADS
// row by row.  Where threads fill whole rows, a thread's rows lie a constant apart, so that their addresses
// differ by constants and need one register.
template <int PARTS, int KEYS, int THREADS, int COUNT>
struct PartsOf {
  enum {
    WHOLE = THREADS % PARTS == 0,
    ALL = KEYS * PARTS % (COUNT * THREADS) == 0,  // none is behind the last row
  };
  static METAL_FUNC int row(int first, int f) {
    return WHOLE ? first / PARTS + f * (THREADS / PARTS) : (first + f * THREADS) / PARTS;
  }
  static METAL_FUNC int part(int first, int f) {
    return WHOLE ? first % PARTS : (first + f * THREADS) % PARTS;
  }
};

// COUNT parts of KEYS rows of one KV head; this thread's first is `first`.  Ask for several before the
// first is put to the tile: their cost is latency.
template <typename T, int BITS, int DIM, int GROUP_SIZE, int KEYS, int THREADS, int COUNT>
METAL_FUNC void ask_rows(const device uint* store, const threadgroup int* slots, int kv_heads,
                         int kv_head, int first, thread uint* held) {
  constexpr int AFFINE = BITS < 16 ? DIM / GROUP_SIZE * int(sizeof(T)) / 2 : 0;
  constexpr int ROW = DIM * BITS / 32 + AFFINE;  // words
  typedef PartsOf<DIM / RowPart<T, BITS>::VALUES, KEYS, THREADS, COUNT> Own;
#pragma unroll
  for (int f = 0; f < COUNT; f++) {
    const int key = Own::ALL ? Own::row(first, f) : metal::min(Own::row(first, f), KEYS - 1);
    const size_t row = size_t(slots[key]) * kv_heads + kv_head;
    ask_part<T, BITS, DIM, GROUP_SIZE>(store + row * ROW, Own::part(first, f),
                                       held + f * RowPart<T, BITS>::WORDS);
  }
}

// Put them to the tile, whose rows are STRIDE elements apart.
template <typename T, int BITS, int DIM, int STRIDE, int KEYS, int THREADS, int COUNT>
METAL_FUNC void put_rows(const thread uint* held, int first, threadgroup uint4* tile) {
  constexpr int PART = RowPart<T, BITS>::VALUES;
  constexpr int PER_QUAD = 16 / int(sizeof(T));
  typedef PartsOf<DIM / PART, KEYS, THREADS, COUNT> Own;
#pragma unroll
  for (int f = 0; f < COUNT; f++) {
    const int key = Own::row(first, f);
    if (Own::ALL || key < KEYS) {
      put_part<T, BITS>(held + f * RowPart<T, BITS>::WORDS,
                        tile + key * (STRIDE / PER_QUAD) + Own::part(first, f) * (PART / PER_QUAD));
    }
  }
}

// Bring KEYS rows to a tile, by all threads of a threadgroup.
template <typename T, int BITS, int DIM, int GROUP_SIZE, int STRIDE, int KEYS, int THREADS>
METAL_FUNC void fetch_rows(const device uint* store, const threadgroup int* slots, int kv_heads,
                           int kv_head, int thread_index, threadgroup uint4* tile) {
  constexpr int COUNT = (KEYS * (DIM / RowPart<T, BITS>::VALUES) + THREADS - 1) / THREADS;
  constexpr int AT_ONCE = COUNT < 4 ? COUNT : 4;
  thread uint held[AT_ONCE * RowPart<T, BITS>::WORDS];
  for (int f = 0; f < COUNT; f += AT_ONCE) {
    const int first = thread_index + f * THREADS;
    ask_rows<T, BITS, DIM, GROUP_SIZE, KEYS, THREADS, AT_ONCE>(store, slots, kv_heads, kv_head,
                                                               first, held);
    put_rows<T, BITS, DIM, STRIDE, KEYS, THREADS, AT_ONCE>(held, first, tile);
  }
}

// One step of the online softmax, in base 2: the tile k, v of keys `base` .. base + KEYS - 1;
// this lane's row sees those from `from` to `to` - 1.  m, l and o are of its row; a lane adds its own
// part to l.  A score is the product times `scale`; if CAPPED, `cap` times the tanh of that.  All threads
// call it together; where `used` is false, rows do not exist.
//
// PARTNERS simdgroups that follow one another have the same rows, and each has its share of v's columns.
// They share the keys to be scored too, and exchange `scores`, KEYS a row; if a tile has too few keys for
// that, each scores all.  The order of sums is the same in every case.
template <typename T, int K_DIM, int V_DIM, int KEYS, int K_STRIDE, int V_STRIDE, bool CAPPED,
          int PARTNERS>
METAL_FUNC void attend_tile(thread metal::simdgroup_matrix<T, 8, 8>* query, const threadgroup T* k,
                            const threadgroup T* v, bool used, int simdgroup_index,
                            threadgroup float* scores, int base, int from, int to, float scale,
                            float cap, int row, int col, thread float& m, thread float& l,
                            thread metal::simdgroup_matrix<float, 8, 8>* o) {
  constexpr float MASKED = -2e30f;  // twice LOWEST, where every maximum starts
  constexpr int K_PARTS = K_DIM / 8;
  constexpr int V_PARTS = V_DIM / 8 / PARTNERS;
  constexpr int KEY_PARTS = KEYS / 8;
  constexpr bool SHARED = PARTNERS > 1 && KEY_PARTS % PARTNERS == 0;
  constexpr int OWN = SHARED ? KEY_PARTS / PARTNERS : KEY_PARTS;
  const int partner = simdgroup_index % PARTNERS;

  thread metal::simdgroup_matrix<float, 8, 8> score[KEY_PARTS];
  threadgroup float* at = scores + simdgroup_index / PARTNERS * KEYS * 8 + row * 8 + col;
  if (used) {
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      score[j].thread_elements()[0] = 0.0f;
      score[j].thread_elements()[1] = 0.0f;
    }
    const threadgroup T* own = SHARED ? k + partner * OWN * 8 * K_STRIDE : k;
#pragma unroll
    for (int d = 0; d < K_PARTS; d++) {
      multiply_each<OWN, 8 * K_STRIDE, K_STRIDE, true>(score, query[d], own + d * 8, row, col);
    }
#pragma unroll
    for (int j = 0; SHARED && j < OWN; j++) {
      at[(partner * OWN + j) * 64] = score[j].thread_elements()[0];
      at[(partner * OWN + j) * 64 + 1] = score[j].thread_elements()[1];
    }
  }
  if (SHARED) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (!used) {
    return;
  }
#pragma unroll
  for (int j = 0; SHARED && j < KEY_PARTS; j++) {
    score[j].thread_elements()[0] = at[j * 64];
    score[j].thread_elements()[1] = at[j * 64 + 1];
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
    multiply_each<V_PARTS, 8, V_STRIDE, false>(
        o, weight, v + j * 8 * V_STRIDE + partner * V_PARTS * 8, row, col);
  }
}
