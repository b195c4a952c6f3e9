"""The CPU host for Metal kernels: kernels of a few lines against numpy."""

import mlx.core as mx
import numpy as np
import pytest

from metal.host import HostError, HostOptions, KernelFault, installed, mlx_source, run_metal
from tests.support.host.launch import launch

SCHEDULES = ["forward", "reverse", 1, 2]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint8])
def test_copy_keeps_every_bit(dtype):
    a = (mx.arange(100) * 0.37).astype(dtype)
    source = "uint i = thread_position_in_grid.x; out[i] = a[i];"
    out = launch(source, [a], ((100,), dtype), (100, 1, 1), (32, 1, 1))
    assert out.dtype == dtype
    assert mx.array_equal(out, a)


def test_arithmetic_in_bfloat_rounds_each_result():
    a, b = mx.random.normal((2, 256)).astype(mx.bfloat16)
    source = "uint i = thread_position_in_grid.x; out[i] = a[i] * b[i] + a[i];"
    out = launch(source, [a, b], ((256,), mx.bfloat16), (256, 1, 1), (64, 1, 1))
    wide = (a.astype(mx.float32) * b.astype(mx.float32)).astype(mx.bfloat16).astype(mx.float32)
    assert mx.array_equal(out, (wide + a.astype(mx.float32)).astype(mx.bfloat16))


def test_float_becomes_bfloat_only_when_asked():
    source = "out[thread_position_in_grid.x] = float(a[0]);"
    with pytest.raises(HostError, match="does not compile"):
        launch(source, [mx.zeros(8)], ((8,), mx.bfloat16), (8, 1, 1), (8, 1, 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reduction_through_threadgroup_memory(schedule):
    source = """
        threadgroup float partial[4];
        uint t = thread_position_in_threadgroup.x;
        float sum = simd_sum(a[thread_position_in_grid.x]);
        if (thread_index_in_simdgroup == 0) {
            partial[simdgroup_index_in_threadgroup] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (t == 0) {
            out[threadgroup_position_in_grid.x] = partial[0] + partial[1] + partial[2] + partial[3];
        }
    """
    a, options = mx.random.normal((3 * 128,)), HostOptions(schedule=schedule)
    out = launch(source, [a], ((3,), mx.float32), (384, 1, 1), (128, 1, 1), options=options)
    np.testing.assert_allclose(out, np.array(a).reshape(3, 128).sum(1), rtol=1e-5, atol=1e-5)


def test_lanes_share_values():
    source = """
        uint i = thread_index_in_simdgroup;
        uint v = i * i;
        out[i] = simd_shuffle(v, 3);
        out[32 + i] = simd_shuffle_xor(v, 5);
        out[64 + i] = simd_shuffle_down(v, 4);
        out[96 + i] = simd_shuffle_up(v, 4);
        out[128 + i] = simd_prefix_exclusive_sum(v);
        out[160 + i] = simd_max(v);
        out[192 + i] = simd_any(i == 31) && !simd_all(i == 31);
        out[224 + i] = uint(ulong(simd_ballot(i % 2 == 0)));
    """
    v, i = np.arange(32) ** 2, np.arange(32)
    expected = [
        np.full(32, 9),
        v[i ^ 5],
        np.where(i + 4 < 32, v[(i + 4) % 32], v),
        np.where(i >= 4, v[i - 4], v),
        np.cumsum(v) - v,
        np.full(32, 961),
        np.full(32, 1),
        np.full(32, 0x55555555),
    ]
    out = launch(source, [mx.zeros(1)], ((256,), mx.uint32), (32, 1, 1), (32, 1, 1))
    np.testing.assert_array_equal(out, np.concatenate(expected))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_matrix_product_by_simdgroup_matrices(dtype):
    source = """
        simdgroup_matrix<T, 8, 8> x, y;
        simdgroup_matrix<float, 8, 8> sum(0.0f);
        uint row = threadgroup_position_in_grid.y * 8;
        uint column = threadgroup_position_in_grid.x * 8;
        for (uint k = 0; k < K; k += 8) {
            simdgroup_load(x, a + row * K + k, K);
            simdgroup_load(y, b + column * K + k, K, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(sum, x, y, sum);
        }
        simdgroup_store(sum, out + row * N + column, N);
    """
    a, b = mx.random.normal((16, 32)).astype(dtype), mx.random.normal((24, 32)).astype(dtype)
    template = [("T", dtype), ("K", 32), ("N", 24)]
    header = "#include <metal_simdgroup_matrix>\n"
    out = launch(
        source, [a, b], ((16, 24), mx.float32), (3 * 32, 2, 1), (32, 1, 1), template, header=header
    )
    wide = [np.array(x.astype(mx.float32), np.float64) for x in (a, b)]
    np.testing.assert_allclose(out, wide[0] @ wide[1].T, rtol=1e-4, atol=1e-4)


def test_template_values_leave_the_name_an_identifier():
    """The name must also be right with the oldest allowed MLX, which leaves a sign in the name."""
    definition = {"name": "test", "input_names": ["a"], "output_names": ["out"], "source": "N"}
    rest = [mx.zeros(8)], [("T", mx.bfloat16), ("N", 3), ("B", True)], [mx.float32]
    text = mlx_source.generated_source(definition, *rest)
    name = "custom_kernel_test__bfloat16_t_3_1_float_float"
    assert (mlx_source.oldest_name(text), f"[[kernel]] void {name}(" in text) == (name, True)
    with pytest.raises(HostError, match="the kernel custom_kernel_test__-3_float_float"):
        launch("out[0] = N;", [mx.zeros(8)], ((8,), mx.float32), (1, 1, 1), (1, 1, 1), [("N", -3)])


def test_a_write_through_an_input_reaches_the_array():
    store = mx.zeros((4, 8), mx.bfloat16)
    source = """
        uint i = thread_position_in_grid.x;
        device T* rows = const_cast<device T*>(a);
        rows[2 * 8 + i] = T(float(i));
        if (i == 0) { out[0] = 1; }
    """
    launch(source, [store], ((1,), mx.int32), (8, 1, 1), (8, 1, 1), [("T", mx.bfloat16)])
    assert store[2].tolist() == list(range(8))
    assert mx.all(store[3] == 0)


def test_transposed_input_is_copied_and_its_strides_are_known():
    a = mx.arange(12).reshape(3, 4).T
    source = "uint i = thread_position_in_grid.x; out[i] = a[i];"
    out = launch(source, [a], ((12,), mx.int32), (12, 1, 1), (4, 1, 1))
    assert out.tolist() == np.arange(12).reshape(3, 4).T.reshape(-1).tolist()
    source = "out[thread_position_in_grid.x] = a_strides[thread_position_in_grid.x] + a_shape[0];"
    out = launch(source, [a], ((2,), mx.int32), (2, 1, 1), (2, 1, 1), ensure_row_contiguous=False)
    assert out.tolist() == [1 + 4, 4 + 4]


def test_threadgroups_at_the_edge_are_smaller():
    source = """
        uint3 n = threads_per_threadgroup;
        uint at = thread_position_in_grid.y * 5 + thread_position_in_grid.x;
        out[at] = n.x * 10 + n.y;
    """
    out = launch(source, [mx.zeros(1)], ((3, 5), mx.uint32), (5, 3, 1), (4, 2, 1))
    assert out.tolist() == [[42] * 4 + [12]] * 2 + [[41] * 4 + [11]]


def test_vectors_and_swizzles():
    header = """
        template <typename T>
        inline float weigh(metal::vec<T, 4> v) { return dot(float4(v), float4(1, 2, 3, 4)); }
    """
    source = """
        device const float4* rows = reinterpret_cast<device const float4*>(a);
        float4 v = rows[thread_position_in_grid.x];
        v.xy = v.yx;
        v.zw *= float2(2.0f, 0.5f);
        out[thread_position_in_grid.x] = weigh<float>(max(v, float4(0.0f)));
    """
    a = mx.random.normal((10, 4))
    out = launch(source, [a], ((10,), mx.float32), (10, 1, 1), (5, 1, 1), header=header)
    v = np.array(a)[:, [1, 0, 2, 3]] * [1, 1, 2, 0.5]
    np.testing.assert_allclose(out, np.maximum(v, 0) @ [1, 2, 3, 4], rtol=1e-5)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("if (t < 40) { threadgroup_barrier(mem_flags::mem_none); }", "returned"),
        ("if (t % 2) { return; }\n out[t] = simd_sum(1.0f);", "returned"),
        ("if (t % 2) { out[t] = simd_sum(1.0f); }\n else { out[t] = simd_max(1.0f); }", "simd_sum"),
        (
            "if (t < 32) { simdgroup_barrier(mem_flags::mem_none); out[t] = simd_sum(1.0f); }\n"
            "threadgroup_barrier(mem_flags::mem_none);\n"
            "if (t > 3) { threadgroup_barrier(mem_flags::mem_none); }",
            "threads",
        ),
    ],
)
@pytest.mark.parametrize("schedule", ["forward", "reverse", 3])
def test_threads_that_do_not_meet_are_a_fault(source, message, schedule):
    source, one = f"uint t = thread_index_in_threadgroup;\n{source}", (64, 1, 1)
    options = HostOptions(schedule=schedule)
    with pytest.raises(KernelFault, match=message) as caught:
        launch(source, [mx.zeros(1)], ((64,), mx.float32), one, one, options=options)
    assert caught.value.kind == "divergence"
    assert "(source):" in caught.value.location
    assert caught.value.thread is not None


def test_threadgroup_memory_has_a_limit():
    source = """
        threadgroup float big[8192];
        threadgroup float more[1];
        big[0] = 1.0f;
        more[0] = 1.0f;
        out[0] = 1.0f;
    """
    with pytest.raises(KernelFault, match="32784 bytes asked for, a threadgroup has 32768"):
        launch(source, [mx.zeros(1)], ((1,), mx.float32), (1, 1, 1), (1, 1, 1))


def test_fresh_memory_is_poisoned():
    source = """
        threadgroup float unset[2];
        out[0] = unset[1];
    """
    out = launch(source, [mx.zeros(1)], ((2,), mx.float32), (1, 1, 1), (1, 1, 1))
    assert mx.all(mx.isnan(out))


def test_stand_in_for_mlx():
    def double(x):
        kernel = mx.fast.metal_kernel(
            name="double",
            input_names=["x"],
            output_names=["y"],
            source="uint i = thread_position_in_grid.x; y[i] = x[i] * 2;",
        )
        return kernel(
            inputs=[x],
            grid=(x.size, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
        )[0]

    original = mx.fast.metal_kernel
    with installed() as made:
        out = mx.compile(lambda x: double(x + 1) + 1)(mx.ones((3, 5)))
    assert mx.all(out == 5)
    assert [k.name for k in made] == ["double"]
    assert mx.fast.metal_kernel is original


@pytest.mark.parametrize("checked", [False, True])
def test_whole_metal_source(checked):
    source = """
        #include <metal_stdlib>
        using namespace metal;
        constant bool negate [[function_constant(3)]];
        template <typename T>
        kernel void scale(
            device T* x [[buffer(1)]],
            constant T& by [[buffer(0)]],
            threadgroup T* scratch [[threadgroup(0)]],
            uint2 at [[thread_position_in_grid]],
            uint2 size [[threads_per_grid]],
            ushort t [[thread_index_in_threadgroup]]) {
          scratch[t] = by;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          x[at.y * size.x + at.x] *= negate ? -scratch[t ^ 1] : scratch[t ^ 1];
        }
    """
    for dtype, name in [(np.float32, "float"), (np.float16, "half"), (np.int32, "int")]:
        x = np.arange(32).astype(dtype).reshape(4, 8)
        how = {"threadgroup_memory": {0: 8 * x.itemsize}, "options": HostOptions(checked=checked)}
        # A constant that is not given is zero, whatever it was before.
        for by, constants, total in ((3, {3: np.bool_(True)}, -3), (2, {}, -6)):
            buffers = {0: dtype(by), 1: x}
            where = (8, 4, 1), (4, 2, 1)
            run_metal(source, f"scale<{name}>", buffers, *where, constants=constants, **how)
            np.testing.assert_array_equal(x, np.arange(32).reshape(4, 8) * total)


def test_a_lane_that_does_not_exist_is_a_fault():
    source = "out[0] = simd_shuffle(1.0f, 32);"
    with pytest.raises(KernelFault, match="there is no lane") as caught:
        launch(source, [mx.zeros(1)], ((1,), mx.float32), (32, 1, 1), (32, 1, 1))
    assert caught.value.kind == "lane"
