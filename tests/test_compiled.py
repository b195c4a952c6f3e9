"""Compiled decode steps give what uncompiled ones give, are few, and leave nothing behind.

On a CPU through ArrayAttention; on a GPU (METAL_LITE_DEVICE=gpu) through the kernels.
"""

import pytest
import tiny_models as tiny
from array_attention import compile_on_cpu

from vllm_metal_lite import backend, compiled, runner
from vllm_metal_lite.attention.kernels import PREFILLS, KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.compiled import CompiledSteps
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.runner import ModelRunner
from vllm_metal_lite.sampling_params import SamplingParams

PROMPTS = tiny.prompts(6, 3, 40, seed=17)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(seed=5, max_tokens=24, top_k=20, frequency_penalty=0.3, logprobs=1)


@pytest.fixture(scope="module", autouse=True)
def cache_of_verdicts(tmp_path_factory):
    """The kernels check themselves once for all tests."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def power_of_two_rows(monkeypatch):
    """As on a GPU; on a CPU steps are not padded."""
    monkeypatch.setattr(runner, "bucket", lambda n: 1 << (n - 1).bit_length())


def make_engine(name="qwen3", **options):
    if not backend.is_cpu():
        return tiny.engine(name, attention="kernels", **options)
    return compile_on_cpu(tiny.engine(name, **options))


def uncompiled(engine):
    engine.runner.compiled.reason = "not wanted"
    return engine


def tokens_of(engine, params=GREEDY, prompts=PROMPTS):
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    done = tiny.run(engine)
    return [done[str(i)].outputs[0].token_ids for i in range(len(prompts))]


@pytest.mark.parametrize("name", ["qwen3", "llama/window", "mixtral"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_equal_those_of_uncompiled_steps(name, params):
    """Chunks, mixed steps, shared prefixes and preemptions in between."""
    options = {"num_blocks": 16, "max_num_batched_tokens": 24, "max_model_len": 100}
    prompts = [*PROMPTS, PROMPTS[1] + [5, 6]]
    engine = make_engine(name, **options)
    assert engine.runner.compiled.reason is None
    expected = tokens_of(uncompiled(make_engine(name, **options)), params, prompts)
    assert tokens_of(engine, params, prompts) == expected
    metrics = engine.metrics()
    assert metrics["preemptions"] > 0
    assert engine.runner.compiled.reason is None
    assert metrics["steps"] > metrics["compiled_steps"] > metrics["steps"] // 2


def count_traces(engine, monkeypatch) -> list[bool]:
    """A list that grows by one a forward that is built; True: to be compiled."""
    traced, call = [], type(engine.runner.model).__call__

    def counting(self, step, attention, wanted):
        traced.append(step.batch is None)
        return call(self, step, attention, wanted)

    monkeypatch.setattr(type(engine.runner.model), "__call__", counting)
    return traced


def test_a_shape_is_traced_once(monkeypatch):
    engine = make_engine()
    traced = count_traces(engine, monkeypatch)
    first = tokens_of(engine)
    times, engine.runner.compiled.num_steps = sum(traced), 0
    assert 0 < times == len(engine.runner.compiled._variants) < 12
    assert tokens_of(engine) == first
    assert sum(traced) == times
    assert engine.runner.compiled.num_steps > 20


@pytest.mark.parametrize("prefill", PREFILLS)
def test_the_kernel_that_ran_last_makes_no_variant(monkeypatch, prefill):
    """Tokens have the shapes of many kernels; launches are stubs here, which give zeros."""

    def launch_nothing(self, arrays, template, grid, threadgroup, shapes, dtypes):
        zeros = [mx.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        mx.eval(zeros)
        return mx.depends(zeros, list(arrays))

    monkeypatch.setattr(Kernel, "__call__", launch_nothing)
    engine = tiny.engine("qwen3", max_num_batched_tokens=24)
    attention = KernelAttention(engine.runner.attention.store, prefill)
    engine.runner = ModelRunner(engine.model.packed, attention, engine.sampler)
    engine.runner.compiled.reason = None
    traced = count_traces(engine, monkeypatch)
    tokens_of(engine)
    assert sum(traced) == len(engine.runner.compiled._variants) > 2


def test_variants_that_are_long_unused_are_forgotten(monkeypatch):
    monkeypatch.setattr(compiled, "_MAX_VARIANTS", 2)
    engine = make_engine()
    expected = tokens_of(uncompiled(make_engine()))
    assert tokens_of(engine) == expected
    assert len(engine.runner.compiled._variants) == 2


def test_a_model_that_cannot_be_traced_runs_uncompiled(monkeypatch):
    engine = make_engine()
    expected = tokens_of(uncompiled(make_engine()))
    norm = type(engine.model.packed.model.model.norm)
    call, calls = norm.__call__, []

    def needs_values(self, x):
        calls.append(x.sum().item())
        return call(self, x)

    monkeypatch.setattr(norm, "__call__", needs_values)
    assert tokens_of(engine) == expected
    assert "eval" in engine.runner.compiled.reason
    assert engine.metrics()["compiled_steps"] == 0


def test_weights_are_not_copied():
    engine = make_engine(max_num_seqs=1)
    tokens_of(engine, prompts=PROMPTS[:1])
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    engine.runner.compiled = CompiledSteps(engine.model.packed, engine.runner.attention)
    engine.runner.compiled.reason = None
    tokens_of(engine, prompts=PROMPTS[:1])
    mx.synchronize()
    mx.clear_cache()
    assert engine.runner.compiled.num_steps > 0
    assert mx.get_active_memory() - before < engine.model.weight_bytes // 8


def test_the_reference_attention_is_not_compiled():
    engine = tiny.engine(attention="reference")
    assert engine.runner.compiled.reason
    assert tokens_of(engine)[0] == tiny.alone(tiny.native("llama"), PROMPTS[0], 24)
    assert engine.metrics()["compiled_steps"] == 0
