"""Answers of a given form: grammars by llguidance, and budgets of thoughts."""

from collections.abc import Sequence
from typing import Any

from vllm_metal_lite.errors import Option, SamplingError, install
from vllm_metal_lite.sampling.masks import Constraint
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.structured_outputs.thinking import ChannelThinking, Thinking


def build(
    params: SamplingParams,
    tokenizer: Any,
    vocab_size: int,
    eos_token_ids: Sequence[int],
) -> Constraint | None:
    """The constraint of an answer with these parameters; None: the answer is not limited.

    tokenizer: a TokenizerWrapper of mlx-lm, or None.  vocab_size: the width of the model's logits.
    Raises SamplingError for a grammar that cannot be used, and BusyError.
    """
    grammar: Constraint | None = None
    if params.structured_outputs is not None:
        if tokenizer is None:
            raise SamplingError(
                Option("structured_outputs"),
                " needs a tokenizer, and this model was loaded without one",
            )
        try:
            from vllm_metal_lite.structured_outputs.grammar import grammar_constraint
        except ModuleNotFoundError as e:
            raise SamplingError(
                Option("structured_outputs"), f" needs {e.name}: {install('structured')}"
            ) from e
        grammar = grammar_constraint(
            params.structured_outputs, tokenizer, vocab_size, eos_token_ids
        )
    if params.thinking is None:
        return grammar
    kind = ChannelThinking if params.thinking.is_channel else Thinking
    return kind(params.thinking, grammar, vocab_size, eos_token_ids)
