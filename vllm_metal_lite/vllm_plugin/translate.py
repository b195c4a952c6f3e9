"""Translates vLLM's SchedulerOutput to a ForwardBatch.

vLLM's scheduler owns blocks, budgets and preemption.  This module only assigns requests to seats of
the InputBatch and the sampler, and keeps their tokens, which vLLM does not send again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import LogprobsTensors

from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, ForwardBatch, SegmentState
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.runner.pooling_table import PoolingTable
from vllm_metal_lite.sampling.masks import TokenMasks
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.vllm_plugin import get
from vllm_metal_lite.vllm_plugin.sampling import translate_params


@dataclass(slots=True)
class PluginRequest:
    """A request that vLLM has not finished.

    asked: vLLM's SamplingParams; None for an embedding, which samples nothing.
    num_prompt_logprobs: as in SamplingParams; None in later turns of a session.
    req_index: the request's seat; None while it is preempted and waits.
    prompt_logprobs: the scores of the prompt, until its last chunk is scheduled; row i scores
    prompt token i + 1.
    had_no_token: no token could be sampled, and an error was logged.
    state_blocks: vLLM's blocks of recurrent states, from the start of the context.
    """

    params: SamplingParams
    num_prompt_tokens: int
    asked: Any = None
    num_prompt_logprobs: int | None = None
    seed: int = 0
    prompt_logprobs: LogprobsTensors | None = None
    had_no_token: bool = False
    req_index: int | None = None
    state_blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step to run.  req_ids, requests: the requests of the batch's segments, in order.

    prompt_logprobs: segment -> tensors that receive its prompt's scores.  pooling: the table of
    embedding requests; None if the engine generates.
    """

    req_ids: list[str]
    requests: list[PluginRequest]
    batch: ForwardBatch
    prompt_logprobs: dict[int, LogprobsTensors]
    pooling: PoolingTable | None = None

    @property
    def num_prompt_logprobs(self) -> int:
        """The largest k of all prompts in the step."""
        return max((p.logprobs.shape[1] - 1 for p in self.prompt_logprobs.values()), default=0)


def segment_slots(blocks: Sequence[int], start: int, end: int, block_size: int) -> SegmentState:
    """The state slots of a segment that computes the tokens [start, end).

    blocks: the request's state blocks so far, 0 for a null block.  Block b is slot b - 1.  The i-th
    block holds the state at the end of the tokens [0, (i + 1) * block_size), or, if it is the last,
    of fewer.
    """
    first, last = (start - 1) // block_size, (end - 1) // block_size
    return SegmentState(
        blocks[first] - 1 if start else EMPTY_SLOT,
        blocks[last] - 1,
        [((i + 1) * block_size, blocks[i] - 1) for i in range(first + 1, last) if blocks[i]],
    )


class StepTranslator:
    """The requests of a worker, in the same tables that LLMEngine fills.

    state_group: the index of the recurrent states among vLLM's KV groups; None if a request's state
    slot is its seat.  pooling: how embeddings are made; None: the engine generates.
    """

    def __init__(
        self,
        inputs: InputBatch,
        sampler: Sampler,
        seed: int,
        state_group: int | None = None,
        pooling: str | None = None,
    ) -> None:
        self.inputs, self.sampler, self.seed = inputs, sampler, seed
        self.state_group, self.pooling = state_group, pooling
        self._poolings = PoolingTable()
        self._requests: dict[str, PluginRequest] = {}
        self._num_seen = 0

    def begin(self, output: SchedulerOutput) -> ScheduledStep | None:
        """Apply vLLM's decisions; None if there is nothing to compute."""
        assert not get(output, "kv_cache_block_copies"), "no prefix ends within a block"
        for req_id in output.finished_req_ids:
            if (request := self._requests.pop(req_id, None)) is not None:
                self._unseat(request)
                self._poolings.remove(req_id)
        for req_id in output.preempted_req_ids or ():
            if (request := self._requests.get(req_id)) is not None:
                self._unseat(request)
        computed: dict[str, int] = {}  # num_computed_tokens by request id
        for new in output.scheduled_new_reqs:
            self._add(new)
            computed[new.req_id] = new.num_computed_tokens
        self._update_cached(output.scheduled_cached_reqs, computed)
        if not output.num_scheduled_tokens:
            return None
        return self._pack(output.num_scheduled_tokens, computed)

    def _add(self, new: NewRequestData) -> None:
        """Add a request; a known id resumes after preemption or starts a session's next turn."""
        tokens = new.prefill_token_ids
        if tokens is None:
            tokens = new.prompt_token_ids
        known = self._requests.get(new.req_id)
        if known is not None:
            self._unseat(known)
        if self.pooling is None:
            request = self._sampling_request(new, known)
        else:
            pooling = new.pooling_params
            normalize = pooling.use_activation is not False
            asked = PoolingParams(self.pooling, normalize, pooling.dimensions)
            self._poolings.add(new.req_id, asked, len(tokens))
            request = PluginRequest(SamplingParams(temperature=0), len(tokens))
        self._requests[new.req_id] = request
        self._seat(request, tokens, new.block_ids)

    def _sampling_request(self, new: NewRequestData, known: PluginRequest | None) -> PluginRequest:
        asked, num_prompt_tokens = new.sampling_params, len(new.prompt_token_ids)
        if known is not None:
            seed = known.seed
        else:
            seed = asked.seed if asked.seed is not None else hash((self.seed, self._num_seen))
            self._num_seen += 1
        params = translate_params(asked, self.sampler.vocab_size)
        is_next_turn = known is not None and known.num_prompt_tokens != num_prompt_tokens
        return PluginRequest(
            params=params,
            num_prompt_tokens=num_prompt_tokens,
            asked=asked,
            num_prompt_logprobs=None if is_next_turn else params.prompt_logprobs,
            seed=seed,
        )

    def _update_cached(self, cached: Any, computed: dict[str, int]) -> None:
        for i, req_id in enumerate(cached.req_ids):
            request = self._requests[req_id]
            computed[req_id] = cached.num_computed_tokens[i]
            blocks = cached.new_block_ids[i] or ()  # one list per KV group
            if req_id in cached.resumed_req_ids:
                self._unseat(request)
                # all_token_ids excludes sampled tokens that vLLM discarded.
                self._seat(request, cached.all_token_ids[req_id], blocks)
            elif blocks:
                self._append_blocks(request, blocks)
            if cached.new_token_ids:  # with stages: only the last one samples
                assert request.req_index is not None, "a scheduled request has a seat"
                tokens = cached.new_token_ids[i]
                self.inputs.set_tokens(request.req_index, computed[req_id], tokens)

    def _seat(
        self, request: PluginRequest, token_ids: Sequence[int], block_ids: Sequence[Sequence[int]]
    ) -> None:
        tokens, prompt = np.array(token_ids, np.int32), request.num_prompt_tokens
        k, scored = request.num_prompt_logprobs, None
        request.prompt_logprobs = None
        # vLLM gets these scores with the first token.  If it discarded both, collect them again.
        if k is not None and len(tokens) == prompt:
            request.prompt_logprobs, scored = LogprobsTensors.empty_cpu(prompt - 1, 1 + k), 0
        request.req_index = seat = self.inputs.add(tokens, prompt, scored)
        request.state_blocks = []
        if block_ids:
            self._append_blocks(request, block_ids)
        if (asked := request.asked) is not None:
            ends, words = asked.all_stop_token_ids, asked.bad_words_token_ids or ()
            named = get(asked, "logprob_token_ids") or ()
            self.sampler.add(seat, request.params, request.seed, tokens, prompt, ends, words, named)

    def _append_blocks(self, request: PluginRequest, block_ids: Sequence[Sequence[int]]) -> None:
        """block_ids: new blocks, one list per KV group."""
        assert request.req_index is not None, "a running request has a seat"
        groups = list(block_ids)
        if self.state_group is not None:
            request.state_blocks += groups.pop(self.state_group)
        self.inputs.append_blocks(request.req_index, *groups)

    def _unseat(self, request: PluginRequest) -> None:
        if (seat := request.req_index) is not None:
            self.inputs.remove(seat)
            self.sampler.remove(seat)
            request.req_index = None

    def _pack(self, scheduled: dict[str, int], computed: dict[str, int]) -> ScheduledStep:
        # pack wants segments of one token first.
        req_ids = sorted(scheduled, key=lambda req_id: scheduled[req_id] > 1)
        requests = [self._requests[req_id] for req_id in req_ids]
        starts = np.array([computed[req_id] for req_id in req_ids])
        lengths = np.array([scheduled[req_id] for req_id in req_ids])
        spans = list(zip(requests, starts.tolist(), (starts + lengths).tolist(), strict=True))
        states, size = None, self.inputs.block_size
        if self.state_group is not None:
            states = [segment_slots(r.state_blocks, start, end, size) for r, start, end in spans]
        seats = np.array([r.req_index for r in requests])
        batch = self.inputs.pack(seats, starts, lengths, states)
        prompt_logprobs = {}
        for segment, (request, _, end) in enumerate(spans):
            if request.prompt_logprobs is not None:
                prompt_logprobs[segment] = request.prompt_logprobs
                if end >= request.num_prompt_tokens:
                    request.prompt_logprobs = None
        batch = self._poolings.extend(batch, req_ids)
        pooling = None if self.pooling is None else self._poolings
        return ScheduledStep(req_ids, requests, batch, prompt_logprobs, pooling)

    def masks(self, step: ScheduledStep, grammar: GrammarOutput | None) -> TokenMasks | None:
        """The grammar's bitmask rows, for requests that get a token in this step."""
        if grammar is None:
            return None
        at = {step.req_ids[s]: row for row, s in enumerate(step.batch.sample_segments.tolist())}
        rows = [at.get(req_id, -1) for req_id in grammar.structured_output_request_ids]
        picked = np.array(rows) >= 0
        if not picked.any():
            return None
        return TokenMasks(np.array(rows)[picked], np.asarray(grammar.grammar_bitmask)[picked])
