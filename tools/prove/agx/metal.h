// What our kernels use of Metal's library, in C++ for OpenCL.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef half float16_t;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));

#define METAL_FUNC inline __attribute__((always_inline))
#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private

// Clang has no constructors of vectors here: chain.py calls these instead.
METAL_FUNC uint2 make_uint2(uint x, uint y) { return (uint2){x, y}; }
METAL_FUNC uint4 make_uint4(uint x, uint y, uint z, uint w) { return (uint4){x, y, z, w}; }
METAL_FUNC float4 make_float4(float x, float y, float z, float w) { return (float4){x, y, z, w}; }

template <typename T, typename From>
METAL_FUNC T as_type(From x) {
  return __builtin_bit_cast(T, x);
}

// The GPU computes in float, so a bfloat16 is 16 bits of one.
struct bfloat16_t {
  ushort bits;
  bfloat16_t() = default;
  METAL_FUNC explicit bfloat16_t(float x) {
    const uint word = __builtin_bit_cast(uint, x);
    bits = ushort((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  // `x ? in memory : in a register` is a float here: clang finds no type with both address spaces.
  METAL_FUNC bfloat16_t& operator=(float x) { return *this = bfloat16_t(x); }
  // Clang's own assignment reads by way of a generic address, which Mesa keeps in registers.  A template, for
  // as_type needs a class that is trivially copied.
  template <int = 0>
  METAL_FUNC bfloat16_t& operator=(const __local bfloat16_t& x) {
    bits = x.bits;
    return *this;
  }
  METAL_FUNC operator float() const { return __builtin_bit_cast(float, uint(bits) << 16); }
};

// OpenCL's functions, which clang's SPIR-V writer knows by their names.
size_t get_global_id(uint);
size_t get_group_id(uint);
size_t get_num_groups(uint);
size_t get_local_size(uint);
uint get_sub_group_id(void);
uint get_sub_group_local_id(void);
void barrier(uint);
void __spirv_ControlBarrier(int, int, int);
float sub_group_reduce_add(float);
float sub_group_shuffle(float, uint);
uint sub_group_shuffle(uint, uint);
int sub_group_shuffle(int, uint);
float sub_group_broadcast(float, uint);
uint sub_group_broadcast(uint, uint);
int sub_group_broadcast(int, uint);
float native_exp2(float);
float native_log2(float);
float native_rsqrt(float);
float native_sin(float);
float native_cos(float);
float rint(float);
float fmin(float, float);
float fmax(float, float);
float fabs(float);

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
METAL_FUNC void threadgroup_barrier(mem_flags) { barrier(1u); }
METAL_FUNC void simdgroup_barrier(mem_flags) { __spirv_ControlBarrier(3, 3, 0x108); }

namespace metal {
METAL_FUNC int min(int a, int b) { return a < b ? a : b; }
METAL_FUNC int max(int a, int b) { return a > b ? a : b; }
METAL_FUNC uint min(uint a, uint b) { return a < b ? a : b; }
METAL_FUNC uint max(uint a, uint b) { return a > b ? a : b; }
METAL_FUNC size_t min(size_t a, size_t b) { return a < b ? a : b; }
METAL_FUNC size_t max(size_t a, size_t b) { return a > b ? a : b; }
METAL_FUNC float min(float a, float b) { return ::fmin(a, b); }
METAL_FUNC float max(float a, float b) { return ::fmax(a, b); }
METAL_FUNC float abs(float x) { return ::fabs(x); }
METAL_FUNC float rint(float x) { return ::rint(x); }
METAL_FUNC float exp2(float x) { return ::native_exp2(x); }
METAL_FUNC float log2(float x) { return ::native_log2(x); }
METAL_FUNC float tanh(float x) {
  return 1.0f - 2.0f / (::native_exp2(x * 2.885390082f) + 1.0f);
}
METAL_FUNC float simd_sum(float x) { return ::sub_group_reduce_add(x); }
METAL_FUNC float simd_max(float x) { return ::sub_group_reduce_add(x); }  // as long; Mesa's is 60 instructions
template <typename T, typename Lane>
METAL_FUNC T simd_shuffle(T x, Lane lane) {
  return ::sub_group_shuffle(x, uint(lane));
}
// One instruction on the GPU, and so here, where Mesa would make eleven.  A simd_shuffle stays as long as Mesa
// makes it: four instructions, as the GPU takes one lane of each quad, and selects.  So does Apple's compiler.
template <typename T, typename Lane>
METAL_FUNC T simd_broadcast(T x, Lane lane) {
  return ::sub_group_broadcast(x, uint(lane));
}
template <typename T, typename Lane>
METAL_FUNC T simd_shuffle_xor(T x, Lane mask) {
  return ::sub_group_broadcast(x, get_sub_group_local_id() ^ uint(mask));
}

namespace precise {
METAL_FUNC float exp2(float x) { return ::native_exp2(x); }
METAL_FUNC float log2(float x) { return ::native_log2(x); }
METAL_FUNC float rsqrt(float x) { return ::native_rsqrt(x); }
METAL_FUNC float divide(float a, float b) { return a / b; }
METAL_FUNC float sin(float x) { return ::native_sin(x); }
METAL_FUNC float cos(float x) { return ::native_cos(x); }
METAL_FUNC float tanh(float x) { return metal::tanh(x); }
}  // namespace precise

namespace fast {
METAL_FUNC float exp2(float x) { return ::native_exp2(x); }
METAL_FUNC float log2(float x) { return ::native_log2(x); }
METAL_FUNC float tanh(float x) { return metal::tanh(x); }
}  // namespace fast

// Mesa has no matrix instruction.  A lane holds two elements of a matrix, as on the GPU; a product is one
// fma for each.  So registers are right, and the number of instructions of a product is not.
template <typename T, int COLUMNS, int ROWS>
struct simdgroup_matrix {
  struct Elements {
    T x, y;
    METAL_FUNC __private T& operator[](int i) __private { return i == 0 ? x : y; }
    METAL_FUNC const __private T& operator[](int i) const __private { return i == 0 ? x : y; }
  } elements;
  METAL_FUNC __private Elements& thread_elements() __private { return elements; }
  METAL_FUNC const __private Elements& thread_elements() const __private { return elements; }
};
template <typename D, typename A, typename B, typename C>
METAL_FUNC void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>& d,
                                              __private simdgroup_matrix<A, 8, 8>& a,
                                              __private simdgroup_matrix<B, 8, 8>& b,
                                              __private simdgroup_matrix<C, 8, 8>& c) {
  d.elements.x = __builtin_fmaf(-float(a.elements.x), float(b.elements.x), c.elements.x);
  d.elements.y = __builtin_fmaf(-float(a.elements.y), float(b.elements.y), c.elements.y);
}
}  // namespace metal
