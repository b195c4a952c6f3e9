// simdgroup_matrix<T, 8, 8>: 64 elements over 32 lanes, two neighbours of a row in each.
//
// Which lane holds which element is not documented by Apple; this is the layout that MLX's kernels
// rely on: lane l holds row (q & 4) + (l / 2) % 4 and columns (q & 2) * 2 + (l % 2) * 2 + {0, 1},
// where q = l / 4.
#pragma once

namespace metal {
namespace host {
constexpr unsigned matrix_row(unsigned lane) { return (lane / 4 & 4) + lane / 2 % 4; }
constexpr unsigned matrix_column(unsigned lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
constexpr unsigned matrix_lane(unsigned row, unsigned column) {
  return (row / 4 * 2 + column / 4) * 8 + row % 4 * 2 + column % 4 / 2;
}
static_assert(matrix_lane(matrix_row(13), matrix_column(13)) == 13);
}  // namespace host

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "Metal has 8 x 8 matrices only");
  static_assert(is_floating_point_v<T>);

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) : elements(T(0)) {
    const unsigned lane = host::lane();
    for (unsigned j = 0; j < 2; j++)
      if (host::matrix_column(lane) + j == host::matrix_row(lane)) elements[j] = diagonal;
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }

 private:
  vec<T, 2> elements;
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <class T, int C, int R>
inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.thread_elements() = vec<T, 2>(value);
  return m;
}

namespace host {
// Where the lane's first element lies, and the step to its second. All lanes give the same matrix.
template <class P>
inline P* matrix_element(Site site, const char* what, P* start, ulong stride, ulong2 origin,
                         bool transpose, ulong& step) {
  const Exchange& e = meet_lanes(site, what, start);
  if (given<P*>(e, 0) != start)
    metal_host::fault("non-uniform", site, "%s: lanes of one simdgroup name different matrices", what);
  const unsigned row = matrix_row(lane()), column = matrix_column(lane());
  step = transpose ? stride : 1;
  start += origin.y * stride + origin.x;
  return start + (transpose ? column * stride + row : row * stride + column);
}

// d = a * b + c, in float.
template <class D, class A, class B, class C>
inline void multiply(Site site, const char* what, vec<D, 2>& d, vec<A, 2> a, vec<B, 2> b,
                     vec<C, 2> c) {
  const vec<float, 4> mine{float(a.x), float(a.y), float(b.x), float(b.y)};
  const Exchange& e = meet_lanes(site, what, mine);
  const unsigned row = matrix_row(lane()), column = matrix_column(lane());
  float sum[2] = {float(c.x), float(c.y)};
  for (unsigned k = 0; k < 8; k++) {
    const float x = load<float>(e.value[matrix_lane(row, k)] + k % 2 * 4);
    const unsigned char* y = e.value[matrix_lane(k, column)] + 8;
    sum[0] += x * load<float>(y);
    sum[1] += x * load<float>(y + 4);
  }
  d = vec<D, 2>(D(sum[0]), D(sum[1]));
}
}  // namespace host

template <class T, class P>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const P* source, ulong stride = 8,
                           ulong2 origin = ulong2(0ul), bool transpose = false, HOST_SITE) {
  static_assert(is_same_v<T, remove_cv_t<P>>, "simdgroup_load: the memory is of the matrix's type");
  ulong step;
  const P* at = host::matrix_element(site, "simdgroup_load", source, stride, origin, transpose, step);
  d.thread_elements() = vec<T, 2>(at[0], at[step]);
}
template <class T, class P>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& a, P* target, ulong stride = 8,
                            ulong2 origin = ulong2(0ul), bool transpose = false, HOST_SITE) {
  static_assert(is_same_v<T, P>, "simdgroup_store: the memory is of the matrix's type");
  ulong step;
  P* at = host::matrix_element(site, "simdgroup_store", target, stride, origin, transpose, step);
  at[0] = a.thread_elements().x;
  at[step] = a.thread_elements().y;
}
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                          const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b,
                                          const simdgroup_matrix<C, 8, 8>& c, HOST_SITE) {
  host::multiply(site, "simdgroup_multiply_accumulate", d.thread_elements(), a.thread_elements(),
                 b.thread_elements(), c.thread_elements());
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, HOST_SITE) {
  host::multiply(site, "simdgroup_multiply", d.thread_elements(), a.thread_elements(),
                 b.thread_elements(), vec<float, 2>(0.0f));
}
}  // namespace metal
