"""vLLM's SamplingParams as ours.  No MLX: the front end checks requests with it."""

from typing import Any

from vllm_metal_lite.errors import SamplingError
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.vllm_plugin.compat import get

# Fields that change what is sampled or reported, and that our sampler does not have.
_UNSUPPORTED = (
    "thinking_token_budget",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "trace_decode_token_ids",
    "prompt_logprob_start",
)


def translate_params(params: Any, vocab_size: int | None) -> SamplingParams:
    """The part of a vLLM SamplingParams that the runner applies.

    vLLM itself sees to n, stop strings, end of sequence, max_tokens and text, so they stay at what
    restrains nothing here.  vocab_size None: unknown, the counts of logprobs are not resolved.
    Raises SamplingError for what we cannot do; one that passes here passes in the worker.
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
        max_tokens=None,
        min_tokens=params.min_tokens,
        logprobs=count(params.logprobs),
        prompt_logprobs=count(params.prompt_logprobs),
    )
