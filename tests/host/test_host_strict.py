"""The strict front end: every refused snippet for its own reason, every valid one accepted."""

import mlx.core as mx
import pytest

pytest.importorskip("ziglang", reason="the strict front end needs clang")

from metal.host.strict import check
from tests.support.foreign_kernels import MLX_KERNELS, MLX_LM_CALLS, mlx_lm_call, mlx_source

HEAD = """
[[kernel]] void k(
    const device float* x [[buffer(0)]],
    const constant int& n [[buffer(1)]],
    const constant float* table [[buffer(2)]],
    device float* y [[buffer(3)]],
    device bfloat16_t* b [[buffer(4)]],
    device half* h [[buffer(5)]],
    uint i [[thread_position_in_grid]]) {
"""


def kernel(body: str, before: str = "") -> str:
    return f"{before}{HEAD}  {body}\n}}\n"


# name: (rule, what the message says, body of the kernel, what stands before it)
REFUSED = {
    # address spaces
    "device_to_threadgroup": (
        "compiler",
        "cannot initialize",
        "threadgroup float* p = y; p[0] = 1;",
    ),
    "device_to_thread": ("compiler", "cannot initialize", "thread float* p = y; p[0] = 1;"),
    "constant_to_device": (
        "compiler",
        "cannot initialize",
        "const device float* p = table; y[i] = p[0];",
    ),
    "threadgroup_to_device": (
        "compiler",
        "cannot initialize",
        "threadgroup float a[4]; device float* p = a; p[0] = 1;",
    ),
    "cast_across_spaces": (
        "compiler",
        "address space",
        "threadgroup float* p = (threadgroup float*)y; p[0] = 1;",
    ),
    "argument_of_another_space": (
        "compiler",
        "no matching function",
        "threadgroup float a[4]; f(a);",
        "void f(device float* p) { p[0] = 1; }\n",
    ),
    "reference_of_another_space": ("compiler", "address space", "thread float& r = y[i]; r = 1;"),
    "write_to_const": ("compiler", "read-only", "device float* p = y; x[i] = p[i];"),
    "drops_const": ("compiler", "cannot initialize", "device float* p = x; p[i] = 1;"),
    "write_to_constant": ("compiler", "read-only", "y[i] = 1; table[0] = 1;"),
    "bare_pointer": ("address-space", "`p` needs an address space", "float* p = y; p[i] = 1;"),
    "bare_reference": ("address-space", "`r` needs an address space", "float& r = y[i]; r = 1;"),
    "bare_parameter": (
        "address-space",
        "`p` needs an address space",
        "f(y);",
        "template <typename T> void f(T* p) { p[0] = T(1); }\n",
    ),
    "bare_field": (
        "address-space",
        "`p` needs an address space",
        "S s; s.p = y; s.p[i] = 1;",
        "struct S { float* p; };\n",
    ),
    "bare_result": (
        "address-space",
        "`f` needs an address space",
        "f(y)[i] = 1;",
        "float* f(device float* p) { return p; }\n",
    ),
    "method_of_a_device_object": (
        "address-space",
        "is not for an object in device",
        "device S* s = (device S*)y; y[i] = s->get();",
        "struct S { float a; float get() const { return a; } };\n",
    ),
    "program_scope_variable": ("compiler", "constant address space", "y[i] = a;", "float a = 1;\n"),
    "static_local": ("compiler", "static local variable", "static int a; y[i] = a;"),
    # threadgroup memory
    "threadgroup_in_a_function": (
        "threadgroup",
        "at the top of a kernel",
        "f(y);",
        "void f(device float* p) { threadgroup float a[4]; a[0] = 1; p[0] = a[0]; }\n",
    ),
    "threadgroup_in_a_block": (
        "threadgroup",
        "at the top of a kernel",
        "if (n > 1) { threadgroup float a[4]; a[0] = 1; y[i] = a[0]; }",
    ),
    "threadgroup_initialised": (
        "threadgroup",
        "at the top of a kernel",
        "threadgroup float a[2] = {0};",
    ),
    "threadgroup_too_large": (
        "threadgroup",
        "too much threadgroup memory: expression evaluates to '32784 <= 32768'",
        "threadgroup float a[8192]; threadgroup half c[1]; a[0] = c[0]; y[i] = a[0];",
    ),
    # C++ that Metal does not have
    "double": ("compiler", "'double'", "double d = x[i]; y[i] = d;"),
    "virtual": ("compiler", "virtual", "S s; y[i] = s.f();", "struct S { virtual int f(); };\n"),
    "try": ("compiler", "exceptions", "try { y[i] = 1; } catch (...) { }"),
    "throw": ("compiler", "exceptions", "throw 1;"),
    "new": ("compiler", "'default new'", "thread float* p = new float; y[i] = *p;"),
    "delete": ("compiler", "'default delete'", "thread float* p = nullptr; delete p;"),
    "dynamic_cast": ("compiler", "dynamic_cast", "y[i] = dynamic_cast<int&>(i);"),
    "typeid": ("compiler", "typeid", "y[i] = typeid(i) == typeid(n);"),
    "function_pointer": (
        "compiler",
        "pointers to functions",
        "float (*g)(float) = f; y[i] = g(x[i]);",
        "float f(float a) { return a; }\n",
    ),
    "variable_length_array": ("compiler", "not a constant expression", "float a[n]; y[i] = a[0];"),
    "variadic_function": ("compiler", "variadic", "y[i] = f(1, 2);", "int f(int a, ...);\n"),
    "thread_local": ("compiler", "'thread_local'", "thread_local int a = 1; y[i] = a;"),
    "std": ("compiler", "'std'", "y[i] = std::exp(x[i]);"),
    "recursion": (
        "recursion",
        "`f` calls itself",
        "y[i] = f(n);",
        "int f(int a) { return a > 0 ? f(a - 1) : 0; }\n",
    ),
    "mutual_recursion": (
        "recursion",
        "`g` calls itself",
        "y[i] = f(n);",
        "int g(int a);\nint f(int a) { return g(a); }\nint g(int a) { return a ? f(a - 1) : 0; }\n",
    ),
    "recursion_of_a_template": (
        "recursion",
        "`f` calls itself",
        "y[i] = f(x[i]);",
        "template <typename T> T f(T a) { return a > T(0) ? f(a - T(1)) : a; }\n",
    ),
    "goto": ("goto", "`goto`", "goto end; end: y[i] = 1;"),
    "asm": ("asm", "`asm`", 'asm("nop"); y[i] = 1;'),
    "lambda": ("lambda", "`[&](`", "auto f = [&](int a) { return a + n; }; y[i] = f(1);"),
    "kernel_with_a_result": (
        "kernel",
        "[[kernel]] int",
        "y[i] = 1;",
        "[[kernel]] int f(device int* y) { return 1; }\n",
    ),
    # types and their library
    "float_to_bfloat": ("bfloat", "'bfloat16_t'", "b[i] = x[i] * 2;"),
    "float_to_bfloat_in_place": ("bfloat", "bfloat16_t'", "b[i] += 1.0f;"),
    "half_to_bfloat": ("compiler", "incompatible type", "half a = half(x[i]); b[i] = a;"),
    "bfloat_to_half": ("compiler", "incompatible type", "h[i] = b[i];"),
    "long_shift": ("shift", "by 40", "y[i] = 1 << 40;"),
    "narrowed_constant": ("compiler", "changes value", "uchar a = 300; y[i] = a;"),
    "float_remainder": ("compiler", "invalid operands", "y[i] = x[i] % 2.0f;"),
    "vector_narrowed": ("compiler", "no viable conversion", "half4 a = float4(1); y[i] = a.x;"),
    "vector_parts": ("compiler", "no matching", "float4 a = float4(float2(1), 2.0f); y[i] = a.x;"),
    "vector_as_condition": ("compiler", "bool", "if (float2(x[i]) < float2(1)) { y[i] = 1; }"),
    "repeated_swizzle": ("compiler", "no setter", "float2 a(1, 2); a.xx = a; y[i] = a.x;"),
    "swizzle_of_opencl": ("compiler", "no member named", "float4 a(1); y[i] = a.s0;"),
    "vector_of_opencl": ("compiler", "unused", "float2 a = (float2)(x[i], 1.0f); y[i] = a.x;"),
    "space_of_opencl": ("opencl", "`__global`", "__global float* p = y; p[i] = 1;"),
    "ambiguous_max": ("compiler", "ambiguous", "y[i] = max(n, x[i]);"),
    "as_type_of_another_size": ("compiler", "one size", "y[i] = as_type<ushort>(x[i]);"),
    "simd_sum_of_64_bits": ("compiler", "ambiguous", "y[i] = metal::simd_sum(ulong(i));"),
    "matrix_of_int": ("compiler", "float, half or bfloat", "simdgroup_matrix<int, 8, 8> m;"),
    "matrix_of_another_shape": ("compiler", "8 x 8", "simdgroup_matrix<float, 4, 4> m;"),
    "matrix_from_thread_memory": (
        "compiler",
        "no matching function",
        "float a[64]; simdgroup_float8x8 m; simdgroup_load(m, a);",
    ),
    "acquire": (
        "compiler",
        "undeclared",
        "device atomic_int* a = (device atomic_int*)y;\n"
        "atomic_load_explicit(a, memory_order_acquire);",
    ),
    "cuda": ("compiler", "undeclared", "__syncthreads(); y[i] = 1;"),
    "uninitialised": ("compiler", "uninitialized", "float a; y[i] = a;"),
    "no_return": ("compiler", "return", "y[i] = f(1);", "int f(int a) { if (a) return 1; }\n"),
    "header_of_c": ("compiler", "not found", "y[i] = 1;", "#include <vector>\n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    rule, message, body, *before = REFUSED[name]
    source = kernel(body, *before)
    found = check(source)
    assert any(v.rule == rule and message in v.message for v in found), found
    # Nothing else is wrong with the snippet, and the line is the right one.
    assert {v.rule for v in found} == {rule}, found
    first, last = source.index(before[0] if before else body), source.index(body) + len(body)
    lines = range(source.count("\n", 0, first) + 1, source.count("\n", 0, last) + 2)
    assert all(v.line in lines for v in found), found


ACCEPTED = {
    "plain": ("y[i] = x[i] * table[0] + n;",),
    "barrier": (
        "threadgroup float a[2][16], c;\n"
        "a[0][i] = x[i]; if (i == 0) { c = 1.0f; }\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);\n"
        "threadgroup float* p = &a[0][0]; y[i] = p[15 - i] + c;",
    ),
    "all_of_threadgroup_memory": ("threadgroup float a[8192]; a[i] = x[i]; y[i] = a[i];",),
    "vectors": (
        "float4 a = ((const device float4*)x)[i]; a.xy = a.zw * 2.0f + float2(1.0f);\n"
        "y[i] = dot(a, float4(a.xyz, 1.0f)) + a[2] + metal::max(a, float4(0.0f)).w;\n"
        "half4 c = half4(a); ((device half4*)h)[i] = c; bool2 less = a.xy < a.zw;\n"
        "y[i] += all(less) ? select(1.0f, 2.0f, any(less)) : as_type<float>(as_type<uint>(a.x));",
    ),
    "bfloat": (
        "float a = float(b[i]) + b[i] * 2.0f; b[i] = bfloat16_t(a); h[i] = half(float(b[i]));\n"
        "b[i] = max(b[i], b[i + 1]); b[i] = simd_sum(b[i]);",
    ),
    "half_narrows_silently": ("h[i] = x[i] * 0.5f; half a = 1.0f; y[i] = a;",),
    "simdgroup": (
        "float a = simd_max(simd_shuffle_xor(x[i], 16)) + simd_broadcast(x[i], 0);\n"
        "y[i] = simd_prefix_exclusive_sum(a) + simd_shuffle_down(a, 1) + quad_sum(a);",
    ),
    "matrix": (
        "threadgroup half a[64]; a[i] = half(x[i]);\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "simdgroup_matrix<half, 8, 8> p; simdgroup_matrix<float, 8, 8> sum(0.0f);\n"
        "simdgroup_load(p, a, 8, ulong2(0, 0), true);\n"
        "simdgroup_multiply_accumulate(sum, p, p, sum);\n"
        "thread auto& e = sum.thread_elements(); e[0] = exp2(e[1]);\n"
        "simdgroup_store(sum, y, 8);",
    ),
    "atomics": (
        "device atomic_uint* a = (device atomic_uint*)y;\n"
        "atomic_fetch_add_explicit(a, 1u, memory_order_relaxed);\n"
        "threadgroup atomic_int c; atomic_store_explicit(&c, 0, memory_order_relaxed);",
    ),
    "helpers": (
        "threadgroup float a[4]; f(a, x[i]); S<4> s{x[i]}; y[i] = s.twice() + a[0] + weights[1];",
        "constant float weights[2] = {0.5f, 2};\n"
        "template <typename T> void f(threadgroup T* p, T v) { p[0] = v; }\n"
        "template <int N> struct S { float a; float twice() thread const { return N * a; } };\n",
    ),
    "matrices_in_a_struct": (
        "S<half> s; fill(s, h); y[i] = s.part[0].thread_elements()[0];",
        "template <typename T> struct S { simdgroup_matrix<T, 8, 8> part[2]; };\n"
        "template <typename T> void fill(thread S<T>& s, const device T* x) {\n"
        "  s.part[0].thread_elements()[0] = x[1]; }\n",
    ),
    "chain_of_overloads": (
        "y[i] = f(n);",
        "float f(float a) { return a; }\nfloat f(int a) { return f(float(a)); }\n",
    ),
    "words_in_comments": ("// goto, asm, double: a [&](int) lambda\n y[i] = 1; /* __global */",),
    "names_that_opencl_keeps": ("float local = 1, global = 2; y[i] = local + global;",),
    "templates": (
        "y[i] = Sum<4>::of(x + i);",
        "template <int N> struct Sum { static float of(const device float* p) {\n"
        "  return p[0] + Sum<N - 1>::of(p + 1); } };\n"
        "template <> struct Sum<0> { static float of(const device float*) { return 0; } };\n",
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    assert check(kernel(*ACCEPTED[name])) == []


@pytest.mark.parametrize("name", MLX_KERNELS)
def test_accepts_mlx(name):
    """MLX's own kernels, which Apple's compiler takes."""
    assert check(mlx_source(name)) == []


@pytest.mark.parametrize("name", MLX_LM_CALLS)
def test_accepts_what_mlx_generates(name):
    """The text that MLX makes of mlx-lm's custom kernels: template, signature, instantiation."""
    source = mlx_lm_call(name, mx.bfloat16).source()
    assert "[[kernel]] void" in source
    assert check(source) == []


def test_reports_each_fault_at_its_line():
    source = kernel("float* p = y;\n  y[i] = 1 << 40;\n  goto end;\n  end: p[0] = 1;")
    assert [(v.rule, v.line) for v in check(source)] == [
        ("address-space", 10),
        ("shift", 11),
        ("goto", 12),
    ]


def test_brackets_that_do_not_match():
    assert [v.message for v in check(HEAD + "if (n) {")] == ["brackets do not match"]
