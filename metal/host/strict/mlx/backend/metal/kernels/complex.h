// Stands before MLX's header of this name: in OpenCL mode a temporary cannot be made by a
// constructor qualified `thread`, which MLX's complex numbers rely on.
#pragma once
#include <metal_stdlib>

#include "mlx/backend/metal/kernels/bf16.h"

using namespace metal;

template <typename T>
struct complex_t {
  using value_type = T;
  T real, imag;
  complex_t() = default;
  constexpr complex_t(T real, T imag = 0) : real(real), imag(imag) {}
  constexpr complex_t(T real, T imag = 0) constant : real(real), imag(imag) {}
};
using complex64_t = complex_t<float>;
