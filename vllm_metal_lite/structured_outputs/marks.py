"""Tokens that are no text to llguidance."""

import json
import re
from copy import copy
from typing import Any


def marks_of(tokenizer: Any) -> dict[str, int]:
    """Ids by text of the tokens that a grammar must name by id.  For llguidance a special token is
    not text; nor is an added token in angle brackets, such as Qwen's `<tool_call>`."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token.content: i
        for i, token in added.items()
        if token.special or token.content[:1] + token.content[-1:] == "<>"
    }


def without_marks(tokenizer: Any) -> list[str]:
    """A fast tokenizer as JSON twice: with marks whose names occur in no text, and unchanged, if
    llguidance cannot read the first.

    llguidance tokenizes the text that a grammar forces.  The tokenizer would find marks in that
    text, and llguidance would refuse them: such a text is spelled by ordinary tokens.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    text = backend.to_str()
    names = {_quoted(mark): _quoted(f"{mark[:-1]}\0{mark[-1:]}") for mark in marks_of(tokenizer)}
    if not names:
        return [text]
    first = "".join(re.escape(name) for name in {name[1] for name in names})
    strings = rf'"[{first}](?:[^"\\]|\\.)*"'
    return [re.sub(strings, lambda found: names.get(found[0], found[0]), text), text]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
