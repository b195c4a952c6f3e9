"""Finds where other conversations may branch off from a prompt.

Messages alone do not show this place: many templates write earlier messages differently from the
last one.  So such conversations are rendered too, and their texts are compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Message = Mapping[str, Any]

# A user's message whose first character no real message begins with.
_OTHER: Message = {"role": "user", "content": "\u2042"}


def chat_checkpoints(
    text: str,
    token_ids: Sequence[int],
    messages: Sequence[Message],
    add_generation_prompt: bool,
    render: Callable[[list[Message]], str],
    encode_text: Callable[[str], list[int]],
) -> tuple[int, ...]:
    """Numbers of tokens after which prompts like this one may continue differently, in order.

    text, token_ids: the prompt of `messages`.  render: other messages as text, without a generation
    prompt; it may raise.  encode_text: makes token ids of a text with special tokens.
    """
    positions = set()
    for alike in _alike(messages, add_generation_prompt):
        try:
            end = num_common(text, render(alike))
        except Exception:  # templates refuse some conversations, by any error
            continue
        # Counted from the nearer end: making tokens costs a hundred times as much as comparing.
        if end <= len(text) // 2:
            num_tokens = len(encode_text(text[:end]))
        else:
            num_tokens = len(token_ids) - len(encode_text(text[end:]))
        # The token at the end may be part of a longer one in yet another conversation.
        positions.add(num_tokens - 1)
    return tuple(sorted(at for at in positions if at > 0))


def num_systems(messages: Sequence[Message]) -> int:
    """The number of leading system messages."""
    return sum(1 for _ in takewhile(lambda message: message.get("role") == "system", messages))


def num_common(a: str, b: str) -> int:
    """The length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def _alike(messages: Sequence[Message], add_generation_prompt: bool) -> Iterator[list[Message]]:
    """Conversations that share a beginning with this one.

    They differ in the first question, in the last question, or only in the answer.
    """
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    for end in sorted({num_systems(messages), *users[-1:]}):
        if end:
            yield [*messages[:end], _OTHER]
    if add_generation_prompt:
        yield list(messages)
