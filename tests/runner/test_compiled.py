"""Compiled steps give what uncompiled ones give, are few, and leave nothing behind.

On a CPU through ArrayAttention; on a GPU (METAL_LITE_DEVICE=gpu) through the kernels.
"""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention.array_attention import compile_on_cpu
from tests.support.attention.cases import PREFILLS
from tests.support.engine.embeddings import alone, compare
from tests.support.kernels.device import change_device, pad_to_powers_of_two, pretend_gpu
from tests.support.kernels.failing import FailingKernels
from tests.support.kernels.launches import Stubs
from tests.support.models import tiny_models as tiny
from tests.support.models.rounding import gather_in_16_bits
from tests.support.replay.record import use_kernels
from vllm_metal_lite import backend
from vllm_metal_lite.attention.paged import attention as planning
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.launches import FusedLaunches
from vllm_metal_lite.fusion.layers import fuse_layers
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.model.packed import NO_FUSION, PackedModel
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.runner import compiled
from vllm_metal_lite.runner.compiled import CompiledSteps
from vllm_metal_lite.runner.step_path import StepPath
from vllm_metal_lite.sampling_params import SamplingParams

PROMPTS = tiny.prompts(6, 3, 40, seed=17)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(seed=5, max_tokens=24, top_k=20, frequency_penalty=0.3, logprobs=1)


@pytest.fixture(autouse=True)
def padded_steps(monkeypatch):
    """Steps are padded, as on a GPU, and no prompt runs as decodes."""
    pad_to_powers_of_two(monkeypatch)
    change_device(monkeypatch, rows_as_decodes=0)


def make_engine(name="qwen3", prefill="gather", **options):
    if backend.is_cpu():
        return compile_on_cpu(tiny.engine(name, **options), prefill)
    engine = tiny.engine(name, attention="kernels", **options)
    engine.runner.attention.prefill = prefill
    return engine


def uncompiled(engine):
    engine.runner.compiled.reason = "not wanted"
    return engine


def tokens_of(engine, params=GREEDY, prompts=PROMPTS):
    return tiny.answers(engine, prompts, params)


@pytest.mark.long
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
    """A list that grows by one entry per forward that is built; True: to be compiled."""
    traced, call = [], type(engine.runner.model).__call__

    def counting(self, attention, *args):
        traced.append(attention.step.batch is None)
        return call(self, attention, *args)

    monkeypatch.setattr(type(engine.runner.model), "__call__", counting)
    return traced


def test_a_shape_is_traced_once(monkeypatch):
    engine = make_engine()
    traced = count_traces(engine, monkeypatch)
    first = tokens_of(engine)
    times, engine.runner.num_compiled_steps = sum(traced), 0
    assert 0 < times == len(engine.runner.compiled._variants) < 12
    assert tokens_of(engine) == first
    assert sum(traced) == times
    assert engine.runner.num_compiled_steps > 20


@pytest.mark.long
@pytest.mark.parametrize("prefill", PREFILLS)
def test_the_kernel_that_ran_last_makes_no_variant(monkeypatch, prefill):
    """Tickets have the shapes of many kernels; launches are stubs here."""
    Stubs(monkeypatch)
    engine = tiny.engine("qwen3", max_num_batched_tokens=24)
    use_kernels(engine, prefill, NO_FUSION).runner.compiled.reason = None
    traced = count_traces(engine, monkeypatch)
    tokens_of(engine)
    assert sum(traced) == len(engine.runner.compiled._variants) > 2


def forwards_with(monkeypatch, name, fuse, **fusion):
    """Of each forward over a model that `fuse` has changed: whether it is compiled, its rows, those
    of its logits, and its launches, which are stubs.  And the number of layers."""
    stubs, found = Stubs(monkeypatch), []
    call = PackedModel.__call__

    def noting(self, attention, *args):
        stubs.needed()
        (logits, hidden), step = call(self, attention, *args), attention.step
        launches = stubs.needed(logits, *attention.state)
        found.append((step.batch is None, len(step.token_ids), len(logits), launches))
        return logits, hidden

    engine = tiny.engine(name, mx.bfloat16, max_num_batched_tokens=24)
    monkeypatch.setattr(PackedModel, "__call__", noting)
    fuse(engine.model.packed.model)
    use_kernels(engine, "gather", FusedLaunches(**fusion)).runner.compiled.reason = None
    tokens_of(engine)
    forms = {(compiled, rows) for compiled, rows, *_ in found}
    assert forms >= {(True, 1), (True, 2), (True, 8), (False, 8), (False, 32)}
    return found, len(engine.runner.attention.store.specs)


def test_products_of_few_rows_are_the_kernel_s_in_compiled_steps_too(monkeypatch):
    """All seven of a layer in forwards of 2 to 8 rows, and the head's."""
    found, layers = forwards_with(monkeypatch, "qwen3", fuse_layers, skinny_rows=range(2, 9))
    for _, rows, logits_rows, launches in found:
        skinny = sum(n for launch, n in launches.items() if launch.startswith("skinny_gemm"))
        assert skinny == 7 * layers * (2 <= rows <= 8) + (2 <= logits_rows <= 8)


def test_experts_of_few_rows_are_the_kernels_in_compiled_steps_too(monkeypatch):
    """Two products of a layer and a sum; a plan unless there is one row."""
    gather_in_16_bits(monkeypatch)
    how = {"expert_rows": range(1, 9), "unused": frozenset({"expert_topk"})}
    found, layers = forwards_with(monkeypatch, "qwen3_moe", fuse_layers, **how)
    of_one = {"expert_gemm": 2 * layers, "expert_sum": layers}
    of_few = {**of_one, "expert_plan": layers}
    for _, rows, _, launches in found:
        experts = {launch: n for launch, n in launches.items() if launch.startswith("expert")}
        assert experts == (of_one if rows == 1 else of_few if rows <= 8 else {})


# Prompts


def arriving(engine, num_decodes, prompts, params=GREEDY):
    """All outputs by request: num_decodes run when the prompts come, one every other step."""
    for i in range(num_decodes):
        engine.add_request(f"decode {i}", PROMPTS[i], replace(params, max_tokens=24))
    for _ in range(6 if num_decodes else 0):
        engine.step()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"prompt {i}", prompt, params)
        for _ in range(2):
            engine.step()
    return tiny.run(engine)


def pass_by(engine, *prompts):
    """Prompts that end with their first token, while the running requests continue."""
    for i, prompt in enumerate(prompts):
        engine.add_request(f"passing {i}", prompt, SamplingParams(temperature=0, max_tokens=1))
    while any(name.startswith("passing") for name in engine._requests):
        engine.step()


def compiled_with_prompts(engine, monkeypatch) -> list:
    """A list that grows by the steps that are run compiled and are not all decodes."""
    steps, call = [], CompiledSteps.__call__

    def noting(self, step, state):
        result = call(self, step, state)
        if result is not None and step.plan.prompts:
            steps.append(step)
        return result

    monkeypatch.setattr(CompiledSteps, "__call__", noting)
    return steps


@pytest.mark.thorough
@given(
    st.sampled_from(["qwen3", "llama/window", "gemma3_text/w9"]),
    st.sampled_from([("varlen", None), ("gather", None), ("varlen", 8), ("gather", 8)]),
    st.integers(0, 4),
    st.integers(6, 40),
    st.lists(st.integers(2, 90), min_size=1, max_size=3),
)
@settings(max_examples=10)
def test_chunks_beside_decodes_give_the_same_tokens(name, how, decodes, budget, lengths):
    """Uncompiled, traced, and then with arrays that were not there when it was traced."""
    prefill, bits = how
    options = {"max_num_batched_tokens": budget, "kv_bits": bits, "enable_prefix_caching": False}
    plain = uncompiled(make_engine(name, prefill, **options))
    engine = make_engine(name, prefill, **options)
    for seed in range(3):
        prompts = [tiny.prompts(1, n, n, seed=n + seed)[0] for n in lengths]
        expected, done = (arriving(e, decodes, prompts) for e in (plain, engine))
        for request, output in expected.items():
            assert done[request].outputs[0].token_ids == output.outputs[0].token_ids
            if bits is None:
                alone = tiny.alone(tiny.native(name), output.prompt_token_ids, 24)
                assert output.outputs[0].token_ids == alone
    assert engine.runner.compiled.reason is None
    assert engine.metrics()["compiled_steps"] > engine.metrics()["steps"] // 2


@pytest.mark.parametrize("name", ["qwen3", "llama/window"])
@pytest.mark.parametrize("prefill", PREFILLS)
def test_a_prompt_alone_is_compiled_when_its_size_comes_again(prefill, name, monkeypatch):
    """Four lengths are one size.  Prompts longer than the window take several calls of SDPA."""
    monkeypatch.setattr(planning, "unfused", lambda *_: None)  # MLX fuses "causal" calls
    engine = make_engine(name, prefill, enable_prefix_caching=False)
    steps = compiled_with_prompts(engine, monkeypatch)
    for length in (17, 32, 21, 30):
        prompt = tiny.prompts(1, length, length, seed=length)[0]
        (got,) = tokens_of(engine, prompts=[prompt])
        assert got == tiny.alone(tiny.native(name), prompt, GREEDY.max_tokens)
    assert len(steps) == (0 if (prefill, name) == ("gather", "llama/window") else 3)


def test_a_large_step_is_submitted_layer_by_layer(monkeypatch):
    """But not while it is traced, or if it is small."""
    Stubs(monkeypatch)
    change_device(monkeypatch, submitted_rows=32)
    engine = use_kernels(tiny.engine("qwen3", enable_prefix_caching=False), "gather", NO_FUSION)
    submitted, submit = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: [submitted.append(a), submit(*a)])
    for length, layers in ((20, 1), (8, 0)):
        submitted.clear()
        tokens_of(engine, replace(GREEDY, max_tokens=1), tiny.prompts(1, length, length))
        assert len(submitted) == 1 + layers * len(engine.runner.attention.store.specs)
    engine.runner.compiled.reason = None
    tokens_of(engine, GREEDY, tiny.prompts(1, 20, 20))
    assert engine.runner.num_compiled_steps > 10


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_beside_decodes_are_compiled_when_they_come_again(pooling, monkeypatch):
    engine = make_engine(enable_prefix_caching=False)
    steps = compiled_with_prompts(engine, monkeypatch)
    tiny.submit(engine, PROMPTS[:2], 100)
    for i in range(4):
        prompt = tiny.prompts(1, 30, 30, seed=i)[0]
        engine.add_request(f"e{i}", prompt, PoolingParams(pooling=pooling))
        done = {}
        while f"e{i}" not in done:
            done |= {output.request_id: output for output in engine.step()}
        compare([done[f"e{i}"].pooled], [alone(tiny.native("qwen3"), prompt, pooling)])
    assert [step.batch.pooled is not None for step in steps].count(True) >= 2


@pytest.mark.long
@pytest.mark.parametrize("prefill", PREFILLS)
def test_log_probabilities_of_prompts(prefill, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    prompts = tiny.prompts(3, 50, 70, seed=2)
    options = {"max_num_batched_tokens": 24}
    expected = arriving(uncompiled(make_engine(**options)), 2, prompts, params)
    engine = make_engine(prefill=prefill, **options)
    steps = compiled_with_prompts(engine, monkeypatch)
    got = arriving(engine, 2, prompts, params)
    assert len(steps) > 4
    assert {len(step.logits_indices) for step in steps} <= {3, 4, 16, 32}  # 1 or 2 prompts; scored
    for name, output in expected.items():
        for theirs, ours in (
            (output.prompt_logprobs[1:], got[name].prompt_logprobs[1:]),
            (output.outputs[0].logprobs, got[name].outputs[0].logprobs),
        ):
            assert [list(p) for p in theirs] == [list(p) for p in ours]
            scores = ([x.logprob for p in side for x in p.values()] for side in (theirs, ours))
            np.testing.assert_allclose(*scores, 1e-4, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("prefill", PREFILLS)
def test_a_long_prompt_beside_four_decodes_is_a_handful_of_variants(prefill, monkeypatch):
    """One a number of keys, from 128 to 512, one more where the decodes' tables grow, and the step
    of decodes that follows, one ahead."""
    change_device(monkeypatch, min_keys=128)
    how = {"max_model_len": 512, "enable_prefix_caching": False}
    engine = make_engine(prefill=prefill, max_num_batched_tokens=20, num_blocks=200, **how)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    tiny.submit(engine, PROMPTS[:4], params)
    while engine.metrics()["decode_tokens"] < 8:
        engine.step()
    traced, steps = count_traces(engine, monkeypatch), compiled_with_prompts(engine, monkeypatch)
    for i, limit in enumerate((9, 5)):  # forwards built, compiled or not
        del traced[:], steps[:]
        prompt = tiny.prompts(1, 480, 480, seed=i)[0]  # 30 chunks of 16
        engine.add_request(f"long {i}", prompt, SamplingParams(max_tokens=1))
        while "long" in str(list(engine._requests)):
            engine.step()
        assert len(traced) <= limit
        assert len(steps) >= 30 - limit // 2
    assert engine.metrics()["requests_running"] == 4


def test_a_variant_with_prompts_is_compiled_when_it_comes_again(monkeypatch):
    """Beside a decode: prompts alone are not compiled."""
    engine = make_engine(enable_prefix_caching=False)
    steps = compiled_with_prompts(engine, monkeypatch)
    prompts = tiny.prompts(3, 20, 20)
    for _ in range(3):
        pass_by(engine, prompts[0])
    assert not steps
    engine.add_request("decode", tiny.prompts(1, 17, 17)[0], GREEDY)
    engine.step()
    for compiled_steps in (0, 1, 2):
        pass_by(engine, prompts[0])
        assert len(steps) == compiled_steps
    pass_by(engine, *prompts)
    assert len(steps) == 2, "more segments are another variant"
    assert "decode" in engine._requests


def test_a_wave_of_like_prompts_behind_a_cached_prefix_is_compiled(monkeypatch):
    change_device(monkeypatch, min_keys=16)
    prefix = tiny.prompts(1, 64, 64)[0]
    waves = [[prefix + tail for tail in tiny.prompts(4, 5, 8, seed=n)] for n in range(3)]
    waves = [[*wave[:3], prefix + [7] * 8] for wave in waves]  # the longest of each of 8 rows
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "num_blocks": 64}
    answers = []
    for engine in (uncompiled(make_engine(**options)), make_engine(**options)):
        steps = compiled_with_prompts(engine, monkeypatch)
        engine.add_request("decode", prefix, replace(GREEDY, max_tokens=60))
        for _ in range(3):
            engine.step()
        done = {}
        for n, wave in enumerate(waves):
            for i, prompt in enumerate(wave):
                engine.add_request(f"{n} {i}", prompt, replace(GREEDY, max_tokens=3))
            while len(done) < 4 * (n + 1):
                done |= {o.request_id: o for o in engine.step() if o.finished}
        assert "decode" in engine._requests
        answers.append({name: o.outputs[0].token_ids for name, o in done.items()})
    assert answers[0] == answers[1]
    assert len(steps) >= 1


@pytest.mark.parametrize("prefill", PREFILLS)
def test_large_steps_are_not_compiled(prefill, monkeypatch):
    change_device(monkeypatch, small_rows=20)
    engine = make_engine(prefill=prefill, enable_prefix_caching=False)
    steps = compiled_with_prompts(engine, monkeypatch)
    engine.add_request("decode", tiny.prompts(1, 17, 17)[0], GREEDY)
    engine.step()
    for _ in range(3):
        pass_by(engine, PROMPTS[0] * 2)
    assert len(PROMPTS[0]) * 2 > 20
    assert "decode" in engine._requests
    assert not steps


def test_variants_that_are_long_unused_are_forgotten(monkeypatch):
    monkeypatch.setattr(compiled, "_MAX_VARIANTS", 2)
    engine = make_engine()
    expected = tokens_of(uncompiled(make_engine()))
    assert tokens_of(engine) == expected
    assert len(engine.runner.compiled._variants) == 2


def test_a_step_with_prompts_that_cannot_be_traced_ends_it_too(monkeypatch, caplog):
    """After decodes were compiled, and with a step of decodes one ahead."""
    caplog.set_level("INFO")
    engine = make_engine(max_num_batched_tokens=20, enable_prefix_caching=False)
    expected = arriving(uncompiled(make_engine(max_num_batched_tokens=20)), 3, PROMPTS[3:])
    norm = type(engine.model.packed.model.model.norm)
    call = norm.__call__

    def needs_values(self, x):
        if len(x) > 8:
            x.sum().item()
        return call(self, x)

    monkeypatch.setattr(norm, "__call__", needs_values)
    steps = compiled_with_prompts(engine, monkeypatch)
    for _ in range(2):
        done = arriving(engine, 3, PROMPTS[3:])
        for request, output in expected.items():
            assert done[request].outputs[0].token_ids == output.outputs[0].token_ids
    assert "eval" in engine.runner.compiled.reason
    assert caplog.text.count("no longer compiled") == 1
    assert engine.metrics()["compiled_steps"] > 0
    assert all(len(step.batch.token_ids) <= 8 for step in steps)


def test_a_fault_of_ours_while_tracing_is_logged_with_its_traceback(monkeypatch, caplog):
    """Traced code that reads the batch: steps continue, not compiled."""
    expected = tokens_of(uncompiled(make_engine()))
    engine, call = make_engine(), PackedModel.__call__

    def reading(self, attention, *args):
        assert attention.step.batch.num_tokens
        return call(self, attention, *args)

    monkeypatch.setitem(globals(), "__name__", "vllm_metal_lite.pretended")
    monkeypatch.setattr(PackedModel, "__call__", reading)
    assert tokens_of(engine) == expected
    assert "no longer compiled: AttributeError" in caplog.text
    assert "Traceback" in caplog.text


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
    assert engine.runner.num_compiled_steps > 0
    assert mx.get_active_memory() - before < engine.model.weight_bytes // 8


def test_the_reference_attention_is_not_compiled():
    engine = tiny.engine(attention="reference")
    assert engine.runner.compiled.reason
    assert tokens_of(engine)[0] == tiny.alone(tiny.native("llama"), PROMPTS[0], 24)
    assert engine.metrics()["compiled_steps"] == 0


# A kernel that fails


@pytest.mark.skipif(not backend.is_cpu(), reason="launches are stubs")
@pytest.mark.parametrize("how", ["call", "eval"])
def test_a_kernel_that_fails_in_a_compiled_step_is_replaced_and_steps_stay_compiled(
    monkeypatch, how
):
    """It is no sign that the model cannot be traced."""
    monkeypatch.setattr(Kernel, "_launcher", lambda self: lambda inputs, **_: inputs)
    fault, kernel = FailingKernels(monkeypatch, how=how), Kernel("paged_decode", ["x"], ["y"])
    engine = make_engine()
    expected = tokens_of(make_engine())
    plain = engine.runner.path

    class WithKernel(type(plain.attention)):
        def begin(self, step, state):
            begun = super().begin(step, state)
            attend = begun.attend
            begun.attend = lambda q, call: attend(
                kernel([q], {}, (1, 1, 1), 32, [(q.shape, q.dtype)])[0], call
            )
            return begun

    with_kernel = copy(plain.attention)
    with_kernel.__class__ = WithKernel
    failures = []
    monkeypatch.setattr(
        StepPath, "fallback", lambda _, error: failures.append(error.kernel) or plain
    )
    engine.runner.path = StepPath(with_kernel)
    engine.runner.compiled = CompiledSteps(engine.model.packed, with_kernel)
    engine.runner.compiled.reason = None
    pretend_gpu(monkeypatch)  # for the next CompiledSteps
    tiny.submit(engine, PROMPTS, GREEDY)
    done = {}
    for _ in range(8):
        done |= {o.request_id: o for o in engine.step() if o.finished}
    compiled = engine.metrics()["compiled_steps"]
    assert compiled > 0
    fault.armed = True
    engine.add_request("late", PROMPTS[0], GREEDY)  # other variants
    done |= tiny.run(engine)
    assert [done[str(i)].outputs[0].token_ids for i in range(len(PROMPTS))] == expected
    assert failures == ["paged_decode"]
    assert engine.runner.compiled.reason is None
    assert engine.metrics()["compiled_steps"] > compiled
