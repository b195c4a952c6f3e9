"""Input and output lines of `generate`: parses jobs, formats results."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

from vllm_metal_lite.errors import MetalLiteError, RequestError, show
from vllm_metal_lite.outputs import CompletionOutput, Logprob, RequestOutput
from vllm_metal_lite.rules import by_token_id, rules_of, whole
from vllm_metal_lite.sampling_params import SamplingParams

_PROMPTS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True)
class Job:
    """One valid line.  The engine checks the prompt, the priority and the checkpoints.

    prompt: a dict with "prompt" or "prompt_token_ids", or (is_chat) a conversation's messages.
    """

    id: str | int | float
    prompt: Any
    is_chat: bool
    params: SamplingParams
    priority: Any
    checkpoints: Any


class BadLine(RequestError):
    """An invalid line.  id: the line's own id, if parsing got that far."""

    def __init__(self, message: str, id: str | int | float) -> None:
        super().__init__(message)
        self.id = id


def parse_line(line: bytes, number: int, defaults: Mapping[str, Any]) -> Job:
    """Read a line; raises BadLine.

    number: the id of a line that has none.  defaults: SamplingParams fields.
    """
    job_id: Any = number
    try:
        entry = _load(line)
        job_id = _id(entry.pop("id", None), number)
        entry = {name: whole(value) for name, value in entry.items()}
        priority, checkpoints = entry.pop("priority", 0), entry.pop("checkpoints", ())
        prompts = {name: entry.pop(name) for name in _PROMPTS if name in entry}
        if len(prompts) != 1:
            raise RequestError(f"there must be exactly one of {', '.join(_PROMPTS)}")
        if unknown := entry.keys() - rules_of(SamplingParams).keys():
            raise RequestError(f"unknown field {show(min(unknown))}")
        if "logit_bias" in entry:
            entry["logit_bias"] = by_token_id(entry["logit_bias"])
        params = SamplingParams(**{**defaults, **entry})
        is_chat = "messages" in prompts
        prompt = prompts["messages"] if is_chat else prompts
        return Job(job_id, prompt, is_chat, params, priority, checkpoints)
    except (MetalLiteError, RecursionError) as e:
        raise BadLine(str(e), job_id) from None


def _load(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as e:
        raise RequestError(f"not JSON: {e.msg} at column {e.colno}") from None
    except UnicodeDecodeError:
        raise RequestError("not UTF-8") from None
    except (ValueError, RecursionError) as e:
        raise RequestError(f"not JSON: {e}") from None
    if not isinstance(entry, dict):
        raise RequestError("not a JSON object")
    return entry


def _id(value: Any, number: int) -> str | int | float:
    """The id of a line, which must be representable as JSON in UTF-8."""
    if value is None:
        return number
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        with suppress(ValueError):  # JSON has no NaN, UTF-8 no lone surrogates
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return value
    raise RequestError(
        f"id must be a string of valid Unicode or a finite number, got {show(value)}"
    )


def result_line(job: Job, output: RequestOutput) -> dict[str, Any]:
    """The result of a job; with `n` above 1, the answers are in a list `outputs`."""
    answers = [_answer(o) for o in output.outputs]
    result: dict[str, Any] = {"id": job.id}
    result |= answers[0] if job.params.n == 1 else {"outputs": answers}
    result["num_prompt_tokens"] = len(output.prompt_token_ids)
    result["num_cached_tokens"] = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [p and _logprobs(p) for p in output.prompt_logprobs]
    return result


def _answer(output: CompletionOutput) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }
    if output.error is not None:
        answer["error"] = output.error
    if output.cumulative_logprob is not None:
        answer["cumulative_logprob"] = _finite(output.cumulative_logprob)
    if output.logprobs is not None:
        answer["logprobs"] = [_logprobs(p) for p in output.logprobs]
    return answer


def _logprobs(position: Mapping[int, Logprob]) -> dict[str, float | None]:
    return {str(token): _finite(p.logprob) for token, p in position.items()}


def _finite(logprob: float) -> float | None:
    """JSON has no infinity: null is the logarithm of a probability of 0."""
    return logprob if isfinite(logprob) else None
