// vec<T, N> with swizzles. As in MSL, two vectors meet only when they are of one type, a scalar
// meets every component, and other conversions are asked for by name.
#pragma once

namespace metal {
template <class T, int N>
struct vec;

namespace host {
// Some components of a vec, in some order: a view that shares the vec's storage.
template <class T, int N, int... I>
struct swizzle {
  T data[N];

  using vector = vec<T, sizeof...(I)>;
  swizzle() = default;
  swizzle(const swizzle&) = default;
  constexpr swizzle& operator=(const swizzle& s) { return *this = vector(s); }

  constexpr operator vector() const { return vector(data[I]...); }
  template <class V>
    requires std::is_convertible_v<V, vector>
  constexpr swizzle& operator=(const V& value) {
    const vector from = value;
    int k = 0;
    ((data[I] = from[k++]), ...);
    return *this;
  }
};

template <class X>
struct shape {
  static constexpr int size = 0;
};
template <class T_, int N>
struct shape<vec<T_, N>> {
  using T = T_;
  static constexpr int size = N;
  using vector = vec<T, N>;
};
template <class T_, int N, int... I>
struct shape<swizzle<T_, N, I...>> {
  using T = T_;
  static constexpr int size = sizeof...(I);
  using vector = vec<T, size>;
};

template <class X>
concept vector = (shape<X>::size > 0);
template <class X>
concept scalar = is_arithmetic_v<X> || std::is_enum_v<X>;
// The number of components that an argument of a vec's constructor brings.
template <class X>
constexpr int width = vector<X> ? shape<X>::size : 1;

template <class A, class B>
struct meet {};
template <vector A, vector B>
  requires std::is_same_v<typename shape<A>::vector, typename shape<B>::vector>
struct meet<A, B> : shape<A> {};
template <vector A, class B>
  requires(!vector<B> && std::is_convertible_v<B, typename shape<A>::T>)
struct meet<A, B> : shape<A> {};
template <class A, vector B>
  requires(!vector<A> && std::is_convertible_v<A, typename shape<B>::T>)
struct meet<A, B> : shape<B> {};

// f of each component of one or two operands.
template <class R, class M, class A, class B, class F>
constexpr vec<R, M::size> each(const A& a, const B& b, F f) {
  const typename M::vector x = a, y = b;
  vec<R, M::size> r{};
  for (int i = 0; i < M::size; i++) r.data[i] = f(x.data[i], y.data[i]);
  return r;
}
}  // namespace host

#define HOST_MEMBERS_2(N, n1, i1) \
  host::swizzle<T, N, i1, 0> n1##x; host::swizzle<T, N, i1, 1> n1##y;
#define HOST_MEMBERS_3(N, n1, i1) HOST_MEMBERS_2(N, n1, i1) host::swizzle<T, N, i1, 2> n1##z;
#define HOST_MEMBERS_4(N, n1, i1) HOST_MEMBERS_3(N, n1, i1) host::swizzle<T, N, i1, 3> n1##w;

// The components by number, by name, every pair, and the triples and quadruples in common use.
#define HOST_VEC_MEMBERS_2                     \
  T data[2];                                   \
  struct { T x, y; };                          \
  struct { T r, g; };                          \
  HOST_MEMBERS_2(2, x, 0) HOST_MEMBERS_2(2, y, 1)
#define HOST_VEC_MEMBERS_3                     \
  T data[3];                                   \
  T padded[4];                                 \
  struct { T x, y, z; };                       \
  struct { T r, g, b; };                       \
  HOST_MEMBERS_3(3, x, 0) HOST_MEMBERS_3(3, y, 1) HOST_MEMBERS_3(3, z, 2) \
  host::swizzle<T, 3, 0, 1, 2> xyz; host::swizzle<T, 3, 2, 1, 0> zyx;     \
  host::swizzle<T, 3, 1, 2, 0> yzx; host::swizzle<T, 3, 2, 0, 1> zxy;
#define HOST_VEC_MEMBERS_4                     \
  T data[4];                                   \
  struct { T x, y, z, w; };                    \
  struct { T r, g, b, a; };                    \
  HOST_MEMBERS_4(4, x, 0) HOST_MEMBERS_4(4, y, 1) HOST_MEMBERS_4(4, z, 2) HOST_MEMBERS_4(4, w, 3) \
  host::swizzle<T, 4, 0, 1, 2> xyz, rgb; host::swizzle<T, 4, 1, 2, 3> yzw;                        \
  host::swizzle<T, 4, 0, 1, 2, 3> xyzw, rgba; host::swizzle<T, 4, 3, 2, 1, 0> wzyx;               \
  host::swizzle<T, 4, 1, 0, 3, 2> yxwz; host::swizzle<T, 4, 2, 3, 0, 1> zwxy;

// MLX's CPU allocator returns addresses that are multiples of 8, not 16 as a GPU's are, so a plain
// build asks for no more; the checker, which moves buffers, checks the real alignment.
#ifdef METAL_HOST_CHECKED
#define HOST_VEC_ALIGN(size) (size)
#else
#define HOST_VEC_ALIGN(size) ((size) < 8 ? (size) : 8)
#endif

#define HOST_DEFINE_VEC(N)                                                                     \
  template <class T>                                                                           \
  struct alignas(HOST_VEC_ALIGN(sizeof(T) * (N == 3 ? 4 : N))) vec<T, N> {                     \
    union {                                                                                    \
      HOST_VEC_MEMBERS_##N                                                                     \
    };                                                                                         \
    vec() = default;                                                                           \
    constexpr vec(const vec& v) : data{} { *this = v; }                                                 \
    constexpr vec& operator=(const vec& v) {                                                   \
      if (__builtin_is_constant_evaluated())                                                   \
        for (int i = 0; i < N; i++) data[i] = v.data[i];                                       \
      else                                                                                     \
        __builtin_memcpy(data, v.data, sizeof(data));                                          \
      return *this;                                                                            \
    }                                                                                          \
    constexpr vec(T all) : data{} {                                                            \
      for (int i = 0; i < N; i++) data[i] = all;                                               \
    }                                                                                          \
    template <class U>                                                                         \
    explicit constexpr vec(const vec<U, N>& v) : data{} {                                      \
      for (int i = 0; i < N; i++) data[i] = T(v.data[i]);                                      \
    }                                                                                          \
    template <class... A>                                                                      \
      requires(sizeof...(A) > 1 && (host::width<A> + ...) == N)                                \
    constexpr vec(const A&... parts) : data{} {                                                \
      int k = 0;                                                                               \
      (fill(k, parts), ...);                                                                   \
    }                                                                                          \
    constexpr T& operator[](int i) { return data[i]; }                                         \
    constexpr const T& operator[](int i) const { return data[i]; }                             \
                                                                                               \
   private:                                                                                    \
    template <class A>                                                                         \
    constexpr void fill(int& k, const A& part) {                                               \
      if constexpr (host::vector<A>) {                                                         \
        const typename host::shape<A>::vector v = part;                                        \
        for (int i = 0; i < host::width<A>; i++) data[k++] = T(v.data[i]);                     \
      } else {                                                                                 \
        data[k++] = T(part);                                                                   \
      }                                                                                        \
    }                                                                                          \
  };
HOST_DEFINE_VEC(2)
HOST_DEFINE_VEC(3)
HOST_DEFINE_VEC(4)

#define HOST_VEC_OPERATOR(op, result)                                                          \
  template <class A, class B, class M = host::meet<A, B>, class T = typename M::T>             \
  constexpr auto operator op(const A& a, const B& b) {                                         \
    return host::each<result, M>(a, b, [](T x, T y) -> result { return result(x op y); });     \
  }
#define HOST_VEC_ASSIGN(op)                                                                    \
  template <host::vector A, class B, class M = host::meet<A, B>>                               \
  constexpr A& operator op##=(A& a, const B& b) {                                              \
    a = a op b;                                                                                \
    return a;                                                                                  \
  }                                                                                            \
  HOST_VEC_OPERATOR(op, T)
HOST_VEC_ASSIGN(+)
HOST_VEC_ASSIGN(-)
HOST_VEC_ASSIGN(*)
HOST_VEC_ASSIGN(/)
HOST_VEC_ASSIGN(%)
HOST_VEC_ASSIGN(&)
HOST_VEC_ASSIGN(|)
HOST_VEC_ASSIGN(^)
HOST_VEC_ASSIGN(<<)
HOST_VEC_ASSIGN(>>)
HOST_VEC_OPERATOR(==, bool)
HOST_VEC_OPERATOR(!=, bool)
HOST_VEC_OPERATOR(<, bool)
HOST_VEC_OPERATOR(>, bool)
HOST_VEC_OPERATOR(<=, bool)
HOST_VEC_OPERATOR(>=, bool)
HOST_VEC_OPERATOR(&&, bool)
HOST_VEC_OPERATOR(||, bool)

template <host::vector A, class M = host::shape<A>>
constexpr typename M::vector operator-(const A& a) {
  return host::each<typename M::T, M>(a, a, [](auto x, auto) { return typename M::T(-x); });
}
template <host::vector A, class M = host::shape<A>>
constexpr typename M::vector operator~(const A& a) {
  return host::each<typename M::T, M>(a, a, [](auto x, auto) { return typename M::T(~x); });
}
template <host::vector A, class M = host::shape<A>>
constexpr vec<bool, M::size> operator!(const A& a) {
  return host::each<bool, M>(a, a, [](auto x, auto) { return !x; });
}

#define HOST_VEC_NAMES(T) \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
HOST_VEC_NAMES(bool)
HOST_VEC_NAMES(char)
HOST_VEC_NAMES(uchar)
HOST_VEC_NAMES(short)
HOST_VEC_NAMES(ushort)
HOST_VEC_NAMES(int)
HOST_VEC_NAMES(uint)
HOST_VEC_NAMES(long)
HOST_VEC_NAMES(ulong)
HOST_VEC_NAMES(half)
HOST_VEC_NAMES(bfloat)
HOST_VEC_NAMES(float)
}  // namespace metal

#define HOST_GLOBAL_NAMES(T) using metal::T##2; using metal::T##3; using metal::T##4;
HOST_GLOBAL_NAMES(bool)
HOST_GLOBAL_NAMES(char)
HOST_GLOBAL_NAMES(uchar)
HOST_GLOBAL_NAMES(short)
HOST_GLOBAL_NAMES(ushort)
HOST_GLOBAL_NAMES(int)
HOST_GLOBAL_NAMES(uint)
HOST_GLOBAL_NAMES(long)
HOST_GLOBAL_NAMES(ulong)
HOST_GLOBAL_NAMES(half)
HOST_GLOBAL_NAMES(bfloat)
HOST_GLOBAL_NAMES(float)
