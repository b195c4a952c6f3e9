// Scalar types: half, bfloat, the short names of the integers, limits and type traits.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
#if defined(__APPLE__)  // in MSL the 64-bit integers are long and ulong; on a Mac's CPU, long long
#define int64_t long
#define uint64_t ulong
#endif

// bfloat as MSL has it: every bfloat is a float, but a float becomes a bfloat only when asked.
// Arithmetic between two bfloats (or with an integer) rounds to bfloat; with a float it is float.
struct bfloat {
  __bf16 bits;  // a float type, so that the compiler's fill for unset variables is NaN

  bfloat() = default;
  template <class I>
    requires std::is_integral_v<I>
  constexpr bfloat(I i) : bfloat(float(i)) {}
  explicit constexpr bfloat(float f) : bits(__builtin_bit_cast(decltype(bits), rounded(f))) {}
  explicit constexpr bfloat(half h) : bfloat(float(h)) {}

  constexpr operator float() const {
    return __builtin_bit_cast(float, uint32_t(__builtin_bit_cast(uint16_t, bits)) << 16);
  }

 private:
  // Round to nearest, ties to even; a NaN stays one.
  static constexpr uint16_t rounded(float f) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);
    return uint16_t((uint64_t(u) + 0x7fff + (u >> 16 & 1)) >> 16);
  }
};

#define HOST_BFLOAT_OPERATOR(op)                                                              \
  constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }   \
  constexpr float operator op(bfloat a, float b) { return float(a) op b; }                    \
  constexpr float operator op(float a, bfloat b) { return a op float(b); }                    \
  template <class I>                                                                          \
    requires std::is_integral_v<I>                                                            \
  constexpr bfloat operator op(bfloat a, I b) {                                               \
    return a op bfloat(b);                                                                    \
  }                                                                                           \
  template <class I>                                                                          \
    requires std::is_integral_v<I>                                                            \
  constexpr bfloat operator op(I a, bfloat b) {                                               \
    return bfloat(a) op b;                                                                    \
  }                                                                                           \
  constexpr bfloat& operator op##=(bfloat& a, bfloat b) { return a = a op b; }
HOST_BFLOAT_OPERATOR(+)
HOST_BFLOAT_OPERATOR(-)
HOST_BFLOAT_OPERATOR(*)
HOST_BFLOAT_OPERATOR(/)
#undef HOST_BFLOAT_OPERATOR
constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }

constexpr half operator""h(long double x) { return half(x); }
constexpr bfloat operator""bf(long double x) { return bfloat(float(x)); }

template <class To, class From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  __builtin_memcpy(&to, &value, sizeof(To));
  return to;
}

#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_PI_F 3.14159265358979323846f
#define FLT_MAX __FLT_MAX__
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define INT_MAX __INT_MAX__
#define UINT_MAX (__INT_MAX__ * 2U + 1U)

namespace metal {
using ::bfloat;
using ::half;

using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_convertible;
using std::is_convertible_v;
using std::is_integral;
using std::is_integral_v;
using std::is_same;
using std::is_same_v;
using std::is_signed;
using std::is_signed_v;
using std::is_unsigned;
using std::is_unsigned_v;
using std::make_unsigned_t;
using std::remove_const_t;
using std::remove_cv_t;
using std::remove_reference_t;
using std::true_type;

template <class T>
using remove_addrspace_t = std::remove_cv_t<T>;
template <class T>
constexpr bool is_floating_point_v = std::is_same_v<std::remove_cv_t<T>, float> ||
                                     std::is_same_v<std::remove_cv_t<T>, half> ||
                                     std::is_same_v<std::remove_cv_t<T>, bfloat>;
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};

template <class T>
struct numeric_limits;

template <class T>
  requires std::is_integral_v<T>
struct numeric_limits<T> {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr int digits = sizeof(T) * 8 - is_signed;
  static constexpr T max() { return T((uint64_t(1) << (digits - 1)) - 1 + (uint64_t(1) << (digits - 1))); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};

#define HOST_FLOAT_LIMITS(T, largest, smallest, eps)                                  \
  template <>                                                                         \
  struct numeric_limits<T> {                                                          \
    static constexpr bool is_signed = true;                                           \
    static constexpr T max() { return T(largest); }                                   \
    static constexpr T min() { return T(smallest); }                                  \
    static constexpr T lowest() { return T(-max()); }                                 \
    static constexpr T epsilon() { return T(eps); }                                   \
    static constexpr T infinity() { return T(__builtin_inff()); }                     \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }                  \
  };
HOST_FLOAT_LIMITS(float, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__)
HOST_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-05f, 9.765625e-04f)
HOST_FLOAT_LIMITS(bfloat, 3.38953139e38f, 1.17549435e-38f, 0.0078125f)
#undef HOST_FLOAT_LIMITS
}  // namespace metal
