"""Translates vLLM's SamplingParams to ours.  The front end uses this, so no MLX import."""

from typing import Any

from vllm_metal_lite.errors import SamplingError
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.vllm_plugin import get

# Fields that change sampling or reporting, and that our sampler lacks.
_UNSUPPORTED = (
    "thinking_token_budget",
    "prompt_logprob_token_ids",
    "trace_decode_token_ids",
    "prompt_logprob_start",
)


def translate_params(params: Any, vocab_size: int | None) -> SamplingParams:
    """The part of a vLLM SamplingParams that the runner applies.

    vLLM itself handles n, stop strings, end of sequence, max_tokens and text; here they keep
    defaults that limit nothing.  vocab_size None: unknown, so logprobs -1 is not resolved.
    Raises SamplingError for unsupported fields; params that pass here also pass in the worker.
    """
    for name in _UNSUPPORTED:
        if get(params, name) is not None:
            raise SamplingError(f"{name} is not supported by vllm-metal-lite")

    def count(value: int | None) -> int | None:
        return (vocab_size or 0) if value == -1 else value

    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias or None,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words or None,  # for messages; the sampler gets token ids
        max_tokens=None,
        min_tokens=params.min_tokens,
        logprobs=count(params.logprobs),
        prompt_logprobs=count(params.prompt_logprobs),
    )
