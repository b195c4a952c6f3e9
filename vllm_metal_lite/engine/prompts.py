"""Accepted prompts: text, token ids, or a dict with one of them."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_metal_lite.errors import RequestError, show


def text_or_ids(prompt: Any) -> Any:
    """The text or the token ids (list, tuple, array) of a prompt; RequestError if it has none."""
    if isinstance(prompt, Mapping):
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
        raise RequestError(f"{name} holds half of a surrogate pair, got {show(value)}") from None
