"""Whole families that see, from files to tokens, against transformers.

Here because transformers' models need torch, which the plugin's environment has.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_model

from tests.support.images import seeing
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.images.eyes import Eyes, read_tower
from vllm_metal_lite.images.families import Prepared, find_family
from vllm_metal_lite.images.towers import merge_order
from vllm_metal_lite.model import loader

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IMAGE, VOCAB = 7, 160
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MARKS = {"image_token_id": IMAGE, "video_token_id": 12}
BETWEEN = {"boi_token_id": 9, "eoi_token_id": 10}
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, **more}


QWEN_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
QWEN = {**MARKS, "vision_start_token_id": 9, "vision_end_token_id": 10}
QWEN_ROPE = rope(mrope_section=[6, 5, 5], mrope_interleaved=True)
QWEN5_TEXT = {
    **TEXT,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": rope(
        mrope_section=[3, 3, 2], mrope_interleaved=True, partial_rotary_factor=0.5
    ),
}
GEMMA3_TEXT = {
    **TEXT,
    "sliding_window": 17,
    "layer_types": LAYER_TYPES,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": rope(rope_theta=1e6),
        "sliding_attention": rope(),
    },
}
SIGLIP = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 32,
    "vision_use_head": False,
}
GEMMA4_TEXT = {
    **TEXT,
    "layer_types": LAYER_TYPES,
    "sliding_window": 17,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "tie_word_embeddings": True,
}
GEMMA4_VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "patch_size": 8,
    "position_embedding_size": 40,
    "pooling_kernel_size": 3,
    "default_output_length": 280,
    "rms_norm_eps": 1e-6,
}
GEMMA4 = {**MARKS, **BETWEEN, "audio_config": None, "audio_token_id": 11}
PIXTRAL = {
    "model_type": "pixtral",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}
MISTRAL_TEXT = {
    **TEXT,
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "rope_parameters": rope(),
    "sliding_window": None,
}

# Name -> transformers' class, text, vision, the rest of the configuration, and rows' patches.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "qwen3_vl": (
        "Qwen3VL",
        {**TEXT, "rope_theta": 1e4, "rope_parameters": QWEN_ROPE, "rope_scaling": QWEN_ROPE},
        QWEN_VISION,
        QWEN,
        2,
    ),
    "qwen3_5": ("Qwen3_5", QWEN5_TEXT, {**QWEN_VISION, "deepstack_visual_indexes": []}, QWEN, 2),
    "gemma3": (
        "Gemma3",
        GEMMA3_TEXT,
        SIGLIP,
        {
            **MARKS,
            "mm_tokens_per_image": 16,
            "image_token_index": IMAGE,
            "boi_token_index": 9,
            "eoi_token_index": 10,
        },
        2,
    ),
    "gemma4 with spans": (
        "Gemma4",
        {**GEMMA4_TEXT, "use_bidirectional_attention": "vision"},
        GEMMA4_VISION,
        GEMMA4,
        3,
    ),
    "gemma4 with inputs of layers": (
        "Gemma4",
        {**GEMMA4_TEXT, "hidden_size_per_layer_input": 16},
        {**GEMMA4_VISION, "use_clipped_linears": True, "standardize": True},
        GEMMA4,
        3,
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {**GEMMA4_TEXT, "use_bidirectional_attention": "vision"},
        {
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 64,
            "mm_posemb_size": 40,
            "output_proj_dims": 64,
        },
        GEMMA4,
        1,
    ),
    "mistral3": (
        "Mistral3",
        MISTRAL_TEXT,
        PIXTRAL,
        {
            "image_token_id": IMAGE,
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        2,
    ),
}
# transformers' processors: the values that normalise.
NORMALISED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
PLAIN = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "do_normalize": False}


class Case:
    """A family's model, made by transformers and saved, and two pictures."""

    def __init__(self, name: str, folder: Path) -> None:
        kind, text, vision, rest, self.merge = FAMILIES[name]
        self.kind, self.folder, self.patch = name.split()[0], folder, vision["patch_size"]
        if self.kind == "gemma4_unified":  # no tower: a row is a patch
            self.patch *= vision["pooling_kernel_size"]
        torch.manual_seed(0)
        torch.set_num_threads(1)
        config = getattr(transformers, f"{kind}Config")(
            text_config=dict(text),
            vision_config=dict(vision),
            tie_word_embeddings=text["tie_word_embeddings"],
            **rest,
        )
        self.model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for path, value in self.model.named_parameters():
                if value.ndim > 1 or "norm" not in path:
                    value.normal_(0, 0.15 if value.ndim > 1 else 0.1)
            for path, value in self.model.named_buffers():
                if path.endswith(("input_min", "output_min", "input_max", "output_max")):
                    value.fill_(-0.8 if path.endswith("min") else 0.8)
        self.model.save_pretrained(folder)
        # What transformers no longer writes, and mlx-lm reads.
        file = folder / "config.json"
        self.config = config = json.loads(file.read_text())
        more = {"qwen3_vl": {"rope_theta": 1e4, "rope_scaling": {**QWEN_ROPE, "type": "default"}}}
        more |= {kind: {"global_head_dim": 32} for kind in ("gemma4", "gemma4_unified")}
        config["text_config"] |= more.get(self.kind, {})
        config["text_config"]["tie_word_embeddings"] = text["tie_word_embeddings"]
        file.write_text(json.dumps({**config, "vocab_size": VOCAB}))
        settings = PLAIN if self.kind.startswith("gemma4") else NORMALISED
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        rng, k = np.random.default_rng(0), self.merge
        self.grids = [(2 * k, 3 * k), (k, 2 * k)] if self.kind != "gemma3" else [(8, 8)] * 2
        sizes = [(3, height * self.patch, width * self.patch) for height, width in self.grids]
        raw = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        scale, offset = (1 / 255, 0) if self.kind.startswith("gemma4") else (2 / 255, 1)
        self.pixels = [(picture * scale - offset).astype(np.float32) for picture in raw]
        self.pictures = [
            Prepared(
                self.patches(picture, grid),
                grid,
                (grid[0] // k, grid[1] // k),
                bytes([number]) * 16,
            )
            for number, (picture, grid) in enumerate(zip(raw, self.grids, strict=True))
        ]
        marks = [[9, *[IMAGE] * picture.num_rows, 10] for picture in self.pictures]
        words = [rng.integers(20, VOCAB, count).tolist() for count in (5, 4, 9)]
        self.tokens = [*words[0], *marks[0], *words[1], *marks[1], *words[2]]

    def patches(self, pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        p = self.patch
        parts = pixels.reshape(3, grid[0], p, grid[1], p)
        order = (1, 3, 2, 4, 0) if self.kind.startswith("gemma4") else (1, 3, 0, 2, 4)
        patches = parts.transpose(order).reshape(-1, 3 * p * p)
        if self.kind.startswith("qwen"):
            rows, columns = merge_order(grid, 2)
            patches = patches[rows * grid[1] + columns]
        return patches

    def inputs(self) -> dict[str, Any]:
        """The pictures as transformers takes them."""
        parts = [self.patches(a, g) for a, g in zip(self.pixels, self.grids, strict=True)]
        if self.kind.startswith("qwen"):  # two equal frames
            films = [np.repeat(a.reshape(-1, 3, 1, 16), 2, 2).reshape(-1, 96) for a in parts]
            grids = torch.tensor([[1, *grid] for grid in self.grids])
            return {"pixel_values": torch.tensor(np.concatenate(films)), "image_grid_thw": grids}
        if self.kind == "gemma3":
            return {"pixel_values": torch.tensor(np.stack(self.pixels))}
        if self.kind.startswith("gemma4"):
            most, width = max(map(len, parts)), parts[0].shape[1]
            pixels = np.zeros((2, most, width), np.float32)
            at = np.full((2, most, 2), -1)
            for i, (part, grid) in enumerate(zip(parts, self.grids, strict=True)):
                pixels[i, : len(part)] = part
                rows, columns = np.divmod(np.arange(len(part)), grid[1])
                at[i, : len(part)] = np.stack([columns, rows], axis=1)
            return {
                "pixel_values": torch.tensor(pixels),
                "image_position_ids": torch.tensor(at),
            }
        sizes = np.array([picture.shape[1:] for picture in self.pixels])
        pixels = np.zeros((2, 3, *sizes.max(axis=0)), np.float32)
        for out, picture in zip(pixels, self.pixels, strict=True):
            out[:, : picture.shape[1], : picture.shape[2]] = picture
        return {"pixel_values": torch.tensor(pixels), "image_sizes": torch.tensor(sizes)}

    def logits(self, tokens: list[int]) -> np.ndarray:
        ids = torch.tensor([tokens])
        kinds = {"gemma3": "token_type_ids", "mistral3": None}.get(self.kind, "mm_token_type_ids")
        is_picture = {kinds: (ids == IMAGE).long()} if kinds else {}
        masks = {}
        if self.kind == "gemma4_unified":
            # As `generate` makes them: rows see later ones in sliding layers.  The plain forward
            # of transformers 5.20 lets them see in all layers.
            masks["attention_mask"] = self.model.create_masks_for_generate(
                config=self.model.config,
                inputs_embeds=torch.zeros(1, len(tokens), TEXT["hidden_size"]),
                attention_mask=None,
                past_key_values=None,
                position_ids=torch.arange(len(tokens))[None],
                **is_picture,
            )
        with torch.no_grad():
            found = self.model(
                input_ids=ids, use_cache=False, **self.inputs(), **is_picture, **masks
            )
        return found.logits[0].float().numpy()

    def features(self) -> np.ndarray:
        with torch.no_grad():
            found = self.model.model.get_image_features(**self.inputs())
        rows = getattr(found, "pooler_output", found)
        rows = [rows] if isinstance(rows, torch.Tensor) else list(rows)
        width = TEXT["hidden_size"]
        return np.concatenate([part.reshape(-1, width).float().numpy() for part in rows])

    def engine(self, **options: Any) -> LLMEngine:
        model, config = load_model(self.folder)
        loaded = loader.from_model(model, None, config, name=self.kind)
        defaults = {"block_size": 8, "num_blocks": 64, "max_model_len": 96, "max_num_seqs": 4}
        return LLMEngine(
            replace(loaded, folder=self.folder),
            EngineConfig(**{**defaults, "attention": "reference", "speculate": "off", **options}),
        )


@cache
def case_in(name: str, folder: Path) -> Case:
    return Case(name, folder / name.replace(" ", "-"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def far(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, as a part of the spread."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.ptp(expected))


@pytest.mark.parametrize("name", FAMILIES)
def test_features_tokens_and_scores_are_those_of_transformers(name: str, folder: Path) -> None:
    """Chunks of 24 tokens cut pictures where these may be cut; a text request runs beside."""
    case = case_in(name, folder)
    engine = case.engine(max_num_batched_tokens=24)
    assert isinstance(engine.eyes, Eyes), engine.eyes.reason
    scale = engine.eyes.family.embed_scale
    features = np.concatenate([np.array(engine.eyes(p).rows) * scale for p in case.pictures])
    assert far(features, case.features()) < 1e-4

    # transformers would look for the picture of an image token in an answer.
    params = tiny.greedy(8, ignore_eos=True, prompt_logprobs=1, logit_bias={IMAGE: -100})
    asked = {"prompt_token_ids": case.tokens, "multi_modal_data": {"image": case.pictures}}
    output, text = tiny.outputs(engine, [asked, case.tokens[:4] * 3], params)
    answer = output.outputs[0].token_ids
    expected = case.logits(case.tokens + answer)
    scores = seeing.scores(expected, case.tokens)
    assert far(seeing.scores_of(output), scores) < 1e-4
    expected[:, IMAGE] -= 100
    assert answer == expected[len(case.tokens) - 1 : -1].argmax(-1).tolist()
    assert tiny.tokens_of([text]) == tiny.answers(case.engine(), [case.tokens[:4] * 3], params)

    # The control: the other order of pictures is another prompt.
    if case.grids[0] == case.grids[1]:
        asked["multi_modal_data"] = {"image": case.pictures[::-1]}
        other = tiny.ask(engine, asked, params)
        assert far(seeing.scores_of(other), scores) > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_quantised_tower_sees_what_its_weights_say(name: str, folder: Path) -> None:
    """The tower of 8 bits against the tower of the weights that these bits mean."""
    case = case_in(name, folder)
    family = find_family(case.config)
    assert family is not None
    plain, packed, count = {}, {}, 0
    for file in sorted(case.folder.glob("*.safetensors")):
        for path, value in mx.load(str(file)).items():
            plain[path] = packed[path] = value
            is_linear = path.endswith(".weight") and value.ndim == 2 and value.shape[1] % 32 == 0
            is_table = "position" in path or "pos_embed" in path
            if path.startswith(family.tower.all_prefixes()) and is_linear and not is_table:
                count += 1
                weight, scales, biases = mx.quantize(value, group_size=32, bits=8)
                packed[path] = weight
                stem = path.removesuffix("weight")
                packed |= {stem + "scales": scales, stem + "biases": biases}
                plain[path] = mx.dequantize(weight, scales, biases, group_size=32, bits=8)
    assert count >= (1 if case.kind == "gemma4_unified" else 8)
    rows = []
    for number, weights in enumerate((plain, packed)):
        place = folder / f"{case.folder.name}-{number}"
        place.mkdir()
        mx.save_safetensors(str(place / "model.safetensors"), weights)
        tower = read_tower(family, place, case.config)
        assert tower.dtype == mx.float32
        picture = case.pictures[0]
        pixels = mx.array(case.patches(case.pixels[0], picture.grid))
        rows.append(np.array(tower(pixels, picture.grid).rows))
    assert far(rows[1], rows[0]) < 1e-4
    # The control: the weights before they were quantised.
    assert far(rows[0], case.features()[: len(rows[0])]) > 1e-4
