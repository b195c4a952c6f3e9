"""What the AGX tool calls a fault, and which checks it runs, without Mesa."""

import pytest

from metal.host.texts import KernelText
from tests.support.kernels import production_shapes
from tools.prove.agx import limits
from tools.prove.agx.__main__ import cases
from tools.prove.agx.limits import AS_MLX, LIMITS, Limit, faults
from tools.prove.agx.shapes import checks
from vllm_metal_lite.kernels.registry import REGISTRY


def test_threads_that_do_not_fit_and_new_spills_are_named(monkeypatch):
    monkeypatch.setattr(limits, "LIMITS", (Limit(("wide", "fused"), 40, "why"),))
    assert faults("a kernel", 1024, 1024, AS_MLX) == faults("wide fused", 256, 384, 40) == []
    assert faults("a kernel", 1024, 896, 0) == ["1024 threads are dispatched, 896 fit"]
    assert faults("wide", 32, 384, AS_MLX + 1) == [f"{AS_MLX + 1} spills, limit {AS_MLX}"]
    assert faults("wide fused", 32, 384, 41) == ["41 spills, limit 40"]


def test_every_limit_is_of_a_check():
    names = [str(check) for check in checks()]
    for limit in LIMITS:
        words = [word for word in limit.words if word != "#2"]
        assert any(all(word in name for word in words) for name in names), limit


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (["gather_rows"], 50),
        (["merge_partitions"], 150),
        (["): merge", "skinny_gemm (64 x"], 200),
        (["64 float16, latent, blocks of 16) #2"], 20),
        (["#2"], 1000),
        (["MLX"], 0),
    ],
)
def test_only_checks_whose_names_may_match_are_run(words, most, monkeypatch):
    run = []

    def texts_of(check):
        """Two texts of each kernel that the check launches."""
        run.append(check)
        files = {f"metal_lite_{REGISTRY[k].file}" for k in (check.kernel, *check.needs)}
        return [KernelText(name, f"{check} {n}", 32) for name in files for n in "ab"]

    monkeypatch.setattr(production_shapes, "texts_of", texts_of)
    everything = cases([])
    run.clear()
    found = cases(words)
    assert found == {t: n for t, n in everything.items() if any(word in n for word in words)}
    assert found
    assert len(run) <= most
