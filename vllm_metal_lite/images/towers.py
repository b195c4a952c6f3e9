"""What vision towers share: patches of one picture in, rows for the language model out.

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
from vllm_metal_lite.images.encoder import Activation, Encoder, EncoderConfig
from vllm_metal_lite.runner.pictures import Features

Config = Mapping[str, Any]
Grid = tuple[int, int]
# Tensors by name.
Weights = dict[str, mx.array]


class Tower(nn.Module):
    """A vision tower, made from a completed config.json.

    prefixes, projector: where a checkpoint has the names of the tower, and of the part that leads
    to the language model.  names: regular expressions that turn these names into those here.
    fill: how many rows of the tower a patch of a large picture takes at most.
    """

    prefixes: tuple[str, ...] = ()
    projector: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    fill = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__()

    @classmethod
    def all_prefixes(cls) -> tuple[str, ...]:
        """The longest first."""
        return tuple(sorted((*cls.prefixes, *cls.projector), key=len, reverse=True))

    @property
    def dtype(self) -> mx.Dtype:
        """The type of patches: that of the embedding's weight, of its scales if it is quantised."""
        embed = self.embed
        dtype: mx.Dtype = embed.get("scales", embed.weight).dtype
        return dtype

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
        """patches: of one picture, or of several tiles of the same grid."""
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


def rope_theta(vision: Config, default: float) -> float:
    """The base of the rotation's frequencies; newer configurations nest it."""
    nested = vision.get("rope_parameters") or {}
    return vision.get("rope_theta") or nested.get("rope_theta") or default


def axial_angles(rows: np.ndarray, columns: np.ndarray, head_dim: int) -> mx.array:
    """(P, 1, head_dim / 2): a half of the frequencies turns by the row, the other by the column."""
    freqs = 10000.0 ** -(np.arange(0, head_dim // 2, 2) / (head_dim // 2))
    angles = np.concatenate([rows[:, None] * freqs, columns[:, None] * freqs], axis=1)
    return mx.array(angles[:, None].astype(np.float32))


def merge_order(grid: tuple[int, int], merge: int) -> tuple[np.ndarray, np.ndarray]:
    """The row and the column of each patch, in the order of Qwen's merger."""
    height, width = grid
    shape = (height // merge, merge, width // merge, merge)
    index = np.arange(height * width).reshape(shape).transpose(0, 2, 1, 3).ravel()
    rows, columns = np.divmod(index, width)
    return rows, columns


def joined(x: mx.array, grid: Grid, factor: int) -> mx.array:
    """(P, C) -> (P / factor^2, factor^2 C): factor x factor neighbouring patches as one row."""
    height, width = grid
    parts = x.reshape(-1, height // factor, factor, width // factor, factor, x.shape[-1])
    return parts.swapaxes(2, 3).reshape(-1, factor**2 * x.shape[-1])


def flattened(weight: mx.array) -> mx.array:
    """The weight of a convolution without overlap as the weight of a linear layer over (C, P, P).

    weight: (outputs, C, P, P), or (outputs, C, T, P, P) for films, or in MLX's order with C last.
    The T frames of a picture are equal, so their weights are added up.
    """
    if weight.shape[-1] != weight.shape[-2]:
        weight = mx.moveaxis(weight, -1, 1)
    if weight.ndim == 5:
        weight = weight.astype(mx.float32).sum(axis=2).astype(weight.dtype)
    return weight.reshape(len(weight), -1)


def resampled(table: mx.array, taps: tuple[np.ndarray, np.ndarray]) -> mx.array:
    """Resample the learned positions of a square to a grid: (side^2, C) -> (height, width, C).

    taps: (height, side) and (width, side), the shares of old rows and columns in the new ones.
    """
    down, across = (mx.array(t.astype(np.float32)) for t in taps)
    side, size = down.shape[1], table.shape[-1]
    rows = down @ table.astype(mx.float32).reshape(side, -1)
    return (across @ rows.reshape(-1, side, size)).astype(table.dtype)


def centres(count: int, side: int) -> np.ndarray:
    """The middles of `count` equal parts of a line with `side` points."""
    return (np.arange(count) + 0.5) * side / count - 0.5


def linear_taps(at: np.ndarray, side: int, reach: float = 1.0) -> np.ndarray:
    """(N,) places on a line of points -> (N, side), the share of each point at each place.

    reach: the distance at which the share of a point becomes 0.
    """
    taps = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(side)) / reach)
    return taps / taps.sum(axis=1, keepdims=True)


def cubic_taps(at: np.ndarray, side: int) -> np.ndarray:
    """The same as `linear_taps` with torch's cubic kernel.  Beyond an end, its point repeats."""
    taps, first = np.zeros((len(at), side)), np.floor(at).astype(int)
    for point in (first + i for i in range(-1, 3)):
        d = np.abs(at - point)
        near, far = (1.25 * d - 2.25) * d * d + 1, ((-0.75 * d + 3.75) * d - 6) * d + 3
        np.add.at(taps, (np.arange(len(at)), point.clip(0, side - 1)), np.where(d <= 1, near, far))
    return taps


def build(kind: type[Tower], config: Config, tensors: Weights) -> Tower:
    """A tower with its weights.  tensors: by the checkpoint's names, of the whole model or of its
    vision part.  Raises ValueError for missing, unknown or misshapen weights."""
    tower = kind(config)
    weights = renamed(kind, tensors)
    weights = {name: flattened(w) if w.ndim > 3 else w for name, w in weights.items()}
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
