"""Seeded faults: each is reported by its kind, and the same kernel without it passes."""

import mlx.core as mx
import numpy as np
import pytest

from metal.host import HostKernel, HostOptions, KernelFault, compiler_available

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")

GROUPS, THREADS = 2, 64
N = GROUPS * THREADS

# Every body below reads x (float, N), writes y (float, N), has two threadgroups of 64 threads, and
# is right.
PRELUDE = """
    uint t = thread_position_in_threadgroup.x;
    uint g = threadgroup_position_in_grid.x;
    uint i = thread_position_in_grid.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
"""
BODIES = {
    # Reverses each group's 64 numbers through threadgroup memory.
    "reverse": """
    threadgroup float buf[64];
    buf[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = buf[63 - t];
""",
    # Reads back what it wrote itself: the barrier orders nothing.
    "own": """
    threadgroup float buf[64];
    buf[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = buf[t];
""",
    # Sums of each group, by simdgroup and then across them.
    "sum": """
    threadgroup float sums[2];
    float total = simd_sum(x[i]);
    if (lane == 0) {
        sums[sg] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float both = simd_sum(lane < 2 ? sums[lane] : 0.0f);
    y[i] = both;
""",
    # A neighbour's number by a shuffle.
    "shuffle": """
    float v = simd_shuffle(x[i], (lane + 1) % 32);
    y[i] = v;
""",
    # Four numbers at a time.
    "vector": """
    if (t < 16) {
        float4 v = *(const device float4*)(x + g * 64 + t * 4);
        *(device float4*)(y + g * 64 + t * 4) = v;
    }
""",
    # Two threads of a group meet in device memory.
    "device": """
    y[i] = x[i];
    threadgroup_barrier(mem_flags::mem_device);
    float v = y[g * 64 + 63 - t];
    threadgroup_barrier(mem_flags::mem_device);
    y[i] = v;
""",
    # A loop whose length is the same for all.
    "loop": """
    threadgroup float buf[64];
    buf[t] = 0;
    for (int k = 0; k < n[0]; k++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        buf[(t + k) % 64] += x[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = buf[t];
""",
    # A matrix through threadgroup memory, by each simdgroup for itself.
    "matrix": """
    threadgroup float tile[2][64];
    tile[sg][lane] = x[i];
    tile[sg][lane + 32] = x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 m;
    simdgroup_load(m, tile[sg], 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_store(m, tile[sg], 8, ulong2(0, 0), true);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = tile[sg][lane];
""",
    # All groups count together; only the count of the first is told.
    "count": """
    device atomic_int* counter = (device atomic_int*)y + g * 64;
    if (t == 0) {
        atomic_store_explicit(counter, 0, memory_order_relaxed);
    } else {
        y[i] = 0;
    }
    threadgroup_barrier(mem_flags::mem_device);
    atomic_fetch_add_explicit(counter, int(t), memory_order_relaxed);
""",
}
# A read that no barrier puts after the write may come first, and then finds nothing written.
UNORDERED = ("race", "uninitialised")
# name: (body, what is replaced, by what, kind or kinds)
FAULTS = {
    # no barrier, or one that does not order what it should
    "barrier_removed": (
        "reverse",
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
        UNORDERED,
    ),
    "barrier_of_no_memory": ("reverse", "mem_threadgroup", "mem_none", UNORDERED),
    "barrier_of_device_memory": ("reverse", "mem_threadgroup", "mem_device", UNORDERED),
    "barrier_of_a_simdgroup": ("reverse", "threadgroup_barrier", "simdgroup_barrier", UNORDERED),
    "barrier_of_threadgroup_memory": ("device", "mem_device", "mem_threadgroup", "race"),
    "second_barrier_removed": (
        "device",
        "63 - t];\n    threadgroup_barrier(mem_flags::mem_device);",
        "63 - t];",
        "race",
    ),
    "barrier_outside_the_loop": (
        "loop",
        "{\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "{",
        UNORDERED,
    ),
    "barrier_before_the_matrix_removed": (
        "matrix",
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n    simdgroup_float8x8",
        "simdgroup_float8x8",
        "race",
    ),
    "barrier_after_the_matrix_removed": (
        "matrix",
        "true);\n    simdgroup_barrier(mem_flags::mem_threadgroup);",
        "true);",
        "race",
    ),
    "sums_not_awaited": ("sum", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", UNORDERED),
    # races of other kinds
    "two_threads_write": ("reverse", "y[i] = buf", "y[i & ~1u] = buf", "race"),
    "two_groups_write": ("reverse", "y[i] = buf", "y[t] = buf", "race"),
    "a_group_reads_another": ("device", "y[g * 64 + 63 - t]", "y[127 - i]", UNORDERED),
    "every_lane_writes": ("sum", "if (lane == 0)", "if (lane < 2)", "race"),
    "wrong_lane": ("sum", "if (lane == 0)", "if (lane == 32)", "uninitialised"),
    "added_without_an_atomic": (
        "count",
        "atomic_fetch_add_explicit(counter, int(t), memory_order_relaxed);",
        "y[g * 64] += t;",
        "race",
    ),
    # bounds
    "read_one_too_far": ("reverse", "x[i]", "x[i + 1]", "out of bounds"),
    "read_one_before": ("reverse", "x[i]", "x[int(i) - 1]", "out of bounds"),
    "write_one_too_far": ("reverse", "y[i] =", "y[i + 1] =", "out of bounds"),
    "far_away": ("reverse", "x[i]", "x[i * 1000003]", "out of bounds"),
    "threadgroup_read_one_too_far": ("reverse", "buf[63 - t]", "buf[64 - t]", "out of bounds"),
    "threadgroup_write_one_too_far": ("reverse", "buf[t] =", "buf[t + 1] =", "out of bounds"),
    "more_lanes_than_sums": ("sum", "lane < 2", "lane < 3", "out of bounds"),
    "vector_past_the_end": ("vector", "t < 16", "t < 16 + g", "out of bounds"),
    "matrix_past_the_end": ("matrix", "tile[2][64]", "tile[2][48]", "out of bounds"),
    # what nobody wrote
    "threadgroup_not_filled": ("reverse", "buf[t] =", "if (t != 5) buf[t] =", "uninitialised"),
    "output_read_first": ("reverse", "y[i] =", "y[i] +=", "uninitialised"),
    "output_not_filled": ("reverse", "y[i] =", "if (i != 77) y[i] =", "unwritten"),
    "last_group_left_out": ("reverse", "y[i] =", "if (g == 0) y[i] =", "unwritten"),
    "vectors_left_out": ("vector", "t < 16", "t < 15", "unwritten"),
    # what may not be written
    "input_written": ("reverse", "y[i] =", "((device float*)x)[i] = 0; y[i] =", "read-only"),
    # alignment
    "vector_misaligned": ("vector", "t * 4);\n        *", "t * 4 + 1);\n        *", "misaligned"),
    # threads that do not meet
    "barrier_for_half": (
        "own",
        "threadgroup_barrier",
        "if (t < 32) threadgroup_barrier",
        "divergence",
    ),
    "barrier_for_a_lane": (
        "own",
        "threadgroup_barrier",
        "if (lane) threadgroup_barrier",
        "divergence",
    ),
    "return_before_the_barrier": (
        "own",
        "threadgroup_barrier",
        "if (t == 0) return; threadgroup_barrier",
        "divergence",
    ),
    "loop_of_uneven_length": ("loop", "k < n[0]", "k < n[0] + int(sg)", "divergence"),
    "sum_of_half_the_lanes": (
        "sum",
        "float total =",
        "if (lane < 16) return; float total =",
        "divergence",
    ),
    "shuffle_from_beyond": ("shuffle", "% 32", "+ 31", "lane"),
    # what C++ leaves undefined
    "division_by_zero": ("loop", "buf[t] = 0", "buf[t] = t / (n[0] - 3)", "undefined"),
    "shift_too_long": ("loop", "buf[t] = 0", "buf[t] = 1 << (n[0] + 29)", "undefined"),
    "nan_as_an_integer": ("reverse", "buf[t] = x[i]", "buf[t] = int(x[i] / 0.0f)", "undefined"),
    "thread_array_one_too_far": (
        "reverse",
        "buf[t] = x[i]",
        "float own[4] = {0, 1, 2, 3}; buf[t] = own[t / 15]",
        "out of bounds",
    ),
    # too much
    "threadgroup_memory": ("reverse", "float buf[64]", "float buf[8193]", "threadgroup memory"),
}
CHECKED = (
    HostOptions(checked=True),
    HostOptions(checked=True, schedule="reverse"),
    HostOptions(checked=True, schedule=3),
)


def run(body: str, options: HostOptions) -> np.ndarray:
    kernel = HostKernel(
        name="seeded",
        input_names=["x", "n"],
        output_names=["y"],
        source=PRELUDE + body,
        options=options,
    )
    (y,) = kernel(
        inputs=[mx.arange(N, dtype=mx.float32), mx.array([3], mx.int32)],
        grid=(N, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(N,)],
        output_dtypes=[mx.float32],
    )
    return np.array(y)


def mutated(body: str, old: str, new: str) -> str:
    assert old in BODIES[body], f"{body} has no {old!r}: the fault is not seeded"
    return BODIES[body].replace(old, new, 1)


@pytest.mark.parametrize("body", BODIES)
def test_right_kernels_pass(body):
    results = [run(BODIES[body], options) for options in (HostOptions(), *CHECKED)]
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(name):
    """By its kind, whatever the order of the threads."""
    *change, kind = FAULTS[name]
    for options in CHECKED:
        with pytest.raises(KernelFault) as raised:
            run(mutated(*change), options)
        assert raised.value.kind in (kind if isinstance(kind, tuple) else (kind,)), raised.value


def test_an_input_named_writable_may_be_written():
    body = mutated(*FAULTS["input_written"][:3])
    assert np.array_equal(
        run(body, HostOptions(checked=True, writable_inputs={"x"})), run(body, HostOptions())
    )


def test_an_output_named_partial_may_be_left_unfilled():
    body = mutated(*FAULTS["output_not_filled"][:3])
    run(body, HostOptions(checked=True, partial_outputs={"y"}))
