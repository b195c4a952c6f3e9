"""How long a model's context is, where config.json says it and where it does not."""

import re
from dataclasses import replace

import pytest

from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.model.context import context_length
from vllm_metal_lite.runner.memory import size_store


def length(name: str, **changes) -> tuple[int, str | None]:
    """The context length of a tiny model, and its source if it is a guess.

    changes: keys of the configuration; None removes a key.
    """
    config = {k: v for k, v in {**config_of(name), **changes}.items() if v is not None}
    return context_length(tiny.build(config), config)


def test_what_config_json_says_counts():
    assert length("llama", max_position_embeddings=1000) == (1000, None)
    changes = {"max_position_embeddings": None, "model_max_length": 1 << 20}
    assert length("kimi_linear", **changes) == (1 << 20, None)


def test_a_nested_configuration_says_it_too():
    text = config_of("gemma3")["text_config"] | {"max_position_embeddings": 777}
    assert length("gemma3", max_position_embeddings=None, text_config=text) == (777, None)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3"])
def test_the_default_of_mlx_lm_is_a_guess(name):
    config = config_of(name)
    text = {k: v for k, v in config.get("text_config", {}).items() if "max_position" not in k}
    changes = {"text_config": text} if text else {}
    context, guess = length(name, max_position_embeddings=None, **changes)
    assert context == 32768
    assert "mlx-lm" in guess


def test_without_any_number_a_usual_length_is_a_guess():
    context, guess = length("llama", max_position_embeddings=None)
    assert (context, bool(guess)) == (8192, True)


def test_a_number_that_is_no_length_is_passed_over():
    assert length("gemma3_text", max_position_embeddings=None, model_max_length=10**30)[0] == 32768


def test_an_explicit_length_may_exceed_a_guess_with_a_warning(caplog):
    model = replace(tiny.packed("llama"), max_position=64, context_guess="a usual length")
    config = EngineConfig(block_size=8, num_blocks=100, max_model_len=128)
    assert size_store(model, config)[1] == 128
    assert re.search("64 tokens are a guess .*max_model_len is 128", caplog.text)
    caplog.clear()
    assert size_store(model, replace(config, max_model_len=None))[1] == 64
    assert "max_model_len may be larger" in caplog.text
    caplog.clear()
    size_store(model, replace(config, max_model_len=32))
    assert not caplog.records
    with pytest.raises(ConfigError, match="at most the model's context length, 64, got 128"):
        size_store(replace(model, context_guess=None), config)
