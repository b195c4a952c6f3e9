"""Prompts to token ids: text, ids, a dict with one of them, or a conversation.

Servers make token ids outside of the engine, so these functions need a tokenizer and no engine.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.engine.chat_checkpoints import chat_checkpoints
from vllm_metal_lite.errors import Option, RequestError, one_line, show

# Roles that chat templates know; a template may name others.
_ROLES = ("system", "user", "assistant", "tool")
Prompt = str | list[int] | Mapping[str, Any]
# A conversation as text, of (messages, add_generation_prompt, more variables).
Render = Callable[[Sequence[Mapping[str, Any]], bool, Mapping[str, Any]], str]


def tokenize(
    prompt: Prompt, tokenizer: TokenizerWrapper | None, vocab_size: int
) -> tuple[str | None, list[int]]:
    """(text, token ids) of a prompt: a string, token ids, or a dict with "prompt_token_ids" or
    "prompt".  Raises RequestError for other types and for ids outside the vocabulary."""
    text, ids = None, text_or_ids(prompt)
    if isinstance(ids, str):
        text, ids = ids, encode(ids, tokenizer) if ids else []
    if len(ids) == 0:
        raise RequestError("the prompt is empty: it must have at least one token")
    for kind in set(map(type, ids)):  # types first: a long prompt has only one
        if kind is bool or not issubclass(kind, (int, np.integer)):
            token = next(token for token in ids if type(token) is kind)
            raise RequestError(f"token ids must be integers, got {show(token)}")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise RequestError(f"token id {show(token)} is outside the vocabulary of {vocab_size}")
    return text, list(map(int, ids))


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


def render_turn(
    tokenizer: TokenizerWrapper | None,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
    *,
    with_checkpoints: bool,
    render: Render | None = None,
    encode_text: Callable[[str], list[int]] | None = None,
) -> tuple[list[int], tuple[int, ...]]:
    """(Token ids, `chat_checkpoints`) of a conversation under the chat template of `model`.

    variables: more of the template's.  with_checkpoints: False for models without recurrent layers.
    render: None: by the template of `tokenizer`.  encode_text: makes the token ids, as a
    PieceEncoder does; None: the tokenizer.  Raises RequestError, with the template's own words.
    """
    if not isinstance(messages, (list, tuple)) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str)
        for message in messages
    ):
        raise RequestError(
            f"messages must be a list of dicts with role and content, got {show(messages)}"
        )
    if not messages:
        raise RequestError("messages is empty: a conversation has at least one message")
    if not isinstance(add_generation_prompt, bool):
        raise RequestError(
            f"add_generation_prompt must be true or false, got {show(add_generation_prompt)}"
        )
    if tokenizer is None or not tokenizer.has_chat_template:
        raise RequestError(
            f"{model} has no chat template, so it takes no messages: "
            "give it a prompt (text or token ids)"
        )
    render = render or partial(by_template, tokenizer)
    encode_text = encode_text or partial(tokenizer.encode, add_special_tokens=False)
    try:
        _check_messages(tokenizer, messages)
        text = render(messages, add_generation_prompt, variables)
        token_ids = encode_text(text) if isinstance(text, str) else None
    except RequestError:
        raise
    except Exception as e:  # templates raise any error, as for unknown roles
        raise RequestError(f"the chat template refuses these messages: {one_line(e)}") from e
    if token_ids is None:
        raise RequestError(f"the chat template returns {show(text)} for {show(variables)}")
    if not with_checkpoints:
        return token_ids, ()
    others = {k: v for k, v in variables.items() if k != "continue_final_message"}
    return token_ids, chat_checkpoints(
        text,
        token_ids,
        messages,
        add_generation_prompt,
        lambda alike: render(alike, False, others),
        encode_text,
    )


def by_template(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """A conversation as text.  Raises what the template raises."""
    text: str = tokenizer.apply_chat_template(
        list(messages),
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    return text


def _check_messages(tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError for a role that the chat template does not name, because many templates
    leave such messages out, and for text that cannot be encoded."""
    template = tokenizer.chat_template
    sources = template.values() if isinstance(template, Mapping) else [template or ""]
    source = "".join(map(str, sources))  # "": a template in Python, which refuses by itself
    for role in dict.fromkeys(message["role"] for message in messages):
        if role not in _ROLES and source and f"'{role}'" not in source.replace('"', "'"):
            raise RequestError(
                f"the role of a message must be one of {', '.join(_ROLES)}, got {show(role)}"
            )
    check_text("messages", messages)


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
    """A salt, or None for none.  Raises RequestError."""
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(Option("cache_salt"), f" must be a non-empty string, got {show(salt)}")
    check_text("cache_salt", salt)
    return salt


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
