"""The strict front end: every refused snippet for its own reason, every valid one accepted."""

from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("ziglang", reason="the strict front end needs clang")

from metal.host.strict import check
from tests.support.host.foreign_kernels import MLX_KERNELS, MLX_LM_CALLS, metal, mlx_lm_call

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


def read_refused() -> dict[str, list[str]]:
    """The snippets of the text file beside this module, by name."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    snippets = (line.split(" | ") for line in lines if line and not line.startswith("#"))
    return {name: [part.replace("\\n", "\n") for part in parts] for name, *parts in snippets}


REFUSED = read_refused()


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
    """MLX's own kernels pass, as they do with Apple's compiler."""
    assert check(metal(*MLX_KERNELS[name])) == []


@pytest.mark.parametrize("name", MLX_LM_CALLS)
def test_accepts_what_mlx_generates(name):
    """The text that MLX makes of mlx-lm's custom kernels: template, signature, instantiation."""
    source = mlx_lm_call(name, mx.bfloat16).source()
    assert "[[kernel]] void" in source
    assert check(source) == []


def test_reports_each_fault_at_its_line():
    source = kernel("float* p = y;\n  y[i] = 1 << 40;\n  goto end;\n  end: p[0] = 1;")
    found = [(v.rule, v.line) for v in check(source)]
    assert found == [("address-space", 10), ("shift", 11), ("goto", 12)]


def test_brackets_that_do_not_match():
    assert [v.message for v in check(HEAD + "if (n) {")] == ["brackets do not match"]
