"""Pooling requests: prompts whose hidden states or logits are read, and that draw no token.

The scheduler sees requests of one token, which end as soon as their prompts are computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.batch.pooled_rows import PooledRows
from vllm_metal_lite.errors import RequestError, show
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass(slots=True)
class _Pooling:
    """sum: of the hidden states so far, since the prompt's first row was computed last."""

    params: PoolingParams
    result: RequestOutput
    is_mean: bool
    sum: np.ndarray | None = None


class PoolingRequests:
    """The unfinished pooling requests of an engine."""

    def __init__(self) -> None:
        self._poolings: dict[Request, _Pooling] = {}

    def add(
        self, request: Request, params: PoolingParams, result: RequestOutput, model: LoadedModel
    ) -> None:
        mode = params.pooling or model.pooling.pooling
        is_mean = mode == "mean" and params.score_token_ids is None
        # A mean needs the hidden states of all rows.
        request.skip_prefix_cache_read = is_mean
        self._poolings[request] = _Pooling(params, result, is_mean)

    def remove(self, request: Request) -> None:
        self._poolings.pop(request, None)

    def extend(self, batch: ForwardBatch, output: SchedulerOutput) -> ForwardBatch:
        """A step's batch, with what its pooling requests read."""
        if not self._poolings:
            return batch
        place = {segment: row for row, segment in enumerate(batch.sample_segments.tolist())}
        segments, ranges, scored, token_ids = [], [], [], []
        num_sampled = len(place)
        for i, (start, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
            pooling = self._poolings.get(output.segments[i].request)
            if pooling is None:
                continue
            num_sampled -= i in place
            if i in place and pooling.params.score_token_ids is not None:
                scored.append(i)
                token_ids.append(pooling.params.score_token_ids)
            elif i in place or pooling.is_mean:
                segments.append(i)
                ranges.append((start if pooling.is_mean else end - 1, end))
        if not segments and not scored:
            return batch
        rows = PooledRows(
            np.array(segments, np.int32),
            np.array(ranges, np.int32).reshape(-1, 2),
            np.array(scored, np.int32),
            np.array([place[i] for i in scored], np.int32),
            _rectangle(token_ids),
            samples_nothing=not num_sampled,
        )
        return replace(batch, pooled=rows)

    def take(self, batch: ForwardBatch, output: SchedulerOutput, result: StepResult) -> None:
        """Record what a completed step has read."""
        rows, values = batch.pooled, result.pooled
        if rows is None or values is None:
            return
        sums, logits = values
        for i, value in zip(rows.segments.tolist(), sums, strict=True):
            segment = output.segments[i]
            pooling = self._poolings.get(segment.request)
            if pooling is None:  # it ended while the step was in flight
                continue
            if pooling.sum is None or segment.num_computed == 0 or not pooling.is_mean:
                pooling.sum = value
            else:
                pooling.sum = pooling.sum + value
            if segment.known_end == segment.request.num_prompt_tokens:
                count = segment.request.num_prompt_tokens if pooling.is_mean else 1
                pooling.result.pooled = _embedding(pooling.sum / count, pooling.params)
        for i, value in zip(rows.scored.tolist(), logits, strict=True):
            pooling = self._poolings.get(output.segments[i].request)
            if pooling is not None:
                ids = pooling.params.score_token_ids or ()
                pooling.result.pooled = value[: len(ids)]


def check_pooling(params: PoolingParams, model: LoadedModel) -> None:
    """Raise RequestError for parameters that a model cannot follow."""
    if not isinstance(params, PoolingParams):
        raise RequestError(f"params must be PoolingParams, got {show(params)}")
    if not model.packed.shows_hidden or model.ranks.stages:
        raise RequestError(f"{model.name} gives no embeddings: its hidden states are not at hand")
    if model.pooling.problem is not None:
        raise RequestError(f"{model.name} gives no embeddings: {model.pooling.problem}")
    if (most := max(params.score_token_ids or (0,))) >= model.vocab_size:
        raise RequestError(f"token id {most} is outside the vocabulary of {model.vocab_size}")


def values_of(output: RequestOutput, params: PoolingParams) -> np.ndarray:
    """What a finished request has read, float32.  Raises RequestError if there is nothing."""
    values, dimensions = output.pooled, params.dimensions
    if values is None or not np.isfinite(values).all():
        raise RequestError(f"the model computes no finite values for {show(output.request_id)}")
    if dimensions is not None and len(values) < dimensions and params.score_token_ids is None:
        raise RequestError(f"dimensions must be at most {len(values)}, got {dimensions}")
    return values


def truncate(
    token_ids: Sequence[int], params: PoolingParams, max_model_len: int, ends: Sequence[int] = ()
) -> list[int]:
    """The first tokens of a prompt, as many as `truncate_prompt_tokens` allows; `ends`, if the
    prompt has them at its end, stay there."""
    most = params.truncate_prompt_tokens
    if most is None:
        return list(token_ids)
    most = max_model_len - 1 if most < 0 else min(most, max_model_len - 1)
    if len(token_ids) <= most:
        return list(token_ids)
    kept = list(ends) if ends and list(token_ids[-len(ends) :]) == list(ends) else []
    kept = kept[-most:]
    return [*token_ids[: most - len(kept)], *kept]


def _embedding(hidden: np.ndarray, params: PoolingParams) -> np.ndarray:
    hidden = hidden[: params.dimensions]
    if not params.normalize:
        return hidden
    return hidden / max(float(np.linalg.norm(hidden)), 1e-12)


def _rectangle(token_ids: Sequence[Sequence[int]]) -> np.ndarray:
    """(L, K) int32; shorter rows are filled with token 0."""
    width = max(map(len, token_ids), default=0)
    filled = [[*ids, *[0] * (width - len(ids))] for ids in token_ids]
    return np.array(filled, np.int32).reshape(len(token_ids), width)
