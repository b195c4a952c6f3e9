"""The estimated peak memory of towers, beside the measured one."""

import gc
import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.images.test_engine import READER
from tests.images.test_towers import REST, TOWERS
from tests.support.kernels.device import change_device, limit_memory
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import LLM, assembly
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import OutOfMemoryError
from vllm_metal_lite.images import encoder
from vllm_metal_lite.images.family import Prepared
from vllm_metal_lite.images.gemma4_towers import Gemma4Embedder
from vllm_metal_lite.images.peak import peak_bytes
from vllm_metal_lite.images.siglip_towers import Gemma3Tower, IdeficsTower, InternTower, Lfm2Tower
from vllm_metal_lite.images.towers import Tower
from vllm_metal_lite.runner.memory import size_store

# The proportions of real towers, in a quarter of their size; two layers, because a peak is a
# layer's.
SIZES = {"hidden_size": 288, "intermediate_size": 1076, "patch_size": 14, "head_dim": 72}
SIZES |= {"num_attention_heads": 4, "num_heads": 4, "num_hidden_layers": 2, "depth": 2}
SIZES |= {"out_hidden_size": 320, "image_size": 14 * 24, "deepstack_visual_indexes": [0]}
SIZES |= {"num_patches": 24 * 24}
# Tiles, the grid of each, and that of the whole picture.
NO_TILES, SIDE = ((0, 0), (0, 0)), (24, 24)
GRIDS = {
    Gemma3Tower: [(*NO_TILES, SIDE)],
    IdeficsTower: [(*NO_TILES, SIDE), ((2, 2), SIDE, SIDE)],
    InternTower: [(*NO_TILES, SIDE), ((1, 4), SIDE, SIDE)],
    Lfm2Tower: [(*NO_TILES, (12, 6)), ((2, 2), SIDE, (20, 18)), ((2, 2), SIDE, SIDE)],
}
OTHERS = [(*NO_TILES, (24, 18)), (*NO_TILES, SIDE)]
# Of 4 x 4 rows: a grid of 24 x 18 patches, 12 x 9 rows, fills them up by a third.
WINDOWS = {"window_size": 14 * 2 * 4, "fullatt_block_indexes": [1]}
UNIFIED = {"patch_size": 14, "pooling_kernel_size": 3, "mm_embed_dim": 960, "mm_posemb_size": 64}


def tower_of(kind: type[Tower], vision: dict[str, Any], dtype: mx.Dtype) -> Tower:
    vision = vision | (UNIFIED if kind is Gemma4Embedder else SIZES)
    vision |= WINDOWS if "window_size" in vision else {}
    text = {"hidden_size": 320, "rms_norm_eps": 1e-5}
    tower = kind({**REST, "vision_config": vision, "text_config": text, "mm_tokens_per_image": 64})
    tower.set_dtype(dtype)
    mx.eval(tower.parameters())
    return tower


def measured(tower: Tower, prepared: Prepared) -> int:
    """As `Eyes` runs it.  How far MLX prepares operations ahead depends on the machine's load."""
    patches = prepared.patches
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    x = mx.array(patches).astype(mx.float32).reshape(len(patches), 3, -1)
    x = x * mx.ones((3, 1)) - mx.ones((3, 1))
    views = prepared.views(x.reshape(patches.shape).astype(tower.dtype))
    mx.eval([tower(part, grid) for part, grid in views])
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "vision"), TOWERS, ids=lambda of: getattr(of, "__name__", ""))
def test_an_estimate_is_not_below_the_peak_and_not_far_above(
    kind: type[Tower], vision: dict[str, Any], dtype: mx.Dtype
) -> None:
    tower = tower_of(kind, vision, dtype)
    for tiles, tile, grid in GRIDS.get(kind, OTHERS):
        num_patches = math.prod(tiles) * math.prod(tile) + math.prod(grid)
        patches = np.zeros((num_patches, tower.embed.weight.shape[-1]), np.uint8)
        peak = measured(tower, Prepared(patches, grid, grid, tiles=tiles, tile=tile))
        assert peak <= peak_bytes(tower, num_patches) <= 3 * peak


def test_scores_of_a_large_picture_are_not_all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MLX does not fuse SDPA; the results are the same to rounding."""
    q, k, v = (mx.random.normal((1, 4, 1024, 32)) for _ in range(3))
    mx.eval(q, k, v)
    whole, peaks = encoder.attention(q, k, v, 0.2), []
    for max_scores in (1 << 30, 1 << 16):
        change_device(monkeypatch, max_scores=max_scores)
        mx.clear_cache()
        mx.reset_peak_memory()
        before, out = mx.get_active_memory(), encoder.attention(q, k, v, 0.2)
        np.testing.assert_allclose(out, whole, atol=1e-5)
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < peaks[0] / 4


# The plan of memory


def test_memory_is_set_aside_for_the_largest_picture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.packed("llama")
    config = EngineConfig(block_size=8, memory_fraction=0.5, max_num_batched_tokens=64)
    block, peak = 8 * model.kv_bytes_per_token, 10**5
    usable = model.weight_bytes + peak + 100 * block
    limit_memory(monkeypatch, 2 * usable)

    def blocks(picture_peak: int) -> int:
        (group,), *_ = size_store(model, config, lambda *_: peak, picture_peak)
        return group.num_blocks

    assert [blocks(picture) for picture in (0, 1, 7 * block)] == [100, 99, 93]
    with caplog.at_level("INFO", "vllm_metal_lite"):
        assert blocks(usable) == 100 - -(-usable // 8 // block)  # no more than an eighth
    assert "the largest picture needs 1.1 MiB while the model sees it; 0.1 MiB are" in caplog.text
    limit_memory(monkeypatch, 2 * (model.weight_bytes + peak))
    with pytest.raises(OutOfMemoryError, match=r"a step of 64 tokens and a picture 0\.1 MiB"):
        blocks(block)


def test_an_engine_sets_aside_what_its_tower_needs() -> None:
    with patch.object(assembly, "size_store", wraps=size_store) as sizing:
        eyes = LLM(str(READER), max_model_len=256, num_blocks=64).engine.eyes
    patches = eyes.processor.most_patches
    assert sizing.call_args.kwargs["picture_peak"] == peak_bytes(eyes.tower, patches) > 0
