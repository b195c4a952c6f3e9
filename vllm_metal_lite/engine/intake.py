"""Checks a user's request, and makes its answers."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from vllm_metal_lite.engine.answer import Answer
from vllm_metal_lite.engine.prompt_ids import is_list
from vllm_metal_lite.errors import Option, RequestError, SamplingError, one_line, show
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.sampling.bad_words import bad_word_ids
from vllm_metal_lite.sampling.constraint import Constraint
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.request import Request

# Limits memory: prompt log-probabilities need (rows, vocab_size) float32 logits per chunk.
_PROMPT_LOGPROBS_CHUNK = 256


def check_arguments(request_id: Any, params: Any, priority: Any, fair_round: Any) -> None:
    """Raise RequestError for arguments of the wrong type."""
    for name, value, kind, allowed in (
        ("params", params, SamplingParams, "SamplingParams"),
        ("request_id", request_id, str, "a string"),
        ("priority", priority, Integral, "an integer"),
        ("fair_round", fair_round, Integral, "an integer"),
    ):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RequestError(f"{name} must be {allowed}, got {show(value)}")


def check_checkpoints(checkpoints: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens of a prompt of num_tokens, as ints.  Raises RequestError."""
    if not is_list(checkpoints):
        raise RequestError(
            f"checkpoints must be a list of numbers of tokens, got {show(checkpoints)}"
        )
    for position in checkpoints:
        if isinstance(position, bool) or not isinstance(position, Integral):
            raise RequestError(f"checkpoints must be integers, got {show(position)}")
        if not 0 < position <= num_tokens:
            raise RequestError(
                f"checkpoint {show(position)} is outside the prompt of {num_tokens} tokens"
            )
    return tuple(map(int, checkpoints))


def bad_words_of(params: SamplingParams, model: LoadedModel) -> list[list[int]]:
    """Token ids of `params.bad_words`.  Raises RequestError."""
    if not params.bad_words:
        return []
    if model.tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and this model was loaded without one")
    try:
        return bad_word_ids(model.tokenizer, params.bad_words)
    except Exception as e:
        raise RequestError(f"the tokenizer refuses bad_words: {one_line(e)}") from e


def constraint_of(params: SamplingParams, model: LoadedModel) -> Constraint | None:
    """The limits of one answer.  Raises SamplingError for a grammar that cannot be used."""
    if params.structured_outputs is None and params.thinking is None:
        return None
    try:
        from vllm_metal_lite.structured_outputs.build import build
    except ModuleNotFoundError as e:
        raise SamplingError(Option("structured_outputs"), f" needs {e.name}") from e
    return build(params, model.tokenizer, model.vocab_size, model.eos_token_ids)


def make_answers(
    requests: Sequence[Request],
    result: RequestOutput,
    params: SamplingParams,
    model: LoadedModel,
    seed: int,
    bad_words: list[list[int]],
) -> list[Answer]:
    """One answer per request; fills in `result`.  seed: the first answer's.  bad_words: their token
    ids."""
    if params.prompt_logprobs is not None:
        result.prompt_logprobs = [None]
    answers = []
    for index, request in enumerate(requests):
        if result.prompt_logprobs is not None and index == 0:
            request.skip_prefix_cache_read = True
            request.max_chunk = _PROMPT_LOGPROBS_CHUNK
        tokenizer, ends, seed_of = model.tokenizer, model.eos_token_ids, seed + index
        answer = Answer(request, params, result, index, tokenizer, ends, seed_of, bad_words)
        answers.append(answer)
    result.outputs = [answer.output for answer in answers]
    return answers
