"""Translates vLLM's SamplingParams to ours.  The front end uses this, so no MLX import."""

from dataclasses import fields
from typing import Any

from vllm_metal_lite.errors import SamplingError
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.vllm_plugin import get

# Fields of vLLM that change sampling or reporting, and that our sampler lacks.
_UNSUPPORTED = (
    "thinking_token_budget",
    "prompt_logprob_token_ids",
    "trace_decode_token_ids",
    "prompt_logprob_start",
)


# Our fields that vLLM itself handles; here they keep defaults that limit nothing.
_OF_VLLM = {
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "skip_special_tokens",
    "structured_outputs",
    "thinking",
}


def translate_params(params: Any, vocab_size: int | None) -> SamplingParams:
    """The part of a vLLM SamplingParams that the runner applies.

    vocab_size None: unknown, so logprobs -1 is not resolved.  Raises SamplingError for unsupported
    fields; params that pass here also pass in the worker.
    """
    for name in _UNSUPPORTED:
        if get(params, name) is not None:
            raise SamplingError(f"{name} is not supported by vllm-metal-lite")
    own = [f.name for f in fields(SamplingParams) if f.name not in _OF_VLLM]
    given = {name: value for name in own if (value := get(params, name)) is not None}
    for name in ("logprobs", "prompt_logprobs"):
        if given.get(name) == -1:
            given[name] = vocab_size or 0
    return SamplingParams(**given, max_tokens=None)
