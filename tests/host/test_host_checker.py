"""The host's checker: each fault is reported, at its line, and correct kernels are not."""

import mlx.core as mx
import numpy as np
import pytest

from metal.host import HostError, HostOptions, KernelFault, run_metal
from tests.support.host.launch import launch

N = 64


def run(source, schedule="forward", a=None, threads=N, groups=1, **options):
    """Run a kernel with an input a and an output out, of N floats each, under the checker."""
    out = launch(
        f"uint t = thread_index_in_threadgroup;\n{source}",
        [mx.arange(N).astype(mx.float32) if a is None else a],
        ((N,), mx.float32),
        (threads * groups, 1, 1),
        (threads, 1, 1),
        options=HostOptions(checked=True, schedule=schedule, **options),
        name="k",
    )
    return np.array(out)


def fault(source, **settings):
    """The fault of a kernel, which must be in the line of the mark `// here`."""
    with pytest.raises(KernelFault) as caught:
        run(source, **settings)
    if "// here" in source:
        before = source[: source.index("// here")]
        assert f"k (source):{before.count(chr(10)) + 2}" in caught.value.location
    return caught.value


FILL = "out[t] = 0.0f;\n"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("out[t] = a[t + 1];", "read of 4 bytes at byte 256 of a, which has 256 bytes"),
        ("out[t] = a[int(t) - 1];", "read of 4 bytes, 4 bytes before a"),
        ("out[t + 1] = 0.0f;", "write of 4 bytes at byte 256 of out"),
        ("out[t] = a[t + 1000000];", "at byte 4000000 of a"),
        ("out[t] = *(device const float*)((device const char*)a + 254);", "at byte 254 of a"),
        ("float4 v = *(device const float4*)(a + 64); out[t] = v.x;", "at byte 256 of a"),
    ],
)
def test_out_of_bounds(statement, message):
    report = fault(f"\n{statement} // here")
    assert report.kind in ("out of bounds", "misaligned")
    if report.kind == "out of bounds":
        assert message in str(report)


def test_out_of_bounds_of_arrays():
    report = fault("threadgroup float s[32];\ns[t] = 1.0f; // here\n" + FILL)
    assert (report.kind, report.thread) == ("out of bounds", (32, 0, 0))
    report = fault(
        "threadgroup float s[32];\nthreadgroup float* p = s;\np[t] = 1.0f; // here\n" + FILL
    )
    assert "write of 4 bytes at byte 128 of threadgroup s, which has 128 bytes" in str(report)
    report = fault(
        "float own[4];\nfor (uint i = 0; i < 4; i++) { own[i] = a[i]; }\nout[t] = own[t]; // here\n"
    )
    assert (report.kind, report.thread) == ("out of bounds", (4, 0, 0))


def test_misaligned():
    report = fault(
        "\ndevice const float4* p = (device const float4*)(a + t);\nout[t] = p->x; // here"
    )
    assert (report.kind, report.thread) == ("misaligned", (1, 0, 0))


def test_a_slice_starts_where_it_would_on_a_gpu():
    source = "out[t] = ((device const float4*)a)[t % 4].y;"
    whole = mx.arange(80).astype(mx.float32)
    assert run(source, a=whole[4:68])[1] == 9
    assert fault(source, a=whole[5:69]).kind == "misaligned"


def test_inputs_are_read_only_unless_named():
    source = FILL + "if (t == 3) { const_cast<device float*>(a)[t] = 1.0f; } // here"
    report = fault(source)
    assert (report.kind, report.thread) == ("read-only", (3, 0, 0))
    a = mx.zeros(N)
    run(source, a=a, writable_inputs=["a"])
    assert a[3].item() == 1


def test_uninitialised():
    report = fault("threadgroup float s[64];\nif (t < 40) { s[t] = a[t]; }\nout[t] = s[t]; // here")
    assert (report.kind, report.thread) == ("uninitialised", (40, 0, 0))
    assert fault("\nout[t] += a[t]; // here").kind == "uninitialised"


def test_threadgroup_memory_is_fresh_in_each_threadgroup():
    source = """
        threadgroup float s[1];
        if (threadgroup_position_in_grid.x == 0) { s[0] = 1.0f; }
        out[threadgroup_position_in_grid.x] = s[0]; // here"""
    report = fault(source, threads=1, groups=2)
    assert (report.kind, report.threadgroup) == ("uninitialised", (1, 0, 0))


def test_outputs_are_filled():
    report = fault("if (t != 7) { out[t] = a[t]; }")
    assert report.kind == "unwritten"
    assert "1 of 64 elements of the output out, from byte 28 on" in str(report)


def test_outputs_behind_an_unfilled_one_are_returned():
    rest = np.zeros(N, np.float32)
    source = """kernel void k(device float* out [[buffer(0)]], device float* rest [[buffer(1)]],
                              uint t [[thread_position_in_grid]]) { rest[t] = float(t); }"""
    with pytest.raises(KernelFault, match="64 of 64 elements of the output out"):
        run_metal(
            source,
            "k",
            [np.zeros(N, np.float32), rest],
            (N, 1, 1),
            (N, 1, 1),
            outputs=[0, 1],
            options=HostOptions(checked=True),
        )
    assert rest[-1] == N - 1


@pytest.mark.parametrize("checked", [False, True])
def test_more_threadgroup_variables_than_the_host_has_room_for(checked):
    """The host is at fault, not the kernel."""
    unused = "".join(f"threadgroup float s{i}[1];\n" for i in range(256))
    source = f"if (t > 999) {{\n{unused}}}\nthreadgroup float s[1];\ns[0] = a[0];\nout[t] = s[0];"
    with pytest.raises(HostError, match="256 threadgroup variables"):
        launch(
            f"uint t = thread_index_in_threadgroup;\n{source}",
            [mx.zeros(N)],
            ((N,), mx.float32),
            (1, 1, 1),
            (1, 1, 1),
            options=HostOptions(checked=checked),
        )


@pytest.mark.parametrize("schedule", ["forward", "reverse", 1])
def test_a_barrier_missing_at_the_end_of_a_loop(schedule):
    # Each round reads what others wrote, then writes: the second barrier keeps the rounds apart.
    source = """
        threadgroup float s[64];
        float sum = 0.0f;
        for (uint i = 0; i < 3; i++) {
            s[t] = a[t] + float(i);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            sum += s[(t + 1) % 64];
            BARRIER
        }
        out[t] = sum;"""
    full = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    assert run(source.replace("BARRIER", full), schedule)[0] == 6
    report = fault(source.replace("BARRIER", ""), schedule=schedule)
    assert report.kind == "race"
    assert "no barrier between orders threadgroup memory" in str(report)
    assert ", the other at k (source):" in report.location


def test_device_memory_needs_its_own_flag():
    source = "out[t] = a[t];\nBARRIER\nfloat v = out[63 - t]; // here\nBARRIER\nout[t] = v;"
    assert run(source.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_device);"))[0] == 63
    wrong = source.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);", 1)
    report = fault(wrong.replace("BARRIER", ""), schedule=1)
    assert report.kind in ("race", "uninitialised")
    both = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
    assert run(source.replace("BARRIER", both))[0] == 63


@pytest.mark.parametrize("schedule", ["forward", "reverse", 1])
def test_nothing_orders_threadgroups(schedule):
    source = "out[t] = a[t];\nthreadgroup_barrier(mem_flags::mem_device);"
    report = fault(source, schedule=schedule, groups=2)
    assert report.kind == "race"
    assert "of another threadgroup" in str(report)


def test_neighbouring_bytes_do_not_race():
    source = """
        threadgroup uchar bytes[64];
        bytes[t] = uchar(t);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        device uchar* raw = (device uchar*)(out + t);
        for (uint i = 0; i < 4; i++) { raw[i] = 0; }
        if (t == 0) { out[0] = float(bytes[63]); }"""
    assert run(source)[0] == 63


@pytest.mark.parametrize(
    "expression",
    [
        "float(int(a[t] * 1e10f))",
        "float(1 << (int(a[t]) + 20))",
        "float(int(2147483647) + int(a[t]))",
        "float(5 / int(a[t]))",
        "float(int(as_type<float>(0x7fc00000u)))",
    ],
)
def test_undefined_arithmetic(expression):
    assert fault(f"\nout[t] = {expression}; // here").kind == "undefined"


def test_matrices_are_watched():
    source = """
        threadgroup float s[64];
        s[t] = a[t];
        BARRIER
        simdgroup_matrix<float, 8, 8> m;
        simdgroup_load(m, s, 8);
        simdgroup_store(m, out, 8); // here"""
    header = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    correct = source.replace("BARRIER", header)
    assert fault(correct).kind == "race"  # two SIMD groups store the same matrix
    once = correct.replace("simdgroup_store", "if (t < 32) { simdgroup_store").replace(
        "out, 8);", "out, 8); }"
    )
    assert run(once)[9] == 9
    report = fault(source.replace("BARRIER", "").replace(" // here", ""), schedule=1)
    assert report.kind in ("race", "uninitialised")


def test_both_halves_of_a_failed_run():
    """After a fault the library is usable, and a correct run gives the same output as before."""
    assert fault("\nout[t] = a[t + 1]; // here").kind == "out of bounds"
    np.testing.assert_array_equal(run("out[t] = a[t];"), np.arange(N))
