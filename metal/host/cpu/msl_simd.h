// Barriers, and the functions by which the lanes of a simdgroup (or of a quad) share values.
//
// Lanes are fibers here: each gives its value, waits for the others, then takes what it needs.  All
// lanes that exist must come to the same line; on a GPU the others' values would be undefined.
#pragma once

#include "runtime.h"

#define HOST_SITE metal_host::Site site = metal_host::Site::here()

namespace metal {
enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(unsigned(a) | unsigned(b));
}

inline void threadgroup_barrier(mem_flags flags, HOST_SITE) {
  metal_host::group_barrier(site, unsigned(flags));
}
inline void simdgroup_barrier(mem_flags flags, HOST_SITE) {
  metal_host::simd_barrier(site, unsigned(flags));
}

namespace host {
using metal_host::Exchange;
using metal_host::Site;

// What MSL lets lanes share: no bool, no 8-byte integers, no bfloat (MLX adds those itself).
template <class T>
constexpr bool narrow = is_arithmetic_v<T> && sizeof(T) <= 4 && !is_same_v<T, bool> &&
                        !is_same_v<T, bfloat>;
template <class T>
constexpr bool shareable_v = narrow<T>;
template <class T, int N>
constexpr bool shareable_v<vec<T, N>> = narrow<T>;
template <class T>
concept shareable = shareable_v<T>;

template <class T>
inline const Exchange& meet_lanes(Site site, const char* what, const T& value,
                                  void (*finish)(Exchange&) = nullptr) {
  static_assert(sizeof(T) <= metal_host::kValueBytes);
  return metal_host::simd_meet(site, what, &value, sizeof(T), finish);
}
template <class T>
inline T load(const unsigned char* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
inline T given(const Exchange& e, unsigned lane) {
  return load<T>(e.value[lane]);
}
inline unsigned lane() { return metal_host::self->lane; }

inline bool exists(const Exchange& e, unsigned lane) { return lane < 32 && e.lanes >> lane & 1; }

// The value of a lane that has to exist.
template <class T>
inline T from_lane(Site site, const char* what, T value, unsigned source) {
  const Exchange& e = meet_lanes(site, what, value);
  if (!exists(e, source))
    metal_host::fault("lane", site, "%s: there is no lane %d", what, int(source));
  return given<T>(e, source);
}
// The lane's own value where the other lane would lie beyond the end.
template <class T>
inline T from_neighbour(Site site, const char* what, T value, unsigned source) {
  const Exchange& e = meet_lanes(site, what, value);
  return exists(e, source) ? given<T>(e, source) : value;
}

// One result for all: neighbours are combined pairwise, as hardware does it, not left to right.
template <class Op, class T>
inline T reduce(Site site, const char* what, T value) {
  const Exchange& e = meet_lanes(site, what, value, [](Exchange& x) {
    const int n = __builtin_popcount(x.lanes);
    T v[32];
    for (int i = 0; i < n; i++) v[i] = given<T>(x, i);
    for (int stride = 1; stride < n; stride *= 2)
      for (int i = 0; i + stride < n; i += 2 * stride) v[i] = Op::apply(v[i], v[i + stride]);
    __builtin_memcpy(x.result[0], v, sizeof(T));
  });
  return load<T>(e.result[0]);
}

// Lane i gets the combination of lanes 0 .. i, or 0 .. i - 1.
template <class Op, bool inclusive, class T>
inline T scan(Site site, const char* what, T value) {
  const Exchange& e = meet_lanes(site, what, value, [](Exchange& x) {
    const int n = __builtin_popcount(x.lanes);
    T sum = T(Op::identity);
    for (int i = 0; i < n; i++) {
      const T next = Op::apply(sum, given<T>(x, i));
      const T mine = inclusive ? next : sum;
      __builtin_memcpy(x.result[i], &mine, sizeof(T));
      sum = next;
    }
  });
  return load<T>(e.result[lane()]);
}

template <class Op, class T>
inline T reduce_quad(Site site, const char* what, T value) {
  const Exchange& e = meet_lanes(site, what, value);
  const unsigned q = lane() & ~3u;
  return Op::apply(Op::apply(given<T>(e, q), given<T>(e, q + 1)),
                   Op::apply(given<T>(e, q + 2), given<T>(e, q + 3)));
}

#define HOST_OPERATION(name, first, expression)                   \
  struct name {                                                   \
    static constexpr int identity = first;                        \
    template <class T>                                            \
    static T apply(T a, T b) {                                    \
      return T(expression);                                       \
    }                                                             \
  };
HOST_OPERATION(sum, 0, a + b)
HOST_OPERATION(product, 1, a* b)
HOST_OPERATION(largest, 0, max(a, b))
HOST_OPERATION(smallest, 0, min(a, b))
HOST_OPERATION(bits_and, 0, a& b)
HOST_OPERATION(bits_or, 0, a | b)
HOST_OPERATION(bits_xor, 0, a ^ b)
}  // namespace host

#define HOST_REDUCE(name, op)                         \
  template <host::shareable T>                        \
  inline T simd_##name(T value, HOST_SITE) {          \
    return host::reduce<host::op>(site, "simd_" #name, value); \
  }                                                   \
  template <host::shareable T>                        \
  inline T quad_##name(T value, HOST_SITE) {          \
    return host::reduce_quad<host::op>(site, "quad_" #name, value); \
  }
HOST_REDUCE(sum, sum)
HOST_REDUCE(product, product)
HOST_REDUCE(max, largest)
HOST_REDUCE(min, smallest)
HOST_REDUCE(and, bits_and)
HOST_REDUCE(or, bits_or)
HOST_REDUCE(xor, bits_xor)

#define HOST_SCAN(name, op, inclusive)                                \
  template <host::shareable T>                                        \
  inline T simd_prefix_##name(T value, HOST_SITE) {                   \
    return host::scan<host::op, inclusive>(site, "simd_prefix_" #name, value); \
  }
HOST_SCAN(inclusive_sum, sum, true)
HOST_SCAN(exclusive_sum, sum, false)
HOST_SCAN(inclusive_product, product, true)
HOST_SCAN(exclusive_product, product, false)

#define HOST_SHUFFLE(name, from, source)               \
  template <host::shareable T>                         \
  inline T simd_##name(T value, ushort n, HOST_SITE) { \
    [[maybe_unused]] const unsigned lane = host::lane(); \
    return host::from(site, "simd_" #name, value, source); \
  }
HOST_SHUFFLE(shuffle, from_lane, n)
HOST_SHUFFLE(broadcast, from_lane, n)
HOST_SHUFFLE(shuffle_xor, from_lane, lane ^ n)
HOST_SHUFFLE(shuffle_down, from_neighbour, lane + n)
HOST_SHUFFLE(shuffle_up, from_neighbour, lane - n)
HOST_SHUFFLE(shuffle_rotate_down, from_lane, (lane + n) % 32)
HOST_SHUFFLE(shuffle_rotate_up, from_lane, (lane - n) % 32)

template <host::shareable T>
inline T simd_broadcast_first(T value, HOST_SITE) {
  return host::from_lane(site, "simd_broadcast_first", value, 0);
}

// The shifted-in lanes come from the near end of `filling`.
template <host::shareable T>
inline T simd_shuffle_and_fill_down(T value, T filling, ushort n, ushort modulo, HOST_SITE) {
  const host::Exchange& v = host::meet_lanes(site, "simd_shuffle_and_fill_down", value);
  const host::Exchange& f = host::meet_lanes(site, "simd_shuffle_and_fill_down", filling);
  const unsigned lane = host::lane(), base = lane / modulo * modulo, at = lane % modulo + n;
  return at < modulo ? host::given<T>(v, base + at) : host::given<T>(f, base + at - modulo);
}
template <host::shareable T>
inline T simd_shuffle_and_fill_up(T value, T filling, ushort n, ushort modulo, HOST_SITE) {
  const host::Exchange& v = host::meet_lanes(site, "simd_shuffle_and_fill_up", value);
  const host::Exchange& f = host::meet_lanes(site, "simd_shuffle_and_fill_up", filling);
  const unsigned lane = host::lane(), base = lane / modulo * modulo, at = lane % modulo;
  return at >= n ? host::given<T>(v, base + at - n) : host::given<T>(f, base + at + modulo - n);
}
template <host::shareable T>
inline T simd_shuffle_and_fill_down(T value, T filling, ushort n, HOST_SITE) {
  return simd_shuffle_and_fill_down(value, filling, n, ushort(32), site);
}
template <host::shareable T>
inline T simd_shuffle_and_fill_up(T value, T filling, ushort n, HOST_SITE) {
  return simd_shuffle_and_fill_up(value, filling, n, ushort(32), site);
}

struct simd_vote {
  typedef ulong vote_t;
  vote_t bits;
  explicit simd_vote(vote_t b = 0) : bits(b) {}
  explicit operator vote_t() const { return bits; }
  bool all() const { return (bits & 0xffffffffu) == 0xffffffffu; }
  bool any() const { return bits != 0; }
};
inline simd_vote simd_ballot(bool condition, HOST_SITE) {
  const uint bit = condition ? 1u << host::lane() : 0u;
  return simd_vote(host::reduce<host::bits_or>(site, "simd_ballot", bit));
}
inline bool simd_any(bool condition, HOST_SITE) {
  return host::reduce<host::bits_or>(site, "simd_any", uint(condition)) != 0;
}
inline bool simd_all(bool condition, HOST_SITE) {
  return host::reduce<host::bits_and>(site, "simd_all", uint(condition)) != 0;
}
}  // namespace metal

// The compiler's own names, on which MLX builds its bfloat overloads.
#define HOST_INTERNAL_SIMD(name)                              \
  template <class... A>                                       \
  inline auto __metal_simd_##name(A... a) {                   \
    return metal::simd_##name(a...);                          \
  }
HOST_INTERNAL_SIMD(broadcast)
HOST_INTERNAL_SIMD(shuffle)
HOST_INTERNAL_SIMD(shuffle_down)
HOST_INTERNAL_SIMD(shuffle_up)
HOST_INTERNAL_SIMD(shuffle_xor)
HOST_INTERNAL_SIMD(shuffle_rotate_down)
HOST_INTERNAL_SIMD(shuffle_rotate_up)
HOST_INTERNAL_SIMD(shuffle_and_fill_down)
HOST_INTERNAL_SIMD(shuffle_and_fill_up)
HOST_INTERNAL_SIMD(max)
HOST_INTERNAL_SIMD(min)
HOST_INTERNAL_SIMD(sum)
HOST_INTERNAL_SIMD(product)
inline float __metal_simd_xor(float x) {  // named by MLX, never called: floats have no xor
  return x;
}
HOST_INTERNAL_SIMD(prefix_inclusive_sum)
HOST_INTERNAL_SIMD(prefix_exclusive_sum)
HOST_INTERNAL_SIMD(prefix_inclusive_product)
HOST_INTERNAL_SIMD(prefix_exclusive_product)
inline ushort __metal_get_simdgroup_size(ushort) { return 32; }
inline ushort __metal_get_thread_index_in_simdgroup(ushort) { return metal_host::self->lane; }
