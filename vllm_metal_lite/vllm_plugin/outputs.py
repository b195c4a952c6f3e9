"""A step's result as vLLM's ModelRunnerOutput, read when vLLM asks for it.

vLLM asks after it has given us the next step, with the executor "mp" from another thread.  So
nothing here reads what the next step changes: neither the table nor who sits in which row.
"""

import itertools
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput

from vllm_metal_lite.runner.result import Logprobs, StepResult
from vllm_metal_lite.sampling import undrawn
from vllm_metal_lite.vllm_plugin.translate import Step

logger = init_logger("vllm.metal_lite")


class StepOutput(AsyncModelRunnerOutput):
    """The output of a step under way."""

    def __init__(self, step: Step, result: StepResult) -> None:
        self._step, self._result = step, result

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step's values.  A step of chunks in the middle of prompts has none."""
        req_ids = self._step.req_ids
        sampled: list[list[int]] = [[] for _ in req_ids]
        logprobs = None
        if segments := self._step.batch.sample_segments.tolist():
            for segment, token in zip(segments, self._tokens(segments), strict=True):
                sampled[segment] = [token]
            logprobs = _logprobs(self._result.logprobs, sampled)
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            logprobs=logprobs,
            prompt_logprobs_dict=self._prompt_logprobs(),
        )

    def get_kv_connector_output(self) -> None:
        """There is no connector.  (Asked for since vLLM 0.33.)"""

    def _tokens(self, segments: list[int]) -> list[int]:
        tokens = self._result.token_ids.tolist()
        for row, reason in self._result.undrawn.items():
            tokens[row] = self._end_undrawn(segments[row], reason)
        return tokens

    def _end_undrawn(self, segment: int, reason: int) -> int:
        """The token to report for a request that no token can be sampled for, after a line of log.

        A worker cannot fail a single request: vLLM takes a token, or an exception, which ends the
        engine.  A grammar refuses token 0, and vLLM then ends the request with an error.  Any other
        request ends as if it had stopped, if one of its tokens stops it.
        """
        request = self._step.requests[segment]
        num_generated = int(self._step.batch.seq_lens[segment]) - request.num_prompt_tokens
        if not request.is_undrawn:  # vLLM may have scheduled a step more
            why = undrawn.why(reason, request.params, num_generated, request.has_grammar)
            logger.error("Request %s: %s", self._step.req_ids[segment], why)
        request.is_undrawn = True
        return 0 if request.has_grammar else min(request.stop_token_ids, default=0)

    def _prompt_logprobs(self) -> dict[str, Any]:
        """Those of the prompts that end with this step."""
        step, batch, done = self._step, self._step.batch, {}
        positions = batch.positions[batch.logits_indices[len(batch.sample_segments) :]]
        for segment, prompt_logprobs in step.prompt_logprobs.items():
            at = np.flatnonzero(batch.prompt_segments == segment)
            if len(at):
                prompt_logprobs.put(positions[at], self._result.prompt_logprobs, at)
            if batch.seq_lens[segment] >= step.requests[segment].num_prompt_tokens:
                done[step.req_ids[segment]] = prompt_logprobs.take()
        return done


def _logprobs(logprobs: Logprobs | None, sampled: list[list[int]]) -> LogprobsLists | None:
    """Rows are counted by tokens sampled: a chunk in the middle of a prompt has none."""
    if logprobs is None:
        return None
    starts = list(itertools.accumulate(map(len, sampled), initial=0))
    return LogprobsLists(logprobs.token_ids, logprobs.logprobs, logprobs.ranks, starts)
