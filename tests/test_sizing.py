"""How many blocks the memory holds."""

from dataclasses import replace

import pytest
import tiny_models as tiny

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import ConfigError, OutOfMemoryError
from vllm_metal_lite.kv import sizing
from vllm_metal_lite.kv.sizing import size_store, step_peak_bytes
from vllm_metal_lite.model.loader import load

BYTES_PER_TOKEN = 3 * 2 * (16 + 16) * 4  # layers, KV heads, K and V, float32


def sizes(*args) -> tuple[int, int]:
    """(num_blocks, max_model_len) of a model whose layers form one KV group."""
    (group,), max_model_len = size_store(*args)
    return group.num_blocks, max_model_len


@pytest.fixture
def model():
    return tiny.packed("llama")


def test_the_numbers_add_up(model, monkeypatch):
    config = EngineConfig(block_size=8, memory_fraction=0.5, max_num_batched_tokens=64)
    assert model.kv_bytes_per_token == BYTES_PER_TOKEN
    peak, room = 10**7, 100 * 8 * BYTES_PER_TOKEN + 1000  # a hundred blocks and a bit
    limit = 2 * (model.weight_bytes + peak + room)
    monkeypatch.setattr(sizing, "step_peak_bytes", lambda *_: peak)
    monkeypatch.setattr(backend, "memory_limit", lambda: limit)
    assert sizes(model, config) == (100, 512)


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


def test_a_real_full_step_stays_within_the_measured_peak(model):
    config = EngineConfig(
        block_size=8, num_blocks=64, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256
    )
    peak = step_peak_bytes(model, config, 256)
    engine = LLMEngine(model, config)
    for i, prompt in enumerate(tiny.prompts(6, 30, 60)):
        engine.add_request(str(i), prompt)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tiny.run(engine)
    assert mx.get_peak_memory() - before <= peak


def test_profiling_leaves_no_memory_behind(model):
    config = EngineConfig(max_num_batched_tokens=64)
    step_peak_bytes(model, config, 512)
    before = mx.get_active_memory()
    step_peak_bytes(model, config, 512)
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory_fraction": 1e-9}, OutOfMemoryError, ["llama", "memory_fraction 1e-09"]),
        ({"num_blocks": 10**12}, OutOfMemoryError, ["1000000000000", "GiB"]),
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


def test_weights_larger_than_the_memory(model, monkeypatch):
    monkeypatch.setattr(backend, "memory_limit", lambda: 1 << 30)
    with pytest.raises(OutOfMemoryError, match=r"does not fit: weights 8\.00 GiB"):
        size_store(replace(model, weight_bytes=8 << 30), EngineConfig())


def test_the_demo_starts_with_its_defaults_on_a_small_machine(monkeypatch):
    monkeypatch.setattr(backend, "memory_limit", lambda: 4 << 30)
    num_blocks, max_model_len = sizes(load("demo"), EngineConfig())
    assert (num_blocks * 16 >= 4 * max_model_len, max_model_len) == (True, 4608)
