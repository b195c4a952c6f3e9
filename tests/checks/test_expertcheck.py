"""The results of the check of the experts' kernels on the CPU host."""

import pytest

from metal.host import compiler_available
from tests.support.miscompiled import seeming_gpu
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.check import Check, MixtureShape
from vllm_metal_lite.checks.run_check import run
from vllm_metal_lite.kernels import expert_topk, source
from vllm_metal_lite.specs import ExpertShape

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("count", [6, 60])
def test_large_logits_that_overflow_are_noticed(count, dtype, monkeypatch, tmp_path):
    check = Check("expert_topk", MixtureShape(ExpertShape(count, 64, 64), dtype))
    header, body = source.read("expert_topk")
    half = body.replace("scores[s] - top)", "scores[s] - 0.5f * top)")
    assert half != body
    with seeming_gpu(monkeypatch, tmp_path):
        assert run(check).passed
        monkeypatch.setattr(source, "read", lambda _: (header, half))
        monkeypatch.setattr(expert_topk._TOPK, "_launchers", {})
        assert not run(check).passed
