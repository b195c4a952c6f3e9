"""What the serving benchmarks run: loads, and models with random weights at real sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.model.loader import LoadedModel, from_model, load

# isort: split
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import qwen3

mx = backend.mx

_QWEN3 = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def _shape(
    hidden: int, layers: int, inner: int, heads: int, kv: int, dim: int, vocab: int, context: int
) -> dict:
    return {
        **_QWEN3,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


SHAPES = {
    "qwen3-0.6b": _shape(1024, 28, 3072, 16, 8, 128, 151936, 40960),
    "qwen3-4b": _shape(2560, 36, 9728, 32, 8, 128, 151936, 40960),
}


def random_config(name: str) -> dict:
    """A key of SHAPES, or HIDDENxLAYERS: heads of 64, two a KV head, vocabulary 8,192."""
    if name in SHAPES:
        return SHAPES[name]
    hidden, layers = map(int, name.split("x"))
    return _shape(
        hidden, layers, 3 * hidden, hidden // 64, max(hidden // 128, 1), 64, 8192, 8192
    )  # fmt: skip


def random_model(
    name: str, dtype: mx.Dtype = mx.float32, bits: int | None = None, **changes: int
) -> LoadedModel:
    """`random_config` with random weights, made in memory; changes: other values of the config.

    Matrices are normal with variance 1 / inputs and norms 1, so that context and order move the
    logits by about their own spread.  bits: quantised, 64 weights a scale.
    """
    config = {**random_config(name), **changes}
    model: nn.Module = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.random.seed(0)

    def fill(w: mx.array) -> mx.array:
        if w.ndim < 2:
            return mx.ones(w.shape, dtype)
        return (mx.random.normal(w.shape) * w.shape[-1] ** -0.5).astype(dtype)

    model.update(tree_map(fill, model.parameters()))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    suffix = f", {bits} bit" if bits else ""
    return from_model(model, None, config, name=f"{name} {str(dtype).split('.')[-1]}{suffix}")


def get_model(name: str, dtype: str = "auto", bits: int | None = None) -> LoadedModel:
    """Random weights for what `random_config` knows; anything else is loaded by name."""
    is_shape = name in SHAPES or name.replace("x", "", 1).isdigit()
    if not is_shape:
        if bits:
            raise MetalLiteError(f"--bits {bits} is for random weights, and {name!r} is a model")
        return load(name, dtype)
    if dtype == "auto":
        dtype = "float32" if backend.is_cpu() else "bfloat16"
    return random_model(name, getattr(mx, dtype), bits)


@dataclass(frozen=True)
class Wave:
    """Requests that arrive together, once each of the wave before has `after` tokens."""

    prompts: list[list[int]]
    max_tokens: list[int]
    after: int = 0


@dataclass(frozen=True)
class Load:
    """waves: in order of arrival.

    prefix_length: tokens that all prompts share; engines whose API must be told are told.
    ends_with_last_wave: the run ends when the last wave is done, whoever else is still running.
    """

    name: str
    waves: list[Wave]
    prefix_length: int = 0
    ends_with_last_wave: bool = False

    @property
    def prompts(self) -> list[list[int]]:
        return [p for w in self.waves for p in w.prompts]

    @property
    def max_tokens(self) -> list[int]:
        return [n for w in self.waves for n in w.max_tokens]

    @property
    def longest(self) -> int:
        return max(len(p) + n for p, n in zip(self.prompts, self.max_tokens, strict=True))


class Sizes:
    """Token ids from a fixed seed, and numbers under one scale (never below `least`)."""

    def __init__(self, vocab_size: int, scale: float) -> None:
        self.vocab_size, self.scale = vocab_size, scale
        self.rng = np.random.default_rng(0)

    def __call__(self, n: float, least: int = 1) -> int:
        return max(int(n * self.scale), least)

    def tokens(self, n: int) -> list[int]:
        return self.rng.integers(0, self.vocab_size, n).tolist()

    def between(self, low: int, high: int, count: int) -> list[int]:
        return self.rng.integers(low, high + 1, count).tolist()


def _at_once(name: str, prompts: list[list[int]], max_tokens: list[int], prefix: int = 0) -> Load:
    return Load(name, [Wave(prompts, max_tokens)], prefix)


def mixed_lengths(s: Sizes) -> list[Load]:
    """A and B: 64 requests of 128 to 1,024 tokens in, 128 out, all at once."""
    count, out = s(64, 4), s(128, 8)
    lengths = s.between(s(128, 8), s(1024, 32), count)
    return [_at_once("mixed lengths", [s.tokens(n) for n in lengths], [out] * count)]


def decode_only(s: Sizes) -> list[Load]:
    """C: 64 requests whose context is 700 on average while they decode 256 tokens."""
    count, out = s(64, 4), s(256, 32)
    prompts = [s.tokens(s(700, 32) - out // 2) for _ in range(count)]
    return [_at_once("decode only", prompts, [out] * count)]


def single(s: Sizes) -> list[Load]:
    """D: one request, 512 in, 256 out."""
    return [_at_once("one request", [s.tokens(s(512, 8))], [s(256, 8)])]


def agents(s: Sizes) -> list[Load]:
    """E: 32 requests that share 4,600 tokens, 64 of their own, 70 out, in four waves.

    A wave arrives when each request of the one before has half of its answer.
    """
    per_wave, out, own = s(8, 2), s(70, 8), s(64, 4)
    prefix = s.tokens(s(4600, 64))
    waves = [
        Wave([prefix + s.tokens(own) for _ in range(per_wave)], [out] * per_wave, out // 2)
        for _ in range(4)
    ]
    return [Load("agents", waves, len(prefix))]


def newcomer(s: Sizes) -> list[Load]:
    """F: four decodes at context 512, then a prompt of 4,096 tokens, 64 out."""
    decodes = Wave([s.tokens(s(512, 8)) for _ in range(4)], [s(2048, 512)] * 4)
    late = Wave([s.tokens(s(4096, 64))], [s(64, 4)], s(64, 24))
    return [Load("newcomer", [decodes, late], ends_with_last_wave=True)]


def three_kinds(s: Sizes, count: int = 16) -> list[Load]:
    """G: prompts of 128; of 16 to 512; and 16 tokens behind a shared prefix of 512."""
    long, out = s(512, 32), s(64, 8)
    lengths = s.rng.integers(long // 32, long + 1, count)
    prefix = s.tokens(long)
    return [
        _at_once("uniform", [s.tokens(long // 4) for _ in range(count)], [out] * count),
        _at_once(
            "mixed lengths",
            [s.tokens(int(n)) for n in lengths],
            s.between(out // 8, out, count),
        ),
        _at_once(
            "shared prefix",
            [prefix + s.tokens(long // 32) for _ in range(count)],
            [out // 2] * count,
            len(prefix),
        ),
    ]


LOADS: dict[str, Callable[[Sizes], list[Load]]] = {
    "A": mixed_lengths,
    "B": mixed_lengths,
    "C": decode_only,
    "D": single,
    "E": agents,
    "F": newcomer,
    "G": three_kinds,
}
