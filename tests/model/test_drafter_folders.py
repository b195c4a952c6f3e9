"""Folders with trained heads and draft models: which fit a model, and with which weights."""

import pytest
from mlx.utils import tree_flatten

from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from tests.support.models.trained_heads import Head, write_head
from vllm_metal_lite import LLM
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model.drafter import with_drafter
from vllm_metal_lite.model.loader import load
from vllm_metal_lite.model.packed import body_of


def is_like(found, expected, tolerance=1e-6):
    return mx.allclose(found, expected, atol=tolerance).item()


@pytest.mark.parametrize("how", ["as published", "bare", "quantised"])
def test_other_files_of_the_same_head(how, tmp_path):
    path, head = tiny.write_folder(tmp_path / "model", "qwen3_5"), Head("qwen3_5")
    own, name = tmp_path / "head", None
    if how == "as published":
        write_head(path, head, is_mlx=False, minus_one=True)
    else:
        own.mkdir()
        (own / "config.json").write_text('{"model_type": "qwen3_5_mtp"}')
        weights = {n.removeprefix("mtp."): w for n, w in head.weights.items()}
        weights = quantised(weights) if how == "quantised" else weights
        mx.save_safetensors(str(own / "model.safetensors"), weights, {"format": "mlx"})
        name = str(own)
    drafter = with_drafter(load(str(path)), name).drafter
    body = body_of(drafter.packed.model)
    tolerance = 0.02 if how == "quantised" else 1e-6
    assert is_like(body.embed_tokens.fc.weight, head.fc, tolerance)
    assert is_like(body.embed_tokens.norm_hidden.weight, head.norms[1])
    attention, expected = body.layers[0].self_attn, head.body.layers[0].self_attn
    assert is_like(attention.q_norm.weight, expected.q_norm.weight)
    assert is_like(body.norm.weight, head.body.norm.weight)


@pytest.mark.parametrize("name", ["deepseek_v3", "nemotron_h", "bailing_hybrid"])
def test_experts_and_latents_as_published(name, tmp_path):
    path, head = tiny.write_folder(tmp_path, name), Head(name)
    drafter = with_drafter(load(str(write_head(path, head))), None).drafter
    expected = dict(tree_flatten(drafter.packed.model.parameters()))
    head.weights = published(head.weights)
    drafter = with_drafter(load(str(write_head(path, head, is_mlx=False))), None).drafter
    found = dict(tree_flatten(drafter.packed.model.parameters()))
    assert found.keys() == expected.keys()
    assert all(is_like(found[n], weight) for n, weight in expected.items())


def published(weights):
    """The tensors of each expert, and the latent's up-projections as one matrix."""
    found, names = {}, {"fc1": "up_proj", "fc2": "down_proj"}
    for name, weight in weights.items():
        if ".switch_mlp." in name:
            stem, part = name.split("switch_mlp.")
            part, _ = part.split(".")
            for i, expert in enumerate(weight):
                found[f"{stem}experts.{i}.{names.get(part, part)}.weight"] = expert
        elif name.endswith("embed_q.weight"):
            stem = name.removesuffix("embed_q.weight")
            parts = [weight.swapaxes(1, 2), weights[f"{stem}unembed_out.weight"]]
            both = mx.concatenate(parts, axis=1)
            found[f"{stem}kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
        elif "unembed_out" not in name:
            found[name] = weight
    return found


def test_a_heads_own_kind_of_layer(tmp_path):
    """K-EXAONE 2.0 names the head's kind of attention, which always rotates."""
    path = tiny.write_folder(tmp_path, "exaone_moe", mtp_layer_types=["full_attention"])
    drafter = with_drafter(load(str(write_head(path, Head("exaone_moe")))), None).drafter
    (spec,) = drafter.packed.layout.specs
    assert spec.window is None
    assert body_of(drafter.packed.model).layers[0].self_attn.use_rope


def quantised(weights):
    found = {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            stem, parts = name.removesuffix("weight"), ("weight", "scales", "biases")
            arrays = mx.quantize(weight, group_size=32, bits=8)
            found |= {f"{stem}{part}": a for part, a in zip(parts, arrays, strict=True)}
        else:
            found[name] = weight
    return found


def test_a_head_that_is_asked_for_must_be_there(tmp_path):
    path, options = str(tiny.write_folder(tmp_path, "qwen3_5")), {"max_model_len": 100}
    with pytest.raises(ModelLoadError, match="no trained head in its folder"):
        LLM(path, num_blocks=16, speculative_config={"method": "mtp"}, **options)


def test_a_model_without_a_head_drafts_by_lookup_alone(tmp_path):
    path = str(tiny.write_folder(tmp_path, "qwen3_5"))
    tiny.edit(tmp_path / "config.json", mtp_num_hidden_layers=1)  # the tensors decide
    assert with_drafter(load(path), None).drafter is None


def write_half_a_head(own):
    head = Head("qwen3_5")
    del head.weights["mtp.fc.weight"]
    own.mkdir()
    write_head(own, head)
    (own / "config.json").write_text('{"model_type": "qwen3_5_mtp"}')


def write_other_tokens(own):
    tiny.write_folder(own, "llama")
    text = (own / "tokenizer.json").read_text()
    (own / "tokenizer.json").write_text(text.replace('"~"', '"~~"'))


def test_half_a_head_in_the_models_folder_is_left_out(tmp_path, caplog):
    path, head = tiny.write_folder(tmp_path, "qwen3_5"), Head("qwen3_5")
    del head.weights["mtp.fc.weight"]
    write_head(path, head)
    with caplog.at_level("WARNING", "vllm_metal_lite"):
        assert with_drafter(load(str(path)), None).drafter is None
    assert "Missing 1 parameters" in caplog.text
    assert "drafts are looked up alone" in caplog.text


def test_a_configuration_may_leave_out_what_mlx_lm_assumes(tmp_path):
    path = write_head(tiny.write_folder(tmp_path, "qwen3_5"), Head("qwen3_5"))
    text = {k: v for k, v in config_of("qwen3_5")["text_config"].items() if k != "rms_norm_eps"}
    tiny.edit(path / "config.json", rms_norm_eps=..., text_config=text)  # 1e-6 in mlx-lm, too
    assert with_drafter(load(str(path)), None).drafter is not None


@pytest.mark.parametrize(
    ("target", "write", "problem"),
    [
        ("llama", lambda own: tiny.write_folder(own, "qwen3_5"), "it keeps recurrent states"),
        ("llama", lambda own: tiny.write_folder(own, "plamo"), "mismatching batch dimension"),
        ("llama", write_other_tokens, "its tokenizer has other tokens"),
        ("qwen3_5", write_half_a_head, "Missing 1 parameters"),
    ],
    ids=["recurrent", "by segment", "other tokens", "half a head"],
)
def test_what_cannot_draft_is_refused_by_name(target, write, problem, tmp_path):
    write(own := tmp_path / "draft")
    model = load(str(tiny.write_folder(tmp_path / "model", target)))
    with pytest.raises(ModelLoadError, match=problem):
        with_drafter(model, str(own))
