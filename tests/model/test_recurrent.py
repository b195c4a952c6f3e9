"""Recurrent layers: states by seat, modules that see sequences, engines over hybrid models."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import tiny_models as tiny
from vllm_metal_lite.attention.base import Step, make_step
from vllm_metal_lite.attention.sdpa.reference import ReferencePlan, ReferenceStepAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import OutOfMemoryError
from vllm_metal_lite.kv.recurrent_state import SeatStates
from vllm_metal_lite.model.sequences.runs import SequenceStep, plan_runs
from vllm_metal_lite.runner.memory import size_store
from vllm_metal_lite.sampling_params import SamplingParams

HYBRIDS = ("qwen3_next", "lfm2", "granitemoehybrid", "mamba", "rwkv7", "longcat_flash_ngram")
SEATS = 6
KEY = (0, 0)


# States by seat


def advance(states: SeatStates, runs: list[tuple[tuple[int, ...], bool]], stamp: int) -> list:
    """One step that appends `stamp` to what each seat remembers; what the runs began with."""
    step = states.begin(runs)
    before = [step.get(i, KEY) for i in range(len(runs))]
    for i, (seats, _) in enumerate(runs):
        old = before[i] if before[i] is not None else mx.zeros((len(seats), 1), mx.int32)
        step.set(i, KEY, old * 10 + stamp)
    step.commit()
    mx.eval(states.arrays)
    return before


@given(st.lists(st.permutations(range(SEATS)), min_size=1, max_size=12), st.data())
def test_each_seat_keeps_its_own_state_whoever_runs_beside_it(orders, data):
    states, memory = SeatStates(), {}
    for stamp, order in enumerate(orders, 1):
        chosen = order[: data.draw(st.integers(1, SEATS))]
        fresh = {s: s not in memory or data.draw(st.booleans()) for s in chosen}
        cut = data.draw(st.integers(1, len(chosen)))
        runs = [
            (tuple(s for s in part if fresh[s] is new), new)
            for part in (chosen[:cut], chosen[cut:])
            for new in (True, False)
        ]
        runs = [run for run in runs if run[0]]
        advance(states, runs, stamp % 10)
        for s in chosen:
            memory[s] = (0 if fresh[s] else memory[s]) * 10 + stamp % 10
        assert states.num_rows == len(memory)
        for seat, value in memory.items():
            step = states.begin([((seat,), False)])
            assert step.get(0, KEY).item() == np.int32(value)


def test_while_the_same_seats_run_their_array_is_taken_as_it_is():
    states = SeatStates()
    advance(states, [((2, 0, 1), True)], 1)
    (array,) = states.arrays
    assert advance(states, [((2, 0, 1), False)], 2)[0] is array
    (array,) = states.arrays
    assert advance(states, [((0, 2, 1), False)], 3)[0] is not array


def test_a_step_that_breaks_off_changes_nothing():
    states = SeatStates()
    advance(states, [((0, 1), True)], 1)
    before = [a.tolist() for a in states.arrays]
    step = states.begin([((1,), False)])
    step.set(0, KEY, step.get(0, KEY) + 5)
    assert [a.tolist() for a in states.arrays] == before


def test_going_on_without_a_state_is_refused():
    with pytest.raises(ValueError, match="seat 3"):
        SeatStates().begin([((3,), False)])


# Rows and sequences


def pack(spans: list[tuple[int, int]]) -> Step:
    """A step of segments (tokens before, tokens now), with two rows of padding."""
    inputs = InputBatch(len(spans), 64, 8)
    rows = np.array([inputs.add([0] * 40, 40) for _ in spans])[::-1]
    for row in rows:
        inputs.append_blocks(row, list(range(8)))
    batch = inputs.pack(rows, *(np.array(x) for x in zip(*spans, strict=True)))
    return make_step(batch, batch.num_tokens + 2, ReferencePlan(()))


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([(5,), (3, 5), (1, 5)]),
    st.booleans(),
)
def test_rows_become_sequences_and_sequences_rows(spans, alone, inner, heads_first):
    step = pack(sorted(spans, key=lambda s: s[1]))
    sequences = SequenceStep(step, SeatStates_with(range(len(spans))), alone)
    covered = np.concatenate([r.rows.ravel() for r in sequences.runs])
    assert sorted(covered.tolist()) == list(range(step.batch.num_tokens))
    assert len(sequences.runs) == len(spans) or not alone
    x = mx.random.normal((step.num_rows, 1, *inner))
    if heads_first and len(inner) == 2:
        x = x.swapaxes(1, 2)
    parts = []
    for run in sequences.runs:
        part = sequences.to_sequences(x, run)
        assert len(part) == len(run.seats)
        length_axis = 2 if part.ndim == 4 and heads_first and inner[0] != 1 else 1
        assert part.shape[length_axis] == run.length
        parts.append(part)
    back = sequences.to_rows(parts)
    n = step.batch.num_tokens
    np.testing.assert_array_equal(np.array(back.reshape(x.shape)[:n]), np.array(x[:n]))


def SeatStates_with(seats) -> SeatStates:
    states = SeatStates()
    advance(states, [(tuple(seats), True)], 1)
    return states


def test_decodes_are_one_run_and_prompts_of_one_length_too():
    step = pack([(20, 1), (9, 1), (31, 1), (0, 4), (0, 4), (3, 4)])
    runs = plan_runs(step.batch, alone=False)
    assert [len(r.seats) for r in runs] == [3, 2, 1]
    assert [r.fresh for r in runs] == [False, True, False]


# Engines over hybrid models


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


@pytest.mark.parametrize("name", HYBRIDS)
def test_chunks_preemptions_and_neighbours_change_no_token(name):
    prompts = tiny.prompts(6, 10, 30, seed=5)
    engine = tiny.engine(name, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=24)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(24))
    rows, done = [], {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        rows.append(engine.runner.attention.store.states.num_rows)
    for i, prompt in enumerate(prompts):
        assert done[str(i)].outputs[0].token_ids == tiny.alone(tiny.native(name), prompt, 24)
    assert engine.metrics()["preemptions"] > 0
    assert max(rows) <= 4, "one row a seat"


def test_an_abort_and_a_step_that_fails_leave_the_others_states_alone(monkeypatch):
    name, prompts = "qwen3_next", tiny.prompts(4, 10, 20, seed=6)
    engine = tiny.engine(name, max_num_batched_tokens=32)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(16))
    for _ in range(6):
        engine.step()
    engine.abort("1")
    attend, calls = ReferenceStepAttention.attend, []

    def fail_in_the_second_layer(*args, **how):
        calls.append(1)
        return attend(*args, **how) if len(calls) < 2 else 1 / 0

    with monkeypatch.context() as m:
        m.setattr(ReferenceStepAttention, "attend", fail_in_the_second_layer)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    done = tiny.run(engine)
    for i in (0, 2, 3):
        assert done[str(i)].outputs[0].token_ids == tiny.alone(tiny.native(name), prompts[i], 16)


def test_decodes_go_through_a_recurrent_module_as_one_batch(monkeypatch):
    engine = tiny.engine("qwen3_next", max_num_batched_tokens=64)
    engine.async_scheduling = False  # a step at a time
    for i, prompt in enumerate(tiny.prompts(3, 8, 15, seed=7)):
        engine.add_request(str(i), prompt, greedy(6))
    engine.step()
    module = engine.model.packed.model.model.layers[0].linear_attn
    base, shapes = type(module).__mro__[1], []
    original = base.__call__

    def spy(self, x, *args, **kwargs):
        shapes.append(x.shape)
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(base, "__call__", spy)
    engine.step()
    assert len(shapes) == engine.model.packed.layout.num_states
    assert {s[:2] for s in shapes} == {(3, 1)}


def test_prefixes_are_not_cached_for_a_model_with_states():
    engine = tiny.engine("lfm2", enable_prefix_caching=True)
    assert "recurrent" in engine.model.packed.no_prefix_cache
    prompt = tiny.prompts(1, 40, 40)[0]
    for i in range(2):
        engine.add_request(str(i), prompt, greedy(3))
        tiny.run(engine)
    assert engine.metrics()["prefix_cache_hit_tokens"] == 0


def test_states_are_counted_one_a_seat(monkeypatch):
    model = tiny.packed("mamba2")
    assert model.kv_bytes_per_token == 0
    # Of each layer: 3 rows of what the convolution sees, and a state of heads x dim x state size.
    conv, ssm = 3 * (128 + 2 * 2 * 8), 8 * 16 * 8
    assert model.state_bytes == 3 * 4 * (conv + ssm)
    (group,), length, _ = size_store(model, EngineConfig(max_num_seqs=8))
    assert group.num_blocks * 16 == 8 * length
    too_many = EngineConfig(max_num_seqs=1 << 14)
    monkeypatch.setattr("vllm_metal_lite.backend.memory_limit", lambda: model.state_bytes << 14)
    with pytest.raises(OutOfMemoryError, match=r"recurrent states of 16384 requests.*max_num_seqs"):
        LLMEngine(model, too_many)


def test_states_that_still_grow_are_not_put_in_one_batch():
    """An n-gram's context has one token after the first, two after the second, ..."""
    name, prompts = "longcat_flash_ngram", [[5], [7, 9], [3, 1, 4], [2, 7, 1, 8, 2], [6] * 12]
    engine = tiny.engine(name)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(8))
    done = tiny.run(engine)
    for i, prompt in enumerate(prompts):
        assert done[str(i)].outputs[0].token_ids == tiny.alone(tiny.native(name), prompt, 8)
