"""How many blocks the memory holds."""

from copy import copy
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.device import change_device, limit_memory, pretend_backend
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import ConfigError, OutOfMemoryError
from vllm_metal_lite.model.loader import load
from vllm_metal_lite.runner import memory as sizing
from vllm_metal_lite.runner import step_peak
from vllm_metal_lite.runner.memory import size_store
from vllm_metal_lite.runner.step_peak import longer_context_bytes, step_peak_bytes

BYTES_PER_TOKEN = 3 * 2 * (16 + 16) * 4  # layers, KV heads, K and V, float32


def sizes(*args) -> tuple[int, int]:
    """(num_blocks, max_model_len) of a model whose layers form one KV group."""
    (group,), max_model_len, _ = size_store(*args)
    return group.num_blocks, max_model_len


@pytest.fixture
def model():
    return tiny.packed("llama")


def test_the_numbers_add_up(model, monkeypatch):
    config = EngineConfig(block_size=8, memory_fraction=0.5, max_num_batched_tokens=64)
    assert model.kv_bytes_per_token == BYTES_PER_TOKEN
    peak, room = 10**7, 100 * 8 * BYTES_PER_TOKEN + 1000  # a hundred blocks and a bit
    limit = 2 * (model.weight_bytes + peak + room)
    limit_memory(monkeypatch, limit)
    assert sizes(model, config, lambda *_: peak) == (100, 512)


def test_no_more_blocks_than_all_seats_at_full_length_can_own(model):
    config = EngineConfig(max_num_seqs=3, max_model_len=100)
    assert sizes(model, config) == (3 * 7, 100)


def test_a_store_of_the_size_asked_for_shortens_the_context(model):
    assert sizes(model, EngineConfig(num_blocks=10)) == (10, 160)
    assert sizes(model, EngineConfig(num_blocks=1000)) == (1000, 512)
    assert sizes(model, EngineConfig(num_blocks=10, max_model_len=160)) == (10, 160)
    assert sizes(model, EngineConfig(num_blocks=10, max_model_len=7)) == (10, 7)


def test_the_peak_of_a_step_is_plausible(model):
    """It holds at least the logits of every seat and their softmax, and grows with the step."""
    small = step_peak_bytes(model, EngineConfig(max_num_batched_tokens=64), 512)
    large = step_peak_bytes(model, EngineConfig(max_num_batched_tokens=512), 512)
    assert small >= 2 * 64 * tiny.VOCAB * 4
    assert small < 64 << 20
    assert 4 * small < large < 16 * small


@pytest.mark.parametrize(("max_num_seqs", "scored"), [(8, None), (8, 1), (1, 1)])
def test_a_real_full_step_stays_within_the_measured_peak(max_num_seqs, scored):
    model = tiny.load("llama", vocab_size=20_000)
    config = EngineConfig(
        block_size=8,
        num_blocks=64,
        max_num_batched_tokens=256,
        max_num_seqs=max_num_seqs,
        max_model_len=256,
        speculate="off",
    )
    peak = step_peak_bytes(model, config, 256)
    engine = LLMEngine(model, config)
    for i, prompt in enumerate(tiny.prompts(6, 200, 240)):
        engine.add_request(str(i), prompt, tiny.greedy(prompt_logprobs=scored))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tiny.run(engine)
    assert mx.get_peak_memory() - before <= peak


def test_scores_that_the_measured_context_does_not_reach_are_counted(model, monkeypatch):
    """On a CPU every call keeps its scores, and needs 1.5 times their memory."""
    (shape,) = model.attention_shapes
    of_100_keys = shape.num_heads * 32 * 100
    monkeypatch.setattr(step_peak, "_CALLS_AT_ONCE", 1)
    change_device(monkeypatch, max_scores=2 * of_100_keys, max_gathered_keys=0)
    assert longer_context_bytes(model, 32, 100, 1000) == 1.5 * of_100_keys * shape.dtype.size
    assert longer_context_bytes(model, 32, 200, 1000) == 0
    monkeypatch.setattr(step_peak, "unfused", lambda *_: None)
    assert longer_context_bytes(model, 32, 100, 1000) == 0


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("rows", [64, 256, 512])
def test_the_calls_of_a_long_chunk_stay_within_the_estimate(monkeypatch, name, rows):
    """Chunks of up to eight calls behind a long context, measured as they are."""
    device = {"profile_rows": rows, "profile_context": 2048, "max_scores": 1 << 19}
    change_device(monkeypatch, **device)
    config = EngineConfig(max_num_batched_tokens=rows, max_num_seqs=1)
    model = tiny.packed(name)
    measured = step_peak_bytes(model, config, 2048)
    assert measured <= step_peak.estimated_step_peak(model, config, 2048) <= 3 * measured


@pytest.mark.parametrize("name", ["qwen3_moe", "ernie4_5_moe", "gemma4_text/moe", "kimi_linear"])
def test_the_estimate_counts_the_experts_of_a_token(name):
    """Two of them in these models, whose attributes have different names."""
    model, config = tiny.packed(name), EngineConfig()
    peak = step_peak.estimated_step_peak(model, config, 2048)
    for count, more in ((2, False), (4, True)):
        other = replace(model, usage=copy(model.usage))
        other.usage.experts_per_token = count
        assert (step_peak.estimated_step_peak(other, config, 2048) > peak) == more


def test_profiling_leaves_no_memory_behind(model):
    config = EngineConfig(max_num_batched_tokens=64)
    step_peak_bytes(model, config, 512)
    before = mx.get_active_memory()
    step_peak_bytes(model, config, 512)
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory_fraction": 1e-9}, OutOfMemoryError, ["llama", "raise memory_fraction"]),
        ({"num_blocks": 10**12}, OutOfMemoryError, ["num_blocks=1000000000000", "lower it"]),
        ({"num_blocks": 2, "max_model_len": 33}, ConfigError, ["33", "32 tokens", "2 blocks"]),
        ({"max_model_len": 513}, ConfigError, ["513", "512"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_the_numbers(model, options, error, words):
    with pytest.raises(error) as caught:
        LLMEngine(model, EngineConfig(**options))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("num_blocks", [None, 20])
def test_a_length_that_memory_cannot_hold_names_the_options_that_help(
    model, monkeypatch, num_blocks
):
    """Without them, if the user set the number of blocks."""
    limit_memory(monkeypatch, model.weight_bytes + 20 * 16 * BYTES_PER_TOKEN)
    config = EngineConfig(memory_fraction=1.0, max_model_len=512, num_blocks=num_blocks)
    with pytest.raises(ConfigError, match="at most the 320 tokens") as caught:
        size_store(model, config, lambda *_: 0)
    helps = str(caught.value).endswith("; raise memory_fraction or lower kv_bits")
    assert helps is (num_blocks is None)


def test_weights_larger_than_the_memory(model, monkeypatch):
    limit_memory(monkeypatch, 1 << 30)
    with pytest.raises(OutOfMemoryError, match=r"does not fit: weights 8\.00 GiB"):
        size_store(replace(model, weight_bytes=8 << 30), EngineConfig())


# Layers with a window beside layers without


def windowed(**changes):
    """Six layers of one size, every second one with a window of 64 tokens."""
    model = tiny.packed("llama")
    wide = replace(model.kv_specs[0], window=64)
    packed = copy(model.packed)
    packed.layout = replace(packed.layout, specs=[wide, replace(wide, window=None)] * 3)
    return replace(model, packed=packed, max_position=100_000, **changes)


def fitting(monkeypatch, num_bytes: int, **options):
    """The groups that fit into this memory beside weights and a step."""
    model = windowed()
    limit_memory(monkeypatch, model.weight_bytes + num_bytes)
    config = EngineConfig(block_size=8, memory_fraction=1.0, **options)
    groups, max_model_len, _ = size_store(model, config, lambda *_: 0)
    assert sizing.store_bytes(model, groups, 8) <= num_bytes
    return [g.num_blocks for g in groups], max_model_len


GROUP_BLOCK = 3 * 8 * BYTES_PER_TOKEN // 3  # bytes of one block of either group


def test_a_window_gets_what_all_seats_can_need_and_the_context_the_rest(monkeypatch):
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    # 9 blocks a window of 64 touches; a step's 64 tokens, and a block more in each seat.
    assert fitting(monkeypatch, 1000 * GROUP_BLOCK, **options) == ([952, 48], 952 * 8)


def test_windows_of_idle_prefixes_get_a_sixteenth_where_contexts_need_the_memory(monkeypatch):
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    (full, window), max_model_len = fitting(monkeypatch, 1000 * GROUP_BLOCK, **options)
    assert (full, max_model_len) == (1000 * 15 // 16 - 48, full * 8)
    assert full + window == 1000
    # A length that was asked for goes first.
    options["max_model_len"] = 952 * 8
    assert fitting(monkeypatch, 1000 * GROUP_BLOCK, **options) == ([952, 48], 952 * 8)
    options["max_model_len"] = 900 * 8
    assert fitting(monkeypatch, 1000 * GROUP_BLOCK, **options) == ([900, 100], 900 * 8)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_memory_that_no_context_needs_is_for_one_window_each_average_prefix(
    monkeypatch, max_num_seqs
):
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 64, "max_model_len": 4096}
    (full, window), _ = fitting(monkeypatch, 10_000 * GROUP_BLOCK, **options)
    assert full == max_num_seqs * 4096 // 8
    assert window == max_num_seqs * 10 + 8 + full // 32 * 9  # 9 blocks of 256 tokens' 32
    options["enable_prefix_caching"] = False
    (full, window), _ = fitting(monkeypatch, 10_000 * GROUP_BLOCK, **options)
    assert window == max_num_seqs * 10 + 8


def test_a_window_longer_than_the_context_gets_no_more_blocks_than_the_context(monkeypatch):
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 256, "max_model_len": 48}
    assert fitting(monkeypatch, 10_000 * GROUP_BLOCK, **options) == ([12, 12], 48)


def test_a_crowd_shares_as_if_its_requests_were_four_windows_long(monkeypatch):
    options = {"max_num_seqs": 1000, "max_num_batched_tokens": 64}
    (full, window), max_model_len = fitting(monkeypatch, 1000 * GROUP_BLOCK, **options)
    assert full + window == 1000
    assert window == pytest.approx(full * 9 / 32, abs=1)  # 9 blocks of 256 tokens' 32
    assert max_model_len == full * 8
    # Where contexts are no longer than two windows, all layers get the same.
    options["max_model_len"] = 128
    assert fitting(monkeypatch, 1000 * GROUP_BLOCK, **options) == ([500, 500], 128)


def test_one_request_and_a_step_always_fit_a_window(monkeypatch):
    for num_bytes in range(2 * GROUP_BLOCK, 200 * GROUP_BLOCK, 3 * GROUP_BLOCK):
        options = {"max_num_seqs": 100, "max_num_batched_tokens": 256}
        (full, window), max_model_len = fitting(monkeypatch, num_bytes, **options)
        assert full * 8 == max_model_len
        assert window == full or window >= -(-(64 + 256) // 8)


def test_num_blocks_counts_the_blocks_of_all_of_the_context():
    config = EngineConfig(
        block_size=8,
        num_blocks=1000,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
    )
    groups, max_model_len, _ = size_store(windowed(), config)
    assert ([g.num_blocks for g in groups], max_model_len) == ([1000, 22], 8000)
    groups, _, _ = size_store(windowed(), replace(config, num_blocks=12))
    assert [g.num_blocks for g in groups] == [12, 12]


def test_num_blocks_raises_the_windows_of_idle_prefixes_as_far_as_memory_allows(monkeypatch):
    options = {"num_blocks": 1000, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    in_all = 1000 + 22 + 282  # 9 of 32, as above
    model = windowed()
    peak = step_peak.estimated_step_peak(model, EngineConfig(block_size=8, **options), 100_000)
    for spare, window in [(0, 304), (-100, 204), (-282, 22), (-290, 22)]:
        monkeypatch.setattr(
            sizing, "estimated_step_peak", lambda *_, s=spare: peak - s * GROUP_BLOCK
        )
        found = fitting(monkeypatch, in_all * GROUP_BLOCK + peak, **options)
        assert found == ([1000, window], 8000)


@given(
    windows=st.sampled_from([(None, 16), (None, 64, 64, 64), (None, 8, 128), (64,), (64, 16)]),
    seats=st.sampled_from([1, 2, 64]),
    chunk=st.sampled_from([1, 16, 64, 2048]),
    max_model_len=st.sampled_from([None, None, 7, 48, 300]),
    num_blocks=st.sampled_from([None, None, 2, 40, 1000]),
    fraction=st.sampled_from([0.3, 1.0]),
    room=st.sampled_from([1, 3, 20, 500, 20_000]),
)
@settings(max_examples=60, deadline=None)
def test_idle_windows_cost_no_start_no_length_and_no_window_of_a_request(
    windows, seats, chunk, max_model_len, num_blocks, fraction, room
):
    model = windowed()
    spec = model.kv_specs[0]
    model.packed.layout = replace(
        model.packed.layout, specs=[replace(spec, window=window) for window in windows]
    )
    limit = model.weight_bytes + room * len(windows) * 8 * spec.bytes_per_token
    config = EngineConfig(
        block_size=8,
        max_num_seqs=seats,
        max_num_batched_tokens=chunk,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        memory_fraction=fraction,
    )
    found = []
    with patch.object(backend, "memory_limit", lambda: limit):
        for caching in (False, True):
            try:
                options = replace(config, enable_prefix_caching=caching)
                found.append(size_store(model, options, lambda *_: 0))
            except (ConfigError, OutOfMemoryError):
                continue
    assert len(found) in (0, 2)
    if not found:
        return
    (plain, length, _), (groups, shorter, _) = found
    left = limit * (1 if num_blocks else fraction) - model.weight_bytes
    assert sizing.store_bytes(model, groups, 8) <= left
    assert shorter == length if max_model_len or num_blocks else shorter >= 0.85 * length
    for group, before in zip(groups, plain, strict=True):
        least = group.most_blocks(shorter, min(chunk, shorter), 8)
        assert min(least, groups[0].num_blocks) <= group.num_blocks <= groups[0].num_blocks
        if groups[0].num_blocks == plain[0].num_blocks:
            assert group.num_blocks >= before.num_blocks


def test_a_model_of_windows_alone_may_see_a_context_longer_than_its_store():
    model = tiny.packed("recurrent_gemma")
    assert sizes(model, EngineConfig(block_size=8, num_blocks=3)) == (3, model.max_position)
    assert sizes(model, EngineConfig(block_size=8, num_blocks=2)) == (2, 16)


def test_the_demo_starts_with_its_defaults_on_a_small_machine(monkeypatch):
    limit_memory(monkeypatch, 4 << 30)
    num_blocks, max_model_len = sizes(load("demo"), EngineConfig())
    assert (num_blocks * 16 >= 4 * max_model_len, max_model_len) == (True, 4608)


def test_memory_is_wired_on_metal_only(monkeypatch):
    wired = []
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    backend.set_memory_limits()
    assert wired == []
    pretend_backend(monkeypatch, "metal")
    limit_memory(monkeypatch, 1 << 33)
    backend.set_memory_limits()
    assert wired == [1 << 33]


def test_a_refused_wired_limit_harms_nothing(monkeypatch):
    refuse = Mock(side_effect=ValueError("larger than the maximum working set size"))
    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    pretend_backend(monkeypatch, "metal")
    limit_memory(monkeypatch, 1 << 33)
    backend.set_memory_limits()
    refuse.assert_called_once()
