"""The five systems that this project grew from: what each gave its users, this engine gives too.

A test is named after its system.  Do not delete one: a rule that only looks unused has a user.
Most run the real engine over tiny models; a few ask the scheduler, where the promise is its own.
"""

import asyncio
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from metal.host import installed
from tests.support.engine.fake_engine import FakeEngine, expected, fake_config, shape
from tests.support.models import tiny_models as tiny
from tests.support.models.tiny_models import greedy
from tools import repro_block_exhaustion as exhaustion
from vllm_metal_lite import LLM, SamplingParams
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.config import PREFILL_POLICIES, EngineConfig
from vllm_metal_lite.engine.async_engine import AsyncEngine
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import ConfigError, RequestError
from vllm_metal_lite.kernels.merge_partitions import merge_partitions
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler import Scheduler

LENGTHS = (7, 19, 12, 30)
PROMPTS = [tiny.prompts(1, n, n, seed=n)[0] for n in LENGTHS]


def alone(n: int, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return tiny.all_alone("llama", prompts, n)


def recorded(engine: LLMEngine) -> list[ForwardBatch]:
    """The batch of each forward, from now on."""
    batches, execute = [], engine.runner.execute

    def recording(batch: ForwardBatch, *rest):
        batches.append(batch)
        return execute(batch, *rest)

    engine.runner.execute = recording
    return batches


def rows(batch: ForwardBatch) -> list[int]:
    """The number of rows of each segment."""
    return np.diff(batch.cu_seqlens_q).tolist()


def is_decodes(batch: ForwardBatch) -> bool:
    """Whether a step has decodes only: these are compiled at once, and fused."""
    return batch.num_decodes == batch.num_segments


# vllm-metal #151: packed prefill


def test_vllm_metal_151_packs_complete_prompts_into_one_forward():
    engine = tiny.engine(max_num_batched_tokens=128)
    batches = recorded(engine)
    assert tiny.answers(engine, PROMPTS, 6) == alone(6)
    first = batches[0]
    assert rows(first) == [*LENGTHS]
    assert first.positions.tolist() == [at for n in LENGTHS for at in range(n)]  # RoPE restarts
    assert first.logits_indices.tolist() == [end - 1 for end in first.cu_seqlens_q[1:].tolist()]
    # One path for one and for many.
    assert tiny.answers(tiny.engine(), PROMPTS[:1], 6) == alone(6)[:1]


def test_vllm_metal_151_steps_have_a_cap_and_take_prompts_in_order():
    engine = tiny.engine(max_num_batched_tokens=20)
    batches = recorded(engine)
    assert tiny.answers(engine, PROMPTS, 1) == alone(1)
    assert [batch.num_tokens for batch in batches] == [20, 20, 20, 8]  # 30 is larger than a step
    seats = [seat for batch in batches for seat in batch.req_indices.tolist()]
    assert seats[0] != seats[-1]
    assert [batch.seq_lens.tolist() for batch in batches] == [[7, 13], [6 + 13, 12, 2], [22], [30]]


def test_vllm_metal_151_masks_suit_a_model_in_bfloat16():
    one_by_one = tiny.engine("llama", mx.bfloat16)
    answers = [tiny.answers(one_by_one, [prompt], 6)[0] for prompt in PROMPTS]
    engine = tiny.engine("llama", mx.bfloat16, max_num_batched_tokens=128)
    assert engine.model.kv_specs[0].dtype == mx.bfloat16
    assert tiny.answers(engine, PROMPTS, 6) == answers


def test_vllm_metal_151_validates_cu_seqlens():
    engine = tiny.engine()
    batches = recorded(engine)
    tiny.answers(engine, PROMPTS[:2], 1)
    blocks = [group.num_blocks for group in engine.kv_groups]
    batches[0].validate(*blocks)
    for wrong in ([0, 0, 26], [0, 30, 26]):
        batch = replace(batches[0], cu_seqlens_q=np.array(wrong, np.int32))
        with pytest.raises(ValueError, match=r"segment [01] has (0|-4) rows"):
            batch.validate(*blocks)


def test_vllm_metal_151_exhaustion_is_certain_and_asserted():
    model = tiny.packed("llama")
    crowd = exhaustion.make_crowd(Namespace(num_requests=5), model.vocab_size)
    needs = [exhaustion.blocks_of(prompt, params) for prompt, params in crowd]
    roomy = EngineConfig(block_size=exhaustion.BLOCK, num_blocks=sum(needs), max_model_len=192)
    tight = replace(roomy, num_blocks=max(max(needs), sum(needs) // 3))
    tokens, metrics = exhaustion.run(model, tight, crowd)
    assert metrics["preemptions"] > 0
    assert metrics["blocks_peak_owned"] == tight.num_blocks
    expected, metrics = exhaustion.run(model, roomy, crowd)
    assert metrics["preemptions"] == 0
    assert tokens == expected
    assert [len(answer) for answer in tokens] == [params.max_tokens for _, params in crowd]


# ROCm/ATOM: chunked prefill


def test_rocm_atom_chunked_prefill_resumes_within_seats_and_samples_at_the_end_only():
    engine = tiny.engine(max_num_batched_tokens=9, max_num_seqs=2)
    batches = recorded(engine)
    assert tiny.answers(engine, PROMPTS, 4) == alone(4)
    progress: dict[int, int] = {}
    for batch in batches:
        assert batch.num_segments <= 2
        assert batch.num_tokens <= 9
        ends = zip(batch.req_indices.tolist(), batch.seq_lens.tolist(), rows(batch), strict=True)
        for seat, end, count in ends:
            assert end - count in (0, progress.get(seat, 0)), "a row was skipped or computed twice"
            progress[seat] = end
    chunks = [batch for batch in batches if not is_decodes(batch)]
    assert any(len(batch.logits_indices) < batch.num_segments for batch in chunks)
    assert sum(len(batch.logits_indices) for batch in batches) == 4 * len(PROMPTS)


def test_rocm_atom_chunked_prefill_maps_slots_by_ranges():
    engine = tiny.engine(max_num_batched_tokens=13)
    batches = recorded(engine)
    tiny.answers(engine, PROMPTS, 3)
    for batch in batches:
        slots, size = batch.slot_mapping(), batch.block_size
        of_row = np.repeat(np.arange(batch.num_segments), rows(batch))
        for row, (segment, at) in enumerate(zip(of_row, batch.positions, strict=True)):
            block = batch.block_tables[0, segment, at // size]
            assert slots[row] == block * size + at % size


def test_rocm_atom_chunked_prefill_recomputes_all_tokens_of_a_preempted_request():
    config = fake_config(4, max_num_seqs=2, enable_prefix_caching=False)
    engine = FakeEngine(config, 6)
    engine.add([1, 2, 3, 4], 13)
    last = engine.add([5, 6, 7, 8], 13)
    while not last.num_preemptions:
        engine.step()
    known = last.num_tokens
    assert known > last.num_prompt_tokens
    again = next(s for out in engine.run() for s in shape(out) if s[0] == "r1")
    assert again == ("r1", 0, known)
    assert last.token_ids[4:] == expected(engine, last)


def test_rocm_atom_chunked_prefill_computes_a_token_after_a_full_prefix_hit():
    engine = tiny.engine()
    for _ in range(2):
        done = tiny.ask(engine, PROMPTS[3][:24], greedy(5))
        assert tiny.tokens_of([done]) == alone(5, [PROMPTS[3][:24]])
    assert done.num_cached_tokens == 16  # of 24: the last block has the last token


def test_rocm_atom_chunked_prefill_looks_nothing_up_after_a_step():
    """What `advance` and `update` cost does not grow with the requests that wait or run."""
    calls = []
    for num_waiting in (0, 500):
        config = fake_config(4, max_num_seqs=4)
        scheduler = Scheduler(config, [KVGroup(num_blocks=64)], 64)
        for i in range(4 + num_waiting):
            scheduler.add(Request(str(i), [i, 1, 2], 9, (i,)))
        out, count = scheduler.schedule(), [0]
        sys.setprofile(lambda frame, event, _, n=count: n.__setitem__(0, n[0] + 1))
        try:
            scheduler.advance(out)
            scheduler.update(out, [7] * 4, {})
        finally:
            sys.setprofile(None)
        calls.append(count[0])
    assert calls[0] == calls[1]


# ROCm/ATOM #1236: long_prefill_token_threshold


@pytest.mark.parametrize(("threshold", "first"), [(0, [7, 19, 12, 26]), (8, [7, 8, 8, 8])])
def test_rocm_atom_1236_a_threshold_limits_each_request_in_each_step(threshold, first):
    options = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": threshold}
    engine = tiny.engine(enable_prefix_caching=False, **options)
    batches = recorded(engine)
    assert tiny.answers(engine, PROMPTS, 3) == alone(3)
    assert rows(batches[0]) == first  # the last one also gets what the budget leaves: 64 - 38
    most = [max(rows(batch)) for batch in batches]
    assert max(most) <= (threshold or 64)


def test_rocm_atom_1236_a_threshold_beyond_its_limits_is_refused():
    limits = {"block_size": 16, "max_model_len": 64}
    with pytest.raises(ConfigError, match=r"at least block_size \(16\), got 15"):
        EngineConfig(long_prefill_token_threshold=15, **limits)
    with pytest.raises(ConfigError, match=r"at most max_model_len \(64\), got 65"):
        EngineConfig(long_prefill_token_threshold=65, **limits)
    for threshold in (0, 16, 64):
        EngineConfig(long_prefill_token_threshold=threshold, **limits)


@pytest.mark.long  # it compiles a kernel for the host
def test_rocm_atom_1236_merging_empty_states_gives_no_nan():
    partial = mx.array(np.full((1, 2, 2, 16), np.nan, np.float32))
    lse = mx.full((1, 2, 2), -1e30)
    with installed(checked=True):
        out = np.array(merge_partitions(mx.nan_to_num(partial, 0), lse, mx.float32))
    assert (out == 0).all()


@pytest.mark.parametrize("name", ["llama", "llama/window/w9", "granitemoehybrid"])
def test_rocm_atom_1236_chunked_equals_single_shot(name):
    for threshold, budget in ((8, 64), (0, 5), (9, 33), (0, 128)):
        options = {"max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold}
        engine = tiny.engine(name, enable_prefix_caching=False, **options)
        assert tiny.answers(engine, PROMPTS, 5) == tiny.all_alone(name, PROMPTS, 5)


# lmdeploy #4631: chunks and decodes by turns


def test_lmdeploy_4631_chunk_forwards_alternate_with_decode_forwards():
    engine = tiny.engine(prefill_policy="alternate", max_num_batched_tokens=16)
    tiny.submit(engine, PROMPTS[:2], 30)
    for _ in range(5):
        tiny.step(engine)
    batches = recorded(engine)
    long = tiny.prompts(1, 90, 90, seed=2)[0]
    engine.add_request("long", long, greedy(4))
    done = tiny.run(engine)
    kinds = ["decode" if is_decodes(batch) else "chunk" for batch in batches]
    assert all(is_decodes(batch) or not batch.num_decodes for batch in batches)
    # A decode waits for one chunk at most, and a chunk for one decode.
    end = len(kinds) - kinds[::-1].index("chunk")
    start = kinds.index("chunk")
    assert kinds[start:end].count("chunk") == -(-90 // 16)
    assert all(a != b for a, b in pairwise(kinds[start:end]))
    assert max(batch.num_tokens for batch in batches) <= 16
    assert tiny.tokens_of([done["long"]]) == alone(4, [long])
    assert tiny.tokens_of([done["0"], done["1"]]) == alone(30)[:2]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "granitemoehybrid"])
def test_lmdeploy_4631_tokens_are_the_same_under_all_policies(name):
    """With too few blocks, with drafts, and with prompts beside decodes."""
    for policy in PREFILL_POLICIES:
        options = {"max_num_batched_tokens": 12, "num_blocks": 9, "speculate": "auto"}
        engine = tiny.engine(name, prefill_policy=policy, **options)
        assert tiny.answers(engine, PROMPTS, 24) == tiny.all_alone(name, PROMPTS, 24)
        assert engine.metrics()["preemptions"] > 0
        assert engine.metrics()["blocks_owned"] == 0


def test_lmdeploy_4631_a_chunk_that_lacks_blocks_lets_decodes_drain():
    config = fake_config(4, prefill_policy="alternate", max_num_batched_tokens=8)
    engine = FakeEngine(config, 7)
    engine.add([1] * 5, 10)
    engine.step()
    engine.step()
    chunked = engine.add([2] * 15, 1)
    assert shape(engine.step()) == [("r1", 0, 8)]
    taken = engine.scheduler.kv.pools[0].allocate(3)  # another owner takes the rest
    waiting = engine.add([3], 1)
    steps = [engine.step() for _ in range(2)]
    assert [shape(out) for out in steps] == [[("r0", 6 + i, 1)] for i in range(2)]
    assert chunked.num_blocks == 2  # reserved up to the end of the chunk, not of the prompt
    assert waiting in engine.scheduler.waiting
    engine.scheduler.kv.pools[0].free(taken)
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_lmdeploy_4631_a_failed_reservation_takes_no_block():
    """It takes no block of any KV group, although one of them has room."""
    kv = KVCacheManager([KVGroup(num_blocks=9), KVGroup(window=5, num_blocks=3)], 4, False)
    request = Request("r", list(range(30)), 1)
    kv.admit(request, kv.find_prefix(request))
    assert kv.allocate(request, 0, 8)
    kv.give_back(request, 8)
    before = [pool.num_available for pool in kv.pools], [*map(repr, request.block_tables)]
    assert kv.allocate(request, 8, 24) is None
    assert before == ([pool.num_available for pool in kv.pools], [*map(repr, request.block_tables)])
    assert kv.allocate(request, 8, 12)


def test_lmdeploy_4631_a_failed_chunk_is_rolled_back():
    engine = tiny.engine(prefill_policy="alternate", max_num_batched_tokens=16)
    execute, failures = engine.runner.execute, iter([3, 5])
    numbers, fails_at = iter(range(1000)), set(failures)

    def failing(*args):
        if next(numbers) in fails_at:
            raise RuntimeError("the forward failed")
        return execute(*args)

    engine.runner.execute = failing
    tiny.submit(engine, PROMPTS, 8)
    done: dict = {}
    while engine.has_unfinished_requests():
        engine.failed_steps.at_fault = []
        done |= tiny.step(engine, RuntimeError)
    assert tiny.tokens_of(done[str(i)] for i in range(4)) == alone(8)


# mminf #81: atomic spans, and mixed steps through the front door


async def collect(engine: AsyncEngine, prompt: dict, params: SamplingParams) -> list[int]:
    """The tokens of a stream."""
    tokens: list[int] = []
    async for output in engine.generate(prompt, params):
        tokens = output.outputs[0].token_ids
    return tokens


SPANS = [(3, 14), (14, 16), (20, 30)]


def cuts(batches: list[ForwardBatch], length: int) -> list[tuple[int, int]]:
    """(start, end) of each chunk of the prompt of this length; no other prompt has it."""
    found = []
    for batch in batches:
        for end, count in zip(batch.seq_lens.tolist(), rows(batch), strict=True):
            if end - count < length and count > 1:
                found.append((end - count, end))
    return found


def check_uncut(batches: list[ForwardBatch]) -> None:
    chunks = cuts(batches, 30)
    assert len(chunks) > 1, "the prompt was computed in one step"
    for start, end in SPANS:
        assert any(a <= start and end <= b for a, b in chunks), "a span was cut"


@pytest.mark.parametrize("policy", PREFILL_POLICIES)
@pytest.mark.parametrize("name", ["llama", "llama/window/w9", "granitemoehybrid"])
def test_mminf_81_no_chunk_cuts_a_span(name, policy):
    engine = tiny.engine(name, prefill_policy=policy, max_num_batched_tokens=12)
    batches = recorded(engine)
    prompt = {"prompt_token_ids": PROMPTS[3], "spans": SPANS}
    done = tiny.ask(engine, prompt, greedy(6, ignore_eos=True))
    assert tiny.tokens_of([done]) == tiny.all_alone(name, PROMPTS[3:], 6)
    check_uncut(batches)
    assert cuts(batches, 30) == [(0, 3), (3, 14), (14, 20), (20, 30)]


def test_mminf_81_spans_pass_the_front_doors(tmp_path):
    limits = {"max_num_batched_tokens": 12, "block_size": 8, "num_blocks": 64, "max_model_len": 128}
    folder = str(tiny.write_folder(tmp_path / "model"))
    llm = LLM(folder, **limits, enable_prefix_caching=False)
    batches = recorded(llm.engine)
    prompt = {"prompt_token_ids": [1 + t % 90 for t in PROMPTS[3]], "spans": SPANS}
    whole = {"prompt": "hello", "spans": [(0, None)]}
    params = greedy(5, ignore_eos=True)
    outputs = llm.generate([prompt, whole], params)
    check_uncut(batches)
    with pytest.raises(RequestError, match=r"prompt 1: .* from 0 to 13, 13 tokens; .* most 12 "):
        llm.generate([prompt, {"prompt": "hello, world!", "spans": [(0, None)]}], params)

    async def both(engine: AsyncEngine) -> list[list[int]]:
        return await asyncio.gather(*(collect(engine, p, params) for p in (prompt, whole)))

    batches.clear()
    engine = AsyncEngine(llm.engine)
    try:
        assert asyncio.run(both(engine)) == tiny.tokens_of(outputs)
    finally:
        engine.shutdown()
    check_uncut(batches)


def test_mminf_81_a_span_is_passed_over_while_it_does_not_fit():
    engine = tiny.engine(max_num_batched_tokens=16, enable_prefix_caching=False)
    decodes = tiny.prompts(4, 2, 2, seed=1)
    tiny.submit(engine, decodes, 30)
    tiny.step(engine)
    order, on_step = [], engine.on_step
    assert on_step is None
    engine.on_step = lambda out: order.extend(r.request_id for r in out.admitted)
    atomic = {"prompt_token_ids": PROMPTS[3][:14], "spans": [(0, 14)]}
    engine.add_request("atomic", atomic, greedy(3))
    engine.add_request("later", PROMPTS[0], greedy(3))
    done = tiny.run(engine)
    assert order == ["later", "atomic"]
    assert tiny.tokens_of([done["atomic"]]) == alone(3, [PROMPTS[3][:14]])
    assert tiny.tokens_of([done["later"]]) == alone(3)[:1]
    # The span did not wait until the decodes were over, and it preempted none of them.
    assert engine.metrics()["preemptions"] == 0


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 30)], r"0 to 30, 30 tokens; .* at most 16 of them \(max_num_batched_tokens\)"),
        ([(4, 31)], "span .*4, 31.* is empty or outside the prompt of 30 tokens"),
        ([(4, 4)], "span .*4, 4.* is empty or outside"),
        ([(-1, 4)], "span .*-1, 4.* is empty or outside"),
        ([(0, 5), (4, 9)], "spans must not overlap: 0 to 5, and one from 4 on"),
        ([4, 5], r"a span must be \(start, end\), in tokens, got 4"),
        ([(0, 2.5)], r"a span must be \(start, end\), in tokens, got .*2.5"),
        ([(None, 5)], r"a span must be \(start, end\), in tokens, got .*None"),
        ("all", r"spans must be a list of \(start, end\), got 'all'"),
    ],
)
def test_mminf_81_what_can_never_fit_is_refused(spans, message):
    engine = tiny.engine(max_num_batched_tokens=16)
    with pytest.raises(RequestError, match=message) as refusal:
        engine.add_request("r", {"prompt_token_ids": PROMPTS[3], "spans": spans}, greedy(3))
    assert "\n" not in str(refusal.value)
    assert not engine.has_unfinished_requests()


def test_mminf_81_prompts_do_not_stop_decodes_and_decodes_keep_their_own_step():
    """Four decodes run when a long prompt arrives."""
    engine = tiny.engine(max_num_batched_tokens=16)
    tiny.submit(engine, tiny.prompts(4, 5, 5, seed=6), 40)
    tiny.step(engine)
    long = tiny.prompts(1, 60, 60, seed=7)[0]
    engine.add_request("long", long, greedy(4))
    batches = recorded(engine)
    done = tiny.run(engine)
    mixed = [batch for batch in batches if not is_decodes(batch)]
    assert [rows(batch) for batch in mixed] == [[1, 1, 1, 1, 12]] * 5  # nobody waits
    assert all(map(is_decodes, batches[len(mixed) + 1 :])), "decodes have a step of their own again"
    assert tiny.tokens_of([done["long"]]) == alone(4, [long])


def test_mminf_81_every_stream_ends_with_its_own_tokens():
    """Through the front door, under pressure: an output routed wrongly, or a request that is not
    queued again, would hang or differ."""
    engine = tiny.engine(num_blocks=12, max_num_batched_tokens=12, max_num_seqs=4)

    spans, params = ([(0, 7)], [(8, 19)], [], SPANS), greedy(20, ignore_eos=True)
    asked = [{"prompt_token_ids": p, "spans": s} for p, s in zip(PROMPTS, spans, strict=True)]

    async def all_of(served: AsyncEngine) -> list[list[int]]:
        return await asyncio.gather(*(collect(served, prompt, params) for prompt in asked * 3))

    served = AsyncEngine(engine)
    try:
        assert asyncio.run(all_of(served)) == alone(20) * 3
    finally:
        served.shutdown()
    assert engine.metrics()["preemptions"] > 0
