"""The transformer of a vision tower.

One class serves all families: they differ in norms, in the MLP, in the rotation, and in the names
of their weights.  A patch sees all patches of its picture, of its tile or of its window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.attention.sdpa.fused import unfused
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile

Activation = Callable[[mx.array], mx.array]
# The cosines and sines of a picture, the same for all layers.
Rotation = tuple[mx.array, mx.array]
# (parts, mask): the rows are cut into equal parts, and only rows of one part see each other.  mask:
# (parts, 1, 1, P / parts) bool, False for padding; None: there is none.
Segments = tuple[int, mx.array | None]
WHOLE: Segments = (1, None)
gelu, gelu_tanh = nn.gelu, nn.gelu_approx
# By the names of transformers.
ACTIVATIONS = {
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": nn.gelu_fast_approx,
    "silu": nn.silu,
}
# The widths of heads for which MLX's SDPA is one kernel.
FUSED_WIDTHS = (64, 80, 128)


@dataclass(frozen=True)
class EncoderConfig:
    """gated: the MLP multiplies its activated half with another one.  bias: whether the linear
    layers have one.  layer_norm: LayerNorm with a bias, otherwise RMSNorm.  sandwich: a norm before
    and one after each half of a layer, and norms of queries, keys and values (Gemma 4).
    qk_norm: queries and keys have norms (GLM-OCR).  scaled: each half of a layer is multiplied by a
    learned vector (InternVL).
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    activation: Activation
    eps: float
    gated: bool = False
    bias: bool = False
    layer_norm: bool = False
    sandwich: bool = False
    clipped: bool = False
    scaled: bool = False
    qk_norm: bool = False


class _Clipped(nn.Module):
    """Clips the input and the output of a linear layer to bounds from the checkpoint (Gemma 4)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("input_min", "output_min"):
            self[name] = mx.array(float("-inf"))
        for name in ("input_max", "output_max"):
            self[name] = mx.array(float("inf"))

    def __call__(self, x: mx.array) -> mx.array:
        y = super().__call__(mx.clip(x, self.input_min, self.input_max))
        return mx.clip(y, self.output_min, self.output_max)


class ClippedLinear(_Clipped, nn.Linear):
    def to_quantized(self, *args: Any, **kwargs: Any) -> nn.Module:
        return ClippedQuantizedLinear.from_linear(self, *args, **kwargs)


class ClippedQuantizedLinear(_Clipped, nn.QuantizedLinear):
    pass


class Scale(nn.Module):
    """A learned factor for each dimension."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = mx.ones(size)

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.weight


class Layer(nn.Module):
    """x (P, hidden_size) -> the same shape."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        size, inner = config.hidden_size, config.intermediate_size
        wide = config.num_heads * config.head_dim
        linear = partial(ClippedLinear if config.clipped else nn.Linear, bias=config.bias)
        norm = nn.LayerNorm if config.layer_norm else nn.RMSNorm
        self.norm1, self.norm2 = (norm(size, eps=config.eps) for _ in range(2))
        self.q, self.k, self.v = (linear(size, wide) for _ in range(3))
        self.o = linear(wide, size)
        if config.gated:
            self.gate = linear(size, inner)
        self.up, self.down = linear(size, inner), linear(inner, size)
        if config.sandwich:
            self.after1, self.after2 = (norm(size, eps=config.eps) for _ in range(2))
        if config.sandwich or config.qk_norm:
            self.q_norm, self.k_norm = (norm(config.head_dim, eps=config.eps) for _ in range(2))
        if config.scaled:
            self["after1"], self["after2"] = Scale(size), Scale(size)

    def __call__(self, x: mx.array, rotation: Rotation | None, segments: Segments) -> mx.array:
        h = self.attend(self.norm1(x), rotation, segments)
        x = x + (self.after1(h) if "after1" in self else h)
        h = self.norm2(x)
        up = self.up(h)
        activation = self.config.activation
        h = self.down(activation(self.gate(h)) * up if self.config.gated else activation(up))
        return x + (self.after2(h) if "after2" in self else h)

    def attend(self, x: mx.array, rotation: Rotation | None, segments: Segments) -> mx.array:
        config = self.config
        q, k, v = (
            f(x).reshape(len(x), config.num_heads, config.head_dim)
            for f in (self.q, self.k, self.v)
        )
        scale = config.head_dim**-0.5
        if "q_norm" in self:
            q, k = self.q_norm(q), self.k_norm(k)
        if config.sandwich:
            v, scale = mx.fast.rms_norm(v, None, config.eps), 1.0
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        count, mask = segments
        width = padded_width(config.head_dim)
        pad = [(0, 0), (0, 0), (0, width - config.head_dim)]
        shape = count, -1, config.num_heads, width
        q, k, v = (mx.pad(a, pad).reshape(shape).swapaxes(1, 2) for a in (q, k, v))
        out = attention(q, k, v, scale, mask)
        return self.o(out.swapaxes(1, 2)[..., : config.head_dim].reshape(len(x), -1))


class Encoder(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.layers = [Layer(config) for _ in range(config.num_layers)]

    def __call__(
        self,
        x: mx.array,
        angles: mx.array | None,
        noted: tuple[int, ...] = (),
        segments: Segments | list[Segments] = WHOLE,
    ) -> tuple[mx.array, list[mx.array]]:
        """The result of the last layer, and those of the layers in `noted`.

        angles: (P, parts, head_dim / parts / 2), see `rotate`; None: nothing is rotated.
        segments: the same for all layers, or a list with one item a layer.
        """
        results = []
        rotation = None if angles is None else (mx.cos(angles)[:, None], mx.sin(angles)[:, None])
        by_layer = [segments] * len(self.layers) if isinstance(segments, tuple) else segments
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, by_layer[i])
            if i in noted:
                results.append(x)
        return x, results


def attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None = None
) -> mx.array:
    """SDPA of (S, heads, P, width), some rows at a time where MLX keeps all scores in memory.

    mask: (S, 1, 1, P), the keys that all rows see; None: all.
    """
    count, heads, num_patches, width = q.shape
    tile, outputs = num_patches, list[mx.array]()
    if unfused(heads, width, None) is not None:
        tile = min(max(profile().max_scores // (count * heads * num_patches), 1), num_patches)
    for start in range(0, num_patches, tile):
        rows = q[:, :, start : start + tile]
        if outputs:  # otherwise MLX begins all tiles and keeps all their scores
            (rows,) = mx.depends([rows], outputs[-1:])
        outputs.append(mx.fast.scaled_dot_product_attention(rows, k, v, scale=scale, mask=mask))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def padded_width(head_dim: int) -> int:
    """The width to which heads are padded with zeros for SDPA.  Zeros change no result, and for
    FUSED_WIDTHS MLX keeps no scores in memory."""
    return next((w for w in FUSED_WIDTHS if w >= head_dim), head_dim)


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """x (P, heads, head_dim), rotated in float32.

    cos, sin: (P, 1, parts, head_dim / parts / 2), of the angles.  The dimensions of a head fall
    into `parts`.  In each part, dimension i of the first half makes a pair with dimension i of the
    second half.
    """
    rows, _, parts, half = cos.shape
    pairs = x.reshape(rows, -1, parts, 2, half)
    a, b = (pairs[:, :, :, i].astype(mx.float32) for i in range(2))
    rotated = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=3)
    return rotated.reshape(x.shape).astype(x.dtype)
