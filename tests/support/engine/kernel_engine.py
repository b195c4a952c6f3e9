"""An engine that launches kernels, on a machine without a GPU (within `metal.host.installed`)."""

from typing import Any

import pytest

from tests.support.kernels.device import RIGHT, pretend_gpu
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.model.packed import NO_FUSION


def engine_with_kernels(name: str, verdict: Verdict = RIGHT, **options: Any) -> LLMEngine:
    """The engine over the tiny model `name`: no kernel is checked, and nothing is fused."""
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpu(patch, verdict)
        patch.setattr(decide, "decide", lambda *_: NO_FUSION)
        return tiny.engine(name, **options)
