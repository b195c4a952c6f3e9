"""The towers of Gemma 4."""

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.encoder import gelu_tanh
from vllm_metal_lite.images.towers import Config, Grid, Tower, encoder_of, rope_theta
from vllm_metal_lite.runner.pictures import Features


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

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
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

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
        rows, columns = np.divmod(np.arange(len(patches)), grid[1])
        x = self.patch_ln2(self.embed(self.patch_ln1(patches.astype(self.dtype))))
        x = x + self.pos_embedding[mx.array(columns), 0] + self.pos_embedding[mx.array(rows), 1]
        return Features(self.projection(mx.fast.rms_norm(self.pos_norm(x), None, self.eps)))
