"""The sampling parameters of a request: its own, else the model's, else vLLM's defaults."""

from collections.abc import Mapping
from typing import Any

from vllm_metal_lite.sampling_params import SamplingParams, generation_defaults
from vllm_metal_lite.server.worker.messages import ModelFacts

# Of models that name none, as in the APIs of OpenAI and Anthropic.
_TEMPERATURE = 1.0


def sampling_params(facts: ModelFacts, given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a request.  Raises SamplingError with the name and the limit.

    given: fields under vLLM's names; None: not given.  Without max_tokens, an answer may fill the
    context.
    """
    fields = generation_defaults(facts.generation_config, temperature=_TEMPERATURE)
    own = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**fields, "max_tokens": None, **own})
