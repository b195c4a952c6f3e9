// What MLX's own kernels use of Metal's library and of MLX's utils.h, beyond metal.h.
#pragma once
#include "metal.h"

typedef int int2 __attribute__((ext_vector_type(2)));
typedef short short2 __attribute__((ext_vector_type(2)));
typedef ushort ushort2 __attribute__((ext_vector_type(2)));
typedef ulong ulong2 __attribute__((ext_vector_type(2)));
typedef ulong ulong3 __attribute__((ext_vector_type(3)));

METAL_FUNC ulong2 make_ulong2(ulong x, ulong y) { return (ulong2){x, y}; }
METAL_FUNC ulong3 make_ulong3(ulong x, ulong y, ulong z) { return (ulong3){x, y, z}; }
METAL_FUNC int2 make_int2(int x, int y) { return (int2){x, y}; }
METAL_FUNC short2 make_short2(short x, short y) { return (short2){x, y}; }

namespace std {
template <typename...>
using void_t = void;
}
namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <bool B>
struct bool_constant {
  static constexpr __constant bool value = B;
};
template <bool B, typename T, typename F>
struct conditional {
  typedef T type;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, typename T, typename F>
using conditional_t = typename conditional<B, T, F>::type;
template <typename T, typename U>
constexpr __constant bool is_same_v = __is_same(T, U);
template <typename T>
using remove_cv_t = __remove_cv(T);
template <typename T>
struct without_space {
  typedef T type;
};
template <typename T>
struct without_space<const __private T> {
  typedef T type;
};
template <typename T>
using remove_addrspace_t = typename without_space<T>::type;
template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <typename T>
struct is_integral : bool_constant<__is_integral(T)> {};

METAL_FUNC float simd_shuffle_down(float x, int by) { return simd_shuffle_xor(x, by); }
METAL_FUNC float quad_sum(float x) { return x + simd_shuffle_xor(x, 1) + simd_shuffle_xor(x, 2); }
METAL_FUNC int clamp(int x, int low, int high) { return min(max(x, low), high); }
template <typename T>
METAL_FUNC T select(T a, T b, bool of_b) {
  return of_b ? b : a;
}

namespace fast {
METAL_FUNC float exp(float x) { return ::native_exp2(x * 1.442695041f); }
}  // namespace fast
}  // namespace metal
using namespace metal;

struct complex64_t {
  float real, imag;
  METAL_FUNC complex64_t(float x, float y) : real(x), imag(y) {}
};
template <typename I>
METAL_FUNC I elem_to_loc(I elem, const __global int*, const __global long*, int) {
  return elem;  // of batches, which no launch here has
}
template <bool B, typename T, typename F>
using ConditionalType = metal::conditional<B, T, F>;
template <typename T>
struct Limits {
  static constexpr __constant T finite_min = T(-65504.0f);
};
template <>
struct Limits<float> {
  static constexpr __constant float finite_min = -3.40282347e+38f;
};
#define M_LOG2E_F 1.442695041f
#define M_LN2_F 0.693147181f
