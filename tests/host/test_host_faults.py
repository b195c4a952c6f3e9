"""Seeded faults: each is reported by its kind, and the same kernel without it passes."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal.host import HostOptions, KernelFault
from tests.support.host.launch import launch
from tests.support.kernels.seeded_faults import read_faults

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
    # The kernel reverses the 64 numbers of each group through threadgroup memory.
    "reverse": """
    threadgroup float buf[64];
    buf[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = buf[63 - t];
""",
    # A thread reads its own number, so the barrier orders nothing.
    "own": """
    threadgroup float buf[64];
    buf[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = buf[t];
""",
    # The kernel sums each group: within SIMD groups, and then across them.
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
    # A lane gets its neighbour's number by a shuffle.
    "shuffle": """
    float v = simd_shuffle(x[i], (lane + 1) % 32);
    y[i] = v;
""",
    # A thread reads four numbers at a time.
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
    # All threads run a loop of the same length.
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
    # Each SIMD group moves a matrix through threadgroup memory of its own.
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
}
FAULTS = read_faults(Path(__file__))
CHECKED = [HostOptions(checked=True, schedule=order) for order in ("forward", "reverse", 3)]


def run(body: str, options: HostOptions) -> np.ndarray:
    inputs, names = [mx.arange(N, dtype=mx.float32), mx.array([3], mx.int32)], ["x", "n"]
    how = {"input_names": names, "output_names": ["y"], "options": options}
    y = launch(PRELUDE + body, inputs, ((N,), mx.float32), (N, 1, 1), (THREADS, 1, 1), **how)
    return np.array(y)


@pytest.mark.parametrize("body", BODIES)
def test_right_kernels_pass(body):
    results = [run(BODIES[body], options) for options in (HostOptions(), *CHECKED)]
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(name):
    """The checker reports the kind, in any order of the threads."""
    fault = FAULTS[name]
    for options in CHECKED:
        with pytest.raises(KernelFault) as raised:
            run(fault.seeded(BODIES[fault.kernel]), options)
        assert raised.value.kind in fault.kinds, raised.value
