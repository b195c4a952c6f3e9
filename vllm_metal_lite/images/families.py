"""What each family of models asks of a picture.

`find_family` reads config.json alone.  A family prepares a picture for its tower, writes the text
that replaces the picture in a prompt, and says how its rows are rotated and what they see.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoConfig

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import RequestError, one_line
from vllm_metal_lite.images.pictures import Picture
from vllm_metal_lite.images.towers import (
    Gemma4Embedder,
    Gemma4Tower,
    PixtralTower,
    QwenTower,
    SiglipTower,
    Tower,
)

Config = Mapping[str, Any]

# Types of models that take pictures elsewhere and not here, and the reason.
NOT_SERVED = {
    "qwen2_vl": "its vision tower is not built here",
    "qwen2_5_vl": "its vision tower attends in windows, which is not built here",
    "kimi_vl": "transformers has no image processor for it",
    "kimi_k25": "transformers has no image processor for it",
    "lfm2-vl": "transformers has no image processor for it without torch",
    "lfm2_vl": "transformers has no image processor for it without torch",
    "gemma3n": "its vision tower is a convolutional network, which is not built here",
    "llama4": "its vision tower is not built here",
}


class Prepared(NamedTuple):
    """A picture, resized and cut into patches.

    patches: (P, values) uint8.  grid: (height, width) in patches.  merged: (height, width) of the
    rows that the language model gets.  digest: names the picture.
    """

    patches: np.ndarray
    grid: tuple[int, int]
    merged: tuple[int, int]
    digest: bytes = b""

    @property
    def num_rows(self) -> int:
        return self.merged[0] * self.merged[1]


@dataclass(frozen=True)
class Family:
    """placeholder: what the chat template writes for a picture.  image_token_id: the token of each
    of its rows.  processor: the class of transformers that prepares pictures, on Pillow.
    text_of: the text of a prepared picture, with one image token a row.
    rotates_by_grid: whether rows are rotated by their place in the picture (M-RoPE).
    sees_whole_picture: whether rows of a picture see later rows of it: in "all" layers, in those
    with a "sliding" window, or in none ("").
    embed_scale: what the model multiplies embeddings by; its features are divided by it.
    channels_last: whether the three values of a pixel follow each other in a patch.
    """

    tower: type[Tower]
    placeholder: str
    image_token_id: int
    processor: str
    prepare: Callable[[Mapping[str, np.ndarray]], Prepared]
    text_of: Callable[[Prepared], str]
    rotates_by_grid: bool = False
    sees_whole_picture: str = ""
    embed_scale: float = 1.0
    channels_last: bool = False


def find_family(config: Config) -> Family | None:
    """The family of a model, or None for a model without eyes.  Raises RequestError, with the
    reason, for a model whose pictures are not served."""
    kind = str(config.get("model_type"))
    if kind in NOT_SERVED and has_tower(config):
        raise RequestError(f"pictures are not served for {kind}: {NOT_SERVED[kind]}")
    if kind not in _FAMILIES or not has_tower(config):
        return None
    return _FAMILIES[kind](completed(config))


def completed(config: Config) -> Config:
    """config.json with the defaults of transformers, which files may leave out."""
    own = {name: value for name, value in config.items() if name != "model_type"}
    kind = str(config.get("model_type"))
    kind = {"pixtral": "llava"}.get(kind, kind)  # the name of the whole model in transformers
    try:
        full = AutoConfig.for_model(kind, **deepcopy(own)).to_dict()  # it changes what it gets
    except Exception:  # an unknown model, or a field that this version refuses
        return config
    parts = {
        name: (full.get(name) or {}) | config.get(name, {})
        for name in ("text_config", "vision_config")
    }
    return full | dict(config) | parts


def has_tower(config: Config) -> bool:
    return isinstance(config.get("vision_config"), Mapping)


def preprocess(family: Family, processor: Any, picture: Picture) -> Prepared:
    """A picture, resized and cut into patches by transformers' processor of the family.  The tower
    scales and normalises the values (eyes.py).  Raises RequestError with the processor's reason,
    such as a picture that is too narrow."""
    try:
        found = processor(
            images=[picture.rgb], do_rescale=False, do_normalize=False, return_tensors="np"
        )
        prepared = family.prepare(found)
    except Exception as e:
        height, width, _ = picture.rgb.shape
        raise RequestError(f"a picture of {width} x {height} pixels: {one_line(e)}") from e
    # Resized values are whole numbers in any type.
    return prepared._replace(patches=prepared.patches.astype(np.uint8), digest=picture.digest)


# Families


def _qwen(config: Config) -> Family:
    merge, frames = (
        config["vision_config"][f"{x}_size"] for x in ("spatial_merge", "temporal_patch")
    )

    def prepare(found: Mapping[str, np.ndarray]) -> Prepared:
        _, height, width = found["image_grid_thw"][0].tolist()
        merged = (height // merge, width // merge)
        # A picture is a film of equal frames; the tower's weights for them are summed.
        patches = found["pixel_values"].reshape(height * width, 3, frames, -1)[:, :, 0]
        return Prepared(patches.reshape(height * width, -1), (height, width), merged)

    def text_of(prepared: Prepared) -> str:
        height, width = prepared.merged
        return "<|image_pad|>" * (height * width)

    return Family(
        QwenTower,
        "<|image_pad|>",
        config["image_token_id"],
        "Qwen2VLImageProcessorPil",
        prepare,
        text_of,
        rotates_by_grid=True,
    )


def _gemma3(config: Config) -> Family:
    patch = config["vision_config"]["patch_size"]
    rows = config.get("mm_tokens_per_image", 256)
    side = int(rows**0.5)

    def prepare(found: Mapping[str, np.ndarray]) -> Prepared:
        patches, grid = cut(found["pixel_values"][0], patch)
        return Prepared(patches, grid, (side, side))

    def text_of(prepared: Prepared) -> str:
        return f"\n\n<start_of_image>{'<image_soft_token>' * rows}<end_of_image>\n\n"

    return Family(
        SiglipTower,
        "<start_of_image>",
        _image_token(config, 262144),
        "Gemma3ImageProcessorPil",
        prepare,
        text_of,
        sees_whole_picture="all",
        # mlx-lm rounds it to bfloat16.
        embed_scale=float(
            mx.array(config["text_config"]["hidden_size"] ** 0.5, mx.bfloat16).astype(mx.float32)
        ),
    )


def _pixtral(config: Config) -> Family:
    patch, merge = config["vision_config"]["patch_size"], config.get("spatial_merge_size", 1)

    def prepare(found: Mapping[str, np.ndarray]) -> Prepared:
        patches, (height, width) = cut(found["pixel_values"][0], patch)
        return Prepared(patches, (height, width), (height // merge, width // merge))

    def text_of(prepared: Prepared) -> str:
        height, width = prepared.merged
        return "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"

    return Family(
        PixtralTower,
        "[IMG]",
        _image_token(config, 10),
        "PixtralImageProcessorPil",
        prepare,
        text_of,
    )


def _gemma4(config: Config, tower: type[Tower] = Gemma4Tower) -> Family:
    vision = config["vision_config"]
    k = vision.get("pooling_kernel_size", 3)
    sees = config["text_config"].get("use_bidirectional_attention") == "vision"

    def prepare(found: Mapping[str, np.ndarray]) -> Prepared:
        at = found["image_position_ids"][0]
        is_patch = at[:, 0] >= 0  # the rest is padding
        patches, at = found["pixel_values"][0][is_patch], at[is_patch]
        width, height = (at.max(axis=0) + 1).tolist()
        merged = (height // k, width // k)
        if tower is Gemma4Embedder:
            return Prepared(_join(patches, (height, width), k), merged, merged)
        return Prepared(patches, (height, width), merged)

    def text_of(prepared: Prepared) -> str:
        height, width = prepared.merged
        return f"<|image>{'<|image|>' * (height * width)}<image|>"

    return Family(
        tower,
        "<|image|>",
        _image_token(config, 258880),
        "Gemma4ImageProcessorPil",
        prepare,
        text_of,
        sees_whole_picture="sliding" if sees else "",
        embed_scale=config["text_config"]["hidden_size"] ** 0.5,
        channels_last=True,
    )


def _gemma4_unified(config: Config) -> Family:
    return _gemma4(config, Gemma4Embedder)


def _image_token(config: Config, default: int) -> int:
    for name in ("image_token_id", "image_token_index"):
        if isinstance(value := config.get(name), int):
            return value
    return default


def cut(pixels: np.ndarray, patch: int) -> tuple[np.ndarray, tuple[int, int]]:
    """(3, height, width) pixels -> (patches (P, 3 * patch * patch), grid)."""
    channels, height, width = pixels.shape
    grid = (height // patch, width // patch)
    parts = pixels.reshape(channels, grid[0], patch, grid[1], patch).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(parts).reshape(grid[0] * grid[1], -1), grid


def _join(patches: np.ndarray, grid: tuple[int, int], k: int) -> np.ndarray:
    """Patches (P, p * p * 3) -> (P / k / k, k * p * k * p * 3): k x k neighbours as one patch."""
    height, width = grid
    p = int((patches.shape[1] // 3) ** 0.5)
    parts = patches.reshape(height // k, k, width // k, k, p, p, 3).transpose(0, 2, 1, 4, 3, 5, 6)
    return np.ascontiguousarray(parts).reshape(height * width // k**2, -1)


_FAMILIES: dict[str, Callable[[Config], Family]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "mistral3": _pixtral,
    "pixtral": _pixtral,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
}
