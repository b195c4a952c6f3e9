"""The towers of Qwen and GLM-V.  Their patches come in the order of the merger: the merge x merge
patches of one row follow one another."""

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.encoder import ACTIVATIONS, Segments, gelu, gelu_tanh
from vllm_metal_lite.images.towers import (
    Config,
    Grid,
    Tower,
    axial_angles,
    centres,
    cubic_taps,
    encoder_of,
    linear_taps,
    merge_order,
    resampled,
)
from vllm_metal_lite.runner.pictures import Features

PREFIXES = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
# Renames the parts of a layer: (regular expression, its name here).
LAYERS = (
    (r"^blocks\.", "encoder.layers."),
    (r"\.attn\.proj\.", ".o."),
    (r"\.attn\.([qkv]|[qk]_norm)\.", r".\1."),
    (r"layers(.*)\.mlp\.(gate|up|down)_proj\.", r"layers\1.\2."),
    (r"\.mlp\.(?:linear_)?fc1\.", ".up."),
    (r"\.mlp\.(?:linear_)?fc2\.", ".down."),
    (r"^patch_embed\.proj\.", "embed."),
)


class Merger(nn.Module):
    """Qwen: joins merge x merge neighbouring patches to one row."""

    def __init__(
        self, size: int, merge: int, out: int, norm_merged: bool = False, rms: bool = False
    ) -> None:
        super().__init__()
        self.merged, self.norm_merged = size * merge**2, norm_merged
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.norm = norm(self.merged if norm_merged else size, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(self.merged, self.merged), nn.Linear(self.merged, out)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.norm(x.reshape(-1, self.merged) if self.norm_merged else x)
        return self.fc2(gelu(self.fc1(x.reshape(-1, self.merged))))


class QwenTower(Tower):
    """Qwen3-VL, Qwen3.5 and later ones."""

    prefixes = PREFIXES
    names = (
        *LAYERS,
        (r"linear_fc(\d)", r"fc\1"),
        (r"^deepstack_merger_list\.", "deep_mergers."),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision = config["vision_config"]
        size, self.merge = vision["hidden_size"], vision["spatial_merge_size"]
        self.embed = nn.Linear(3 * vision["patch_size"] ** 2, size)
        self.side = int(vision["num_position_embeddings"] ** 0.5)
        self.pos_embed = nn.Embedding(self.side**2, size)
        self.head_dim = size // vision["num_heads"]
        self.encoder = encoder_of(
            vision, self.head_dim, gelu_tanh, 1e-6, bias=True, layer_norm=True
        )
        out = vision["out_hidden_size"]
        self.merger = Merger(size, self.merge, out)
        self.deep_layers = tuple(vision.get("deepstack_visual_indexes", ()))
        self.deep_mergers = [
            Merger(size, self.merge, out, norm_merged=True) for _ in self.deep_layers
        ]

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
        rows, columns = merge_order(grid, self.merge)
        height, width = (linear_taps(np.linspace(0, self.side - 1, n), self.side) for n in grid)
        positions = resampled(self.pos_embed.weight, (height, width))
        x = self.embed(patches) + positions[mx.array(rows), mx.array(columns)]
        angles = axial_angles(rows, columns, self.head_dim)
        x, deep = self.encoder(x, angles, self.deep_layers)
        mergers = zip(self.deep_mergers, deep, strict=True)
        return Features(self.merger(x), tuple(merger(h) for merger, h in mergers))


class Qwen2Tower(Tower):
    """Qwen2-VL and Qwen2.5-VL.  In most layers of 2.5, a patch sees only its window."""

    prefixes = PREFIXES
    names = (
        *LAYERS,
        (r"^merger\.ln_q\.", "merger.norm."),
        (r"^merger\.mlp\.0\.", "merger.fc1."),
        (r"^merger\.mlp\.2\.", "merger.fc2."),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision = config["vision_config"]
        self.merge, depth, patch = (
            vision[name] for name in ("spatial_merge_size", "depth", "patch_size")
        )
        is_windowed = "window_size" in vision
        if is_windowed:
            size, out = vision["hidden_size"], vision["out_hidden_size"]
            # The side of a window, in rows of the language model.
            self.window = vision["window_size"] // self.merge // patch
            self.whole = set(vision["fullatt_block_indexes"])
            # The narrowest large picture, 200 to 1, has 9 rows: three windows of 4.
            self.fill = 4 / 3
        else:
            size, out, self.window = vision["embed_dim"], vision["hidden_size"], 0
            vision = {**vision, "hidden_size": size}
            vision["intermediate_size"] = int(size * vision["mlp_ratio"])
        self.depth, self.head_dim = depth, size // vision["num_heads"]
        self.embed = nn.Linear(3 * patch**2, size, bias=False)
        activation = ACTIVATIONS[vision["hidden_act"]]
        kind = {"bias": True, "gated": is_windowed, "layer_norm": not is_windowed}
        self.encoder = encoder_of(vision, self.head_dim, activation, 1e-6, **kind)
        self.merger = Merger(size, self.merge, out, rms=is_windowed)

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
        rows, columns = merge_order(grid, self.merge)
        x = self.embed(patches)
        if not self.window:
            x, _ = self.encoder(x, axial_angles(rows, columns, self.head_dim))
            return Features(self.merger(x))
        index = in_windows((grid[0] // self.merge, grid[1] // self.merge), self.window)
        unit = self.merge**2
        at = (index.ravel().clip(0)[:, None] * unit + np.arange(unit)).ravel()
        is_patch = np.repeat(index.ravel() >= 0, unit)
        mask = None if is_patch.all() else mx.array(is_patch.reshape(len(index), 1, 1, -1))
        windows: Segments = (len(index), mask)
        whole: Segments = (1, None if mask is None else mask.reshape(1, 1, 1, -1))
        segments = [whole if i in self.whole else windows for i in range(self.depth)]
        angles = axial_angles(rows[at], columns[at], self.head_dim)
        x, _ = self.encoder(x[mx.array(at)], angles, segments=segments)
        back = np.flatnonzero(index.ravel() >= 0)[np.argsort(index[index >= 0])]
        return Features(self.merger(x)[mx.array(back)])


def in_windows(grid: Grid, side: int) -> np.ndarray:
    """(windows, side * side): the places of a grid, window by window; -1 is padding."""
    height, width = (-(-n // side) * side for n in grid)
    index = np.full((height, width), -1)
    index[: grid[0], : grid[1]] = np.arange(grid[0] * grid[1]).reshape(grid)
    parts = index.reshape(height // side, side, width // side, side).swapaxes(1, 2)
    return parts.reshape(-1, side * side)


class GlmTower(Tower):
    """GLM-4.1V, 4.5V and 4.6V; GLM-OCR, without learned positions."""

    prefixes = PREFIXES
    names = (
        *LAYERS,
        (r"^embeddings\.position_embedding\.weight", "positions"),
        (r"^post_conv_layernorm\.", "norm1."),
        (r"^post_layernorm\.", "norm2."),
        (r"^merger\.post_projection_norm\.", "norm3."),
        (r"^merger\.", ""),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision = config["vision_config"]
        size, out, eps = (
            vision[name] for name in ("hidden_size", "out_hidden_size", "rms_norm_eps")
        )
        self.merge, patch = vision["spatial_merge_size"], vision["patch_size"]
        self.head_dim = size // vision["num_heads"]
        self.embed = nn.Linear(3 * patch**2, size)
        self.norm2 = nn.RMSNorm(size, eps=eps)
        if is_ocr := config.get("model_type") == "glm_ocr":
            inner = 3 * out
        else:
            self.side = vision["image_size"] // patch
            self.positions, self.norm1 = mx.zeros((self.side**2, size)), nn.RMSNorm(size, eps=eps)
            # As in transformers: the layers' inner size is out_hidden_size.
            inner, vision = vision["intermediate_size"], {**vision, "intermediate_size": out}
        self.encoder = encoder_of(
            vision, self.head_dim, nn.silu, eps, gated=True, bias=is_ocr, qk_norm=is_ocr
        )
        self.downsample, self.norm3 = nn.Linear(size * self.merge**2, out), nn.LayerNorm(out)
        self.proj = nn.Linear(out, out, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(out, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, out, bias=False)

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
        rows, columns = merge_order(grid, self.merge)
        x = self.embed(patches)
        if "positions" in self:
            height, width = (cubic_taps(centres(n, self.side), self.side) for n in grid)
            positions = resampled(self.positions, (height, width))
            x = self.norm1(x) + positions[mx.array(rows), mx.array(columns)]
        x, _ = self.encoder(x, axial_angles(rows, columns, self.head_dim))
        # A merged row has all values of one channel together.
        x = self.norm2(x).reshape(-1, self.merge**2, x.shape[-1]).swapaxes(1, 2)
        x = gelu(self.norm3(self.proj(self.downsample(x.reshape(len(x), -1)))))
        return Features(self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x)))
