"""Random walks through the grammar that a format makes of a tool's schema.

All formats of the table of writers are walked, so a new format needs no test of its own.
"""

import asyncio
import os
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import llguidance
import llguidance.hf
import numpy as np

from tests.support.chat.byte_tokenizer import tokenizer_of
from tests.support.chat.text import cut, parse
from tests.support.chat.writers import WRITERS
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.server import structured
from vllm_metal_lite.structured_outputs.marks import marks_of

# Walks of each schema, and random schemas of each format.
WALKS = int(os.environ.get("WALKS", "6"))
REQUIRED = ToolChoice("required", parallel=False)
MARKER = re.compile(r"<[|｜][^<>]*[|｜]>|\[[A-Z_]+\]|</?[a-z_:]*(?:tool_calls?|TOOLCALL)>")
_QUOTES = {"gemma4": '<|"|>', "function_gemma": "<escape>"}
_LIKELY, _CLOSING = "ab123 /\n\"'\\tn}]),", "ab/\"'}])"
_LONGEST = 6000


class Tokens(NamedTuple):
    """Tokens of one byte; with a token for each marker of a format, or with none."""

    tokenizer: Any
    marks: dict[str, int]
    plain: Any = None

    def encode(self, text: str) -> list[int]:
        if self.plain is None:
            return [*text.encode()]
        found: list[int] = self.plain.encode(text, add_special_tokens=False)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        if self.plain is None:
            return bytes(tokens).decode(errors="replace")
        return str(self.plain.decode(tokens))


@cache
def tokens_of(name: str, special: bool) -> Tokens:
    """special: markers are tokens.  Of Harmony they must be: nothing else ends its texts."""
    if not special and name != "harmony":
        return Tokens(llguidance.LLTokenizer("byte"), {})
    written = " ".join([WRITERS[name]([("put", {})]), *FORMATS[name].markers])
    plain = tokenizer_of(set(MARKER.findall(written)), True)
    return Tokens(llguidance.hf.from_tokenizer(plain), marks_of(plain), plain)


def compiled(name: str, tool: Tool, special: bool = False) -> llguidance.LLMatcher | None:
    """The grammar of a call of a tool, compiled; None: the schema is refused."""
    tokens = tokens_of(name, special)
    try:
        form = structured.answer_form(FORMATS[name], tokens.marks, [tool], REQUIRED, None)
        assert form is not None
        asyncio.run(structured.check_calls(form, [tool]))
    except structured.ApiError:
        return None
    return llguidance.LLMatcher(tokens.tokenizer, form.grammar)


def walk(
    matcher: llguidance.LLMatcher,
    rng: random.Random,
    ends: Sequence[list[int]],
    words: Sequence[list[int]],
    tokens: Tokens,
) -> list[int]:
    """A random answer that follows a grammar; it ends, by one of `ends`, soon after it can.
    words: what ends a string, if that is no quote."""
    answer, num_free, eos = list[int](), rng.randrange(12), tokens.tokenizer.eos_token
    likely, closing = (
        {*tokens.encode(text), *tokens.marks.values()} for text in (_LIKELY, _CLOSING)
    )
    while len(answer) < _LONGEST:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        if allowed == [eos]:
            return answer
        seen = {*allowed}
        for end in ends if num_free <= 0 else ():
            if end[0] in seen and matcher.validate_tokens(end) == len(end):
                last = matcher.deep_copy()
                if last.try_consume_tokens(end) == len(end) and last.is_accepting():
                    return answer + end
        taken = [w for w in words if num_free <= 0 and matcher.validate_tokens(w) == len(w)]
        if taken and rng.random() < 0.3:
            word = rng.choice(taken)
            assert matcher.consume_tokens(word)
            answer += word
            continue
        wanted = closing if num_free < -20 else likely
        liked = [token for token in allowed if token in wanted]
        token = rng.choice(liked if liked and rng.random() < 0.9 else allowed)
        if token == eos:
            return answer
        num_free -= len(allowed) > 1
        assert matcher.consume_token(token)
        answer.append(token)
    raise AssertionError(tokens.decode(answer))


def walks(name: str, tool: Tool, count: int = WALKS) -> Iterator[tuple[str, Any]]:
    """Random calls of a tool, and their arguments as the format's reader reads them: whole, a
    character at a time, and in random pieces.  Markers are tokens in every second walk."""
    for special in False, True:
        if (found := compiled(name, tool, special)) is None:
            return
        tokens = tokens_of(name, special)
        written = WRITERS[name]([(tool.name, {"x": 987})]).removesuffix("<|call|>")
        head, tail = written.split("987")
        # Harmony's thoughts may be messages without end.
        start = tokens.encode(head.removesuffix('{"x": ')) if name == "harmony" else []
        assert found.consume_tokens(start)
        between = WRITERS[name]([("put", {"x": 987, "zz": 1})]).split("987")[1].split("zz")[0]
        closing = _QUOTES.get(name, '"'), "'", "]", "}"
        closers = ["".join(some) for n in range(4) for some in product(closing, repeat=n)]
        ends = [tokens.encode(closer + tail) for closer in closers]
        words = [tokens.encode(word) for word in (between, closing[0])]
        for seed in range(special, count, 2):
            rng = random.Random(seed)
            walked = walk(found.deep_copy(), rng, ends, words, tokens)
            answer = tokens.decode(start + walked)
            said = parse(FORMATS[name], answer, [tool], is_held=True)
            assert said.calls, answer
            places = [rng.randrange(len(answer) + 1) for _ in range(rng.randrange(9))]
            for pieces in list(answer), cut(answer, places):
                again = parse(FORMATS[name], pieces, [tool], is_held=True)
                assert again == said, (answer, pieces)
            yield answer, said.called[0][1]
