"""A kernel that fails in the drafter, or a lack of memory there, ends no request."""

from unittest.mock import Mock

import pytest

from metal.host import installed
from tests.engine.test_trained_heads import drafting
from tests.support.kernels.device import RIGHT, pretend_gpu
from tests.support.kernels.failing import FailingKernels
from tests.support.models import tiny_models as tiny
from tests.support.models.trained_heads import Head, write_head
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.model.loader import load
from vllm_metal_lite.model.packed import NO_FUSION
from vllm_metal_lite.runner.drafter import Drafter


@pytest.fixture
def armed_in(monkeypatch):
    """Call with a kernel, how its launches fail, and a method of Drafter: they fail within it."""

    def arm(kernel, how, method):
        fault, own = FailingKernels(monkeypatch, kernel, how=how), getattr(Drafter, method)

        def failing(*args):
            fault.armed = True
            try:
                return own(*args)
            finally:
                fault.armed = False

        monkeypatch.setattr(Drafter, method, failing)
        return fault

    return arm


@pytest.mark.parametrize("how", ["call", "eval", "submit"])
@pytest.mark.parametrize("method", ["follow", "draft"])
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_a_kernel_that_fails_in_the_drafter_alone_is_replaced(
    name, method, how, tmp_path, armed_in, monkeypatch, caplog
):
    model = load(str(write_head(tiny.write_folder(tmp_path, name), Head(name))))
    prompts, params = tiny.prompts(2, 5, 20, seed=2), tiny.greedy(12, ignore_eos=True)
    fault = armed_in("kv_write", how, method)
    pretend_gpu(monkeypatch, RIGHT)
    monkeypatch.setattr(decide, "decide", lambda *_: NO_FUSION)
    with installed(writable_inputs=["states"]):
        engine = drafting(model)
        assert tiny.answers(engine, prompts, params) == tiny.all_alone(name, prompts, 12)
        assert fault.failed
        assert engine.runner.attention.name == "reference"
        tiny.answers(engine, prompts, params)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "kv_write fails in a step" in warning
    assert engine.metrics()["draft_tokens"] > 10


def test_without_room_to_draft_no_request_ends(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise RuntimeError("[metal::malloc] Unable to allocate 9 bytes")

    path = write_head(tiny.write_folder(tmp_path, "glm4_moe"), Head("glm4_moe"))
    model, prompts = load(str(path)), tiny.prompts(3, 5, 20, seed=2)
    engine = drafting(model)
    monkeypatch.setattr(engine.runner.drafter, "draft", full)
    answers = tiny.answers(engine, prompts, tiny.greedy(20, ignore_eos=True))
    assert answers == tiny.all_alone("glm4_moe", prompts, 20)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "no model drafts tokens from now on" in warning


@pytest.mark.parametrize("how", ["memory", "call", "eval", "submit"])
def test_a_draft_model_that_fails_to_catch_up_ends_no_request(
    how, tmp_path, armed_in, monkeypatch, caplog
):
    path, prompts = str(tiny.write_folder(tmp_path, "llama")), tiny.prompts(3, 5, 20, seed=2)
    params = tiny.greedy(40, ignore_eos=True)
    if how != "memory":
        armed_in("kv_write", how, "catch_up")
        pretend_gpu(monkeypatch, RIGHT)
        monkeypatch.setattr(decide, "decide", lambda *_: NO_FUSION)
    with installed(writable_inputs=["states"]):
        engine = drafting(load(path), share=0.2, draft_model=path)
        if how == "memory":
            full = Mock(side_effect=RuntimeError("[metal::malloc] Unable to allocate 9 bytes"))
            monkeypatch.setattr(engine.runner.drafter, "catch_up", full)
        assert tiny.answers(engine, prompts, params) == tiny.all_alone("llama", prompts, 40)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    if how == "memory":
        assert "no model drafts tokens from now on" in warning
    else:
        assert "kv_write fails in a step" in warning
        assert engine.runner.drafter is not None


def test_a_failure_of_the_step_before_is_not_the_drafters(tmp_path, monkeypatch):
    def lost(*args):
        raise RuntimeError("lost")

    path = write_head(tiny.write_folder(tmp_path, "glm4_moe"), Head("glm4_moe"))
    runner = drafting(load(str(path))).runner
    monkeypatch.setattr(runner.drafter, "draft", lost)
    monkeypatch.setattr(runner, "_last", Mock(wait=lost))
    with pytest.raises(RuntimeError, match="lost"):
        runner.draft(None)
    assert runner.drafter is not None
