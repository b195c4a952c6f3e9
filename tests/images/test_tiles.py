"""Pictures that towers see in parts: their tiles, and the text that marks the tiles."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.eyes import Processor
from vllm_metal_lite.images.families import find_family
from vllm_metal_lite.images.family import cut
from vllm_metal_lite.images.pictures import Picture, picture_of

HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def processor_of(folder: Path, kind: str, settings: dict[str, Any], **config: Any) -> Processor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**HALVES, **settings}))
    family = find_family({"model_type": kind, "vision_config": {}, **config})
    assert family is not None
    return Processor(family, folder)


def picture(height: int, width: int) -> Picture:
    rng = np.random.default_rng(height * width)
    return picture_of(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def places(text: str, token: str) -> str:
    """The text, with the length of each run of an image token in place of the run."""
    return re.sub(f"(?:{re.escape(token)})+", lambda m: f"[{len(m[0]) // len(token)}]", text)


@pytest.mark.parametrize("size", [(300, 500), (1000, 400), (1000, 1000)])
@pytest.mark.parametrize(
    ("kind", "side", "patch", "factor", "splits"),
    [
        ("idefics3", 384, 14, 3, True),
        ("smolvlm", 512, 16, 4, True),
        ("smolvlm", 512, 16, 4, False),
    ],
)
def test_the_text_of_smolvlm_is_that_of_transformers(
    kind: str,
    side: int,
    patch: int,
    factor: int,
    splits: bool,
    size: tuple[int, int],
    tmp_path: Path,
) -> None:
    settings = {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}
    settings["do_image_splitting"] = splits
    vision = {"patch_size": patch, "image_size": side}
    processor = processor_of(tmp_path, kind, settings, scale_factor=factor, vision_config=vision)
    prepared = processor(picture(*size))
    count = get_rows_and_columns(settings, *size) if splits else (0, 0)
    rows = (side // patch // factor) ** 2
    around = "<fake_token_around_image>"
    text = processor.family.text_of(prepared)
    assert text == get_image_prompt_string(*count, rows, around, "<image>", "<global-img>")
    assert text.count("<image>") == prepared.num_rows


def get_rows_and_columns(settings: dict[str, Any], height: int, width: int) -> tuple[int, int]:
    """The tiles of a picture whose longer side is resized to four tiles."""
    longest = max(height, width)
    down, across = (-(-4 * n // longest) for n in (height, width))
    return down, across


def test_internvl_sees_tiles_and_the_whole(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, "internvl", {"size": {"height": 448, "width": 448}})
    for size, rows in (((448, 448), 256), ((448, 900), 768), ((1400, 500), 1024)):
        prepared = processor(picture(*size))
        text = processor.family.text_of(prepared)
        assert places(text, "<IMG_CONTEXT>") == f"<img>[{rows}]</img>"
        assert prepared.num_rows == rows == len(prepared.patches) // 4


# Height, width, settings -> the text, and the grid of the last view.
LFM2: list[tuple[int, int, dict[str, Any], str, tuple[int, int]]] = [
    (300, 500, {}, "[144]", (18, 32)),
    (33, 41, {}, "[72]", (16, 18)),
    (10, 900, {}, "[76]", (2, 152)),
    (512, 1024, {}, "[242]", (22, 44)),
    (3000, 700, {"do_image_splitting": False}, "[231]", (66, 14)),
    (
        725,
        725,
        {},
        "<|img_row_1_col_1|>[256]<|img_row_1_col_2|>[256]<|img_row_2_col_1|>[256]"
        "<|img_row_2_col_2|>[256]<|img_thumbnail|>[256]",
        (32, 32),
    ),
    (
        2000,
        1500,
        {},
        "<|img_row_1_col_1|>[256]<|img_row_1_col_2|>[256]<|img_row_2_col_1|>[256]"
        "<|img_row_2_col_2|>[256]<|img_row_3_col_1|>[256]<|img_row_3_col_2|>[256]"
        "<|img_thumbnail|>[234]",
        (36, 26),
    ),
    (
        600,
        1300,
        {"use_thumbnail": False},
        "<|img_row_1_col_1|>[256]<|img_row_1_col_2|>[256]",
        (0, 0),
    ),
]


@pytest.mark.parametrize(("height", "width", "settings", "text", "last"), LFM2)
def test_tiles_of_lfm2(
    height: int,
    width: int,
    settings: dict[str, Any],
    text: str,
    last: tuple[int, int],
    tmp_path: Path,
) -> None:
    """As transformers' processor answers, which needs torchvision: its answers are written here.
    Older folders have the settings of tiles in processor_config.json."""
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    processor = processor_of(tmp_path, "lfm2-vl", {"do_resize": False, "patch_size": 16})
    prepared = processor(picture(height, width))
    found = processor.family.text_of(prepared)
    assert places(found, "<image>") == f"<|image_start|>{text}<|image_end|>"
    assert found.count("<image>") == prepared.num_rows == len(prepared.patches) // 4
    assert prepared.grid == last
    views = prepared.views(mx.array(prepared.patches))
    assert [grid for _, grid in views][-1] == (last if last[0] else (32, 32))
    assert sum(len(part) for part, _ in views) == len(prepared.patches)
    if last[0]:
        size = last[1] * 16, last[0] * 16
        whole = Image.fromarray(picture(height, width).rgb).resize(size, Image.Resampling.BILINEAR)
        patches, _ = cut(np.asarray(whole).transpose(2, 0, 1), 16)
        np.testing.assert_array_equal(prepared.patches[-len(patches) :], patches)
