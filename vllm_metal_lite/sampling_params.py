"""How the tokens of one request are chosen, under vLLM's names."""

from dataclasses import dataclass
from typing import Annotated

from vllm_metal_lite.errors import Option, SamplingError
from vllm_metal_lite.rules import (
    Flag,
    apply_rules,
    biases,
    integer,
    number,
    switch,
    texts,
    token_ids,
)
from vllm_metal_lite.structured_params import StructuredOutputsParams, ThinkingParams, record

_SEED = integer(-(2**63), 2**64 - 1, allowed="an integer of 64 bits")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; validated when made, `SamplingError` if out of range.

    JSON lines, the server's APIs and requests of vLLM have the same fields.  The command line, and
    a model's generation_config.json, have those with a `Flag`.
    temperature 0 is greedy.  top_k 0 or -1 keeps every token.  max_tokens None means "up to the
    context length".  seed makes the request's tokens independent of whatever else is in the batch.
    logprobs / prompt_logprobs: how many of the most likely tokens to report at each position
    (0: only the chosen one), from the model's logits after a grammar's mask, as in vLLM.
    allowed_token_ids: nothing else is sampled.  bad_words: strings that are never completed.
    structured_outputs: the form of the answer, or a dict of its fields.  thinking: where the form
    begins if the model thinks first, and how long the model may think.
    """

    n: Annotated[int, integer(1, 1024)] = 1
    temperature: Annotated[float, number(0), Flag("T", "0: always the most likely token")] = 1.0
    top_k: Annotated[
        int,
        integer(-1, allowed="a positive integer, or 0 or -1 for all tokens"),
        Flag("N", "only the N most likely tokens; 0: all"),
    ] = 0
    top_p: Annotated[
        float,
        number(0, 1, above=True),
        Flag("P", "only the most likely tokens that together have probability P"),
    ] = 1.0
    min_p: Annotated[
        float,
        number(0, 1),
        Flag("P", "only tokens at least P times as likely as the most likely one"),
    ] = 0.0
    seed: Annotated[int | None, _SEED] = None
    repetition_penalty: Annotated[
        float, number(0, above=True), Flag("X", "above 1: tokens seen before become less likely")
    ] = 1.0
    presence_penalty: Annotated[
        float,
        number(-2, 2),
        Flag("X", "-2 to 2; above 0: tokens of the answer so far become less likely"),
    ] = 0.0
    frequency_penalty: Annotated[
        float, number(-2, 2), Flag("X", "the same, times how often a token occurs")
    ] = 0.0
    logit_bias: Annotated[dict[int, float] | None, biases()] = None
    allowed_token_ids: Annotated[list[int] | tuple[int, ...] | None, token_ids(empty=False)] = None
    bad_words: Annotated[list[str] | tuple[str, ...] | None, texts()] = None
    stop: Annotated[str | list[str] | tuple[str, ...] | None, texts(alone=True)] = None
    stop_token_ids: Annotated[list[int] | tuple[int, ...] | None, token_ids()] = None
    include_stop_str_in_output: Annotated[bool, switch()] = False
    ignore_eos: Annotated[bool, switch()] = False
    max_tokens: Annotated[int | None, integer(1)] = 16
    min_tokens: Annotated[int, integer(0)] = 0
    logprobs: Annotated[int | None, integer(0)] = None
    prompt_logprobs: Annotated[int | None, integer(0)] = None
    skip_special_tokens: Annotated[bool, switch()] = True
    structured_outputs: Annotated[
        StructuredOutputsParams | None, record(StructuredOutputsParams, "structured_outputs")
    ] = None
    thinking: Annotated[ThinkingParams | None, record(ThinkingParams, "thinking")] = None

    def __post_init__(self) -> None:
        apply_rules(self, SamplingError)
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
