"""One architecture through every kind of step, against mlx-lm running each request alone.

The steps are those of `bench`; mlx-lm's own path is the prompt in one go and then token by token,
with its own caches.  At the end the engine serves all requests over too few blocks; its greedy
tokens must be mlx-lm's.  Errors are relative to the scale of the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from tests.support.engine.poison import poison_free_blocks
from tests.support.models import tiny_models as tiny
from tests.support.models.bench import (
    MODES,
    PROMPT_LENGTHS,
    SEQUENCES,
    SHARED,
    Bench,
    Logits,
    chunked,
    mixed,
    modes_of,
    packed,
    wrong_seat,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.layout import Node, StateLayer
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import Mode

TOLERANCE = 1e-4
PROMPTS = [s[:n] for s, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)]
GENERATED = 20  # tokens by the engine


def serve(model: LoadedModel, kv_bits: int | None = None) -> tuple[list[list[int]], dict[str, int]]:
    """The engine's greedy tokens of each prompt, over too few blocks for all; its counters."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    engine = tiny.engine(model, num_blocks=10, kv_bits=kv_bits, **options)
    poison_free_blocks(engine)
    params = tiny.greedy(GENERATED, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        named = [SHARED] if len(prompt) > SHARED else []
        engine.add_request(str(i), prompt, params, checkpoints=named)
    done = tiny.run(engine)
    return [done[str(i)].outputs[0].token_ids for i in range(len(PROMPTS))], engine.metrics()


@dataclass
class Result:
    """What one configuration showed.

    status: "passed", "failed", "refused" (by us, when loading), or "cannot run" (mlx-lm by itself).
    state: what its layers keep.  attention: "packed", or "by segment", which is slower.
    recurrent: "packed", "in sequences", which is slower, or "-" without recurrent layers.
    errors: the largest of each mode, relative; inf: it raised; of "engine", 1 if a token differs.
    control: the error of `wrong_seat`.
    early, order: how far, in standard deviations of the last logits, they move when the first half
    of the tokens changes, and when the order does.
    drift: mlx-lm decoding against mlx-lm reading the same tokens at once.
    """

    name: str
    status: str
    reason: str = ""
    state: str = ""
    attention: str = "packed"
    recurrent: str = "-"
    errors: dict[str, float] = field(default_factory=dict)
    control: float = 0.0
    early: float = 0.0
    order: float = 0.0
    drift: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)


@cache
def check(name: str) -> Result:
    """Run one configuration through everything; never raises."""
    result = Result(name, "cannot run")
    config = tiny.config_of(name)
    try:
        model = tiny.build(config)
        expected = [
            native_logits(model, s, n) for s, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)
        ]
        greedy = [
            [int(token) for token, _ in generate_step(mx.array(p), model, max_tokens=GENERATED)]
            for p in PROMPTS
        ]
        _sensitivity(model, result, expected)
    except (Exception, SystemExit) as e:
        result.reason = _one_line(e)
        return result
    try:
        loaded = loader.from_model(model, None, config, name)
    except ModelLoadError as e:
        result.status, result.reason = "refused", str(e)
        return result

    result.state = _state(loaded, config)
    if loaded.packed.by_segment:
        result.attention = "by segment"
    if loaded.packed.layout.states:
        result.recurrent = "packed" if loaded.packed.mode is Mode.PACKED else "in sequences"
    scale = float(np.abs(np.concatenate(expected)).max())
    runs = {
        mode: lambda run=run: _error(run(Bench(loaded)), expected, scale)
        for mode, run in MODES.items()
        if mode in modes_of(loaded.packed)
    }
    runs["engine"] = lambda: float(serve(loaded)[0] != greedy)
    for mode, run in runs.items():
        try:
            result.errors[mode] = run()
        except Exception as e:
            result.errors[mode] = float("inf")
            result.reason = result.reason or f"{mode}: {_one_line(e)}"
    again = native_logits(model, SEQUENCES[2], PROMPT_LENGTHS[2])
    result.errors["unpacked"] = _error({(2, 33): again[-1]}, expected, scale)
    result.control = _error(wrong_seat(Bench(loaded)), expected, scale)
    result.status = "passed" if result.worst < TOLERANCE else "failed"
    return result


def bfloat16_errors(name: str) -> tuple[float, float]:
    """How far bfloat16 is from float32 with the same (rounded) weights, root of the mean square,
    relative: packed by us, and run by mlx-lm itself."""
    config = tiny.config_of(name)
    models = [tiny.build(config) for _ in range(2)]
    for model in models:
        model.set_dtype(mx.bfloat16)
    models[1].set_dtype(mx.float32)
    own, exact = (
        [native_logits(m, s, n) for s, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)]
        for m in models
    )
    loaded = loader.from_model(models[0], None, config, name)
    scale = np.abs(np.concatenate(exact)).max()
    ours, theirs = [], []
    for run in (packed, chunked, mixed):
        for (r, n), x in run(Bench(loaded)).items():
            ours.append(x[: tiny.VOCAB] - exact[r][n - 1])
            theirs.append(own[r][n - 1] - exact[r][n - 1])
    return tuple(float(np.sqrt(np.mean(np.square(e))) / scale) for e in (ours, theirs))


def native_logits(
    model: nn.Module, tokens: list[int], prompt: int, make_caches: Callable = make_prompt_cache
) -> np.ndarray:
    """mlx-lm's logits (len(tokens), V): the prompt in one go, then token by token."""
    caches = make_caches(model)
    parts = [tokens[:prompt], *([t] for t in tokens[prompt:])]
    logits = [model(mx.array([part]), cache=caches)[0].astype(mx.float32) for part in parts]
    out = np.array(mx.concatenate(logits))[:, : tiny.VOCAB]
    if not np.isfinite(out).all():
        raise ValueError("its logits are not finite")
    return out


def _error(got: Logits, expected: list[np.ndarray], scale: float) -> float:
    """Largest error relative to scale; NaN counts as infinite."""
    worst = max(np.abs(x[: tiny.VOCAB] - expected[r][n - 1]).max() for (r, n), x in got.items())
    return float(worst / scale) if np.isfinite(worst) else float("inf")


def _sensitivity(model: nn.Module, result: Result, expected: list[np.ndarray]) -> None:
    tokens, prompt = SEQUENCES[2], PROMPT_LENGTHS[2]
    plain = native_logits(model, tokens, len(tokens))
    distant = [(t + 1) % tiny.VOCAB for t in tokens[: prompt // 2]]  # out of the windows' reach
    changed = native_logits(model, distant + tokens[prompt // 2 :], len(tokens))[-1]
    reordered = native_logits(model, [*tokens[-2::-1], tokens[-1]], len(tokens))[-1]
    scale = plain[-1].std()
    result.early = float(np.abs(changed - plain[-1]).std() / scale)
    result.order = float(np.abs(reordered - plain[-1]).std() / scale)
    result.drift = float(np.abs(plain - expected[2]).max() / np.abs(plain).max())


def _state(loaded: LoadedModel, config: dict[str, Any]) -> str:
    """What the layers keep, in their order, each kind once; "(a + b)" where one keeps both."""
    rank = (config.get("text_config") or config).get("kv_lora_rank")
    layout = loaded.packed.layout

    def kind(node: Node) -> str:
        if isinstance(node, tuple):
            return f"({' + '.join(map(kind, node))})"
        if isinstance(node, StateLayer):
            return "recurrent"
        if node is None:
            return "nothing"
        spec = layout.specs[node.index]
        is_latent = spec.num_kv_heads == 1 and rank in (spec.k_head_dim, spec.v_head_dim)
        kv = "latent" if is_latent else "KV"
        return "window" if spec.window else "chunk" if spec.attention_chunk else kv

    return ", ".join(dict.fromkeys(map(kind, layout.nodes)))


def _one_line(e: BaseException) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())}"[:200]
