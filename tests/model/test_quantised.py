"""Model folders with quantised weights: on a CPU they are expanded to float32 when loaded.

The oracle is mlx-lm computing with the packed weights, where MLX's CPU backend can.
"""

import json
from itertools import product

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.afm7 import FusedLinear
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import quantize_model

from tests.support.models import configs as arch_configs
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.layer_weights import cast, expand

TOKENS = tiny.prompts(1, 24, 24, seed=8)[0]
MODES = {
    "affine-2": {"bits": 2, "group_size": 32, "mode": "affine"},
    "affine-3": {"bits": 3, "group_size": 32, "mode": "affine"},
    "affine-5": {"bits": 5, "group_size": 32, "mode": "affine"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}
NAMES = [n for n in arch_configs.CONFIGS if "quantization" in arch_configs.config_of(n)]


def folder(path, name: str, dtype: mx.Dtype, **changes):
    """A model folder, and the same model in mlx-lm, float32 activations on packed weights."""
    folder = tiny.write_folder(path, name, **changes)
    weights = mx.load(str(folder / "model.safetensors"))
    floats = {k: w.astype(dtype) for k, w in weights.items() if mx.issubdtype(w.dtype, mx.floating)}
    weights = {**weights, **floats}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    native = tiny.build(tiny.config_of(name, **changes))
    native.load_weights(list(weights.items()))
    native.set_dtype(mx.float32)
    return folder, native


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("prism")])
def test_every_quantised_configuration_loads_from_a_folder(tmp_path, name, dtype):
    path, native = folder(tmp_path, name, dtype)
    check(path, native)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_quantisation_loads_from_a_folder(tmp_path, mode, dtype):
    path, native = folder(tmp_path, "llama", dtype, quantization=MODES[mode])
    packed = loader.load(str(path), "float32")
    assert packed.num_parameters == check(path, native).num_parameters


def check(path, native) -> loader.LoadedModel:
    loaded = loader.load(str(path))
    assert loaded.dtype == mx.float32
    weights = dict(tree_flatten(loaded.packed.model.parameters()))
    assert not [k for k, w in weights.items() if not mx.issubdtype(w.dtype, mx.floating)]
    expected = tiny.logits_alone(native, TOKENS)
    got = tiny.logits_alone(loaded.packed.model, TOKENS)
    assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()
    return loaded


FORMS = [
    *(
        {"group_size": size, "bits": bits, "mode": "affine"}
        for size, bits in product((32, 64, 128), (2, 3, 4, 5, 6, 8))
    ),
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]
EXPERTS = mx.array([[1], [0], [2], [1], [2]])
USES = {
    "linear": (lambda: nn.Linear(128, 64, bias=False), lambda layer, x: layer(x)),
    "biased": (lambda: nn.Linear(128, 64), lambda layer, x: layer(x)),
    "embedding": (lambda: nn.Embedding(64, 128), lambda layer, x: layer(EXPERTS)),
    "tied": (lambda: nn.Embedding(64, 128), lambda layer, x: layer.as_linear(x)),
    "experts": (lambda: SwitchLinear(128, 64, 3, bias=False), lambda layer, x: layer(x, EXPERTS)),
    "experts-biased": (lambda: SwitchLinear(128, 64, 3), lambda layer, x: layer(x, EXPERTS)),
    "latent": (lambda: MultiLinear(128, 64, 3), lambda layer, x: layer(x[:, :, None])),
    "latent-back": (
        lambda: MultiLinear(128, 64, 3),
        lambda layer, x: layer(x[:, :, None, :64], transpose=False),
    ),
}


@pytest.mark.parametrize("scales", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "form", FORMS, ids=lambda form: "{mode}-{bits}-{group_size}".format(**form)
)
def test_every_kind_of_layer_computes_as_its_packed_form(use, form, scales):
    make, compute = USES[use]
    holder = nn.Sequential(make())
    if "bias" in holder.layers[0]:
        holder.layers[0].bias = mx.random.normal(holder.layers[0].bias.shape)
    nn.quantize(holder, **form)
    holder.set_dtype(scales)
    holder.set_dtype(mx.float32)
    x = mx.random.normal((5, 1, 128))
    expected = np.array(compute(holder.layers[0], x).astype(mx.float32))
    expand(holder)
    weights = [w for _, w in tree_flatten(holder.parameters())]
    assert {w.dtype for w in weights} == {mx.float32}
    got = np.array(compute(holder.layers[0], x))
    assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max()


def test_a_subclass_of_a_quantised_layer_stays_packed():
    holder = nn.Sequential(FusedLinear(64, [32, 16]).to_quantized())
    x = mx.random.normal((3, 64))
    expected = holder(x)
    expand(holder)
    assert all(np.array_equal(a, b) for a, b in zip(holder(x), expected, strict=True))


def scaled_experts(path):
    """A folder with nvfp4 experts, each with its own scale, and the model in mlx-lm."""
    folder = tiny.write_folder(path, "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    native = tiny.build(config)
    native.load_weights(str(folder / "model.safetensors"))
    native, config = quantize_model(native, config, None, None, "nvfp4", global_scale=True)
    weights = dict(tree_flatten(native.parameters()))
    assert [name for name in weights if name.endswith("global_scale")]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder, native


def test_experts_are_expanded_with_their_global_scales(tmp_path):
    """MLX's CPU backend has no product with these scales: its own expansion is the oracle."""
    path, native = scaled_experts(tmp_path)
    packed = native.model.layers[0].mlp.switch_mlp.up_proj
    expected = [
        mx.dequantize(w, s, None, 16, 4, "nvfp4", g, mx.float32)
        for w, s, g in zip(packed.weight, packed.scales, packed.global_scale, strict=True)
    ]
    loaded = loader.load(str(path)).packed.model.model.layers[0].mlp.switch_mlp.up_proj
    assert np.allclose(loaded.weight, mx.stack(expected), rtol=1e-6, atol=0)


def test_packed_experts_with_global_scales_are_refused_on_a_cpu(tmp_path):
    path, native = scaled_experts(tmp_path)
    with pytest.raises(ModelLoadError, match="Global scale is only supported on the GPU"):
        loader.load(str(path), dtype="bfloat16")
    cast(native, mx.bfloat16)
    scales = {w.dtype for k, w in tree_flatten(native.parameters()) if k.endswith("global_scale")}
    assert scales == {mx.float32}  # MLX takes no other


@pytest.mark.parametrize("path", ["glm4_moe e_score_correction_bias", "qwen3_5 A_log"])
def test_weights_that_mlx_lm_keeps_in_float32_are_not_rounded(path):
    name, weight = path.split()
    cast(model := tiny.build(tiny.config_of(name)), mx.bfloat16)
    types = {w.dtype for k, w in tree_flatten(model.parameters()) if k.endswith(weight)}
    assert types == {mx.float32}
