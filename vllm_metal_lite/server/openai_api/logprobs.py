"""Log-probabilities as OpenAI's two APIs show them, and as vLLM shows those of a prompt."""

import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.engine.detokenizer import Detokenizer, token_texts
from vllm_metal_lite.model.files.tokenizer import BYTES
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.worker.messages import Position

_LOWEST = -9999.0  # vLLM's value for minus infinity, which JSON does not have
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenNames:
    """Names tokens by their text, or with as_ids by "token_id:N", as vLLM does."""

    def __init__(self, tokenizer: TokenizerWrapper, as_ids: bool = False) -> None:
        self.tokenizer, self._as_ids = tokenizer, as_ids
        self.text_of = token_texts(tokenizer)

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.text_of(token_id)

    def bytes(self, token_id: int) -> list[int]:
        """The token's own bytes, also if they are only a part of a character."""
        text = self.text_of(token_id)
        if "\ufffd" in text:
            token = self.tokenizer.convert_ids_to_tokens(token_id)
            if isinstance(token, str) and (byte := _BYTE.fullmatch(token)):
                return [int(byte[1], 16)]
            if isinstance(token, str) and all(c in BYTES for c in token):
                return [BYTES[c] for c in token]
        return list(text.encode())


def chat_logprobs(positions: Iterable[Position], top: int, names: TokenNames) -> list[Any]:
    """The log-probabilities of tokens as chat completions and responses show them.

    top: how many of the most likely tokens each position lists.
    """
    content = []
    for position in positions:
        ranked = sorted((scored for scored in position if scored[2] <= top), key=itemgetter(2))
        tops = [_entry(scored, names) for scored in ranked]
        content.append({**_entry(position[0], names), "top_logprobs": tops})
    return content


def _entry(scored: tuple[int, float, int], names: TokenNames) -> dict[str, Any]:
    token_id, logprob, _ = scored
    return {
        "token": names.name(token_id),
        "logprob": _finite(logprob),
        "bytes": names.bytes(token_id),
    }


class TextOffsets:
    """The offset of each token in the text, in characters.

    Tokens that are parts of one character share its offset.
    prompt_token_ids: the tokens before the first one.  start: the first token's offset.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        start: int = 0,
    ) -> None:
        self._tokenizer, self._start = tokenizer, start
        self._token_ids: list[int] = []
        self._num_held = 0  # spaces that mlx-lm holds back until the next token
        self._detokenizer = Detokenizer(tokenizer, params, self._token_ids, prompt_token_ids)

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.end)
            self._token_ids.append(token_id)
            if self.end != offsets[-1]:
                self._num_held = 0
            elif self._tokenizer.decode([token_id]) == " ":
                self._num_held += 1
        return offsets

    @property
    def end(self) -> int:
        """The offset after the text so far."""
        return self._start + len(self._detokenizer.text()) + self._num_held


def echoed_offsets(names: TokenNames, token_ids: Sequence[int], text: str) -> list[int]:
    """The offsets of a prompt's tokens in its text, which may lack the tokens added in front."""
    found = TextOffsets(names.tokenizer, SamplingParams(skip_special_tokens=False))
    offsets = found.add(token_ids)
    added = max(found.end - len(text), 0)
    return [max(offset - added, 0) for offset in offsets]


def legacy_logprobs(
    token_ids: Iterable[int],
    positions: Iterable[Position | None],
    offsets: Sequence[int],
    names: TokenNames,
) -> dict[str, list[Any]]:
    """The field `logprobs` of a choice of completions.

    offsets: where each token begins in the choice's text.  A position is None at the first token of
    a prompt, which has no log-probabilities.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        tokens.append(names.name(token_id))
        top: dict[str, float] = {}
        for candidate, logprob, _ in position or ():  # the chosen token comes first
            top.setdefault(names.name(candidate), _finite(logprob))
        values.append(_finite(position[0][1]) if position else None)
        tops.append(top or None)
    scores: dict[str, list[Any]] = {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
    }
    return scores | {"text_offset": [*offsets]}


def prompt_logprobs(
    positions: Sequence[Position | None] | None, names: TokenNames
) -> list[dict[str, Any] | None] | None:
    """The field `prompt_logprobs`, as vLLM has it."""

    def scores(position: Position) -> dict[str, Any]:
        return {
            str(token): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": names.text_of(token),
            }
            for token, value, rank in position
        }

    if positions is None:
        return None
    return [None if position is None else scores(position) for position in positions]


def _finite(logprob: float) -> float:
    return max(_LOWEST, logprob)  # of NaN, too, because NaN is not larger than any number
