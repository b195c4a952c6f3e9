"""What each family makes of a picture: patches as transformers' processors cut them, the text that
replaces the picture, and the positions of its rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoImageProcessor

from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.images.eyes import Processor
from vllm_metal_lite.images.families import NOT_SERVED, find_family
from vllm_metal_lite.images.family import Family, Prepared
from vllm_metal_lite.images.pictures import picture_of
from vllm_metal_lite.images.positions import axes, axis_of_frequency
from vllm_metal_lite.images.prompts import expand, place
from vllm_metal_lite.model.files.inner_model import completed

QWEN = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
QWEN |= {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
QWEN |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SQUARE = {"size": {"height": 896, "width": 896}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN2 = {**QWEN, "patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 12845056}}
GLM = {"size": {"shortest_edge": 12544, "longest_edge": 9633792}, "patch_size": 14}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# Their processors also have to be told to divide a picture.
OPTIONS = {"internvl": {"crop_to_patches": True}}

# Name -> config.json, preprocessor_config.json, and the class there.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "qwen3_vl": ({"image_token_id": 7}, QWEN, "Qwen2VLImageProcessorFast"),
    "qwen3_5": ({"image_token_id": 7}, QWEN, "Qwen2VLImageProcessorFast"),
    "gemma3": (
        {"vision_config": {"patch_size": 14, "image_size": 896}},
        SQUARE,
        "Gemma3ImageProcessor",
    ),
    "gemma4": (
        {"text_config": {"use_bidirectional_attention": "vision"}},
        {},
        "Gemma4ImageProcessor",
    ),
    "mistral3": (
        {"image_token_index": 10, "spatial_merge_size": 2, "vision_config": {"patch_size": 14}},
        {"patch_size": 28, "size": {"longest_edge": 1540}},
        "PixtralImageProcessor",
    ),
    "llava": (
        {"image_token_index": 10, "vision_config": {"model_type": "pixtral", "patch_size": 16}},
        {"patch_size": 16, "size": {"longest_edge": 1024}},
        "PixtralImageProcessor",
    ),
    "qwen2_vl": ({"image_token_id": 7}, QWEN2, "Qwen2VLImageProcessor"),
    "qwen2_5_vl": ({"image_token_id": 7}, QWEN2, "Qwen2VLImageProcessor"),
    "glm4v": ({"image_token_id": 7}, GLM, "Glm4vImageProcessor"),
    "glm4v_moe": ({"image_token_id": 7}, GLM, "Glm4vImageProcessor"),
    "glm_ocr": ({"image_token_id": 7}, GLM, "Glm46VImageProcessor"),
    "glm46v": ({"image_token_id": 7}, GLM, "Glm46VImageProcessor"),
    # 384 pixels are no multiple of 14: a rest of 6 at the edges is left out.
    "idefics3": (
        {"scale_factor": 3, "vision_config": {"patch_size": 14, "image_size": 384}},
        {"max_image_size": {"longest_edge": 384}, "size": {"longest_edge": 1536}, **HALVES},
        "Idefics3ImageProcessor",
    ),
    "smolvlm": (
        {"scale_factor": 4, "vision_config": {"patch_size": 16, "image_size": 128}},
        {"max_image_size": {"longest_edge": 128}, "size": {"longest_edge": 512}, **HALVES},
        "SmolVLMImageProcessor",
    ),
    "internvl": ({}, {"size": {"height": 448, "width": 448}}, "GotOcr2ImageProcessorFast"),
    "pixtral": (
        {"image_token_index": 10, "vision_config": {"patch_size": 16}},
        {"patch_size": 16, "size": {"longest_edge": 1024}},
        "PixtralImageProcessor",
    ),
}


def config_of(kind: str) -> dict[str, Any]:
    return {"model_type": kind, "vision_config": {}, "text_config": {}} | FAMILIES[kind][0]


def family_of(kind: str) -> Family:
    family = find_family(config_of(kind))
    assert family is not None
    return family


def picture(height: int, width: int) -> Any:
    rng = np.random.default_rng(height * width)
    return picture_of(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def unit(family: Family, merged: tuple[int, int], name: bytes = b"") -> Prepared:
    return Prepared(np.zeros((1, 3), np.uint8), (1, 1), merged, name)


def pixels_of_transformers(kind: str, folder: Path, rgb: np.ndarray, mine: Prepared) -> np.ndarray:
    """The patches of transformers' processor in a folder, (P, values), as `mine` is cut."""
    theirs = AutoImageProcessor.from_pretrained(folder)(
        images=[rgb], return_tensors="np", **OPTIONS.get(kind, {})
    )
    pixels: np.ndarray = theirs["pixel_values"]
    if kind.startswith(("qwen", "glm")):  # two equal frames
        pixels = pixels.reshape(len(pixels), 3, 2, -1)[:, :, 0]
    elif kind == "gemma4":
        pixels = pixels[0][theirs["image_position_ids"][0, :, 0] >= 0]
        assert mine.num_rows == theirs["num_soft_tokens_per_image"][0]
    else:
        *_, height, width = pixels.shape
        p = height // mine.grid[0]
        views = pixels.reshape(-1, 3, height, width)[..., : height // p * p, : width // p * p]
        parts = views.reshape(len(views), 3, height // p, p, width // p, p)
        pixels = parts.transpose(0, 2, 4, 1, 3, 5)
    return pixels.reshape(mine.patches.shape)


@pytest.mark.parametrize("size", [(300, 500), (64, 700), (33, 41), (1000, 1000)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_patches_are_those_of_transformers(
    kind: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """In their values after scaling: transformers scales before it cuts, and in another order."""
    _, settings, name = FAMILIES[kind]
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": name} | settings)
    )
    processor = Processor(family_of(kind), tmp_path)
    mine = processor(picture(*size))
    pixels = pixels_of_transformers(kind, tmp_path, picture(*size).rgb, mine)
    scale, offset = (a[:, None] for a in processor.scale_and_offset)
    values = mine.patches.reshape(len(mine.patches), 3, -1) * scale - offset
    np.testing.assert_allclose(values.reshape(pixels.shape), pixels, atol=1e-6)


def test_fields_that_files_leave_out_are_those_of_transformers() -> None:
    """As in Pixtral 12B, whose vision_config has no sizes."""
    vision = {"model_type": "pixtral", "patch_size": 16, "hidden_act": "silu"}
    config = {"model_type": "pixtral", "text_config": {}, "vision_config": vision}
    found = completed(config)["vision_config"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    assert [found[name] for name in sizes] == [1024, 4096, 24, 16]
    assert (found["hidden_act"], found["patch_size"]) == ("silu", 16)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_reading_a_configuration_does_not_change_it(kind: str) -> None:
    config = config_of(kind)
    config["text_config"] = {"rope_scaling": {"mrope_section": [1]}, **config["text_config"]}
    before = json.dumps(config)
    completed(config)
    assert json.dumps(config) == before


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_token_of_a_row_has_two_names(kind: str) -> None:
    """The value of the file takes precedence over transformers' default for the other name."""
    for name in ("image_token_id", "image_token_index"):
        config = {k: v for k, v in config_of(kind).items() if not k.startswith("image_token")}
        family = find_family({**config, name: 77})
        assert family is not None
        assert family.image_token_id == 77


def test_a_picture_is_prepared_once(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN))
    processor = Processor(family_of("qwen3_vl"), tmp_path)
    assert processor(picture(90, 60)) is processor(picture(90, 60))


def test_a_picture_that_is_too_narrow_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN))
    processor = Processor(family_of("qwen3_vl"), tmp_path)
    with pytest.raises(RequestError, match=r"a picture of 2010 x 10 pixels: .*ratio"):
        processor(picture(10, 2010))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen3_vl", "<|image_pad|>" * 6),
        ("qwen2_5_vl", "<|image_pad|>" * 6),
        ("glm4v", "<|image|>" * 6),
        ("gemma4", "<|image>" + "<|image|>" * 6 + "<image|>"),
        ("mistral3", "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"),
        (
            "gemma3",
            "\n\n<start_of_image>" + "<image_soft_token>" * 6 + "<end_of_image>\n\n",
        ),
    ],
)
def test_the_text_of_a_picture(kind: str, text: str) -> None:
    family = family_of(kind)
    prompt = f"a {family.placeholder} b"
    assert expand(prompt, family, [unit(family, (2, 3))]) == f"a {text} b"


def test_pictures_are_placed_in_order() -> None:
    family = family_of("qwen3_vl")
    pictures = [unit(family, (2, 3), b"A"), unit(family, (1, 2), b"B")]
    tokens = [1, *[7] * 6, 2, 3, *[7] * 2, 4]
    placed = place(tokens, family, pictures)
    assert placed.rows.tolist() == [1, 2, 3, 4, 5, 6, 9, 10]
    assert placed.ends.tolist() == [6, 8]
    names = [placed.extra_name(at, at + 2) for at in range(0, 12, 2)]
    assert names == [b"A", b"A", b"A", b"A", b"B", b"B"]
    assert placed.extra_name(7, 9) == b""
    assert placed.extra_name(0, 12) == b"AB"


@pytest.mark.parametrize("num_places", [1, 3])
def test_a_prompt_must_have_a_place_for_each_picture(num_places: int) -> None:
    family = family_of("qwen3_vl")
    pictures = [unit(family, (1, 1)), unit(family, (1, 1))]
    prompt = family.placeholder * num_places
    if num_places > len(pictures):
        with pytest.raises(RequestError, match=r"has 3 places for pictures .* 2 pictures"):
            expand(prompt, family, pictures)
    with pytest.raises(RequestError, match=f"has {num_places} image tokens .* have 2 rows"):
        place([7] * num_places, family, pictures)


def test_positions_of_rows() -> None:
    """Text counts on all axes; a picture of 2 x 3 rows turns the text behind it by 3, not 6."""
    positions = axes(10, [2], [(2, 3)])
    assert positions.T.tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        *[[2, 2 + row, 2 + column] for row in range(2) for column in range(3)],
        [5, 5, 5],
        [6, 6, 6],
    ]


def test_frequencies_take_turns_among_the_axes() -> None:
    assert axis_of_frequency([3, 3, 2]).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert axis_of_frequency([6, 1, 1]).tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_frequencies_of_an_axis_follow_one_another_in_older_models() -> None:
    assert axis_of_frequency([2, 3, 3], in_turns=False).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    in_turns = {kind for kind in FAMILIES if family_of(kind).rotates_in_turns}
    by_grid = {kind for kind in FAMILIES if family_of(kind).rotates_by_grid}
    assert in_turns & by_grid == {"qwen3_vl", "qwen3_5"}
    of_glm = {"glm4v", "glm4v_moe", "glm46v", "glm_ocr"}
    assert by_grid - in_turns == {"qwen2_vl", "qwen2_5_vl"} | of_glm


@pytest.mark.parametrize("kind", [*NOT_SERVED, "llava", "a_type_of_next_year"])
def test_models_whose_pictures_are_not_served_say_why(kind: str) -> None:
    reason = NOT_SERVED.get(kind, "its vision tower is not built here")
    with pytest.raises(RequestError, match=f"not served for {kind}.*: {reason}"):
        find_family({"model_type": kind, "vision_config": {"model_type": "clip_vision_model"}})
    assert find_family({"model_type": kind}) is None  # its text alone


@pytest.mark.parametrize("config", [{"model_type": "qwen3"}, {"model_type": "qwen3_vl"}])
def test_a_model_without_a_tower_has_no_family(config: dict[str, Any]) -> None:
    assert find_family(config) is None
