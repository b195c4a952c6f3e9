// Lets a kernel of metal/ compile as CUDA: what MSL means, in CUDA's words.
//
// A simdgroup is a warp and threadgroup memory is shared memory.  Address spaces are rewritten by the
// launcher (translate.py), not by macros: `device` is part of what __device__ expands to.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define METAL_FUNC __device__ __forceinline__

using bfloat16_t = __nv_bfloat16;
using float16_t = __half;
using uchar = unsigned char;
using uint = unsigned int;
using ushort = unsigned short;

template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

METAL_FUNC uint2 make_vector(uint x, uint y) { return make_uint2(x, y); }
METAL_FUNC uint4 make_vector(uint x, uint y, uint z, uint w) { return make_uint4(x, y, z, w); }
METAL_FUNC float4 make_vector(float x, float y, float z, float w) { return make_float4(x, y, z, w); }
#define uint2(...) make_vector(__VA_ARGS__)
#define uint4(...) make_vector(__VA_ARGS__)
#define float4(...) make_vector(__VA_ARGS__)

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
METAL_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }

namespace metal {

template <typename T>
METAL_FUNC T max(T a, T b) { return a > b ? a : b; }
template <typename T>
METAL_FUNC T min(T a, T b) { return a < b ? a : b; }
METAL_FUNC float log2(float x) { return ::log2f(x); }
METAL_FUNC float rint(float x) { return ::rintf(x); }
namespace fast {
METAL_FUNC float exp2(float x) { return ::exp2f(x); }
}  // namespace fast
namespace precise {
METAL_FUNC float tanh(float x) { return ::tanhf(x); }
METAL_FUNC float cos(float x) { return ::cosf(x); }
METAL_FUNC float sin(float x) { return ::sinf(x); }
METAL_FUNC float exp2(float x) { return ::exp2f(x); }
METAL_FUNC float log2(float x) { return ::log2f(x); }
METAL_FUNC float rsqrt(float x) { return ::rsqrtf(x); }
METAL_FUNC float divide(float x, float y) { return __fdiv_rn(x, y); }
}  // namespace precise

template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
template <typename T>
METAL_FUNC T simd_shuffle(T x, ushort lane) { return __shfl_sync(0xffffffffu, x, lane); }
template <typename T>
METAL_FUNC T simd_broadcast(T x, ushort lane) { return __shfl_sync(0xffffffffu, x, lane); }

METAL_FUNC float simd_max(float x) {
  for (int step = 16; step > 0; step /= 2) {
    x = max(x, simd_shuffle_xor(x, ushort(step)));
  }
  return x;
}

METAL_FUNC float simd_sum(float x) {
  for (int step = 16; step > 0; step /= 2) {
    x += simd_shuffle_xor(x, ushort(step));
  }
  return x;
}

}  // namespace metal
