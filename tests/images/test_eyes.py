"""What a tower gets are transformers' pixels, whatever the order of channels in a patch."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.images.test_families import FAMILIES, family_of, picture, pixels_of_transformers
from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.eyes import Eyes, Processor

# Each channel has its own.
NORMAL = {"do_normalize": True, "image_mean": [0.1, 0.4, 0.7], "image_std": [0.3, 0.5, 0.9]}


def processor_of(kind: str, folder: Path, **more: Any) -> Processor:
    _, settings, name = FAMILIES[kind]
    settings = {"image_processor_type": name} | settings | more
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return Processor(family_of(kind), folder)


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_channel_is_normalised_by_its_own_numbers(kind: str, tmp_path: Path) -> None:
    processor = processor_of(kind, tmp_path, **NORMAL)
    tower: Any = SimpleNamespace(parameters=dict, dtype=mx.float32)
    prepared = processor(picture(90, 60))
    eyes = Eyes(processor, tower, 1)
    mine = np.array(eyes._normalised(prepared.patches))
    pixels = pixels_of_transformers(kind, tmp_path, picture(90, 60).rgb, prepared)
    np.testing.assert_allclose(mine, pixels, atol=1e-5)
    # The control: in the other order they differ.
    eyes.family = replace(eyes.family, channels_last=not eyes.family.channels_last)
    assert np.abs(np.array(eyes._normalised(prepared.patches)) - pixels).max() > 0.1


def test_one_number_may_be_that_of_all_channels(tmp_path: Path) -> None:
    processor = processor_of("gemma3", tmp_path)
    processor._processor.image_mean, processor._processor.image_std = 0.5, 0.25
    scale, offset = processor.scale_and_offset
    np.testing.assert_allclose(scale, [4 / 255] * 3)
    np.testing.assert_allclose(offset, [2.0] * 3)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("qwen3_vl", 65_536),
        ("gemma3", 64**2),
        ("gemma4", 280 * 3**2),
        ("mistral3", 110**2),
        ("idefics3", 17 * 27**2),
        ("internvl", 13 * 32**2),
    ],
)
def test_the_largest_picture_that_a_tower_may_get(kind: str, most: int, tmp_path: Path) -> None:
    """As the settings say: 16,777,216 pixels, a square of 896, 280 rows, an edge of 1,540, and 16
    or 12 tiles beside the whole.  Most of these are no squares."""
    processor = processor_of(kind, tmp_path)
    assert processor.most_patches == most
