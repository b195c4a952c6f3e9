"""An engine that launches kernels, on a machine without a GPU: see metal/host."""

from typing import Any

import pytest

from tests.support.kernels.device import pretend_gpu
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.attention.select import Verdict
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.model.packed import NO_FUSION

_RIGHT = Verdict({}, "gather")


def as_on_a_gpu(patch: pytest.MonkeyPatch, verdict: Verdict = _RIGHT) -> None:
    """Engines use kernels, as the verdict says; nothing is checked."""
    pretend_gpu(patch)
    patch.setattr(verdicts, "verify", lambda *_: verdict)


def engine_with_kernels(name: str, verdict: Verdict = _RIGHT, **options: Any) -> LLMEngine:
    """The engine over the tiny model `name`, within `metal.host.installed`: no kernel is checked,
    and nothing is fused."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch, verdict)
        patch.setattr(decide, "decide", lambda *_: NO_FUSION)
        return tiny.engine(name, **options)
