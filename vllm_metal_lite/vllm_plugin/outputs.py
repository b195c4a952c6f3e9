"""A step's result as vLLM's ModelRunnerOutput, read when vLLM asks for it.

vLLM reads a result after it has sent the next step; with executor "mp", from another thread.  So
this module must not read state that the next step changes: the table and its row assignment.
"""

import itertools
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput

from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.sampling import no_token
from vllm_metal_lite.sampling.logprobs import Logprobs
from vllm_metal_lite.vllm_plugin import logger
from vllm_metal_lite.vllm_plugin.translate import ScheduledStep


class StepOutput(AsyncModelRunnerOutput):
    """The output of a step in flight."""

    def __init__(self, step: ScheduledStep, result: StepResult) -> None:
        self._step, self._result = step, result

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step's results.  Chunks inside a prompt sample no token."""
        step, req_ids = self._step, self._step.req_ids
        output = ModelRunnerOutput(req_ids, {req_id: i for i, req_id in enumerate(req_ids)})
        if step.pooling is not None:  # the embedding of each prompt that ends with the step
            read = dict(step.pooling.take(step.batch, req_ids, self._result.pooled))
            found = [torch.from_numpy(read[name]) if name in read else None for name in req_ids]
            output.pooler_output = found
            return output
        sampled: list[list[int]] = [[] for _ in req_ids]
        output.sampled_token_ids = sampled
        if segments := step.batch.sample_segments.tolist():
            for segment, token in zip(segments, self._tokens(segments), strict=True):
                sampled[segment] = [token]
            output.logprobs = _logprobs(self._result.logprobs, sampled)
        output.prompt_logprobs_dict = self._prompt_logprobs()
        return output

    def get_kv_connector_output(self) -> None:
        """No connector.  (vLLM calls this since 0.33.)"""

    def _tokens(self, segments: list[int]) -> list[int]:
        tokens = self._result.token_ids.tolist()
        for row, reason in self._result.no_token.items():
            tokens[row] = self._report_no_token(segments[row], reason)
        return tokens

    def _report_no_token(self, segment: int, reason: int) -> int:
        """Log that no token can be sampled for a request; return the token to report instead.

        A worker cannot fail one request: vLLM accepts a token, or an exception that ends the
        engine.  A grammar refuses token 0, and vLLM then fails the request.  Any other request
        reports a stop token if it has one, and ends as stopped.
        """
        request = self._step.requests[segment]
        has_grammar = request.asked.structured_outputs is not None
        num_generated = int(self._step.batch.seq_lens[segment]) - request.num_prompt_tokens
        if not request.had_no_token:  # vLLM may have scheduled one more step
            why = no_token.why(reason, request.params, num_generated, has_grammar)
            logger.error("Request %s: %s", self._step.req_ids[segment], why)
        request.had_no_token = True
        # Not all_stop_token_ids: under ignore_eos, they hold tokens that do not end the request.
        ends = {request.asked.eos_token_id, *(request.asked.stop_token_ids or ())} - {None}
        return 0 if has_grammar else min(ends, default=0)

    def _prompt_logprobs(self) -> dict[str, Any]:
        """Prompt log-probabilities, by request id, of prompts that end with this step."""
        step, batch, done = self._step, self._step.batch, {}
        positions = batch.positions[batch.logits_indices[len(batch.sample_segments) :]]
        for segment, collected in step.prompt_logprobs.items():
            at = np.flatnonzero(batch.prompt_segments == segment)
            if len(at):
                scored = self._result.prompt_logprobs
                assert scored is not None, "rows of a prompt were not scored"
                width = collected.logprobs.shape[1]
                rows = scored.token_ids[at, :width], scored.logprobs[at, :width], scored.ranks[at]
                for tensor, values in zip(collected[:3], rows, strict=True):
                    tensor.numpy()[positions[at]] = values
            if batch.seq_lens[segment] >= step.requests[segment].num_prompt_tokens:
                done[step.req_ids[segment]] = collected
        return done


def _logprobs(
    logprobs: Logprobs[np.ndarray] | None, sampled: list[list[int]]
) -> LogprobsLists | None:
    """One row per sampled token: a chunk inside a prompt has none."""
    if logprobs is None:
        return None
    starts = list(itertools.accumulate(map(len, sampled), initial=0))
    return LogprobsLists(logprobs.token_ids, logprobs.logprobs, logprobs.ranks, starts)
