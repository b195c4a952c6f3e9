// In place of MLX's complex.h, whose constructors differ only in the address space that they
// construct in: nothing here. No kernel of attention or norms computes with complex numbers.
#pragma once

#include <metal_stdlib>

using namespace metal;

template <typename T>
struct complex_t {
  T real;
  T imag;
  constexpr complex_t(T real, T imag) : real(real), imag(imag) {}
  constexpr complex_t() : real(0), imag(0) {}
};
typedef complex_t<float> complex64_t;
