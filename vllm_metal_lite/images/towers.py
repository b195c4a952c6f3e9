"""The vision towers: patches of one picture in, rows for the language model out.

A tower is built from config.json, and its weights are renamed to the names here.  `patches` are
(P, values), as the family's image processor gives them; `grid` is (height, width) in patches.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.encoder import (
    ACTIVATIONS,
    Activation,
    Encoder,
    EncoderConfig,
    gelu,
    gelu_tanh,
)
from vllm_metal_lite.runner.pictures import Features

Config = Mapping[str, Any]
# Tensors by name.
Weights = dict[str, mx.array]


class Tower(nn.Module):
    """A vision tower, made from a completed config.json.

    prefixes, projector: where a checkpoint has the names of the tower, and of the part that leads
    to the language model.  names: regular expressions that turn these names into those here.
    """

    prefixes: tuple[str, ...] = ()
    projector: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()

    def __init__(self, config: Config) -> None:
        super().__init__()

    @classmethod
    def all_prefixes(cls) -> tuple[str, ...]:
        """The longest first."""
        return tuple(sorted((*cls.prefixes, *cls.projector), key=len, reverse=True))

    @staticmethod
    def flatten(weight: mx.array) -> mx.array:
        """The weight of the patches' embedding, as that of a linear layer."""
        return weight

    @property
    def dtype(self) -> mx.Dtype:
        """The type of patches: that of the embedding's weight, of its scales if it is quantised."""
        embed = self.embed
        dtype: mx.Dtype = embed.get("scales", embed.weight).dtype
        return dtype

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Features:
        raise NotImplementedError


def encoder_of(
    vision: Config, head_dim: int, activation: Activation, eps: float, **kind: bool
) -> Encoder:
    """The encoder of a vision_config; Qwen has other names for two sizes.  kind: the other fields
    of an EncoderConfig."""
    layers, heads = (
        vision[own if own in vision else usual]
        for own, usual in (("depth", "num_hidden_layers"), ("num_heads", "num_attention_heads"))
    )
    size, inner = vision["hidden_size"], vision["intermediate_size"]
    return Encoder(EncoderConfig(size, inner, layers, heads, head_dim, activation, eps, **kind))


def flatten_conv2d(weight: mx.array) -> mx.array:
    """(outputs, 3, P, P), or in MLX's order (outputs, P, P, 3) -> (outputs, 3 P P)."""
    if weight.shape[1] != 3:
        weight = weight.transpose(0, 3, 1, 2)
    return weight.reshape(len(weight), -1)


class Merger(nn.Module):
    """Qwen: joins merge x merge neighbouring patches to one row."""

    def __init__(self, size: int, merged: int, out: int, norm_merged: bool) -> None:
        super().__init__()
        self.merged, self.norm_merged = merged, norm_merged
        self.norm = nn.LayerNorm(merged if norm_merged else size, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(merged, merged), nn.Linear(merged, out)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.norm(x.reshape(-1, self.merged) if self.norm_merged else x)
        return self.fc2(gelu(self.fc1(x.reshape(-1, self.merged))))


class QwenTower(Tower):
    """Qwen3-VL, Qwen3.5 and later ones.  Patches come in the order of the merger: the merge x merge
    patches of one row follow one another."""

    prefixes = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
    names = (
        (r"^blocks\.", "encoder.layers."),
        (r"\.attn\.proj\.", ".o."),
        (r"\.attn\.([qkv])\.", r".\1."),
        (r"\.mlp\.linear_fc1\.", ".up."),
        (r"\.mlp\.linear_fc2\.", ".down."),
        (r"linear_fc(\d)", r"fc\1"),
        (r"^patch_embed\.proj\.", "embed."),
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
        merged, out = size * self.merge**2, vision["out_hidden_size"]
        self.merger = Merger(size, merged, out, norm_merged=False)
        self.deep_layers = tuple(vision.get("deepstack_visual_indexes", ()))
        self.deep_mergers = [Merger(size, merged, out, norm_merged=True) for _ in self.deep_layers]

    @staticmethod
    def flatten(weight: mx.array) -> mx.array:
        """(outputs, 3, T, P, P), or in MLX's order (outputs, T, P, P, 3) -> (outputs, 3 P P): the
        T frames of a picture are equal."""
        if weight.shape[1] != 3:
            weight = weight.transpose(0, 4, 1, 2, 3)
        return weight.astype(mx.float32).sum(axis=2).reshape(len(weight), -1).astype(weight.dtype)

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Features:
        rows, columns = merge_order(grid, self.merge)
        x = self.embed(patches) + self._positions(rows, columns, grid)
        freqs = 10000.0 ** -(np.arange(0, self.head_dim // 2, 2) / (self.head_dim // 2))
        angles = np.concatenate([rows[:, None] * freqs, columns[:, None] * freqs], axis=1)
        x, deep = self.encoder(x, mx.array(angles[:, None].astype(np.float32)), self.deep_layers)
        mergers = zip(self.deep_mergers, deep, strict=True)
        return Features(self.merger(x), tuple(merger(h) for merger, h in mergers))

    def _positions(self, rows: np.ndarray, columns: np.ndarray, grid: tuple[int, int]) -> mx.array:
        """The learned positions, a square, interpolated for a grid."""
        side = self.side
        y, x = (
            np.linspace(0, side - 1, n, dtype=np.float32)[at]
            for n, at in zip(grid, (rows, columns), strict=True)
        )
        top, left = y.astype(np.int32), x.astype(np.int32)
        down, right = (np.minimum(at + 1, side - 1) for at in (top, left))
        dy, dx = y - top, x - left
        total = mx.zeros((), self.dtype)
        for row, column, weight in (
            (top, left, (1 - dy) * (1 - dx)),
            (top, right, (1 - dy) * dx),
            (down, left, dy * (1 - dx)),
            (down, right, dy * dx),
        ):
            value = self.pos_embed(mx.array(row * side + column))
            part = value * mx.array(weight)[:, None].astype(value.dtype)
            total = total + part
        return total


class GemmaNorm(nn.Module):
    """An RMSNorm whose weight is an offset from 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = mx.zeros(size), eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1 + self.weight, self.eps)


class SiglipTower(Tower):
    """Gemma 3: a picture is always a square of one size, and gives mm_tokens_per_image rows."""

    prefixes = ("model.vision_tower.", "vision_tower.")
    projector = ("model.multi_modal_projector.", "multi_modal_projector.")
    names = (
        (r"^vision_model\.", ""),
        (r"^embeddings\.patch_embedding\.", "embed."),
        (r"^embeddings\.position_embedding\.weight", "positions"),
        (r"\.self_attn\.out_proj\.", ".o."),
        (r"\.self_attn\.([qkv])_proj\.", r".\1."),
        (r"\.layer_norm(\d)\.", r".norm\1."),
        (r"\.mlp\.fc1\.", ".up."),
        (r"\.mlp\.fc2\.", ".down."),
        (r"^mm_soft_emb_norm\.", "soft_norm."),
        (r"^mm_input_projection_weight", "projection"),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision, text = config["vision_config"], config["text_config"]
        size, heads = vision["hidden_size"], vision["num_attention_heads"]
        eps = vision.get("layer_norm_eps", 1e-6)
        self.side = vision["image_size"] // vision["patch_size"]
        self.kernel = self.side // int(config.get("mm_tokens_per_image", 256) ** 0.5)
        self.embed = nn.Linear(3 * vision["patch_size"] ** 2, size)
        self.positions = mx.zeros((self.side**2, size))
        self.encoder = encoder_of(vision, size // heads, gelu_tanh, eps, bias=True, layer_norm=True)
        self.post_layernorm = nn.LayerNorm(size, eps=eps)
        self.soft_norm = GemmaNorm(size, eps)
        self.projection = mx.zeros((size, text["hidden_size"]))

    flatten = staticmethod(flatten_conv2d)

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Features:
        x, _ = self.encoder(self.embed(patches) + self.positions, None)
        x = self.post_layernorm(x)
        n, k = self.side // self.kernel, self.kernel
        pooled = x.reshape(n, k, n, k, -1).mean(axis=(1, 3)).reshape(n * n, -1)
        return Features(self.soft_norm(pooled) @ self.projection)


class PixtralTower(Tower):
    """Pixtral and Mistral 3, which also joins merge x merge neighbouring patches to one row."""

    prefixes = ("model.vision_tower.", "vision_tower.")
    projector = ("model.multi_modal_projector.", "multi_modal_projector.")
    names = (
        (r"^vision_model\.", ""),
        (r"^patch_conv\.", "embed."),
        (r"^transformer\.", "encoder."),
        (r"\.attention\.([qkvo])_proj\.", r".\1."),
        (r"\.attention_norm\.", ".norm1."),
        (r"\.ffn_norm\.", ".norm2."),
        (r"\.feed_forward\.(gate|up|down)_proj\.", r".\1."),
        (r"^patch_merger\.merging_layer\.", "merging."),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision, text = config["vision_config"], config["text_config"]
        size, heads = vision["hidden_size"], vision["num_attention_heads"]
        self.head_dim = vision.get("head_dim") or size // heads
        self.theta = rope_theta(vision, 10000.0)
        self.merge = config.get("spatial_merge_size", 1)
        bias = config.get("multimodal_projector_bias", self.merge == 1)
        self.embed = nn.Linear(3 * vision["patch_size"] ** 2, size, bias=False)
        self.ln_pre = nn.RMSNorm(size, eps=1e-5)
        activation = ACTIVATIONS[vision.get("hidden_act", "gelu")]
        eps = vision.get("rms_norm_eps", 1e-5)
        self.encoder = encoder_of(vision, self.head_dim, activation, eps, gated=True)
        if self.merge > 1:
            self.norm = nn.RMSNorm(size, eps=text["rms_norm_eps"])
            self.merging = nn.Linear(size * self.merge**2, size, bias=False)
        self.linear_1 = nn.Linear(size, text["hidden_size"], bias=bias)
        self.linear_2 = nn.Linear(text["hidden_size"], text["hidden_size"], bias=bias)

    flatten = staticmethod(flatten_conv2d)

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Features:
        height, width = grid
        freqs = self.theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        at = np.stack(np.divmod(np.arange(height * width), width))[:, :, None]
        angles = np.concatenate([at[0] * freqs[::2], at[1] * freqs[1::2]], axis=1)
        x, _ = self.encoder(
            self.ln_pre(self.embed(patches)), mx.array(angles[:, None].astype(np.float32))
        )
        if self.merge > 1:
            m = self.merge
            x = self.norm(x).reshape(height // m, m, width // m, m, -1)
            # A merged row has all values of one channel together.
            x = x.transpose(0, 2, 4, 1, 3).reshape(height * width // m**2, -1)
            x = self.merging(x)
        return Features(self.linear_2(gelu(self.linear_1(x))))


class Gemma4Tower(Tower):
    """Gemma 4: averages pooling x pooling neighbouring patches to one row."""

    prefixes = ("model.vision_tower.", "vision_tower.")
    projector = ("model.embed_vision.", "embed_vision.")
    names = (
        (r"^patch_embedder\.input_proj\.", "embed."),
        (r"^patch_embedder\.position_embedding_table", "positions"),
        (r"\.linear\.", "."),
        (r"\.self_attn\.([qkvo])_proj\.", r".\1."),
        (r"\.self_attn\.([qk]_norm)\.", r".\1."),
        (r"\.mlp\.(gate|up|down)_proj\.", r".\1."),
        (r"\.input_layernorm\.", ".norm1."),
        (r"\.post_attention_layernorm\.", ".after1."),
        (r"\.pre_feedforward_layernorm\.", ".norm2."),
        (r"\.post_feedforward_layernorm\.", ".after2."),
        (r"^embedding_projection\.", "projection."),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision, text = config["vision_config"], config["text_config"]
        self.size = size = vision["hidden_size"]
        self.eps = vision.get("rms_norm_eps", 1e-6)
        self.pool = vision.get("pooling_kernel_size", 3)
        self.head_dim = vision.get("head_dim", 64)
        self.theta = rope_theta(vision, 100.0)
        self.embed = nn.Linear(3 * vision["patch_size"] ** 2, size, bias=False)
        self.positions = mx.zeros((2, vision.get("position_embedding_size", 10240), size))
        clipped = vision.get("use_clipped_linears", False)
        self.encoder = encoder_of(
            vision, self.head_dim, gelu_tanh, self.eps, gated=True, sandwich=True, clipped=clipped
        )
        if vision.get("standardize", False):
            self.std_bias, self.std_scale = mx.zeros(size), mx.ones(size)
        self.projection = nn.Linear(size, text["hidden_size"], bias=False)

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Features:
        height, width = grid
        rows, columns = np.divmod(np.arange(height * width), width)
        x = self.embed((2 * (patches - 0.5)).astype(self.dtype))
        x = x + self.positions[0, mx.array(columns)] + self.positions[1, mx.array(rows)]
        part = self.head_dim // 2
        freqs = self.theta ** -(np.arange(0, part, 2) / part)
        angles = np.stack([columns, rows], axis=1)[:, :, None] * freqs
        x, _ = self.encoder(x, mx.array(angles.astype(np.float32)))
        k = self.pool
        pooled = x.reshape(height // k, k, width // k, k, -1).astype(mx.float32).mean(axis=(1, 3))
        x = (pooled.reshape(-1, self.size) * self.size**0.5).astype(x.dtype)
        if "std_bias" in self:
            x = (x - self.std_bias) * self.std_scale
        return Features(self.projection(mx.fast.rms_norm(x, None, self.eps)))


class Gemma4Embedder(Tower):
    """Gemma 4 unified has no transformer: each patch becomes a row by itself."""

    prefixes = ("model.vision_embedder.", "vision_embedder.")
    projector = ("model.embed_vision.", "embed_vision.")
    names = ((r"^patch_dense\.", "embed."), (r"^embedding_projection\.", "projection."))

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision, text = config["vision_config"], config["text_config"]
        side = vision["patch_size"] * vision["pooling_kernel_size"]
        values, size = 3 * side**2, vision["mm_embed_dim"]
        self.eps = vision.get("rms_norm_eps", 1e-6)
        self.patch_ln1, self.embed = nn.LayerNorm(values), nn.Linear(values, size)
        self.patch_ln2, self.pos_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.pos_embedding = mx.zeros((vision["mm_posemb_size"], 2, size))
        self.projection = nn.Linear(size, text["hidden_size"], bias=False)

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Features:
        rows, columns = np.divmod(np.arange(len(patches)), grid[1])
        x = self.patch_ln2(self.embed(self.patch_ln1(patches.astype(self.dtype))))
        x = x + self.pos_embedding[mx.array(columns), 0] + self.pos_embedding[mx.array(rows), 1]
        return Features(self.projection(mx.fast.rms_norm(self.pos_norm(x), None, self.eps)))


def rope_theta(vision: Config, default: float) -> float:
    """The base of the rotation's frequencies; newer configurations nest it."""
    nested = vision.get("rope_parameters") or {}
    return vision.get("rope_theta") or nested.get("rope_theta") or default


def merge_order(grid: tuple[int, int], merge: int) -> tuple[np.ndarray, np.ndarray]:
    """The row and the column of each patch, in the order of Qwen's merger."""
    height, width = grid
    shape = (height // merge, merge, width // merge, merge)
    index = np.arange(height * width).reshape(shape).transpose(0, 2, 1, 3).ravel()
    rows, columns = np.divmod(index, width)
    return rows, columns


def build(kind: type[Tower], config: Config, tensors: Weights) -> Tower:
    """A tower with its weights.  tensors: by the checkpoint's names, of the whole model or of its
    vision part.  Raises ValueError for missing, unknown or misshapen weights."""
    tower = kind(config)
    weights = renamed(kind, tensors)
    if "embed.weight" in weights:
        weights["embed.weight"] = kind.flatten(weights["embed.weight"])
    quantise(tower, weights, (config.get("quantization") or {}).get("mode", "affine"))
    tower.load_weights(list(weights.items()))
    tower.eval()
    return tower


def renamed(kind: type[Tower], tensors: Weights) -> Weights:
    """The tensors of a tower, by the names of the classes here."""
    out: Weights = {}
    for name, tensor in tensors.items():
        prefix = next((p for p in kind.all_prefixes() if name.startswith(p)), None)
        if prefix is None or name.endswith("position_ids"):
            continue
        rest = name.removeprefix(prefix)
        parts = [(rest, tensor)]
        if ".attn.qkv." in rest:
            split = mx.split(tensor, 3)
            parts = [
                (rest.replace(".qkv.", f".{x}."), t) for x, t in zip("qkv", split, strict=True)
            ]
        for rest, tensor in parts:
            for pattern, replacement in kind.names:
                rest = re.sub(pattern, replacement, rest)
            out[rest] = tensor
    return out


def quantise(tower: Tower, weights: Weights, mode: str) -> None:
    """Make the layers quantised whose weights are; group size and bits follow from the shapes."""
    for path, layer in tower.named_modules():
        scales, weight = weights.get(f"{path}.scales"), weights.get(f"{path}.weight")
        if scales is None or weight is None:
            continue
        inputs = layer.weight.shape[-1]
        size, bits = inputs // scales.shape[-1], 32 * weight.shape[-1] // inputs
        nn.quantize(tower, size, bits, mode=mode, class_predicate=partial(_is_path, path))


def _is_path(path: str, other: str, module: nn.Module) -> bool:
    return path == other
