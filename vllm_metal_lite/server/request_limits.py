"""The limits of a request, checked before any work on it; docs/server.md has the table.

Work on a request holds Python's lock, which stops all other requests: a large request takes long to
parse, and a small one may ask for much work.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_metal_lite.errors import shorten
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.errors import ApiError, bad
from vllm_metal_lite.structured_params import MAX_FORM

# The most entries of a list or an object, by the field's name in any API.
MAX_ENTRIES = {
    "messages": 2_048,
    "input": 2_048,
    "prompt": 1_000_000,  # token ids
    "tokens": 1_000_000,
    "stop": 128,
    "stop_sequences": 128,
    "bad_words": 512,
    "logit_bias": 4_096,
    "allowed_token_ids": 32_768,
}
MAX_OTHER_ENTRIES = 1_024  # tools, stop_token_ids, documents, metadata, ...
# The most characters of all texts within a field.
MAX_CHARACTERS = {
    "tools": 1_000_000,
    "stop": 8_192,
    "stop_sequences": 8_192,
    "bad_words": 16_384,
    "response_format": MAX_FORM,
    "structured_outputs": MAX_FORM,
    "output_format": MAX_FORM,
    "output_config": MAX_FORM,
    "text": MAX_FORM,
}
# The most of a pooling request.  A query and an instruction count again in each of its pairs.
MAX_POOLED_CHARACTERS, MAX_POOLED_TOKENS = 16_000_000, 4_000_000
MAX_N = 128  # as in OpenAI's API
# The most log-probabilities of a request: its tokens times those of each token.  The answer of a
# request with n=1 has no limit, because it may always fill the context.
MAX_PROMPT_LOGPROBS, MAX_LOGPROBS_OF_ANSWERS = 200_000, 500_000
# The most objects and numbers in a body's JSON.  Parsing takes a microsecond an object, and 30 ns a
# number such as a token id.  Commas are counted instead of numbers.
MAX_CONTAINERS, MAX_COMMAS = 20_000, 1_000_000
_FEW = 1 << 16  # bytes; a smaller body is always cheap to parse
_SLICE = 1 << 18
_IS_TEXT = bytes(set(range(256)) - set(b'",[{'))


def check_json(raw: bytes) -> None:
    """Raise ApiError (400) for JSON of too many values to parse at once."""
    if len(raw) >= _FEW and _excess(raw) and (found := _excess(b"".join(_outside_strings(raw)))):
        raise ApiError(400, f"the body has {found} are allowed")


def _excess(text: bytes) -> str | None:
    """In words, the limit that a JSON text exceeds; None if it exceeds none."""
    for name, signs, most in (
        ("objects and lists", (b"{", b"["), MAX_CONTAINERS),
        ("commas between values", (b",",), MAX_COMMAS),
    ):
        if (count := sum(map(text.count, signs))) > most:
            return f"{count:,} {name}, and at most {most:,}"
    return None


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """The brackets and commas of JSON that are not within strings."""
    kept = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _IS_TEXT)
    inside = 0
    for at in range(0, len(kept), _SLICE):
        parts = kept[at : at + _SLICE].split(b'"')
        yield b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2


def check_fields(body: Any) -> Any:
    """Raise ApiError (400) for a body with a field of too many entries, or too much text.

    Before pydantic looks at the fields, because it makes an error for each bad entry.
    """
    for name, value in body.items() if isinstance(body, dict) else ():
        is_ids = name == "input" and isinstance(value, list) and value and type(value[0]) is int
        most = MAX_ENTRIES.get("tokens" if is_ids else name, MAX_OTHER_ENTRIES)
        if isinstance(value, (list, dict)) and len(value) > most:
            words = f" may have at most {most:,} entries, got {len(value):,}"
            raise bad(shorten(name), words)
        most = MAX_CHARACTERS.get(name, 0)
        if most and (size := num_characters(value)) > most:
            raise bad(name, f" may have at most {most:,} characters, got {size:,}")
    return body


def num_characters(value: Any) -> int:
    """Characters of all texts within a value of JSON."""
    count, left = 0, [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            left += value.keys()
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
    return count


def check_logprobs(lengths: Sequence[int], max_model_len: int, params: SamplingParams) -> None:
    """Raise ApiError (400) for too many log-probabilities of all prompts, or of several answers.

    lengths: tokens of each prompt.
    """
    rooms = [max(max_model_len - length, 0) for length in lengths]
    tokens = params.n * sum(min(params.max_tokens or room, room) for room in rooms)
    count = f"n={params.n}" if len(lengths) == 1 else f"{params.n * len(lengths)}"
    answers = 0 if count == "n=1" else tokens
    of_prompt = sum(lengths), "prompt tokens", MAX_PROMPT_LOGPROBS
    of_answers = answers, f"tokens of {count} answers", MAX_LOGPROBS_OF_ANSWERS
    for name, (tokens, what, most) in (("prompt_logprobs", of_prompt), ("logprobs", of_answers)):
        each = getattr(params, name)
        if each is not None and (asked := tokens * (each + 1)) > most:
            raise ApiError(
                400,
                f"{name}={each} for {tokens:,} {what} asks for {asked:,} log-probabilities, and at "
                f"most {most:,} are allowed",
                param=name,
            )
