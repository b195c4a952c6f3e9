"""Towers with learned positions and without rotation: SigLIP's, and InternVL's."""

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.encoder import ACTIVATIONS, gelu, gelu_tanh
from vllm_metal_lite.images.towers import (
    Config,
    Grid,
    Tower,
    centres,
    encoder_of,
    joined,
    linear_taps,
    resampled,
)
from vllm_metal_lite.runner.pictures import Features

SIGLIP = (
    (r"^vision_model\.", ""),
    (r"^embeddings\.patch_embedding\.", "embed."),
    (r"^embeddings\.position_embedding\.weight", "positions"),
    (r"\.self_attn\.out_proj\.", ".o."),
    (r"\.self_attn\.([qkv])_proj\.", r".\1."),
    (r"\.layer_norm(\d)\.", r".norm\1."),
    (r"\.mlp\.fc1\.", ".up."),
    (r"\.mlp\.fc2\.", ".down."),
)


class SiglipTower(Tower):
    """SigLIP without a projector; families add theirs."""

    prefixes = ("model.vision_tower.", "vision_tower.")
    projector = ("model.multi_modal_projector.", "multi_modal_projector.")
    names: tuple[tuple[str, str], ...] = SIGLIP

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision = config["vision_config"]
        size, heads = vision["hidden_size"], vision["num_attention_heads"]
        self.eps = eps = vision.get("layer_norm_eps", 1e-6)
        self.side = self.side_of(vision)
        self.embed = nn.Linear(3 * vision["patch_size"] ** 2, size)
        self.positions = mx.zeros((self.side**2, size))
        self.encoder = encoder_of(vision, size // heads, gelu_tanh, eps, bias=True, layer_norm=True)
        self.post_layernorm = nn.LayerNorm(size, eps=eps)

    @staticmethod
    def side_of(vision: Config) -> int:
        """The side of the square of positions."""
        return int(vision["image_size"] // vision["patch_size"])

    def encode(self, patches: mx.array, positions: mx.array) -> mx.array:
        """(B * P, values) patches of B pictures of one size, (P, C) positions -> (B * P, C)."""
        x = self.embed(patches).reshape(-1, *positions.shape)
        x = (x + positions).reshape(len(patches), -1)
        x, _ = self.encoder(x, None, segments=(len(patches) // len(positions), None))
        return self.post_layernorm(x)


class GemmaNorm(nn.Module):
    """An RMSNorm whose weight is an offset from 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = mx.zeros(size), eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1 + self.weight, self.eps)


class Gemma3Tower(SiglipTower):
    """A picture is always a square of one size, and gives mm_tokens_per_image rows."""

    names = (
        *SIGLIP,
        (r"^mm_soft_emb_norm\.", "soft_norm."),
        (r"^mm_input_projection_weight", "projection"),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        size = config["vision_config"]["hidden_size"]
        self.kernel = self.side // int(config.get("mm_tokens_per_image", 256) ** 0.5)
        self.soft_norm = GemmaNorm(size, self.eps)
        self.projection = mx.zeros((size, config["text_config"]["hidden_size"]))

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
        x = self.encode(patches, self.positions)
        n, k = self.side // self.kernel, self.kernel
        pooled = x.reshape(n, k, n, k, -1).mean(axis=(1, 3)).reshape(n * n, -1)
        return Features(self.soft_norm(pooled) @ self.projection)


class IdeficsTower(SiglipTower):
    """Idefics3 and SmolVLM, which cut a picture into tiles of one size."""

    prefixes = ("model.vision_model.", "vision_model.")
    projector = ("model.connector.", "connector.")
    names = (*SIGLIP, (r"^modality_projection\.proj\.", "projection."))

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.factor = config["scale_factor"]
        merged = config["vision_config"]["hidden_size"] * self.factor**2
        self.projection = nn.Linear(merged, config["text_config"]["hidden_size"], bias=False)

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
        x = self.encode(patches, self.positions)
        return Features(self.projection(joined(x, grid, self.factor)))


class Lfm2Tower(SiglipTower):
    """LFM2-VL, with tiles of one size and a view of the whole picture in its own proportions."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.factor = config["downsample_factor"]
        merged, text = (
            config["vision_config"]["hidden_size"] * self.factor**2,
            config["text_config"],
        )
        inner, bias = config["projector_hidden_size"], config["projector_bias"]
        if config["projector_use_layernorm"]:
            self.layer_norm = nn.LayerNorm(merged)
        self.activation = ACTIVATIONS[config["projector_hidden_act"]]
        self.linear_1 = nn.Linear(merged, inner, bias=bias)
        self.linear_2 = nn.Linear(inner, text["hidden_size"], bias=bias)

    @staticmethod
    def side_of(vision: Config) -> int:
        return int(vision["num_patches"] ** 0.5)

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
        height, width = (
            linear_taps(centres(n, self.side), self.side, max(1, self.side / n)) for n in grid
        )
        positions = resampled(self.positions, (height, width)).reshape(grid[0] * grid[1], -1)
        # Its weights take the three colours of a point together.
        patches = patches.reshape(len(patches), 3, -1).swapaxes(1, 2).reshape(len(patches), -1)
        x = joined(self.encode(patches, positions), grid, self.factor)
        x = self.layer_norm(x) if "layer_norm" in self else x
        return Features(self.linear_2(self.activation(self.linear_1(x))))


class InternTower(Tower):
    """InternVL, with tiles of one size.  Each has a class token, which is left out at the end."""

    prefixes = ("model.vision_tower.", "vision_tower.")
    projector = ("model.multi_modal_projector.", "multi_modal_projector.")
    names = (
        (r"^embeddings\.(cls_token|position_embeddings)", r"\1"),
        (r"^embeddings\.patch_embeddings\.projection\.", "embed."),
        (r"^encoder\.layer\.", "encoder.layers."),
        (r"\.attention\.([qkv])_proj\.", r".\1."),
        (r"\.attention\.projection_layer\.", ".o."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"\.lambda_(\d)", r".after\1.weight"),
        (r"\.mlp\.fc1\.", ".up."),
        (r"\.mlp\.fc2\.", ".down."),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision = config["vision_config"]
        size, eps = vision["hidden_size"], vision["layer_norm_eps"]
        image, patch = (
            n if isinstance(n := vision[name], int) else n[0]
            for name in ("image_size", "patch_size")
        )
        self.factor = round(1 / config["downsample_ratio"])
        self.embed = nn.Linear(3 * patch**2, size)
        self.cls_token = mx.zeros((1, 1, size))
        self.position_embeddings = mx.zeros((1, (image // patch) ** 2 + 1, size))
        self.encoder = encoder_of(
            vision,
            size // vision["num_attention_heads"],
            ACTIVATIONS[vision["hidden_act"]],
            eps,
            bias=True,
            layer_norm=True,
            scaled=True,
        )
        merged, text = size * self.factor**2, config["text_config"]
        self.layer_norm = nn.LayerNorm(merged)
        self.linear_1 = nn.Linear(merged, text["hidden_size"])
        self.linear_2 = nn.Linear(text["hidden_size"], text["hidden_size"])

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
        x = self.embed(patches).reshape(-1, grid[0] * grid[1], self.cls_token.shape[-1])
        first = mx.broadcast_to(self.cls_token, (len(x), 1, x.shape[-1]))
        x = mx.concatenate([first, x], axis=1) + self.position_embeddings
        shape = x.shape
        x, _ = self.encoder(x.reshape(-1, shape[-1]), None, segments=(len(x), None))
        x = x.reshape(shape)[:, 1:].reshape(len(patches), -1)
        x = self.layer_norm(joined(x, grid, self.factor))
        return Features(self.linear_2(gelu(self.linear_1(x))))
