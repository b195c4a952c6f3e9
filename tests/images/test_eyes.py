"""What a tower gets are transformers' pixels, whatever the order of channels in a patch."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoImageProcessor

from tests.images.test_families import FAMILIES, family_of, picture
from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.eyes import Eyes, Processor

# Each channel has its own mean and deviation.
NORMAL = {"do_normalize": True, "image_mean": [0.1, 0.4, 0.7], "image_std": [0.3, 0.5, 0.9]}


def processors(kind: str, folder: Path, **more: Any) -> tuple[Processor, Any]:
    _, settings, name = FAMILIES[kind]
    settings = {"image_processor_type": name} | settings | more
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return Processor(family_of(kind), folder), AutoImageProcessor.from_pretrained(folder)


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_channel_is_normalised_by_its_own_numbers(kind: str, tmp_path: Path) -> None:
    processor, oracle = processors(kind, tmp_path, **NORMAL)
    tower: Any = SimpleNamespace(parameters=dict, dtype=mx.float32)
    prepared = processor(picture(90, 60))
    eyes = Eyes(processor, tower, 1)
    mine = np.array(eyes._normalised(prepared.patches))
    theirs = oracle(images=[picture(90, 60).rgb], return_tensors="np")["pixel_values"]
    if kind.startswith("qwen"):  # two equal frames
        pixels = theirs.reshape(len(theirs), 3, 2, -1)[:, :, 0].reshape(mine.shape)
    elif kind == "gemma4":
        pixels = theirs[0, : len(mine)]
    else:
        height, width = prepared.grid
        p = theirs.shape[2] // height
        parts = theirs[0].reshape(3, height, p, width, p).transpose(1, 3, 0, 2, 4)
        pixels = parts.reshape(mine.shape)
    np.testing.assert_allclose(mine, pixels, atol=1e-5)
    # The control: in the other order they differ.
    eyes.family = replace(eyes.family, channels_last=not eyes.family.channels_last)
    assert np.abs(np.array(eyes._normalised(prepared.patches)) - pixels).max() > 0.1


def test_one_number_may_be_that_of_all_channels(tmp_path: Path) -> None:
    processor, _ = processors("gemma3", tmp_path)
    processor._processor.image_mean, processor._processor.image_std = 0.5, 0.25
    scale, offset = processor.scale_and_offset
    np.testing.assert_allclose(scale, [4 / 255] * 3)
    np.testing.assert_allclose(offset, [2.0] * 3)


@pytest.mark.parametrize(
    ("kind", "most"),
    [("qwen3_vl", 65_536), ("gemma3", 64**2), ("gemma4", 48**2), ("mistral3", 110**2)],
)
def test_the_largest_picture_that_a_tower_may_get(kind: str, most: int, tmp_path: Path) -> None:
    """The settings limit 16,777,216 pixels, a square of 896, 280 rows, and an edge of 1,540."""
    processor, _ = processors(kind, tmp_path)
    assert processor.most_patches == most
