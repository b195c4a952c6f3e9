"""Many requests through one engine: lines of JSON in, results out.

Only lines that run, or wait to be written, are in memory.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

from tqdm import tqdm

from vllm_metal_lite.cli import log
from vllm_metal_lite.cli.files import LineReader, OrderedWriter
from vllm_metal_lite.cli.options import engine_flag
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.interrupt import DeferredInterrupt
from vllm_metal_lite.errors import MetalLiteError, RequestError, one_line, show
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


def job_of(entry: dict[str, Any], job_id: Any, defaults: Mapping[str, Any]) -> Job:
    """The job of a line without its id; raises RequestError.  defaults: SamplingParams fields."""
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


def read_line(line: bytes) -> dict[str, Any]:
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


def id_of(value: Any, number: int) -> str | int | float:
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


_IDLE_SECONDS = 0.1  # longest wait for a line; Ctrl-C is handled between waits
_REFRESH_SECONDS = 0.2  # between updates of the progress bar


class Batch:
    """Keeps at most `window` requests in the engine, and writes their results."""

    def __init__(
        self,
        engine: LLMEngine,
        reader: LineReader,
        writer: OrderedWriter,
        defaults: Mapping[str, Any],
        window: int,
    ) -> None:
        self._engine, self._reader, self._writer = engine, reader, writer
        self._defaults, self._window = defaults, window
        self._jobs: dict[str, tuple[int, Job]] = {}  # in the engine, by request id
        self._num_read = 0
        self.num_refused = 0
        self.first_refusal = ""
        self._num_done = self._prompt_tokens = self._cached_tokens = self._new_tokens = 0
        self._seconds = 0.0

    def run(self, total: int | None, show_bar: bool) -> bool:
        """Run to the end of the input.  True: Ctrl-C came first; finished results are written.

        total: lines of the input, if known, for the progress bar.
        """
        start = shown = time.perf_counter()
        with (
            DeferredInterrupt(lambda: tqdm.write(log.STOPPING, file=sys.stderr)) as interrupt,
            tqdm(total=total, unit="prompt", dynamic_ncols=True, disable=not show_bar) as self._bar,
        ):
            try:
                while not interrupt.pressed and (self._jobs or not self._reader.ended):
                    self._fill()
                    self._step()
                    now = time.perf_counter()
                    if now - shown >= _REFRESH_SECONDS:
                        new = self._engine.metrics()["decode_tokens"] + self._num_done
                        self._bar.set_postfix_str(f"{new / (now - start):.0f} tokens/s")
                        shown = now
            except KeyboardInterrupt:  # a second Ctrl-C, within a step
                pass
            finally:
                self._seconds = time.perf_counter() - start
                self._engine.abort(list(self._jobs))
        return interrupt.pressed

    def summary(self) -> str:
        """One line: the work done, and its speed."""
        return (
            f"{self._num_done} requests: {self._prompt_tokens:,} prompt tokens "
            f"({self._cached_tokens:,} cached), {self._new_tokens:,} generated in "
            f"{self._seconds:.1f} s: {self._new_tokens / max(self._seconds, 1e-9):,.1f} tokens/s, "
            f"{self._engine.metrics()['preemptions']} preemptions"
        )

    def _fill(self) -> None:
        """Add requests up to the window; wait for a line only if the engine is idle."""
        for _ in range(self._window - len(self._jobs)):
            line = self._reader.next(timeout=0 if self._jobs else _IDLE_SECONDS)
            if line is None:
                return
            position, self._num_read = self._num_read, self._num_read + 1
            number, content = line
            job_id: Any = number
            try:
                entry = read_line(content)
                job_id = id_of(entry.pop("id", None), number)
                job = job_of(entry, job_id, self._defaults)
                self._add(str(number), job)
            except (MetalLiteError, RecursionError) as e:
                why = e.spelled(engine_flag) if isinstance(e, MetalLiteError) else str(e)
                self._refuse(position, job_id, f"line {number}: {why}")
            else:
                self._jobs[str(number)] = position, job

    def _add(self, request_id: str, job: Job) -> None:
        prompt, checkpoints = job.prompt, job.checkpoints
        if job.is_chat:
            prompt, found = self._engine.render_turn(prompt)
            checkpoints = found if checkpoints == () else checkpoints
        self._engine.add_request(
            request_id, prompt, job.params, priority=job.priority, checkpoints=checkpoints
        )

    def _step(self) -> None:
        try:
            outputs = self._engine.step() if self._jobs else []
        except Exception as e:
            if self._engine.failed_steps.is_hopeless:
                raise
            # End the lines at fault; the others are computed again.
            lost = self._engine.requests_at_fault
            self._engine.abort(lost)
            for request_id in lost:
                position, job = self._jobs.pop(request_id)
                message = f"line {request_id}: a step of the engine failed: {one_line(e)}"
                self._refuse(position, job.id, message)
            return
        for output in outputs:
            if not output.finished:
                continue
            position, job = self._jobs.pop(output.request_id)
            self._num_done += 1
            self._prompt_tokens += len(output.prompt_token_ids)
            self._cached_tokens += output.num_cached_tokens
            self._new_tokens += sum(len(o.token_ids) for o in output.outputs)
            errors = [f"line {output.request_id}: {o.error}" for o in output.outputs if o.error]
            self._put(position, result_line(job, output), errors)

    def _refuse(self, position: int, job_id: Any, message: str) -> None:
        self._put(position, {"id": job_id, "error": message}, [message])

    def _put(self, position: int, result: dict[str, Any], errors: Sequence[str]) -> None:
        if errors:
            self.num_refused += 1
            self.first_refusal = self.first_refusal or errors[0]
        self._writer.put(position, result)
        self._bar.update()
