"""A kernel that fails in mid-serving is replaced; no token is lost or changed.

On the CPU host.  Launches raise where they are called, where their results are needed,
or where the step is submitted.
"""

import asyncio
import re
from functools import cache
from types import SimpleNamespace

import pytest

from metal.host import installed
from tests.support.kernels.device import change_device, fused_rows, pretend_gpu
from tests.support.kernels.failing import MESSAGE, FailingKernels
from tests.support.models import tiny_models as tiny
from tests.support.models.rounding import gather_in_16_bits
from vllm_metal_lite.attention.select import select
from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.async_engine import AsyncEngine
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.model.packed import NO_FUSION
from vllm_metal_lite.sampling_params import SamplingParams

# The engine in which a kernel is used: (model, fused, way of prompts, options).
PLAIN = ("llama", False, "gather", {})
SMALL_STEPS = ("llama", False, "gather", {"max_num_batched_tokens": 12})
FUSED = ("qwen3", True, "varlen", {})
QUANTISED = ("llama", False, "gather", {"kv_bits": 8})
USED_IN = {
    "kv_write": PLAIN,
    "kv_gather": PLAIN,
    "gather_rows": SMALL_STEPS,
    "paged_decode": PLAIN,
    "merge_partitions": PLAIN,
    "kv_write_quantised": QUANTISED,
    "kv_gather_quantised": QUANTISED,
    "varlen_prefill": FUSED,
    "shared_prefix": FUSED,
    "rope_write": FUSED,
    "fused_decode": FUSED,
    "add_rms_norm": FUSED,
}
# Without these, no kernel serves the store.
ESSENTIAL = {"kv_write", "kv_write_quantised"}

# Two arrive every second step, so that steps mix chunks and decodes.  The last two share 16 tokens.
SHARED = tiny.prompts(1, 16, 16, seed=8)[0]
PROMPTS = [*tiny.prompts(4, 5, 14, seed=9), [*SHARED, 3, 1], [*SHARED, 4, 1, 5]]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
SAMPLED = SamplingParams(
    seed=5, max_tokens=10, top_k=20, frequency_penalty=0.5, logprobs=1, min_tokens=4
)
ARMED_AFTER = 3  # steps


@pytest.fixture(scope="module", autouse=True)
def host():
    with pytest.MonkeyPatch.context() as patch, installed():
        # Decodes are split, and a prefix is shared, at the lengths of these prompts; "gather" means
        # all prompts.
        how = {"rows_as_decodes": 0, "min_keys": 16, "small_scores": 0}
        change_device(patch, min_split_context=8, min_split_keys=8, min_saved_tokens=8, **how)
        yield


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    fused_rows(monkeypatch, range(0), range(0))


def engine_of(kind, option="auto", **more):
    name, fused, prefill, options = kind
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpu(patch, Verdict({}, prefill))
        if not fused:
            patch.setattr(decide, "decide", lambda *_: NO_FUSION)
        how = {"max_num_batched_tokens": 24, **options, **more}
        return tiny.engine(name, attention=option, **how)


def serve(engine, params=GREEDY, before_step=lambda number: None):
    """The requests, one every second step -> their tokens."""
    waiting, tokens = list(enumerate(PROMPTS)), {}
    for number in range(200):
        for index, prompt in waiting[:2] if number % 2 == 0 else ():
            engine.add_request(str(index), prompt, params)
            waiting = waiting[1:]
        before_step(number)
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if not waiting and not engine.has_unfinished_requests():
            return [tokens[str(i)] for i in range(len(PROMPTS))]
    raise AssertionError("requests are left")


@cache
def undisturbed(kernel, params="greedy"):
    return serve(engine_of(USED_IN[kernel]), {"greedy": GREEDY, "sampled": SAMPLED}[params])


def arm(fault):
    def before_step(number):
        fault.armed = number >= ARMED_AFTER

    return before_step


def raises_once(engine, fault, error, match, at=ARMED_AFTER):
    """The step `at` fails with this error, and `fault` is armed in no other."""

    def before_step(number):
        if number == at:
            fault.armed = True
            with pytest.raises(error, match=match):
                engine.step()
            fault.armed = False

    return before_step


@pytest.mark.parametrize("how", ["call", "eval", "submit"])
@pytest.mark.parametrize("kernel", USED_IN)
def test_a_kernel_that_fails_is_replaced_and_no_token_changes(monkeypatch, caplog, kernel, how):
    expected = undisturbed(kernel)
    fault = FailingKernels(monkeypatch, kernel, how=how)
    engine = engine_of(USED_IN[kernel])
    assert serve(engine, before_step=arm(fault)) == expected
    assert fault.launched >= fault.failed > 0
    failed = fault.failed
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    message = MESSAGE if how == "call" else "only supports float32"
    assert re.search(rf"{kernel} fails in a step: .*{re.escape(message)}", warning)
    assert "\n" not in warning
    assert engine.metrics()["failed_kernels"] == 1
    assert kernel in engine.runner.path.reason
    reference = engine.runner.attention.name == "reference"
    assert reference == (kernel in ESSENTIAL)
    assert serve(engine) == expected  # from here on without the kernel
    assert fault.failed == failed


@pytest.mark.parametrize("kernel", ["rope_write", "fused_decode", "add_rms_norm"])
def test_a_kernel_that_fails_in_the_trial_at_the_start_is_all_that_is_replaced(
    monkeypatch, caplog, tmp_path, kernel
):
    expected = undisturbed(kernel)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no trial has passed yet
    fault = FailingKernels(monkeypatch, kernel, how="eval")  # a trial does not submit
    fault.armed = True
    engine = engine_of(FUSED)
    assert engine.runner.path.failed_kernels == (kernel,)
    assert engine.runner.path.fusion is not NO_FUSION
    assert len(caplog.messages) == 1
    failed = fault.failed
    assert serve(engine) == expected
    assert fault.failed == failed


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("kernel", ["kv_write", "varlen_prefill", "fused_decode"])
def test_what_is_sampled_does_not_change_either(monkeypatch, kernel, ahead):
    """The sampler counts tokens on the host and on the device; a failed step counts none."""
    expected = undisturbed(kernel, "sampled")
    fault = FailingKernels(monkeypatch, kernel)
    engine = engine_of(USED_IN[kernel])
    tiny.run_ahead(engine, ahead)
    assert serve(engine, SAMPLED, arm(fault)) == expected
    assert fault.failed
    assert (engine.metrics()["steps_ahead"] > 0) == ahead


def test_all_kernels_fail_one_after_the_other(monkeypatch, caplog):
    """Each once; at the end the reference attention is left, which uses none."""
    expected = undisturbed("varlen_prefill")
    fault = FailingKernels(monkeypatch)
    engine = engine_of(FUSED)
    assert serve(engine, before_step=arm(fault)) == expected
    assert engine.runner.attention.name == "reference"
    assert engine.runner.path.fusion is NO_FUSION
    names = re.findall(r"(\w+) fails in a step", caplog.text)
    assert len(names) == len(set(names)) == engine.metrics()["failed_kernels"] > 2


def test_a_kernel_that_its_next_best_way_needs_leaves_the_reference(monkeypatch, caplog):
    expected = undisturbed("paged_decode")
    fault = FailingKernels(monkeypatch, "paged_decode")
    monkeypatch.setattr(
        "vllm_metal_lite.runner.step_path.select",
        lambda *args, known, fatal: select(*args[:3], args[3] if fatal else Verdict({}), (), fatal),
    )
    engine = engine_of(PLAIN)
    assert serve(engine, before_step=arm(fault)) == expected
    assert engine.runner.attention.name == "reference"
    assert len(re.findall("paged_decode fails in a step", caplog.text)) == 1


def test_forced_kernels_raise_and_every_request_can_go_on(monkeypatch):
    expected = undisturbed("kv_write")
    fault = FailingKernels(monkeypatch, "kv_write")
    engine, message = engine_of(PLAIN, option="kernels"), r"='kernels' is not possible: .*kv_write"
    failing = raises_once(engine, fault, ConfigError, message)
    assert serve(engine, before_step=failing) == expected
    assert fault.failed
    assert engine.runner.attention.name == "kernels"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[malloc] Unable to allocate 123 bytes."),
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"),
        KeyboardInterrupt(),
    ],
    ids=str,
)
def test_errors_that_are_not_a_kernel_s_are_raised_and_nothing_is_lost(monkeypatch, caplog, error):
    """Ctrl-C in the middle of a step as well."""
    expected = undisturbed("rope_write")
    fault = FailingKernels(monkeypatch, "rope_write", how="call", error=error)
    engine = engine_of(FUSED)
    match = f"^{re.escape(str(error))}$"
    failing = raises_once(engine, fault, type(error), match, at=ARMED_AFTER + 1)
    assert serve(engine, before_step=failing) == expected
    assert fault.failed == 1
    assert all(m.startswith("a step of the engine failed: ") for m in caplog.messages)
    assert engine.metrics()["failed_kernels"] == 0


def test_an_error_that_no_launch_repeats_is_raised(monkeypatch, caplog):
    expected = undisturbed("rope_write")
    engine, fault = engine_of(FUSED), SimpleNamespace(armed=False)
    sample = type(engine.runner.sampler).__call__

    def fail(*args):
        output = sample(*args)
        if fault.armed:
            fault.armed = False
            raise RuntimeError("not a kernel")
        return output

    monkeypatch.setattr(type(engine.runner.sampler), "__call__", fail)
    failing = raises_once(engine, fault, RuntimeError, "not a kernel")
    assert serve(engine, before_step=failing) == expected
    assert all(m.startswith("a step of the engine failed: ") for m in caplog.messages)


@pytest.mark.parametrize(
    ("kernel", "fused"),
    [("varlen_prefill", True), ("fused_decode", True), ("kv_write", False), ("rope_write", True)],
)
def test_recurrent_states_are_those_of_the_step_before(monkeypatch, kernel, fused):
    kind = ("qwen3_next", fused, "varlen", {})
    expected = serve(engine_of(kind))
    fault = FailingKernels(monkeypatch, kernel)
    assert serve(engine_of(kind), before_step=arm(fault)) == expected
    assert fault.failed


@pytest.mark.long
def test_products_of_few_rows(monkeypatch):
    """In 16 bits the ways round differently: a request has the tokens of one or the other."""

    def engine(rows):
        fused_rows(monkeypatch, rows)
        return engine_of(FUSED, dtype=mx.bfloat16)

    expected = [serve(engine(rows)) for rows in (range(1, 65), range(0))]
    fault, failing = FailingKernels(monkeypatch, "skinny_gemm"), engine(range(1, 65))
    assert "products of" in failing.runner.path.reason
    tokens = serve(failing, before_step=arm(fault))
    assert all(t in either for t, *either in zip(tokens, *expected, strict=True))
    assert fault.failed
    assert failing.runner.path.fusion.skinny_rows == range(0)
    assert "products of" not in failing.runner.path.reason


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["expert_topk", "expert_plan", "expert_gemm", "expert_sum"])
def test_experts_of_few_rows(monkeypatch, kernel):
    """The experts run without their kernels, or only without that of the router."""
    gather_in_16_bits(monkeypatch)

    def engine(rows):
        fused_rows(monkeypatch, expert_rows=rows)
        return engine_of(("qwen3_moe", True, "varlen", {}), dtype=mx.float16)

    expected = [serve(engine(rows)) for rows in (range(1, 65), range(0))]
    fault, failing = FailingKernels(monkeypatch, kernel), engine(range(1, 65))
    assert "experts of" in failing.runner.path.reason
    tokens = serve(failing, before_step=arm(fault))
    assert all(t in either for t, *either in zip(tokens, *expected, strict=True))
    assert fault.failed
    fusion, of_router = failing.runner.path.fusion, kernel == "expert_topk"
    assert fusion.expert_rows == range(1, 65 * of_router)
    assert ("expert_topk" in fusion.unused) == of_router
    assert ("experts of" in failing.runner.path.reason) == of_router


def test_the_reference_writes_the_store_in_place_after_kernels(monkeypatch):
    """Nothing else holds the store.  Host kernels leave no graph, so this test cannot see a GPU's
    failed graph, which holds the store as long as its error lives."""
    fault = FailingKernels(monkeypatch, "kv_write")
    engine = engine_of(PLAIN, num_blocks=4096)
    engine.add_request("a", PROMPTS[0], GREEDY)
    fault.armed = True
    engine.step()
    assert engine.runner.attention.name == "reference"
    for _ in range(3):
        engine.step()
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine.step()
        mx.synchronize()
        assert mx.get_peak_memory() - before < engine.runner.attention.store.keys[0].nbytes


async def test_a_stream_goes_on(monkeypatch):
    expected = undisturbed("fused_decode")
    fault = FailingKernels(monkeypatch, "fused_decode")

    async def stream(engine, prompt):
        async for output in engine.generate(prompt, GREEDY):
            tokens = list(output.outputs[0].token_ids)
            fault.armed = fault.armed or len(tokens) > 3
        return tokens

    engine = AsyncEngine(engine_of(FUSED))
    try:
        assert await asyncio.gather(*(stream(engine, prompt) for prompt in PROMPTS)) == expected
    finally:
        engine.shutdown()
    assert fault.failed


def test_a_compiler_that_speaks_of_memory_does_not_mean_that_memory_ran_out(monkeypatch):
    error = RuntimeError("Threadgroup memory size (40960) exceeds the maximum allowed (32768)")
    fault = FailingKernels(monkeypatch, "add_rms_norm", how="call", error=error)
    engine = engine_of(FUSED)
    assert serve(engine, before_step=arm(fault)) == undisturbed("add_rms_norm")
    assert engine.runner.path.failed_kernels == ("add_rms_norm",)
