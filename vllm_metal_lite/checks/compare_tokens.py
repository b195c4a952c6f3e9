"""Compares the greedy tokens of an engine with kernels with those of the reference.

In 16 bits, two correct computations may round differently and so swap the two best logits.  At the
first token that differs, the unmodified model computes the logits, and the distance of the two
tokens' logits decides whether they were a tie.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.sampling_params import SamplingParams

# The tokens of each prompt: within a block, over many blocks, in several chunks.  STARTS says where
# a prompt begins in the text, so the last two begin alike.
PROMPTS = (7, 60, 300, 600, 700)
STARTS = (3, 1, 2, 0, 0)
NEW_TOKENS = 24
_CHUNK = 256
_BLOCK = 16

# Two logits are a tie if they are nearer than this share of the standard deviation of the row's
# logits.  In a random row of a large vocabulary, the two best logits are about 0.2 apart, and a
# random one is about 4 below the best.
TIE_16_BIT, _TIE_FLOAT32 = 0.1, 0.02


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that differs.

    position: its index in the answer.  margin: distance of the two tokens' logits, in standard
    deviations of the row.
    """

    prompt: int
    position: int
    by_kernels: int
    by_reference: int
    margin: float
    is_tie: bool


@dataclass(frozen=True)
class Comparison:
    """path, reason: the attention path that "auto" chose, and why.

    tokens: the number of compared tokens.  seconds: path -> the seconds of the answers.
    """

    path: str
    reason: str
    answers: int
    tokens: int
    seconds: dict[str, float]
    differences: list[Difference] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return all(difference.is_tie for difference in self.differences)


def compare(
    model: LoadedModel,
    make_engine: Callable[[LoadedModel, EngineConfig], Any],
    progress: Callable[[str], object] = lambda _: None,
) -> Comparison:
    """Answer the same prompts with the reference and with the path that "auto" chooses here.

    make_engine: LLMEngine.  progress: gets the name of the part that begins.
    """
    prompts = _prompts(model)
    seconds = {}
    progress("the answers of the reference")
    reference, seconds["reference"] = _answers(
        make_engine(model, _config(model, "reference")), prompts
    )
    mx.clear_cache()
    progress("the engine with kernels")
    engine = make_engine(model, _config(model, "auto"))
    path, reason = engine.runner.attention.name, engine.runner.path.reason
    progress("the answers of the kernels")
    by_kernels, seconds["auto"] = _answers(engine, prompts)
    del engine
    found = []
    for index, (a, b) in enumerate(zip(by_kernels, reference, strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            found.append(_difference(model, index, at, prompts[index], a, b))
    tokens = sum(len(answer) for answer in reference)
    return Comparison(path, reason, len(prompts), tokens, seconds, found)


def _config(model: LoadedModel, attention: str) -> EngineConfig:
    longest = min(model.max_position, max(PROMPTS) + NEW_TOKENS + _BLOCK)
    return EngineConfig(
        block_size=_BLOCK,
        num_blocks=len(PROMPTS) * -(-longest // _BLOCK) + len(PROMPTS),
        max_num_seqs=len(PROMPTS),
        max_num_batched_tokens=_CHUNK,
        max_model_len=longest,
        attention=attention,
        speculate="off",
    )


def _prompts(model: LoadedModel) -> list[list[int]]:
    """Beginnings of one text, or random tokens if the model has no tokenizer."""
    longest = min(max(PROMPTS), model.max_position - NEW_TOKENS)
    text = " ".join(f"The door of room {n} is {'open' if n % 3 else 'locked'}." for n in range(400))
    tokens = [] if model.tokenizer is None else list(model.tokenizer.encode(text))
    if len(tokens) < longest:
        rng = np.random.default_rng(0)
        tokens += rng.integers(0, model.vocab_size, longest).tolist()
    return [tokens[i : min(i + length, longest)] for i, length in zip(STARTS, PROMPTS, strict=True)]


def _answers(engine: Any, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], float]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
    answers: dict[str, list[int]] = {}
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    return [answers[str(i)] for i in range(len(prompts))], time.perf_counter() - start


def _difference(
    model: LoadedModel, index: int, at: int, prompt: list[int], a: list[int], b: list[int]
) -> Difference:
    plain = model.packed.model
    tokens = mx.array([prompt + b[:at]])
    logits = plain(tokens, cache=make_prompt_cache(plain))[0, -1].astype(mx.float32)
    margin = float(mx.abs(logits[a[at]] - logits[b[at]]) / mx.std(logits))
    limit = _TIE_FLOAT32 if model.dtype == mx.float32 else TIE_16_BIT
    return Difference(index, at, a[at], b[at], margin, margin <= limit)
