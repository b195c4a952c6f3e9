"""A kernel that fails in mid-serving gives way; no token is lost or changed.

On the CPU host.  Launches raise where they are called, or where the step is evaluated.
"""

import re
from functools import cache

import pytest

from metal.host import compiler_available, installed
from tests.support import tiny_models as tiny
from tests.support.device import change_device
from tests.support.kernel_faults import MESSAGE, FailingKernel
from vllm_metal_lite import backend
from vllm_metal_lite.attention.select import Verdict
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kernels import launch
from vllm_metal_lite.model.packed import NO_FUSION
from vllm_metal_lite.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")

# The engine in which a kernel is used: (model, fused, way of prompts, options).
PLAIN = ("llama", False, "gather", {})
FUSED = ("qwen3", True, "varlen", {})
QUANTISED = ("llama", False, "gather", {"kv_bits": 8})
USED_IN = {
    "kv_write": PLAIN,
    "kv_gather": PLAIN,
    "gather_rows": PLAIN,
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
ESSENTIAL = {"kv_write", "kv_write_quantised", "kv_gather_quantised"}

# Two arrive every second step, so that steps mix chunks and decodes.  The last ones share 16 tokens.
SHARED = tiny.prompts(1, 16, 16, seed=8)[0]
PROMPTS = [*tiny.prompts(4, 5, 14, seed=9), SHARED + [3, 1], SHARED + [4, 1, 5]]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
SAMPLED = SamplingParams(
    seed=5, max_tokens=10, top_k=20, frequency_penalty=0.5, logprobs=1, min_tokens=4
)
ARMED_AFTER = 3  # steps


@pytest.fixture(scope="module", autouse=True)
def host():
    with pytest.MonkeyPatch.context() as patch, installed():
        # Decodes are split, and a prefix is shared, at the lengths of these prompts.
        change_device(
            patch, min_split_context=8, min_split_keys=8, min_saved_tokens=8, rows_as_decodes=0,
            min_segment_rows=1, min_keys=16,
        )  # fmt: skip
        yield


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    monkeypatch.setattr(decide, "faster_rows", lambda *_: range(0))


def engine_of(kind, option="auto", **more):
    name, fused, prefill, options = kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "is_cpu", lambda: False)
        patch.setattr(backend, "memory_limit", lambda: 1 << 30)
        patch.setattr(verdicts, "verify", lambda *_: Verdict({}, prefill))
        if not fused:
            patch.setattr(decide, "decide", lambda *_: (NO_FUSION, ""))
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
def undisturbed(kind_of, params):
    kind = USED_IN.get(kind_of) or OTHERS[kind_of]
    return serve(engine_of(kind), {"greedy": GREEDY, "sampled": SAMPLED}[params])


OTHERS = {"recurrent": ("qwen3_next", True, "varlen", {})}


def arm(fault, at=ARMED_AFTER):
    def before_step(number):
        fault.armed = number >= at

    return before_step


@pytest.mark.parametrize("how", ["call", "eval"])
@pytest.mark.parametrize("kernel", USED_IN)
def test_a_kernel_that_fails_gives_way_and_no_token_changes(monkeypatch, caplog, kernel, how):
    expected = undisturbed(kernel, "greedy")
    fault = FailingKernel(monkeypatch, kernel, how)
    engine = engine_of(USED_IN[kernel])
    assert serve(engine, before_step=arm(fault)) == expected
    assert fault.launched >= fault.failed > 0
    failed = fault.failed
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    message = MESSAGE if how == "call" else "only supports float32"
    assert re.search(rf"{kernel} fails in a step: .*{re.escape(message)}", warning)
    assert "\n" not in warning
    assert engine.metrics()["failed_kernels"] == 1
    assert kernel in engine.attention_reason
    reference = engine.runner.attention.name == "reference"
    assert reference == (kernel in ESSENTIAL)
    assert serve(engine) == expected  # from here on without the kernel
    assert fault.failed == failed
