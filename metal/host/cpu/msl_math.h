// Metal's common, math, integer, relational and geometric functions.
//
// Each scalar function is a set of plain overloads, not a template: a call with an int where only
// float and half exist is ambiguous here as it is in MSL. fast:: and precise:: compute the same.
// No C maths header is included, since its global names would join the overload sets.
#pragma once

namespace metal {
namespace host {
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float exp10(float x) { return __builtin_powf(10.0f, x); }
inline float fract(float x) { return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f); }
inline float sinpi(float x) { return __builtin_sinf(x * M_PI_F); }
inline float cospi(float x) { return __builtin_cosf(x * M_PI_F); }
inline float tanpi(float x) { return __builtin_tanf(x * M_PI_F); }
inline float divide(float x, float y) { return x / y; }
inline float clamp(float x, float lo, float hi) {
  return __builtin_fminf(__builtin_fmaxf(x, lo), hi);
}
inline float max3(float x, float y, float z) { return __builtin_fmaxf(__builtin_fmaxf(x, y), z); }
inline float min3(float x, float y, float z) { return __builtin_fminf(__builtin_fminf(x, y), z); }
inline float median3(float x, float y, float z) {
  return __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z));
}
}  // namespace host

// name, and what computes it in float.
#define HOST_FLOAT_1(X)                                                                          \
  X(acos, __builtin_acosf) X(acosh, __builtin_acoshf) X(asin, __builtin_asinf)                   \
  X(asinh, __builtin_asinhf) X(atan, __builtin_atanf) X(atanh, __builtin_atanhf)                 \
  X(ceil, __builtin_ceilf) X(cos, __builtin_cosf) X(cosh, __builtin_coshf)                       \
  X(cospi, host::cospi) X(exp, __builtin_expf) X(exp2, __builtin_exp2f) X(exp10, host::exp10)    \
  X(fabs, __builtin_fabsf) X(floor, __builtin_floorf) X(fract, host::fract)                      \
  X(log, __builtin_logf) X(log2, __builtin_log2f) X(log10, __builtin_log10f)                     \
  X(rint, __builtin_rintf) X(round, __builtin_roundf) X(rsqrt, host::rsqrt)                      \
  X(sin, __builtin_sinf) X(sinh, __builtin_sinhf) X(sinpi, host::sinpi)                          \
  X(sqrt, __builtin_sqrtf) X(tan, __builtin_tanf) X(tanh, __builtin_tanhf)                       \
  X(tanpi, host::tanpi) X(trunc, __builtin_truncf)
#define HOST_FLOAT_1_MORE(X) X(abs, __builtin_fabsf)
#define HOST_FLOAT_2(X)                                                                          \
  X(atan2, __builtin_atan2f) X(divide, host::divide) X(fmax, __builtin_fmaxf)                    \
  X(fmin, __builtin_fminf) X(fmod, __builtin_fmodf) X(nextafter, __builtin_nextafterf)           \
  X(pow, __builtin_powf) X(powr, __builtin_powf)
#define HOST_FLOAT_2_MORE(X) \
  X(fdim, __builtin_fdimf) X(max, __builtin_fmaxf) X(min, __builtin_fminf)
#define HOST_FLOAT_3(X)                                                                          \
  X(fma, __builtin_fmaf) X(fmax3, host::max3) X(fmin3, host::min3) X(fmedian3, host::median3)
#define HOST_FLOAT_3_MORE(X) \
  X(clamp, host::clamp) X(max3, host::max3) X(min3, host::min3) X(median3, host::median3)

#define HOST_VEC_1(name)                                                                         \
  template <host::vector A, class M = host::shape<A>>                                            \
  inline typename M::vector name(const A& a) {                                                   \
    return host::each<typename M::T, M>(a, a, [](auto x, auto) { return name(x); });             \
  }
#define HOST_VEC_2(name)                                                                         \
  template <class A, class B, class M = host::meet<A, B>, class V = typename M::vector>          \
  inline V name(const A& a, const B& b) {                                                        \
    return host::each<typename M::T, M>(a, b, [](auto x, auto y) { return name(x, y); });        \
  }
#define HOST_VEC_3(name)                                                                         \
  template <host::vector A, class B, class C, class M = host::meet<A, B>,                        \
            class V = typename host::meet<A, C>::vector>                                         \
  inline V name(const A& a, const B& b, const C& c) {                                            \
    const V x = a, y = b, z = c;                                                                 \
    V r;                                                                                         \
    for (int i = 0; i < M::size; i++) r.data[i] = name(x.data[i], y.data[i], z.data[i]);         \
    return r;                                                                                    \
  }

#define HOST_DEFINE_1(name, f)                           \
  inline float name(float x) { return f(x); }            \
  inline half name(half x) { return half(f(float(x))); } \
  HOST_VEC_1(name)
#define HOST_DEFINE_2(name, f)                                             \
  inline float name(float x, float y) { return f(x, y); }                  \
  inline half name(half x, half y) { return half(f(float(x), float(y))); } \
  HOST_VEC_2(name)
#define HOST_DEFINE_3(name, f)                                                                  \
  inline float name(float x, float y, float z) { return f(x, y, z); }                           \
  inline half name(half x, half y, half z) { return half(f(float(x), float(y), float(z))); }    \
  HOST_VEC_3(name)
#define HOST_DEFINE_ALL                                                                          \
  HOST_FLOAT_1(HOST_DEFINE_1) HOST_FLOAT_1_MORE(HOST_DEFINE_1)                                   \
  HOST_FLOAT_2(HOST_DEFINE_2) HOST_FLOAT_2_MORE(HOST_DEFINE_2)                                   \
  HOST_FLOAT_3(HOST_DEFINE_3) HOST_FLOAT_3_MORE(HOST_DEFINE_3)

HOST_DEFINE_ALL
namespace fast {
HOST_DEFINE_ALL
}
namespace precise {
HOST_DEFINE_ALL
}

// Integers: the functions that exist for them too.
#define HOST_INTEGER(T)                                                                          \
  inline T max(T x, T y) { return x < y ? y : x; }                                               \
  inline T min(T x, T y) { return y < x ? y : x; }                                               \
  inline T max3(T x, T y, T z) { return max(max(x, y), z); }                                     \
  inline T min3(T x, T y, T z) { return min(min(x, y), z); }                                     \
  inline T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }                                \
  inline T abs(T x) { return x < T(0) ? T(-x) : x; }
HOST_INTEGER(char)
HOST_INTEGER(int8_t)
HOST_INTEGER(uchar)
HOST_INTEGER(short)
HOST_INTEGER(ushort)
HOST_INTEGER(int)
HOST_INTEGER(uint)
HOST_INTEGER(long)
HOST_INTEGER(ulong)

// Relational.
#define HOST_RELATIONAL(name, f)                    \
  inline bool name(float x) { return f(x); }        \
  inline bool name(half x) { return f(float(x)); }  \
  template <host::vector A, class M = host::shape<A>> \
  inline vec<bool, M::size> name(const A& a) {      \
    return host::each<bool, M>(a, a, [](auto x, auto) { return name(x); }); \
  }
HOST_RELATIONAL(isnan, __builtin_isnan)
HOST_RELATIONAL(isinf, __builtin_isinf)
HOST_RELATIONAL(isfinite, __builtin_isfinite)

template <class T>
  requires is_arithmetic_v<T>
inline T select(T when_false, T when_true, bool condition) {
  return condition ? when_true : when_false;
}
template <class T, int N>
inline vec<T, N> select(vec<T, N> when_false, vec<T, N> when_true, vec<bool, N> condition) {
  for (int i = 0; i < N; i++) when_false[i] = condition[i] ? when_true[i] : when_false[i];
  return when_false;
}
// A function with a second result, its inverse, and one of whole vectors.
inline float frexp(float x, int& e) { return __builtin_frexpf(x, &e); }
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
template <class T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum = sum + a[i] * b[i];
  return sum;
}
}  // namespace metal

// The compiler's own names under Apple's functions: MLX builds its bfloat overloads on them.
enum { __METAL_MAYBE_FAST_MATH__, __METAL_FAST_MATH__, __METAL_PRECISE_MATH__ };
#define HOST_INTERNAL_1(name, f) \
  inline float __metal_##name(float x, int) { using namespace metal; return f(x); }
#define HOST_INTERNAL_2(name, f) \
  inline float __metal_##name(float x, float y, int = 0) { using namespace metal; return f(x, y); }
#define HOST_INTERNAL_3(name, f)                                    \
  inline float __metal_##name(float x, float y, float z, int = 0) { \
    using namespace metal;                                          \
    return f(x, y, z);                                              \
  }
HOST_FLOAT_1(HOST_INTERNAL_1)
HOST_FLOAT_2(HOST_INTERNAL_2)
HOST_FLOAT_3(HOST_INTERNAL_3)
inline float __metal_frexp(float x, int* e) { return __builtin_frexpf(x, e); }
inline float __metal_ldexp(float x, int e, int) { return __builtin_ldexpf(x, e); }
