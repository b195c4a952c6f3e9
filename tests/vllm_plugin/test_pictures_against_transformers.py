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
from mlx.utils import tree_flatten

from tests.support.images import seeing
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.images.eyes import Eyes, joined, read_tower
from vllm_metal_lite.images.families import find_family, tiled
from vllm_metal_lite.images.family import Prepared
from vllm_metal_lite.images.towers import flattened, merge_order, renamed
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.files import inner_model
from vllm_metal_lite.model.files.checkpoint import load_checkpoint
from vllm_metal_lite.model.files.inner_model import completed

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
LLAVA = {"image_token_id": IMAGE, "image_token_index": IMAGE, "vision_feature_layer": -1}
LLAVA |= {"vision_feature_select_strategy": "full"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"norm_topk_prob": True}
LLAMA_TEXT = {**MISTRAL_TEXT, "model_type": "llama"}
QWEN2_TEXT = {name: value for name, value in TEXT.items() if name != "head_dim"}
QWEN2_TEXT |= {"rope_parameters": rope(mrope_section=[2, 3, 3])}
QWEN2_VISION = {
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": 64,
    "mlp_ratio": 2,
    "num_heads": 2,
    "patch_size": 4,
}
# Windows of 2 x 2 rows.
QWEN25_VISION = {**QWEN_VISION, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1]}
GLM_TEXT = {**QWEN2_TEXT, "num_attention_heads": 2, "num_key_value_heads": 1}
GLM_TEXT |= {"rope_parameters": rope(mrope_section=[2, 3, 3], partial_rotary_factor=0.5)}
GLM_MOE_TEXT = {
    **GLM_TEXT,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
GLM_VISION = {**QWEN_VISION, "image_size": 16, "intermediate_size": 80}
GLM = {**MARKS, "image_start_token_id": 9, "image_end_token_id": 10}
TILES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
LFM2_TEXT = {
    **QWEN2_TEXT,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention"] * 2,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
    "rope_parameters": rope(),
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
    "mistral3": ("Mistral3", MISTRAL_TEXT, PIXTRAL, {**LLAVA, "spatial_merge_size": 2}, 2),
    "pixtral": ("Llava", MISTRAL_TEXT, PIXTRAL, LLAVA, 1),
    "llava": ("Llava", MISTRAL_TEXT, PIXTRAL, LLAVA, 1),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {**TEXT, **EXPERTS, "rope_theta": 1e4, "rope_parameters": QWEN_ROPE},
        QWEN_VISION,
        QWEN,
        2,
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**QWEN5_TEXT, **EXPERTS, "shared_expert_intermediate_size": 32},
        {**QWEN_VISION, "deepstack_visual_indexes": []},
        QWEN,
        2,
    ),
    "qwen2_vl": ("Qwen2VL", QWEN2_TEXT, QWEN2_VISION, QWEN, 2),
    "qwen2_5_vl": ("Qwen2_5_VL", QWEN2_TEXT, QWEN25_VISION, QWEN, 2),
    "glm4v": ("Glm4v", GLM_TEXT, GLM_VISION, GLM, 2),
    "glm46v": ("Glm46V", {**GLM_TEXT, "model_type": "glm4v_text"}, GLM_VISION, GLM, 2),
    "glm4v_moe": ("Glm4vMoe", GLM_MOE_TEXT, GLM_VISION, GLM, 2),
    "glm_ocr": ("GlmOcr", GLM_TEXT, {**GLM_VISION, "attention_bias": True}, GLM, 2),
    "idefics3": ("Idefics3", LLAMA_TEXT, TILES, {"image_token_id": IMAGE, "scale_factor": 2}, 2),
    "smolvlm": ("SmolVLM", LLAMA_TEXT, TILES, {"image_token_id": IMAGE, "scale_factor": 2}, 2),
    "internvl": (
        "InternVL",
        {**QWEN2_TEXT, "model_type": "qwen2", "rope_parameters": rope()},
        {**TILES, "attention_bias": True, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_token_id": IMAGE},
        2,
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        LFM2_TEXT,
        {**TILES, "model_type": "siglip2_vision_model", "num_patches": 16},
        {"image_token_id": IMAGE, "projector_hidden_size": 48},
        2,
    ),
}
QWEN2 = ("qwen2_vl", "qwen2_5_vl")
PIXTRALS = ("mistral3", "pixtral", "llava")
TILED = ("idefics3", "smolvlm", "internvl", "lfm2_vl")
# The published config.json of models, without fields that change nothing here.  They leave out
# sizes, and name the tower in several ways.  Name -> type of the whole, the rest.
PIXTRAL_SIZES = {"model_type": "pixtral", "head_dim": 64, "patch_size": 16, "image_size": 1024}
SMALL = {"num_hidden_layers": 1, "vocab_size": 64}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-VL-4B": (
        "qwen3_vl",
        {
            "text_config": {**SMALL, "model_type": "qwen3_vl_text", "hidden_size": 2560},
            "vision_config": {
                "deepstack_visual_indexes": [5, 11, 17],
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "model_type": "qwen3_vl",
                "out_hidden_size": 2560,
            },
        },
    ),
    "Qwen2-VL-7B": (
        "qwen2_vl",
        {
            **SMALL,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {
                "depth": 32,
                "embed_dim": 1280,
                "mlp_ratio": 4,
                "num_heads": 16,
                "in_chans": 3,
                "hidden_size": 3584,
                "patch_size": 14,
                "spatial_patch_size": 14,
            },
        },
    ),
    "Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        {
            **SMALL,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {
                "hidden_size": 1280,
                "in_chans": 3,
                "model_type": "qwen2_5_vl",
                "out_hidden_size": 2048,
                "spatial_patch_size": 14,
                "tokens_per_second": 2,
            },
        },
    ),
    "GLM-4.1V-9B": (
        "glm4v",
        {
            "text_config": {
                **SMALL,
                "model_type": "glm4v_text",
                "hidden_size": 4096,
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
            },
            "vision_config": {"model_type": "glm4v", "depth": 24, "hidden_size": 1536},
        },
    ),
    "GLM-OCR": (
        "glm_ocr",
        {
            "text_config": {**SMALL, "model_type": "glm_ocr_text", "hidden_size": 1536},
            "vision_config": {"model_type": "glm_ocr_vision", "depth": 24},
        },
    ),
    "gemma-3-4b": (
        "gemma3",
        {
            "text_config": {**SMALL, "model_type": "gemma3_text", "hidden_size": 2560},
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    "pixtral-12b": (
        "llava",
        {
            "text_config": {**SMALL, "model_type": "mistral", "hidden_size": 5120},
            "vision_config": PIXTRAL_SIZES,
        },
    ),
    "Mistral-Small-3.1": (
        "mistral3",
        {
            "spatial_merge_size": 2,
            "text_config": {**SMALL, "model_type": "mistral", "hidden_size": 5120},
            "vision_config": {**PIXTRAL_SIZES, "patch_size": 14, "image_size": 1540},
        },
    ),
    "SmolVLM-Instruct": (
        "idefics3",
        {
            "scale_factor": 3,
            "text_config": {**SMALL, "model_type": "llama", "hidden_size": 2048},
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 384,
                "intermediate_size": 4304,
                "model_type": "idefics3",
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
        },
    ),
    "SmolVLM2-256M": (
        "smolvlm",
        {
            "scale_factor": 4,
            "text_config": {
                **SMALL,
                "model_type": "llama",
                "hidden_size": 576,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
            },
            "vision_config": {
                "hidden_size": 768,
                "image_size": 512,
                "model_type": "smolvlm_vision",
                "num_attention_heads": 12,
                "patch_size": 16,
            },
        },
    ),
    "InternVL3-1B-hf": (
        "internvl",
        {
            "text_config": {
                **SMALL,
                "model_type": "qwen2",
                "hidden_size": 896,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
            },
            "vision_config": {
                "attention_bias": True,
                "model_type": "internvl_vision",
                "norm_type": "layer_norm",
            },
        },
    ),
    "LFM2-VL-450M": (
        "lfm2-vl",
        {
            "downsample_factor": 2,
            "image_token_index": 396,
            "projector_hidden_size": 2560,
            "text_config": {
                **SMALL,
                "model_type": "lfm2",
                "hidden_size": 1024,
                "num_attention_heads": 16,
                "num_hidden_layers": 2,
                "layer_types": ["conv", "full_attention"],
                "block_auto_adjust_ff_dim": True,
                "block_dim": 1024,
                "block_ff_dim": 6656,
                "block_ffn_dim_multiplier": 1.0,
                "block_multiple_of": 256,
                "intermediate_size": 6656,
            },
            "vision_config": {
                "hidden_size": 768,
                "model_type": "siglip2_vision_model",
                "num_attention_heads": 12,
                "vision_use_head": False,
            },
        },
    ),
}
# The others run by the model inside.
KNOWN_TO_MLX_LM = ("qwen3_vl", "qwen2_vl", "qwen2_5_vl", "gemma3", "llava", "mistral3")
# transformers' processors: the values that normalise.
NORMALISED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
PLAIN = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "do_normalize": False}


class Case:
    """A family's model, made by transformers and saved, and two pictures."""

    def __init__(self, name: str, folder: Path) -> None:
        kind, text, vision, rest, self.merge = FAMILIES[name]
        self.kind, self.folder, self.patch = name.split()[0], folder, vision["patch_size"]
        if self.kind == "internvl":
            self.patch = self.patch[0]
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
        # The published files of Qwen3.5 have the experts of a layer in one tensor.
        self.model.save_pretrained(folder, save_original_format=self.kind != "qwen3_5_moe")
        if self.kind == "qwen3_vl_moe":  # the published files have these the other way round
            saved = folder / "model.safetensors"
            tensors = {
                path: value.swapaxes(1, 2) if ".experts." in path else value
                for path, value in mx.load(str(saved)).items()
            }
            mx.save_safetensors(str(saved), tensors)
        # What transformers no longer writes, and mlx-lm reads.
        file = folder / "config.json"
        self.config = config = json.loads(file.read_text())
        mrope = {"rope_theta": 1e4, "rope_scaling": {**QWEN_ROPE, "type": "default"}}
        more = {"qwen3_vl": mrope, "qwen3_vl_moe": {**mrope, **EXPERTS}}
        sections = {"mrope_section": [2, 3, 3], "type": "mrope"}
        more |= {kind: {"rope_theta": 1e4, "rope_scaling": sections} for kind in QWEN2}
        more |= {kind: {"global_head_dim": 32} for kind in ("gemma4", "gemma4_unified")}
        config["text_config"] |= more.get(self.kind, {})
        config["text_config"]["tie_word_embeddings"] = text["tie_word_embeddings"]
        if self.kind == "pixtral":
            config["model_type"] = "pixtral"
        file.write_text(json.dumps({**config, "vocab_size": VOCAB}))
        settings = PLAIN if self.kind.startswith("gemma4") else NORMALISED
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        # Two pictures; a tiled one is also seen as a whole, at the end.
        rng, k = np.random.default_rng(0), self.merge
        self.grids = [[(2 * k, 3 * k)], [(k, 2 * k)]]
        if self.kind == "gemma3":
            self.grids = [[(8, 8)]] * 2
        if self.kind in TILED:
            whole = (2, 6) if self.kind == "lfm2_vl" else (4, 4)
            self.grids = [[(4, 4), (4, 4), whole], [whole]]
        p = self.patch
        raw = [
            [rng.integers(0, 256, (3, h * p, w * p), dtype=np.uint8) for h, w in grids]
            for grids in self.grids
        ]
        scale, offset = (1 / 255, 0) if self.kind.startswith("gemma4") else (2 / 255, 1)
        self.scale, self.offset = scale, offset
        self.pixels = [(view * scale - offset).astype(np.float32) for part in raw for view in part]
        self.pictures = []
        for number, (views, grids) in enumerate(zip(raw, self.grids, strict=True)):
            height, width = grids[-1]
            prepared = tiled(views, p, k, (1, len(views) - 1))
            if self.kind not in TILED:
                patches, merged = self.patches(views[0], grids[0]), (height // k, width // k)
                prepared = Prepared(patches, grids[0], merged)
            self.pictures.append(prepared._replace(digest=bytes([number]) * 16))
        marks = [[9, *[IMAGE] * picture.num_rows, 10] for picture in self.pictures]
        words = [rng.integers(20, VOCAB, count).tolist() for count in (5, 4, 9)]
        self.tokens = [*words[0], *marks[0], *words[1], *marks[1], *words[2]]

    def patches(self, pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        p = self.patch
        parts = pixels.reshape(3, grid[0], p, grid[1], p)
        is_last = self.kind.startswith("gemma4") or self.kind == "lfm2_vl"
        order = (1, 3, 2, 4, 0) if is_last else (1, 3, 0, 2, 4)
        patches = parts.transpose(order).reshape(-1, 3 * p * p)
        if self.kind.startswith(("qwen", "glm")):
            rows, columns = merge_order(grid, 2)
            patches = patches[rows * grid[1] + columns]
        return patches

    def inputs(self) -> dict[str, Any]:
        """The pictures as transformers takes them."""
        all_grids = [grid for grids in self.grids for grid in grids]
        parts = [self.patches(a, g) for a, g in zip(self.pixels, all_grids, strict=True)]
        if self.kind.startswith(("qwen", "glm")):  # two equal frames
            films = [np.repeat(a.reshape(-1, 3, 1, 16), 2, 2).reshape(-1, 96) for a in parts]
            grids = torch.tensor([[1, *grid] for grid in all_grids])
            return {"pixel_values": torch.tensor(np.concatenate(films)), "image_grid_thw": grids}
        if self.kind in ("gemma3", "internvl"):
            return {"pixel_values": torch.tensor(np.stack(self.pixels))}
        if self.kind in ("idefics3", "smolvlm"):
            return {"pixel_values": torch.tensor(np.stack(self.pixels))[None]}
        if self.kind.startswith("gemma4") or self.kind == "lfm2_vl":
            most, width = max(map(len, parts)), parts[0].shape[1]
            pixels = np.zeros((len(parts), most, width), np.float32)
            at = np.full((len(parts), most, 2), -1)
            for i, (part, grid) in enumerate(zip(parts, all_grids, strict=True)):
                pixels[i, : len(part)] = part
                rows, columns = np.divmod(np.arange(len(part)), grid[1])
                at[i, : len(part)] = np.stack([columns, rows], axis=1)
            if self.kind == "lfm2_vl":
                return {
                    "pixel_values": torch.tensor(pixels),
                    "pixel_attention_mask": torch.tensor(at[..., 0] >= 0).int(),
                    "spatial_shapes": torch.tensor(all_grids),
                }
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
        kinds = {"gemma3": "token_type_ids"} | dict.fromkeys((*TILED, *PIXTRALS))
        kinds = kinds.get(self.kind, "mm_token_type_ids")
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
        model, config, _ = load_checkpoint(self.folder, trust_remote_code=False)
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


# The towers of these are others'.
SAME_TOWER = ("qwen3_vl_moe", "qwen3_5_moe", "llava", "glm46v", "glm4v_moe", "smolvlm")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SAME_TOWER])
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
        pixels = mx.array(picture.patches.astype(np.float32) * case.scale - case.offset)
        found = joined([tower(part, grid) for part, grid in picture.views(pixels)])
        rows.append(np.array(found.rows))
    assert far(rows[1], rows[0]) < 1e-4
    # The control: the weights before they were quantised.
    assert far(rows[0], case.features()[: len(rows[0])]) > 1e-4


def published(name: str) -> tuple[dict[str, Any], Any, dict[str, mx.array]]:
    """config.json, transformers' configuration, and weights that take no memory."""
    kind, rest = PUBLISHED[name]
    theirs = transformers.AutoConfig.for_model(kind.replace("-", "_"), **rest)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(theirs)
    tensors = {
        path: mx.broadcast_to(mx.zeros(()), tuple(value.shape))
        for path, value in model.state_dict().items()
    }
    return {"model_type": kind, **rest}, theirs, tensors


def shapes(weights: Any) -> dict[str, tuple[int, ...]]:
    return {path: value.shape for path, value in dict(weights).items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_make_towers_of_the_published_sizes(name: str) -> None:
    """Names and shapes of all weights, as transformers has them."""
    config, _, tensors = published(name)
    family = find_family(config)
    assert family is not None
    expected = {
        path: flattened(value) if value.ndim > 3 else value
        for path, value in renamed(family.tower, tensors).items()
    }
    built = family.tower(completed(config))
    assert shapes(tree_flatten(built.parameters())) == shapes(expected)


INSIDE = [name for name, (kind, _) in PUBLISHED.items() if kind not in KNOWN_TO_MLX_LM]


@pytest.mark.parametrize("name", INSIDE)
def test_published_configurations_make_the_language_model_inside(name: str, tmp_path: Path) -> None:
    config, theirs, tensors = published(name)
    if theirs.tie_word_embeddings or config["model_type"] == "lfm2-vl":
        del tensors["lm_head.weight"]
    else:
        saved = {"lm_head.weight": mx.zeros(1)}  # only its name is read
        mx.save_safetensors(str(tmp_path / "model.safetensors"), saved)
    found = inner_model.Model(inner_model.inner_model(config, tmp_path))
    expected = found.sanitize(tensors)
    assert len(expected) > 8
    assert shapes(tree_flatten(found.parameters())) == shapes(expected)
