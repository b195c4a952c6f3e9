"""Each family of models that the plugin's documents name starts, under its real name in vLLM."""

import json

import pytest
from transformers.models.auto import modeling_auto
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from tests.support.models import tiny_models as tiny
from tests.support.models.configs import CANNOT_RUN, CONFIGS, config_of
from tests.vllm_plugin import kit

PROMPTS = tiny.prompts(3, 5, 40, seed=3)
# Values that mlx-lm reads and transformers refuses.
CHANGES = {"exaone4": {"sliding_window_pattern": 2}}


@pytest.mark.parametrize("name", [*kit.TEXT_PARTS, *kit.FAMILIES, "gpt_oss", "deepseek_v3"])
def test_a_family_starts_and_answers(name):
    """Without torchvision, as a text model; a hybrid one caches prefixes."""
    kit.skip_if_vllm_cannot_read(name)
    with kit.engine(name, max_num_batched_tokens=32) as llm:
        model_config = llm.llm_engine.vllm_config.model_config
        assert model_config.architectures == [kit.NAMES[name]]
        assert model_config.is_hybrid == name.startswith(("qwen3_5", "qwen3_next", "lfm2"))
        answers = kit.tokens(kit.generate(llm, PROMPTS, max_tokens=8))
        assert answers == [kit.alone(name, p, 8) for p in PROMPTS]


def _real_names(model_type):
    """The names in vLLM, of the multimodal model first."""
    tables = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    found = [table[model_type] for table in tables if model_type in table]
    names = [name for some in found for name in ([some] if isinstance(some, str) else some)]
    return [name for name in names if name in registry.ModelRegistry.models]


def test_no_option_that_vllm_sets_for_a_model_is_refused(tmp_path):
    """For all of docs/models.md that vLLM and transformers know; nobody gives an option."""
    current_platform.pre_register_and_update()
    tried, refused = 0, {}
    for name in CONFIGS:
        for architecture in _real_names(name) if name not in CANNOT_RUN else ():
            config = config_of(name, architectures=[architecture], **CHANGES.get(name, {}))
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                EngineArgs(
                    str(tmp_path), skip_tokenizer_init=True, max_model_len=64
                ).create_engine_config()
            except Exception as e:
                refused[architecture] = str(e)
            tried += 1
    assert not refused
    assert tried > 60


def test_an_option_of_a_user_is_refused_also_where_vllm_would_set_it():
    kit.skip_if_vllm_cannot_read("gemma4")
    args = EngineArgs(str(kit.folder("gemma4")), attention_backend="TRITON_ATTN")
    with pytest.raises(Exception, match="does not support --attention-backend"):
        args.create_engine_config()


@pytest.mark.parametrize(("revision", "refused"), [("main", False), ("v1", True)])
def test_a_model_of_the_hub_has_a_revision(monkeypatch, revision, refused):
    """vLLM 0.33 asks the hub for the default one, "main", and sets the option."""
    name = "vllm.config.model.resolve_revision"
    monkeypatch.setattr(name, lambda *_: revision, raising=False)
    args = EngineArgs(str(kit.folder("llama")), revision="v1" if refused else None)
    if not refused:
        args.create_engine_config()
        return
    with pytest.raises(Exception, match="does not support --revision v1"):
        args.create_engine_config()
