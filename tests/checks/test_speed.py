"""The two timed candidates do the same work.  Times themselves mean nothing here."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.kernels.device import change_device, gpu_on_host
from tests.support.kernels.launches import watch
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import attention, isolated, speed
from vllm_metal_lite.checks.check import Check, Loads, Speed
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.checks.run_check import run
from vllm_metal_lite.kernels import timing
from vllm_metal_lite.kernels.registry import REGISTRY, name_of_launch
from vllm_metal_lite.specs import AttentionShape, GatedNormShape, KernelUse, RopeShape

measure = speed.measure
SHAPE = AttentionShape(4, 2, 32, 32, mx.float32)
LATENT = AttentionShape(4, 1, 64, 16, mx.float32, latent=True)
SHAPES = SHAPE, replace(SHAPE, window=9, softcap=2.0, sinks=True), replace(SHAPE, kv_bits=8), LATENT
USE = KernelUse(
    SHAPES,
    16,
    (RopeShape(32, eps=1e-5), RopeShape(16, True, None, factor=1.5)),
    (64,),
    recurrences=(GatedNormShape(32, 3, mx.float32),),
)
TIMED = [row.name for row in REGISTRY.values() if row.timed]
SMALL = Loads(3, 20, 70, 3, 32, ((2, 20, 20), (1, 40, 20)), 9)


@pytest.fixture
def a_gpu(monkeypatch, tmp_path):
    """A device that splits the contexts of SMALL loads, also those of a request with drafts."""
    change_device(monkeypatch, min_split_context=40, min_split_keys=8, min_saved_tokens=16)
    change_device(monkeypatch, rows_as_decodes=SMALL.drafted, min_prefix_split_keys=8)
    with gpu_on_host(monkeypatch, tmp_path):
        yield


@pytest.mark.parametrize("kernel", TIMED)
def test_both_candidates_compute_the_same_and_one_lacks_the_kernel(monkeypatch, a_gpu, kernel):
    launched = set()
    watch(monkeypatch, lambda k, _, template: launched.add(name_of_launch(k, template)))
    name = kernel if REGISTRY[kernel].template else REGISTRY[kernel].file
    loads = 0

    def seconds(ours, fallback):
        nonlocal loads
        loads += 1
        results = []
        for work, with_it in ((ours, True), (fallback, False)):
            launched.clear()
            out = work()
            first = out if isinstance(out, mx.array) else out[0]
            results.append(np.array(first.astype(mx.float32)).ravel())
            assert (name in launched) == with_it, kernel
        np.testing.assert_allclose(*results, rtol=2e-4, atol=2e-4)
        return 1.0, 2.0

    monkeypatch.setattr(speed, "_seconds", seconds)
    checks = [c for c in checks_for(USE) if c.kernel == kernel]
    found = [measure(check, SMALL) for check in checks]
    assert loads
    assert found == [
        None
        if c.beside or (c.rope and "decode" not in kernel and "_write" not in kernel)
        else Speed(2.0, 4.0)
        if kernel in ("varlen_prefill", "latent_prefill")
        else Speed(1.0, 2.0)
        for c in checks
    ]


def test_what_has_no_alternative_is_not_timed(a_gpu):
    for check in checks_for(USE):
        if check.kernel not in TIMED:
            assert measure(check) is None


def test_only_a_kernel_that_is_right_is_timed(monkeypatch, a_gpu):
    monkeypatch.setattr(speed, "measure", lambda check: Speed(1.0, 2.0))
    check = checks_for(USE)[0]
    assert run(check).speed is None
    assert run(check, timed=True).speed == Speed(1.0, 2.0)
    monkeypatch.setattr(attention, "write", lambda _: 2.0)
    assert run(check, timed=True).speed is None


@pytest.mark.parametrize(
    ("cost", "rounds", "calls"),
    [(0.002, 5, 20), (0.0105, 5, 4), (0.06, 3, 1), (0.1, 2, 1), (3.0, 1, 1)],
)
def test_candidates_are_timed_alternately_and_slow_ones_less_often(
    monkeypatch, cost, rounds, calls
):
    """A device that slows down does so for both candidates."""
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def candidate(name, factor):
        def run(count):
            for _ in range(count):
                order.append(name)
                now[0] += factor * cost * (1 + len(order) / 1000)

        return run

    candidates = [candidate("ours", 1.0), candidate("other", 1.005)]
    ours, other = timing.seconds_alternating(candidates, calls=20, enough=0.24)
    assert cost < ours < other < 2 * cost
    before = 2 * (2 + 1)  # two calls that warm up, and one that decides how many are timed
    assert order[before:] == (["ours"] * calls + ["other"] * calls) * rounds


def test_slow_must_be_found_twice(monkeypatch):
    times = iter([(2.0, 1.0), (1.2, 1.0), (2.0, 1.0), (3.0, 1.0), (1.4, 1.0)])
    monkeypatch.setattr(speed, "_seconds", lambda *_: next(times))
    check = next(c for c in checks_for(USE) if c.kernel == "gather_rows")
    assert [measure(check).seconds for _ in range(3)] == [1.2, 2.0, 1.4]


def test_timing_on_a_slow_device_ends_before_the_deadline(monkeypatch):
    """Otherwise a correct kernel would be remembered as one that hangs."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def work(seconds):
        now[0] += seconds
        return mx.zeros(1)

    pairs = [(lambda: work(1.0), lambda: work(0.5))] * 2
    monkeypatch.setattr(attention, "timed_prefill", lambda *_: pairs)
    assert measure(Check("varlen_prefill", SHAPE, 16)).ratio == 2
    assert now[0] < 0.75 * isolated.DEADLINE


def test_a_load_that_does_not_fit_is_not_timed(monkeypatch):
    no_memory = Mock(side_effect=RuntimeError("[metal::malloc] too much"))
    monkeypatch.setattr(speed, "measure", no_memory)
    monkeypatch.setattr(attention, "write", lambda _: 0.0)
    result = run(checks_for(USE)[0], timed=True)
    assert result.passed
    assert result.timing_failed


def test_slow_is_clearly_slower():
    assert not Speed(1.4, 1.0).is_slow
    assert Speed(1.6, 1.0).is_slow
    assert not Speed(40e-6, 24e-6).is_slow, "the host's time for a launch"
    assert Speed(400e-6, 240e-6).is_slow
    assert str(Speed(1.6e-3, 1e-6)) == "takes 1,600 us where its fallback takes 1 us"
