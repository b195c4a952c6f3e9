"""The tower of Pixtral and Mistral 3: patches are rotated by row and column in turns."""

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.encoder import ACTIVATIONS, gelu
from vllm_metal_lite.images.towers import Config, Grid, Tower, encoder_of, rope_theta
from vllm_metal_lite.runner.pictures import Features


class PixtralTower(Tower):
    """Pixtral and Mistral 3.  Mistral 3 also joins merge x merge neighbours to one row."""

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

    def __call__(self, patches: mx.array, grid: Grid) -> Features:
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
