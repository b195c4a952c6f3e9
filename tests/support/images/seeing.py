"""Tiny models with a tower of random features, and mlx-lm's forward with pictures as the oracle."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.nn as nn
import numpy as np

from tests.support.models import tiny_models as tiny
from tests.support.models.configs import VOCAB, config_of
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.images.eyes import Eyes
from vllm_metal_lite.images.family import Family, Prepared
from vllm_metal_lite.images.pictures import read
from vllm_metal_lite.images.positions import axis_of_frequency
from vllm_metal_lite.images.towers import Tower
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.pictures import Features

IMAGE = 7  # the token of a picture's row
# The frequencies of the heads of these models, by axis.
SECTIONS = {"qwen3_vl": [4, 2, 2], "qwen3_5": [1, 1, 0]}
# Written by hand: the axis of each frequency.
AXES = {"qwen3_vl": [0, 1, 2, 0, 1, 2, 0, 0], "qwen3_5": [0, 1]}
SEES = {"gemma3": "all", "gemma4": "sliding"}
NAMES = (*SECTIONS, *SEES)
# The first layers whose results get more features.
NUM_DEEP = {"qwen3_vl": 2}


class RandomTower(Tower):
    """A picture's features are random numbers that the seed and its first patch decide."""

    def __init__(self, name: str, seed: int = 0) -> None:
        super().__init__({})
        text = config_of(name)["text_config"]
        self.embed, self.seed = nn.Linear(1, 1), seed
        self.embed.weight, self.embed.bias = mx.full((1, 1), seed, mx.float32), mx.zeros(1)
        self.size, self.num_deep = text["hidden_size"], NUM_DEEP.get(name, 0)
        self.num_runs = 0

    def __call__(self, patches: mx.array, grid: tuple[int, int]) -> Features:
        self.num_runs += 1
        rng = np.random.default_rng([self.seed, *np.array(patches[0]).astype(int)])
        shape = 1 + self.num_deep, grid[0] * grid[1], self.size
        rows, *deep = (mx.array(a) for a in rng.standard_normal(shape).astype(np.float32))
        return Features(rows, tuple(deep))


class CountedEyes(Eyes):
    """num_looks: how many features steps asked for, kept ones included."""

    num_looks = 0

    def __call__(self, picture: Prepared) -> Features:
        self.num_looks += 1
        return super().__call__(picture)


def picture(seed: int, height: int, width: int) -> Prepared:
    patches = np.random.default_rng(seed).integers(0, 256, (height * width, 12), dtype=np.uint8)
    return Prepared(patches, (height, width), (height, width), patches[0].tobytes())


def eyes_of(name: str, seed: int = 0) -> CountedEyes:
    family = Family(
        RandomTower,
        "<image>",
        IMAGE,
        "",
        prepare=lambda found: found,
        text_of=lambda prepared: "",
        rotates_by_grid=name in SECTIONS,
        sees_whole_picture=SEES.get(name, ""),
        embed_scale=8.0 if name in SEES else 1.0,
    )
    normal = (np.ones(3), np.zeros(3))
    processor = SimpleNamespace(family=family, scale_and_offset=normal, settings="", of=read)
    return CountedEyes(processor, RandomTower(name, seed), 100)


@cache
def model_of(name: str) -> LoadedModel:
    loaded = tiny.load(name)
    if name in SECTIONS:
        axes = axis_of_frequency(SECTIONS[name])
        loaded.packed.axis_of_frequency = axes
    return loaded


def engine(name: str = "qwen3_vl", tower: int = 0, **options: Any) -> LLMEngine:
    """A small engine whose model sees, without drafts.  tower: the seed of its tower."""
    defaults = {"block_size": 8, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    config = EngineConfig(**{**defaults, "max_model_len": 80, "speculate": "off", **options})
    model = model_of(name).with_kv_bits(config.kv_bits)
    eyes = eyes_of(name, tower)
    with patch("vllm_metal_lite.images.eyes.attach", lambda *_: eyes):
        return LLMEngine(model, config)


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB, count).tolist()


def prompt(*parts: list[int] | Prepared) -> dict[str, Any]:
    """A prompt of tokens and pictures."""
    tokens: list[int] = []
    for part in parts:
        tokens += [IMAGE] * part.num_rows if isinstance(part, Prepared) else part
    pictures = [p for p in parts if isinstance(p, Prepared)]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": pictures}}


# The oracle


def logits(
    name: str, tokens: Sequence[int], pictures: Sequence[Prepared], wrong: str = ""
) -> np.ndarray:
    """mlx-lm's logits (n, V) of one sequence, its pictures put in from outside.

    wrong: "text" ignores pictures; "causal": no row sees a later one; "one axis": positions count
    tokens; "answer": positions behind the first picture count tokens.
    """
    model, eyes = tiny.build(config_of(name)), eyes_of(name)
    body = model.language_model.model
    ids = np.array(tokens)
    # The answer may have the token too; it is text there.
    at = np.flatnonzero(ids == IMAGE)[: sum(picture.num_rows for picture in pictures)]
    h = np.array(body.embed_tokens(mx.array(ids)[None]))[0]
    if pictures and wrong != "text":
        found = [eyes(picture) for picture in pictures]
        h[at] = np.concatenate([np.array(f.rows) for f in found])
        for layer, parts in enumerate(zip(*(f.deep for f in found), strict=True)):
            more = np.zeros_like(h)
            more[at] = np.concatenate([np.array(part) for part in parts])
            body.layers[layer] = Adding(body.layers[layer], more)
    if name in SECTIONS:
        positions = three_positions(len(ids), at, pictures)
        if wrong == "one axis":
            positions = [(i, i, i) for i in range(len(ids))]
        if wrong == "answer":
            last = at[-1] + 1 if len(at) else 0
            positions[last:] = [(i, i, i) for i in range(last, len(ids))]
        for layer in body.layers:
            if "self_attn" in layer:
                attention = layer["self_attn"]
                attention.rope = ThreeAxes(attention.rope, np.array(positions), AXES[name])
        out = model(mx.array(ids)[None], input_embeddings=mx.array(h)[None])
    else:
        sizes = [] if wrong == "causal" else [picture.num_rows for picture in pictures]
        with seeing_masks(len(ids), at, sizes, SEES[name]):
            # Gemma 4 has inputs of each layer by token; those of pictures are token 0's.
            ids[at] = 0
            out = model(mx.array(ids)[None], input_embeddings=mx.array(h)[None])
    return np.array(out)[0]


def three_positions(
    count: int, at: np.ndarray, pictures: Sequence[Prepared]
) -> list[tuple[int, int, int]]:
    """(time, row, column) of each token, token by token."""
    positions: list[tuple[int, int, int]] = []
    left, is_picture, start = list(pictures), set(at.tolist()), 0
    while len(positions) < count:
        if left and len(positions) in is_picture:
            height, width = left.pop(0).merged
            positions += [
                (start, start + y, start + x) for y in range(height) for x in range(width)
            ]
            start += max(height, width)
        else:
            positions.append((start, start, start))
            start += 1
    return positions


class ThreeAxes:
    """In place of nn.RoPE: the angle of each frequency follows one of three positions."""

    def __init__(self, rope: nn.RoPE, positions: np.ndarray, axis: Sequence[int]) -> None:
        assert len(axis) == rope.dims // 2
        frequencies = rope.base ** -(np.arange(len(axis)) / len(axis))
        self.dims, self.angles = rope.dims, positions[:, list(axis)] * frequencies

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        values, half = np.array(x, np.float64), self.dims // 2
        a, b = values[..., :half], values[..., half : self.dims]
        cos, sin = np.cos(self.angles), np.sin(self.angles)
        rotated = [a * cos - b * sin, b * cos + a * sin, values[..., self.dims :]]
        return mx.array(np.concatenate(rotated, axis=-1).astype(np.float32))


class Adding(nn.Module):
    """A layer whose result gets more features."""

    def __init__(self, layer: nn.Module, more: np.ndarray) -> None:
        super().__init__()
        self.layer, self.more, self.self_attn = layer, mx.array(more), layer.self_attn

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self.layer(*args, **kwargs) + self.more


@contextmanager
def seeing_masks(count: int, at: np.ndarray, sizes: Sequence[int], sees: str) -> Iterator[None]:
    """mlx-lm's Gemma under transformers' masks: rows of one picture see each other."""
    span = np.zeros((count, count), bool)
    for end, size in zip(np.cumsum(sizes, dtype=int), sizes, strict=True):
        rows = at[end - size : end]
        span[np.ix_(rows, rows)] = True

    def mask(h: Any, cache: Any = None, window_size: Any = None, return_array: Any = None) -> Any:
        q, k = np.arange(count)[:, None], np.arange(count)
        found = k <= q
        if window_size:
            found &= k > q - window_size
        return mx.array(found | span if sees == "all" or window_size else found)

    names = [f"mlx_lm.models.{kind}_text" for kind in SEES]
    modules = [importlib.import_module(name) for name in names]
    with (
        patch.object(modules[0], "create_attention_mask", mask),
        patch.object(modules[1], "create_attention_mask", mask),
    ):
        yield


def scores_of(output: Any) -> np.ndarray:
    """The log-probabilities of a prompt's tokens behind the first."""
    tokens = output.prompt_token_ids
    return np.array([output.prompt_logprobs[i][t].logprob for i, t in enumerate(tokens) if i])


def scores(of_logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """As `scores_of`, from logits."""
    wide = of_logits.astype(np.float64)
    of_all = wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)
    return of_all[np.arange(len(tokens) - 1), list(tokens[1:])]
