"""Towers compute in the type of their weights: float32 takes three times as long on a GPU."""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import pytest

from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.gemma4_towers import Gemma4Embedder, Gemma4Tower
from vllm_metal_lite.images.pixtral_tower import PixtralTower
from vllm_metal_lite.images.qwen_towers import GlmTower, Qwen2Tower, QwenTower
from vllm_metal_lite.images.siglip_towers import Gemma3Tower, IdeficsTower, InternTower, Lfm2Tower
from vllm_metal_lite.images.towers import Tower, flattened
from vllm_metal_lite.model.calls import observing

SIZES = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4}
HEADS = {"num_hidden_layers": 1, "num_attention_heads": 2}
QWEN = {"depth": 1, "num_heads": 2, "out_hidden_size": 24, "spatial_merge_size": 2}
QWEN |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN2 = QWEN | {"embed_dim": 32, "mlp_ratio": 2, "hidden_act": "quick_gelu"}
WINDOWS = QWEN | {"window_size": 16, "fullatt_block_indexes": [], "hidden_act": "silu"}
GLM = QWEN | {"image_size": 16, "rms_norm_eps": 1e-6}
INTERN = {"image_size": [16, 16], "layer_norm_eps": 1e-6, "hidden_act": "gelu"}
UNIFIED = {"model_patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16}
REST = {"mm_tokens_per_image": 4, "scale_factor": 2, "downsample_factor": 2}
REST |= {"downsample_ratio": 0.5, "projector_hidden_size": 24, "projector_hidden_act": "gelu"}
REST |= {"projector_bias": True, "projector_use_layernorm": True}
TOWERS: list[tuple[type[Tower], dict[str, Any]]] = [
    (QwenTower, SIZES | QWEN),
    (Qwen2Tower, SIZES | QWEN2),
    (Qwen2Tower, SIZES | WINDOWS),
    (GlmTower, SIZES | GLM),
    (IdeficsTower, SIZES | HEADS | {"image_size": 16}),
    (InternTower, SIZES | HEADS | INTERN),
    (Lfm2Tower, SIZES | HEADS | {"num_patches": 9}),
    (Gemma3Tower, SIZES | HEADS | {"image_size": 16}),
    (PixtralTower, SIZES | HEADS | {"head_dim": 16, "rope_theta": 100.0}),
    (Gemma4Tower, SIZES | HEADS | {"head_dim": 16, "pooling_kernel_size": 2}),
    (Gemma4Embedder, UNIFIED | {"patch_size": 2, "pooling_kernel_size": 2}),
]


@pytest.mark.parametrize(("kind", "vision"), TOWERS, ids=lambda of: getattr(of, "__name__", ""))
def test_a_tower_computes_in_the_type_of_its_weights(
    kind: type[Tower], vision: dict[str, Any]
) -> None:
    text = {"hidden_size": 24, "rms_norm_eps": 1e-5}
    tower = kind({"vision_config": vision, "text_config": text, **REST})
    tower.set_dtype(mx.bfloat16)
    seen = []

    def note(module: nn.Module, call: Callable[..., Any], x: mx.array, *args: Any) -> Any:
        seen.append(x.dtype)
        return call(x, *args)

    layers = [m for name, m in tower.named_modules() if "layers." in name and "norm" in name]
    with observing([m for m in layers if not list(m.children())], note):
        features = tower(mx.ones((16, 48), mx.bfloat16), (4, 4))
    assert {x.dtype for x in (features.rows, *features.deep)} == {mx.bfloat16}
    assert set(seen) <= {mx.bfloat16}
    assert seen or kind is Gemma4Embedder


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 3, 2, 4, 4), (5, 6, 2, 2)])
def test_convolutions_are_the_same_in_both_orders(shape: tuple[int, ...]) -> None:
    """torch has channels second, MLX last.  A film of equal frames is summed."""
    weight = mx.random.normal(shape, key=mx.random.key(0))
    found = flattened(weight)
    assert mx.array_equal(found, flattened(mx.moveaxis(weight, 1, -1)))
    patch = mx.random.normal((shape[1], *shape[-2:]), key=mx.random.key(1))
    film = mx.broadcast_to(patch[:, None], weight.shape[1:]) if len(shape) == 5 else patch
    assert mx.allclose(found @ patch.flatten(), (weight * film).reshape(shape[0], -1).sum(axis=1))
