"""Model folders with quantised weights: on a CPU they are expanded to float32 when loaded.

The oracle is mlx-lm computing with the packed weights.
"""

import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.support import arch_configs
from tests.support import tiny_models as tiny
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model import loader

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
    check(path, native)


def check(path, native) -> None:
    loaded = loader.load(str(path))
    assert loaded.dtype == mx.float32
    weights = dict(tree_flatten(loaded.packed.model.parameters()))
    assert not [k for k, w in weights.items() if not mx.issubdtype(w.dtype, mx.floating)]
    expected = tiny.logits_alone(native, TOKENS)
    got = tiny.logits_alone(loaded.packed.model, TOKENS)
    assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()
