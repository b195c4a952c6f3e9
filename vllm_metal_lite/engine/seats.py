"""The seats of running requests: rows of the input table and of the sampler."""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN, ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.engine.answer import Answer
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, Segment


class Seats:
    """Each running request has one row in both tables.  req_index: the row of each request."""

    def __init__(
        self, inputs: InputBatch, sampler: Sampler, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._inputs, self._sampler, self._eos = inputs, sampler, eos_token_ids
        self.req_index: dict[Request, int] = {}

    def add(self, answer: Answer) -> None:
        """Seat an admitted request."""
        request = answer.request
        tokens, first_scored = request.token_ids, answer.prompt_logprobs_from
        seat = self._inputs.add(tokens, request.num_prompt_tokens, first_scored)
        self.req_index[request] = seat
        if answer.pooling is None or answer.score_token_ids:  # otherwise it draws no token
            self.update_sampler(answer)

    def indices(self, requests: Sequence[Request]) -> np.ndarray:
        """The seats of running requests, (B,) int32."""
        return np.array([self.req_index[request] for request in requests], np.int32)

    def remove(self, request: Request) -> None:
        """Free the seat of a request, if it has one."""
        if (seat := self.req_index.pop(request, None)) is not None:
            self._inputs.remove(seat)
            self._sampler.remove(seat)

    def pack(self, output: SchedulerOutput) -> ForwardBatch:
        """The batch of a scheduled step, whose requests have seats and get their new blocks."""
        segments, req_index = output.segments, self.req_index
        self._append_blocks(segments)
        return self._inputs.pack(
            np.array([req_index[s.request] for s in segments]),
            np.array([s.num_computed for s in segments]),
            np.array([s.num_scheduled for s in segments]),
            [s.state for s in segments if s.state is not None] or None,
            [s.draft_token_ids for s in segments] if output.has_drafts else None,
        )

    def take_blocks(self, segments: Sequence[Segment]) -> None:
        """Append the new blocks of segments to their requests' tables before `pack`."""
        self._append_blocks(segments)
        for segment in segments:
            segment.new_block_ids = ()

    def _append_blocks(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if segment.new_block_ids:
                seat = self.req_index[segment.request]
                self._inputs.append_blocks(seat, *segment.new_block_ids)

    def tokens_of(self, request: Request) -> np.ndarray:
        """The known tokens of a running request, (n,) int32."""
        seat = self.req_index[request]
        known = self._inputs.token_ids[seat, : self._inputs.num_tokens[seat]]
        return known[:-1] if known[-1] == UNKNOWN_TOKEN else known

    def force(self, answer: Answer, token_ids: list[int]) -> None:
        """Put tokens that are known without sampling in place of the unknown one."""
        if (seat := self.req_index.get(answer.request)) is not None:
            self._inputs.replace_unknown(seat, token_ids)
            self.update_sampler(answer)

    def accept(self, request: Request, token_ids: list[int]) -> None:
        """Record what a step with drafts has given and taken: for the sampler the tokens, for the
        table the number of blocks."""
        if (seat := self.req_index.get(request)) is not None:
            self._sampler.accept(seat, token_ids)
            self._inputs.num_blocks[seat] = request.num_blocks

    def update_sampler(self, answer: Answer) -> None:
        """Make the sampler continue from the known tokens of a running request."""
        request = answer.request
        self._sampler.add(
            self.req_index[request],
            answer.params,
            answer.seed,
            np.array(request.token_ids, np.int32),
            request.num_prompt_tokens,
            self._eos,
            bad_words=answer.bad_words,
            logprob_token_ids=answer.score_token_ids,
        )
