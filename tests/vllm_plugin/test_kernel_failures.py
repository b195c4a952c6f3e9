"""A kernel that fails under vLLM is replaced; the engine and its requests continue."""

import pytest

from tests.support.kernels.device import change_device
from tests.support.kernels.failing import FailingKernels
from tests.support.models import tiny_models as tiny
from tests.vllm_plugin import kit
from vllm_metal_lite.attention import select
from vllm_metal_lite.model.packed import NO_FUSION
from vllm_metal_lite.vllm_plugin.worker import MetalLiteWorker

SHARED = tiny.prompts(1, 20, 20, seed=2)[0]
PROMPTS = [[*SHARED, 3], [*SHARED, 4, 5], *tiny.prompts(3, 3, 40, seed=4)]
CHUNKS = {"max_num_batched_tokens": 16}


@pytest.fixture(autouse=True)
def no_prompt_is_a_decode(kernels, monkeypatch):
    change_device(monkeypatch, rows_as_decodes=0)
    # "kernels" would end the engine instead; "auto" takes none on a CPU.
    monkeypatch.setenv("METAL_LITE_ATTENTION", "auto")
    monkeypatch.setattr(select, "_problem", lambda *_: None)


@pytest.mark.parametrize("how", ["call", "submit"])
@pytest.mark.parametrize("kernel", ["kv_write", "varlen_prefill", "fused_decode"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_answers_are_those_of_the_model_alone(monkeypatch, kernel, how, async_scheduling):
    if kernel == "kv_write":  # fused launches do without
        monkeypatch.setattr("vllm_metal_lite.fusion.decide.decide", lambda *_: NO_FUSION)
    fault = FailingKernels(monkeypatch, kernel, how=how)
    with kit.engine(async_scheduling=async_scheduling, **CHUNKS) as llm:
        assert kit.worker(llm).runner.attention.name == "kernels"
        for i, prompt in enumerate(PROMPTS):
            kit.add(llm, str(i), prompt, max_tokens=12)
        done = kit.run(llm, steps=4)
        fault.armed = True
        done |= kit.run(llm)
        answers = kit.tokens([done[str(i)] for i in range(len(PROMPTS))])
        assert len(kit.worker(llm).runner.path.failed_kernels) == 1
    assert fault.failed
    assert answers == [kit.alone("llama", p, 12) for p in PROMPTS]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_kernel_that_fails_while_the_engine_warms_up(monkeypatch, name):
    fault = FailingKernels(monkeypatch, "fused_decode")
    warm_up = MetalLiteWorker.compile_or_warm_up_model

    def failing(self):
        fault.armed = True
        return warm_up(self)

    monkeypatch.setattr(MetalLiteWorker, "compile_or_warm_up_model", failing)
    with kit.engine(name, **CHUNKS) as llm:
        assert fault.failed
        assert len(kit.worker(llm).runner.path.failed_kernels) == 1
        answers = kit.tokens(kit.generate(llm, PROMPTS[:2], max_tokens=5))
    assert answers == [kit.alone(name, p, 5) for p in PROMPTS[:2]]
