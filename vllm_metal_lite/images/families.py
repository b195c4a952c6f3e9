"""What each family of models asks of a picture.

`find_family` reads config.json alone.  A family prepares a picture for its tower, writes the text
that replaces the picture in a prompt, and says how its rows are rotated and what they see.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import RequestError, one_line
from vllm_metal_lite.images.family import Family, Prepared, cut
from vllm_metal_lite.images.gemma4_towers import Gemma4Embedder, Gemma4Tower
from vllm_metal_lite.images.pictures import Picture
from vllm_metal_lite.images.pixtral_tower import PixtralTower
from vllm_metal_lite.images.qwen_towers import GlmTower, Qwen2Tower, QwenTower
from vllm_metal_lite.images.siglip_towers import Gemma3Tower, IdeficsTower, InternTower, Lfm2Tower
from vllm_metal_lite.images.towers import Config, Grid, Tower
from vllm_metal_lite.model.files.inner_model import completed

# Why pictures are not served for types of models that are often asked for.
NOT_SERVED = {
    "gemma3n": "its vision tower is a convolutional network, which is not built here",
    "kimi_k25": "transformers has no image processor for it",
    "kimi_vl": "transformers has no image processor for it",
}


def find_family(config: Config) -> Family | None:
    """The family of a model, or None for a model without a vision tower.  Raises RequestError, with
    the reason, for a model whose pictures are not served."""
    kind = str(config.get("model_type")).replace("-", "_")
    if not isinstance(config.get("vision_config"), Mapping):
        return None
    tower = config["vision_config"].get("model_type")
    if kind == "llava" and tower != "pixtral":
        kind = f"llava with the vision tower {tower}"
    if kind not in _FAMILIES:
        reason = NOT_SERVED.get(kind, "its vision tower is not built here")
        raise RequestError(f"pictures are not served for {kind}: {reason}")
    full, names = completed(config), ("image_token_id", "image_token_index")  # new and old
    tokens = [of[name] for of in (config, full) for name in names if of.get(name) is not None]
    full["image_token_id"] = tokens[0] if tokens else None
    return _FAMILIES[kind](full)


def preprocess(family: Family, processor: Any, picture: Picture) -> Prepared:
    """A picture, resized and cut into patches by transformers' processor of the family.  The tower
    scales and normalises the values (eyes.py).  Raises RequestError with the processor's reason,
    such as a picture that is too narrow."""
    try:
        found = processor(
            images=[picture.rgb],
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
            **family.options,
        )
        prepared = family.prepare(found)
    except Exception as e:
        height, width, _ = picture.rgb.shape
        raise RequestError(f"a picture of {width} x {height} pixels: {one_line(e)}") from e
    # Resized values are whole numbers in any type.
    return prepared._replace(patches=prepared.patches.astype(np.uint8), digest=picture.digest)


# Families


def text_of_rows(token: str, before: str = "", after: str = "") -> Callable[[Prepared], str]:
    """The text of pictures whose rows follow one another."""
    return lambda prepared: f"{before}{token * prepared.num_rows}{after}"


def _qwen(
    config: Config,
    tower: type[Tower] = QwenTower,
    token: str = "<|image_pad|>",
    processor: str = "Qwen2VLImageProcessorPil",
) -> Family:
    vision = config["vision_config"]
    merge, frames = vision["spatial_merge_size"], vision["temporal_patch_size"]

    def prepare(found: Mapping[str, np.ndarray]) -> Prepared:
        _, height, width = found["image_grid_thw"][0].tolist()
        merged = (height // merge, width // merge)
        # A picture is a film of equal frames; the tower's weights for them are summed.
        patches = found["pixel_values"].reshape(height * width, 3, frames, -1)[:, :, 0]
        return Prepared(patches.reshape(height * width, -1), (height, width), merged)

    return Family(
        tower,
        token,
        config["image_token_id"],
        processor,
        prepare,
        text_of_rows(token),
        rotates_by_grid=True,
        rotates_in_turns=tower is QwenTower,
    )


_qwen2 = partial(_qwen, tower=Qwen2Tower)
_glm = partial(_qwen, tower=GlmTower, token="<|image|>", processor="Glm4vImageProcessorPil")


def _gemma3(config: Config) -> Family:
    patch = config["vision_config"]["patch_size"]
    side = int(config.get("mm_tokens_per_image", 256) ** 0.5)

    def prepare(found: Mapping[str, np.ndarray]) -> Prepared:
        patches, grid = cut(found["pixel_values"][0], patch)
        return Prepared(patches, grid, (side, side))

    return Family(
        Gemma3Tower,
        "<start_of_image>",
        config["image_token_id"],
        "Gemma3ImageProcessorPil",
        prepare,
        text_of_rows("<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n"),
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
        config["image_token_id"],
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

    return Family(
        tower,
        "<|image|>",
        config["image_token_id"],
        "Gemma4ImageProcessorPil",
        prepare,
        text_of_rows("<|image|>", "<|image>", "<image|>"),
        sees_whole_picture="sliding" if sees else "",
        embed_scale=config["text_config"]["hidden_size"] ** 0.5,
        channels_last=True,
    )


_gemma4_unified = partial(_gemma4, tower=Gemma4Embedder)


def _idefics(config: Config) -> Family:
    vision, factor = config["vision_config"], config["scale_factor"]
    around = "<fake_token_around_image>"

    def prepare(found: Mapping[str, np.ndarray]) -> Prepared:
        tiles = found["rows"][0][0], found["cols"][0][0]
        return tiled(found["pixel_values"][0], vision["patch_size"], factor, tiles)

    def text_of(prepared: Prepared) -> str:
        rows = "<image>" * prepared.rows_of_tile
        height, width = prepared.tiles
        tiles = "".join(
            "".join(f"{around}<row_{y + 1}_col_{x + 1}>{rows}" for x in range(width)) + "\n"
            for y in range(height)
        )
        return f"{tiles}{tiles and chr(10)}{around}<global-img>{rows}{around}"

    return Family(
        IdeficsTower,
        "<image>",
        config["image_token_id"],
        f"{'SmolVLM' if config['model_type'] == 'smolvlm' else 'Idefics3'}ImageProcessorPil",
        prepare,
        text_of,
        options={"return_row_col_info": True},
    )


def _lfm2(config: Config) -> Family:
    patch, factor = config["vision_config"]["patch_size"], config["downsample_factor"]

    def prepare(found: Mapping[str, Any]) -> Prepared:
        return tiled(found["pixel_values"], patch, factor, found["tiles"], found["has_whole"])

    def text_of(prepared: Prepared) -> str:
        height, width = prepared.tiles
        places = [(y + 1, x + 1) for y in range(height) for x in range(width)]
        rows = "<image>" * prepared.rows_of_tile
        tiles = "".join(f"<|img_row_{y}_col_{x}|>{rows}" for y, x in places)
        whole = "<image>" * (prepared.merged[0] * prepared.merged[1])
        thumbnail = "<|img_thumbnail|>" if tiles and whole else ""
        return f"<|image_start|>{tiles}{thumbnail}{whole}<|image_end|>"

    return Family(
        Lfm2Tower,
        "<image>",
        config["image_token_id"],
        "Lfm2VlImageProcessorPil",
        prepare,
        text_of,
    )


def _intern(config: Config) -> Family:
    patch, factor = config["vision_config"]["patch_size"], round(1 / config["downsample_ratio"])
    side = patch if isinstance(patch, int) else patch[0]

    def prepare(found: Mapping[str, np.ndarray]) -> Prepared:
        views = found["pixel_values"]
        # The last view is the whole picture.
        return tiled(views, side, factor, (1, len(views) - 1))

    return Family(
        InternTower,
        "<IMG_CONTEXT>",
        config["image_token_id"],
        "GotOcr2ImageProcessorPil",
        prepare,
        text_of_rows("<IMG_CONTEXT>", "<img>", "</img>"),
        options={"crop_to_patches": True},
    )


def tiled(
    views: Iterable[np.ndarray], patch: int, factor: int, tiles: Grid, has_whole: bool = True
) -> Prepared:
    """views: (3, height, width) pixels of tiles of one size, and of the whole picture at the end.
    factor: how many patches of a row and of a column become one row."""
    found = [cut(view, patch) for view in views]
    grid = found[-1][1] if has_whole else (0, 0)
    tile = found[0][1]
    return Prepared(
        np.concatenate([patches for patches, _ in found]),
        grid,
        (grid[0] // factor, grid[1] // factor),
        tiles=tiles,
        tile=tile,
        rows_of_tile=tile[0] // factor * (tile[1] // factor),
    )


def _join(patches: np.ndarray, grid: Grid, k: int) -> np.ndarray:
    """Patches (P, p * p * 3) -> (P / k / k, k * p * k * p * 3): k x k neighbours as one patch."""
    height, width = grid
    p = int((patches.shape[1] // 3) ** 0.5)
    parts = patches.reshape(height // k, k, width // k, k, p, p, 3).transpose(0, 2, 1, 4, 3, 5, 6)
    return np.ascontiguousarray(parts).reshape(height * width // k**2, -1)


_FAMILIES: dict[str, Callable[[Config], Family]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "glm46v": _glm,
    "glm_ocr": _glm,
    "glm4v": _glm,
    "glm4v_moe": _glm,
    "idefics3": _idefics,
    "internvl": _intern,
    "lfm2_vl": _lfm2,
    "llava": _pixtral,
    "mistral3": _pixtral,
    "pixtral": _pixtral,
    "qwen2_5_vl": _qwen2,
    "qwen2_vl": _qwen2,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "smolvlm": _idefics,
}
