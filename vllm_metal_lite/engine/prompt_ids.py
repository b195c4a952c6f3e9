"""Prompts to token ids: text, ids, or a dict with one of them.

Servers make token ids outside of the engine, so these functions need a tokenizer and no engine.
"""

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.errors import Option, RequestError, one_line, show
from vllm_metal_lite.scheduler.request import Span

Prompt = str | list[int] | Mapping[str, Any]


def tokenize(
    prompt: Prompt,
    tokenizer: TokenizerWrapper | None,
    vocab_size: int,
    expand: Callable[[str], str] = str,
) -> tuple[str | None, list[int]]:
    """(text, token ids) of a prompt: a string, token ids, or a dict with "prompt_token_ids" or
    "prompt".  expand: adds the rows of pictures to a text.  Raises RequestError for other types and
    for ids outside the vocabulary."""
    text, ids = None, text_or_ids(prompt)
    if isinstance(ids, str):
        text, ids = ids, encode(expand(ids), tokenizer) if ids else []
    if len(ids) == 0:
        raise RequestError("the prompt is empty: it must have at least one token")
    kinds = set(map(type, ids))
    for kind in kinds:  # types first: a long prompt has only one
        if kind is bool or not issubclass(kind, (int, np.integer)):
            token = next(token for token in ids if type(token) is kind)
            raise RequestError(f"token ids must be integers, got {show(token)}")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise RequestError(f"token id {show(token)} is outside the vocabulary of {vocab_size}")
    return text, list(ids) if kinds == {int} else list(map(int, ids))


def encode(
    text: str, tokenizer: TokenizerWrapper | None, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text, with the special tokens that the tokenizer adds."""
    check_text("the prompt", text)
    if tokenizer is None:
        raise RequestError("this model was loaded without a tokenizer: give token ids")
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as e:
        raise RequestError(f"the tokenizer refuses the prompt: {one_line(e)}") from e


def text_or_ids(prompt: Any) -> Any:
    """The text or the token ids (list, tuple, array) of a prompt; RequestError if it has none."""
    if isinstance(prompt, Mapping) and {"prompt", "prompt_token_ids"} & prompt.keys():
        token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if token_ids is None:
            if not isinstance(text, str):
                raise RequestError(f"prompt must be a string, got {show(text)}")
            return text
        if not is_list(token_ids):
            raise RequestError(
                f"prompt_token_ids must be a list of token ids, got {show(token_ids)}"
            )
        return token_ids
    if not (isinstance(prompt, str) or is_list(prompt)):
        raise RequestError(
            "a prompt must be a string, a list of token ids, or a dict with 'prompt' or "
            f"'prompt_token_ids', got {show(prompt)}"
        )
    return prompt


def as_list(prompts: Any) -> list[Any]:
    """The prompts of a call that takes one or a list.  Raises RequestError for other types."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not is_list(prompts):
        raise RequestError(f"prompts must be a prompt or a list of them, got {show(prompts)}")
    batch = list(prompts)
    return [batch] if batch and isinstance(batch[0], (int, np.integer)) else batch


def cache_salt(prompt: Prompt) -> str | None:
    """The "cache_salt" of a prompt, see `check_salt`."""
    return check_salt(prompt.get("cache_salt")) if isinstance(prompt, Mapping) else None


def check_salt(salt: Any) -> str | None:
    """The salt.  Raises RequestError for anything but None and a non-empty string."""
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(Option("cache_salt"), f" must be a non-empty string, got {show(salt)}")
    check_text("cache_salt", salt)
    return salt


def pictures_of(prompt: Prompt) -> list[Any]:
    """The pictures in the "multi_modal_data" of a prompt, named as vLLM names them.  Raises
    RequestError for anything but {"image": a picture or a list of them}."""
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if data is None:
        return []
    if not isinstance(data, Mapping) or data.keys() - {"image"}:
        raise RequestError(
            f'multi_modal_data must be {{"image": a picture or a list of them}}, got {show(data)}'
        )
    found = data.get("image")
    return list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]


def spans_of(prompt: Prompt, num_tokens: int) -> tuple[Span, ...]:
    """The "spans" of a prompt of num_tokens, in order.  An end of None is the end of the prompt.
    Raises RequestError for anything but a list of (start, end) that do not overlap."""
    spans = prompt.get("spans") if isinstance(prompt, Mapping) else None
    if spans is None:
        return ()
    if not is_list(spans):
        raise RequestError(f"spans must be a list of (start, end), got {show(spans)}")
    pairs = sorted(_span(span, num_tokens) for span in spans)
    for (start, end), (other, _) in pairwise(pairs):
        if other < end:
            raise RequestError(f"spans must not overlap: {start} to {end}, and one from {other} on")
    return tuple(pairs)


def _span(span: Any, num_tokens: int) -> Span:
    pair: list[Any] = list(span) if is_list(span) and len(span) == 2 else [None, None]
    start, end = pair[0], num_tokens if pair[1] is None else pair[1]
    if not all(isinstance(at, Integral) and not isinstance(at, bool) for at in (start, end)):
        raise RequestError(f"a span must be (start, end), in tokens, got {show(span)}")
    if not 0 <= start < end <= num_tokens:
        raise RequestError(
            f"span {show(span)} is empty or outside the prompt of {num_tokens} tokens"
        )
    return int(start), int(end)


def is_list(value: Any) -> bool:
    """Whether a value is a list, a tuple, or a non-scalar array."""
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def check_text(name: str, value: Any) -> None:
    """Raise RequestError if a value contains an unpaired surrogate.

    Python and JSON strings can hold one; tokenizers cannot encode it.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} contains an unpaired surrogate, got {show(value)}") from None
