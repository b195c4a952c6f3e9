"""How one request wants its tokens chosen, named as vLLM names it."""

from dataclasses import dataclass

from vllm_metal_lite.errors import Option, SamplingError
from vllm_metal_lite.rules import apply_rules, biases, integer, number, switch, texts, token_ids
from vllm_metal_lite.structured_params import StructuredOutputsParams, ThinkingParams, record

SAMPLING_RULES = {
    "n": integer(1, 1024),
    "temperature": number(0),
    "top_k": integer(-1, allowed="a positive integer, or 0 or -1 for all tokens"),
    "top_p": number(0, 1, above=True),
    "min_p": number(0, 1),
    "seed": integer(-(2**63), 2**64 - 1, allowed="an integer of 64 bits", optional=True),
    "repetition_penalty": number(0, above=True),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": biases(),
    "allowed_token_ids": token_ids(empty=False),
    "bad_words": texts(),
    "stop": texts(alone=True),
    "stop_token_ids": token_ids(),
    "include_stop_str_in_output": switch(),
    "ignore_eos": switch(),
    "max_tokens": integer(1, optional=True),
    "min_tokens": integer(0),
    "logprobs": integer(0, optional=True),
    "prompt_logprobs": integer(0, optional=True),
    "skip_special_tokens": switch(),
    "structured_outputs": record(StructuredOutputsParams),
    "thinking": record(ThinkingParams),
}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; validated when made, `SamplingError` if out of range.

    temperature 0 is greedy.  top_k 0 or -1 keeps every token.  max_tokens None means "up to the
    context length".  seed makes the request's tokens independent of whatever else is in the batch.
    logprobs / prompt_logprobs: how many of the most likely tokens to report at each position
    (0: only the chosen one), from the model's logits after a grammar's mask, as in vLLM.
    allowed_token_ids: nothing else is sampled.  bad_words: strings that are never completed.
    structured_outputs: the form of the answer, or a dict of its fields.  thinking: where the form
    begins if the model thinks first, and how long the model may think.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    thinking: ThinkingParams | None = None

    def __post_init__(self) -> None:
        apply_rules(self, SAMPLING_RULES, SamplingError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            values = f" ({self.max_tokens}), got {self.min_tokens}"
            raise SamplingError(
                Option("min_tokens"), " must be at most ", Option("max_tokens"), values
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5
