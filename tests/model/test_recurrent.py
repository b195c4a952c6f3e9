"""Recurrent layers through the seam, and engines over models that have them."""

from functools import partial

import mlx.nn as nn
import pytest

from metal.host import installed
from tests.support.kernels.device import limit_memory
from tests.support.kernels.failing import FailingKernels
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import OutOfMemoryError
from vllm_metal_lite.kv.state_store import StateSpec, StateStore
from vllm_metal_lite.model.packed import Mode
from vllm_metal_lite.model.seam.hooks import building
from vllm_metal_lite.model.seam.recurrent import ConvInput, ShortConv
from vllm_metal_lite.model.seam.state_cache import StateCache
from vllm_metal_lite.runner.memory import size_store

# A model whose recurrent layers work on packed rows: whether SiLU follows its convolutions; None if
# it has none.
PACKED = {
    "bailing_moe_v3": True, "falcon_h1": True, "gear": False, "granitemoehybrid": True,
    "kimi_k3": True, "kimi_linear": True, "lfm2": False, "lfm2-vl": False, "lfm2_moe": False,
    "mamba2": True, "nemotron_h": True, "olmo_hybrid": True, "plamo2": True, "qwen3_5": True,
    "qwen3_5_moe": True, "qwen3_next": True, "qwen3_next/q4": True, "prism_hadamard_qwen35": True,
}  # fmt: skip
# Recurrences that no kernel computes.
BY_RUNS = {
    "bailing_hybrid", "bailing_moe_linear", "baichuan_m1", "gear/softcap", "jamba",
    "longcat_flash_ngram", "mamba", "recurrent_gemma", "rwkv7",
}  # fmt: skip

HYBRIDS = (
    "qwen3_next", "kimi_linear", "lfm2", "granitemoehybrid", "mamba", "rwkv7",
    "longcat_flash_ngram",
)  # fmt: skip


greedy = partial(tiny.greedy, ignore_eos=True)


# The seam


@pytest.mark.parametrize("name", PACKED)
def test_recurrent_layers_work_on_packed_rows(name):
    """A release of mlx-lm that computes a recurrence in another way fails here."""
    packed = tiny.packed(name).packed
    assert packed.mode is Mode.PACKED
    convs = [m for _, m in packed.model.named_modules() if isinstance(m, ShortConv)]
    assert convs
    assert {conv.silu for conv in convs} == {PACKED[name]}


@pytest.mark.parametrize("name", sorted(BY_RUNS))
def test_other_recurrent_layers_see_sequences_and_say_why(name):
    packed = tiny.packed(name).packed
    assert packed.mode is not Mode.PACKED
    assert "\n" not in packed.reason


class Unused:
    """A recurrence that must not be asked."""


UNFORESEEN = {
    "a sum": lambda state, rows: state + rows,
    "a product": lambda state, rows: state * 0.5,
    "a matrix product": lambda state, rows: rows @ state,
    "a slice": lambda state, rows: mx.concatenate([state[:, 1:], rows], axis=1),
    "rows before the state": lambda state, rows: mx.concatenate([rows, state], axis=1),
    "three parts": lambda state, rows: mx.concatenate([state, rows, rows], axis=1),
}


@pytest.mark.parametrize("use", UNFORESEEN)
def test_a_state_fails_in_any_use_that_nobody_foresaw(use):
    packed = tiny.packed("qwen3_next").packed
    state = StateCache(0, 2, Unused(), None)[0]
    rows = mx.ones((3, 1, 8))
    with pytest.raises((ValueError, TypeError)), building(packed._recurrent_hooks()):
        mx.eval(UNFORESEEN[use](state, rows) + rows)


@pytest.mark.parametrize("how", [
    {"groups": 1}, {"padding": 3, "groups": 8}, {"stride": 2, "groups": 8},
    {"dilation": 2, "groups": 8},
])  # fmt: skip
def test_a_convolution_of_another_kind_is_refused(how):
    conv = nn.Conv1d(8, 8, 4, **how)
    conv.__class__ = ShortConv
    state = StateCache(0, 2, Unused(), None)[0]
    with pytest.raises(NotImplementedError, match="depthwise"):
        conv(ConvInput(state, mx.ones((3, 1, 8))))


def test_a_cache_has_as_many_states_as_the_layer():
    cache = StateCache(0, 2, Unused(), None)
    assert [state.key for state in cache] == [(0, 0), (0, 1)]
    with pytest.raises(IndexError):
        cache[2]


def test_states_outside_of_the_modules_that_see_sequences_are_refused():
    with pytest.raises(NotImplementedError, match="outside the modules"):
        StateCache(0, 1, None, None)[0]


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2"])
def test_projections_around_a_recurrence_run_once_a_step(name, monkeypatch):
    """Not once for each length: all rows of prompts, chunks and decodes go through together."""
    engine = tiny.engine(name, max_num_batched_tokens=64, enable_prefix_caching=False)
    tiny.run_ahead(engine, False)
    engine.add_request("0", tiny.prompts(1, 8, 8, seed=7)[0], greedy(6))
    engine.step()
    for i, length in enumerate((3, 9, 17), 1):
        engine.add_request(str(i), tiny.prompts(1, length, length, seed=i)[0], greedy(6))
    users = engine.model.packed.layout.state_users.values()
    inside = {id(m) for user in users for _, m in user.named_modules() if isinstance(m, nn.Linear)}
    original, calls = nn.Linear.__call__, []

    def spy(self, x):
        if id(self) in inside:
            calls.append((id(self), len(x)))
        return original(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", spy)
    engine.step()
    assert {module for module, _ in calls} == inside
    assert len(calls) == len(inside)
    assert all(rows >= 1 + 3 + 9 + 17 for _, rows in calls)


# Engines


@pytest.mark.parametrize(("caching", "slots"), [(True, 14), (False, 4)])
def test_slots_are_counted(caching, slots):
    engine = tiny.engine("mamba", num_blocks=10, max_num_seqs=4, enable_prefix_caching=caching)
    assert engine.runner.attention.store.states.num_slots == slots
    assert engine.metrics()["state_slots_total"] == slots


@pytest.mark.parametrize("name", HYBRIDS)
def test_requests_fork_behind_a_position_that_the_caller_names(name):
    shared = tiny.prompts(1, 24, 24, seed=2)[0]
    prompts = [[*shared, *rest] for rest in tiny.prompts(4, 3, 20, seed=3)]
    engine = tiny.engine(name, max_num_batched_tokens=32)
    first = tiny.answers(engine, prompts[:1], 8, checkpoints=[len(shared)])
    others = tiny.outputs(engine, prompts[1:], 8, checkpoints=[len(shared)])
    assert first + tiny.tokens_of(others) == tiny.all_alone(name, prompts, 8)
    assert [output.num_cached_tokens for output in others] == [24] * 3


@pytest.mark.parametrize("how", ["call", "eval", "submit"])
@pytest.mark.parametrize(("name", "kernel"), [
    ("qwen3_next", "gated_delta"), ("qwen3_next", "causal_conv"),
    ("nemotron_h", "gated_delta"),
    ("lfm2", "causal_conv"), ("lfm2", "paged_decode"),
])  # fmt: skip
def test_a_kernel_that_fails_costs_states_and_no_token(name, kernel, how, monkeypatch):
    """The requests of the step start again, from a checkpoint or from their first token."""
    prompts = tiny.prompts(3, 10, 20, seed=6)
    with installed(writable_inputs=["states"]):
        engine = tiny.engine_with_kernels(name, max_num_batched_tokens=24)
        assert engine.runner.attention.name == "kernels"
        lost, launch = [], engine.runner._fall_back
        monkeypatch.setattr(
            engine.runner, "_fall_back", lambda e, *args: lost.append(e) or launch(e, *args)
        )
        tiny.submit(engine, prompts, 10)
        for _ in range(4):
            engine.step()
        fault = FailingKernels(monkeypatch, kernel, how=how)
        fault.armed = True
        done = tiny.run(engine)
    assert fault.failed > 0
    assert lost
    assert tiny.tokens_of(done[i] for i in "012") == tiny.all_alone(name, prompts, 10)


def test_states_that_grow_may_be_in_one_batch():
    """An n-gram's context has one token after the first, two after the second, ..."""
    name, prompts = "longcat_flash_ngram", [[5], [7, 9], [3, 1, 4], [2, 7, 1, 8, 2], [6] * 12]
    assert tiny.answers(tiny.engine(name), prompts, 8) == tiny.all_alone(name, prompts, 8)


# Memory


def test_states_are_counted_one_a_slot(monkeypatch):
    model = tiny.packed("mamba2")
    assert model.kv_bytes_per_token == 0
    # Of each layer: 3 rows of what the convolution sees, and a state of heads x dim x state size.
    conv, ssm = 3 * (128 + 2 * 2 * 16), 8 * 16 * 16
    assert model.state_bytes == 3 * 4 * (conv + ssm)
    assert model.packed.state_store(5).nbytes == 5 * model.state_bytes
    (group,), length, slots = size_store(model, EngineConfig(max_num_seqs=8))
    assert group.num_blocks * 16 == 8 * length
    assert slots == 8 + 15 * 8
    limit_memory(monkeypatch, model.state_bytes << 14)
    for num_blocks in None, 1:
        too_many = EngineConfig(max_num_seqs=1 << 14, num_blocks=num_blocks)
        with pytest.raises(OutOfMemoryError, match=r"states of 16384 requests.*max_num_seqs"):
            LLMEngine(model, too_many)


def test_a_pool_without_states_has_no_slots():
    assert StateStore((), 8).num_slots == 0
    store = StateStore([StateSpec((0, 0), (2, 3), mx.float16)], 8)
    assert store.num_slots == 8
    assert store.nbytes == 8 * 2 * 3 * 2


@pytest.mark.parametrize(("gib", "slots"), [(0, 8), (1e-4, 8 + 9), (1e308, 8 + 64)])
def test_checkpoints_have_the_memory_that_they_are_given(gib, slots):
    """Every checkpoint is behind a block."""
    model = tiny.packed("qwen3_next")
    assert int(1e-4 * 2**30 / model.state_bytes) == 9
    config = EngineConfig(max_num_seqs=8, num_blocks=64, state_cache_gib=gib, max_model_len=128)
    assert size_store(model, config)[2] == slots


def test_checkpoints_that_do_not_fit_are_counted_in_the_error(monkeypatch):
    model = tiny.packed("qwen3_next")
    config = EngineConfig(max_num_seqs=8, state_cache_gib=1)
    limit_memory(monkeypatch, model.state_bytes * 100)
    with pytest.raises(
        OutOfMemoryError, match=r"of 8 requests and \d+ checkpoints .*state_cache_gib"
    ):
        LLMEngine(model, config)
