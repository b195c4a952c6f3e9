"""KernelAttention on the CPU host: whole steps and whole engines."""

from dataclasses import replace

import numpy as np
import pytest

from metal.host import installed
from tests.support.attention.cases import PREFILLS, RAGGED, Case, KernelCase, check
from tests.support.kernels.device import change_device, checks_find
from tests.support.kernels.launches import watch
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from vllm_metal_lite import SamplingParams
from vllm_metal_lite.attention.paged import attention as planning
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.paged.step import VarlenPrompts, WholePrompt
from vllm_metal_lite.attention.sdpa import execute as sdpa_run
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.registry import Verdict


@pytest.fixture(autouse=True)
def host(monkeypatch):
    checks_find(monkeypatch, Verdict({}, "varlen"))
    change_device(monkeypatch, small_rows=0)  # or "gather" would be for large steps only
    with installed():
        yield


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize(
    "how", [{}, {"window": 11}, {"softcap": 2.0}, {"window": 5, "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("segments", [RAGGED, RAGGED[:3], RAGGED[3:]], ids=len)
def test_a_step_of_decodes_prompts_and_chunks(segments, how, prefill):
    check(KernelCase(segments, prefill=prefill, sinks=True), padding=3, **how)


@pytest.mark.parametrize("how", [{}, {"window": 11}], ids=str)
@pytest.mark.parametrize("bits", [None, 8])
def test_prompts_by_the_calls_that_a_gpu_fuses(monkeypatch, how, bits):
    """MLX's SDPA takes the gathered keys without a copy; on a CPU it gets no call."""
    monkeypatch.setattr(sdpa_run, "unfused", lambda *_: None)
    case = KernelCase(RAGGED, prefill="gather", sinks=True, dim=64, bits=bits)
    check(case, padding=3, **how)


@pytest.mark.parametrize("window", [None, 25, 24])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_prompt_alone_by_the_call_that_a_gpu_fuses(monkeypatch, window, bits):
    """One call for all rows, padding included, unless a window is shorter than the prompt."""
    for module in (sdpa_run, planning):
        monkeypatch.setattr(module, "unfused", lambda *_: None)
    change_device(monkeypatch, rows_as_decodes=0)
    case = KernelCase([(0, 25)], prefill="gather", sinks=True, dim=64, bits=bits)
    case.shapes = [replace(case.shapes[0], window=window)]
    plan = KernelAttention(case.store, "gather", case.shapes).prepare(case.batch, 28).plan
    assert isinstance(plan.prompts, WholePrompt) == plan.repeats == (window != 24)
    check(case, padding=3, window=window)


@pytest.mark.parametrize("window", [None, 40])
def test_chunks_whose_scores_are_bounded_are_cut_into_tiles_that_share_keys(monkeypatch, window):
    """On a CPU no SDPA is fused, and nowhere for heads of 256."""
    change_device(monkeypatch, max_scores=4 * 40 * 100)
    segments = [(7, 1), (100, 70), (30, 1), (60, 90), (0, 50)]
    check(KernelCase(segments, prefill="gather", sinks=True), padding=3, window=window)


def prompts_of_step(segments, dim=32, more_keys=0, **options):
    case = Case(segments, dim=dim)
    attention = KernelAttention(case.store, "gather", case.shapes, **options)
    batch = replace(case.batch, seq_lens=case.batch.seq_lens + np.int32(more_keys))
    return attention.prepare(batch, batch.num_tokens).plan.prompts


def test_small_steps_read_the_store_in_place_whatever_is_faster_for_large_ones(monkeypatch):
    """They are compiled, if a decode waits for them: MLX's calls differ from step to step."""
    segments, scores = [(5, 1), (20, 6), (8, 25)], 6 * 26 + 25 * 33
    change_device(monkeypatch, rows_as_decodes=0)
    assert not prompts_of_step(segments).repeats  # small_rows is 0
    change_device(monkeypatch, small_rows=31, small_scores=scores)
    small = prompts_of_step(segments)
    assert isinstance(small, VarlenPrompts)
    assert small.repeats
    for change in ({"small_rows": 30}, {"small_scores": scores - 1}):
        with monkeypatch.context() as patch:
            change_device(patch, **change)
            assert not prompts_of_step(segments).repeats
    assert not prompts_of_step(segments[1:]).repeats, "nothing waits"
    assert not prompts_of_step(segments, failed_kernels=["varlen_prefill"]).repeats
    assert not prompts_of_step(segments, dim=512).repeats, "too wide for varlen_prefill"
    change_device(monkeypatch, small_rows=701, small_scores=768 * 8192)
    many = prompts_of_step([(5, 1), (0, 700)], more_keys=2**22)
    assert not many.repeats, "more scores than an int32 counts"


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_narrow_types_and_unlike_head_sizes(dtype, prefill):
    check(KernelCase(RAGGED, dim=96, v_dim=64, dtype=dtype, prefill=prefill), window=11)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_quantised_store(dtype, bits):
    case = KernelCase(RAGGED, dim=96, v_dim=80, dtype=dtype, bits=bits, prefill="gather")
    check(case, padding=3, window=11)


# Whole engines


def tokens(model, prompts, **config):
    engine = tiny.engine(model, max_model_len=64, **config)
    return tiny.answers(engine, prompts, 20), engine


def test_a_decode_may_read_what_another_one_writes_in_the_same_step(monkeypatch):
    """The second prompt ends behind a block that the first request completes in this very step."""
    fused = []

    def note(kernel, _, template):
        if kernel == "paged_decode":
            fused.append(template["FUSED"])

    watch(monkeypatch, note)
    model, greedy = tiny.build(config_of("qwen3")), SamplingParams(temperature=0, max_tokens=5)
    first = tiny.prompts(1, 15, 15)[0]
    second = [*first, tiny.alone(model, first, 1)[0], 7]
    with installed(schedule="reverse"):  # the reader comes first, if it may
        engine = tiny.engine("qwen3", attention="kernels")
        tiny.run_ahead(engine, False)  # or the block has no name until the step after
        store = engine.runner.attention.store
        for arrays in (store.keys, store.values):  # what is read before it is written is NaN
            arrays[:] = [mx.full(a.shape, float("nan"), a.dtype) for a in arrays]
        engine.add_request("0", first, greedy)
        done = {o.request_id: o for o in engine.step()}
        engine.add_request("1", second, greedy)
        fused.clear()
        while len(done) < 2 or not all(o.finished for o in done.values()):
            done |= {o.request_id: o for o in engine.step()}
    assert done["1"].num_cached_tokens == 16
    layers = len(store.keys)
    assert fused[: 2 * layers] == [False] * layers + [True] * layers
    for name, prompt in (("0", first), ("1", second)):
        assert done[name].outputs[0].token_ids == tiny.alone(model, prompt, 5)


@pytest.mark.parametrize(
    ("prefill", "kv_bits"), [(how, bits) for how in ("varlen", "gather") for bits in (None, 8, 4)]
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "llama/window"])
def test_an_engine_on_kernels_gives_the_tokens_of_the_reference(
    monkeypatch, name, prefill, kv_bits
):
    """Chunks, mixed steps, cached prefixes and preemptions."""
    checks_find(monkeypatch, Verdict({}, prefill))
    model = tiny.packed(name)
    prompts = tiny.prompts(4, 9, 16, seed=5)
    prompts.append(prompts[1][:8] + prompts[2])
    how = {"num_blocks": 9, "max_num_batched_tokens": 12, "max_num_seqs": 3, "kv_bits": kv_bits}
    expected, _ = tokens(model, prompts, attention="reference", **how)
    got, engine = tokens(model, prompts, attention="kernels", **how)
    assert engine.runner.attention.name == "kernels"
    assert engine.metrics()["preemptions"] > 0
    assert got == expected
