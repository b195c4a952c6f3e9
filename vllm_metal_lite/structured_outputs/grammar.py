"""Answers that follow a grammar, token by token."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.errors import Option, SamplingError, one_line
from vllm_metal_lite.structured_outputs.compiler import Compiler, readable_error
from vllm_metal_lite.structured_outputs.marks import marks_of, without_marks
from vllm_metal_lite.structured_params import StructuredOutputsParams


class GrammarConstraint:
    """A `Constraint`: the answer follows a grammar, and then ends.

    num_tokens: the larger of the model's and the tokenizer's vocabularies.
    """

    def __init__(self, compiled: Future[LLMatcher], num_tokens: int) -> None:
        self._compiled = compiled  # keeps the weak reference of the Compiler alive
        self._matcher = compiled.result().deep_copy()
        self._mask = np.zeros(-(-num_tokens // 32), np.uint32)
        self._num_after = 0  # tokens after the grammar's end, if a request ignores EOS

    def fill(self, bits: np.ndarray) -> bool:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        # A matcher that hit a limit allows the answer to end, which would hide the failure.  If no
        # token is allowed, the answer ends with `error`.
        bits[:] = 0 if self._matcher.is_error() else self._mask[: len(bits)]
        return True

    def accept(self, token_id: int) -> None:
        if self._matcher.is_stopped():
            self._num_after += 1
        else:
            self._matcher.consume_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        after = min(num_tokens, self._num_after)
        self._num_after -= after
        if num_tokens > after:
            self._matcher.rollback(num_tokens - after)

    def forced(self) -> list[int]:
        if self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())

    def error(self) -> str:
        return readable_error(self._matcher.get_error()) if self._matcher.is_error() else ""


def read_tokenizer(tokens: Any, num_tokens: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """A fast tokenizer for llguidance."""
    *texts, last = without_marks(tokens)
    for text in texts:
        with suppress(ValueError):
            return LLTokenizer(text, n_vocab=num_tokens, eos_token=list(eos_token_ids))
    return LLTokenizer(last, n_vocab=num_tokens, eos_token=list(eos_token_ids))


_compilers_lock = Lock()
# Each model has one compiler: reading a vocabulary of 150,000 tokens takes a second.
_compilers: "WeakKeyDictionary[TokenizerWrapper, Compiler]" = WeakKeyDictionary()


def grammar_constraint(
    params: StructuredOutputsParams,
    tokenizer: TokenizerWrapper,
    vocab_size: int,
    eos_token_ids: Sequence[int],
) -> GrammarConstraint:
    """A grammar at its beginning.  Raises SamplingError for one that cannot be used."""
    if not eos_token_ids:
        raise SamplingError(
            Option("structured_outputs"),
            f" needs a token that ends an answer: this model has no eos_token_id in its vocabulary "
            f"of {vocab_size}",
        )
    tokens = tokenizer._tokenizer
    with _compilers_lock:
        if tokenizer not in _compilers:
            num_tokens = max(vocab_size, len(tokens))
            try:
                read = read_tokenizer(tokens, num_tokens, eos_token_ids)
                _compilers[tokenizer] = Compiler(read, marks_of(tokens))
            except Exception as e:  # a slow tokenizer, or one that llguidance cannot read
                raise SamplingError(
                    Option("structured_outputs"),
                    f" cannot be used with this model's tokenizer: {one_line(e)}",
                ) from e
    compiler = _compilers[tokenizer]
    return GrammarConstraint(compiler.compile(params), compiler.tokenizer.vocab_size)
