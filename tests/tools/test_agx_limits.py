"""What the AGX tool calls a fault, without Mesa."""

from tools.prove.agx import limits
from tools.prove.agx.limits import AS_MLX, LIMITS, Limit, faults
from tools.prove.agx.shapes import checks


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
