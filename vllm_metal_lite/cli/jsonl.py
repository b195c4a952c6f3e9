"""The lines of `generate`: a line in, a job; an output, a line out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_metal_lite.errors import MetalLiteError, RequestError
from vllm_metal_lite.outputs import CompletionOutput, Logprob, RequestOutput
from vllm_metal_lite.sampling_params import SamplingParams

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING = {f.name for f in fields(SamplingParams) if f.init}


@dataclass(frozen=True)
class Job:
    """One good line.  prompt: text, token ids, or (is_chat) the messages of a conversation."""

    id: str | int | float
    prompt: Any
    is_chat: bool
    params: SamplingParams
    priority: int


class BadLine(RequestError):
    """A line that cannot be meant; `id` is the one it names, if it gets that far."""

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
        given = entry.pop("id", None)
        if isinstance(given, (str, int, float)):
            job_id = given
        elif given is not None:
            raise RequestError("id must be a string or a number")
        priority = entry.pop("priority", 0)
        if not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r}")
        named = [name for name in _PROMPTS if name in entry]
        if len(named) != 1:
            raise RequestError(f"there must be exactly one of {', '.join(_PROMPTS)}")
        prompt = entry.pop(named[0])
        _check_prompt(named[0], prompt)
        unknown = entry.keys() - _SAMPLING
        if unknown:
            raise RequestError(f"unknown field {sorted(unknown)[0]!r}")
        params = _params({**defaults, **entry})
        return Job(job_id, prompt, named[0] == "messages", params, priority)
    except MetalLiteError as e:
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


def _check_prompt(name: str, prompt: Any) -> None:
    if name == "prompt" and not isinstance(prompt, str):
        raise RequestError("prompt must be a string")
    if name == "prompt_token_ids" and not isinstance(prompt, list):
        raise RequestError("prompt_token_ids must be a list of integers")
    if name == "messages" and not (
        isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    ):
        raise RequestError("messages must be a list of objects with role and content")
    try:  # JSON can spell half a character ("\ud800"), a tokenizer cannot read it
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds half of a surrogate pair") from None


def _params(given: dict[str, Any]) -> SamplingParams:
    if isinstance(given.get("logit_bias"), dict):  # keys of JSON objects are strings
        given["logit_bias"] = {_int(token): b for token, b in given["logit_bias"].items()}
    for name, value in given.items():
        try:
            SamplingParams(**{"max_tokens": None, name: value})
        except MetalLiteError:
            raise
        except (TypeError, AttributeError, OverflowError):
            shown = repr(value)
            shown = shown if len(shown) <= 40 else shown[:40] + "..."
            raise RequestError(f"{name} cannot be {shown}") from None
    return SamplingParams(**given)


def _int(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 20 else text


def result_line(job: Job, output: RequestOutput) -> dict[str, Any]:
    """The result of a job; with `n` above 1, its answers are in a list `outputs`."""
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
    if output.logprobs is not None:
        answer["cumulative_logprob"] = output.cumulative_logprob
        answer["logprobs"] = [_logprobs(p) for p in output.logprobs]
    return answer


def _logprobs(position: Mapping[int, Logprob]) -> dict[str, float]:
    return {str(token): p.logprob for token, p in position.items()}
