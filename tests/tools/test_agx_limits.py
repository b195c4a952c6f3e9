"""What the AGX tool calls a fault, without Mesa."""

from tools.prove.agx import limits
from tools.prove.agx.limits import AS_MLX, Limit, faults


def test_threads_that_do_not_fit_and_new_spills_are_named(monkeypatch):
    monkeypatch.setattr(limits, "LIMITS", (Limit(("wide", "fused"), 40, "why"),))
    assert faults("a kernel", 1024, 1024, AS_MLX) == faults("wide fused", 256, 384, 40) == []
    assert faults("a kernel", 1024, 896, 0) == ["1024 threads are dispatched, 896 fit"]
    assert faults("wide", 32, 384, AS_MLX + 1) == [f"{AS_MLX + 1} spills, limit {AS_MLX}"]
    assert faults("wide fused", 32, 384, 41) == ["41 spills, limit 40"]
