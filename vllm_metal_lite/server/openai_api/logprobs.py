"""Log-probabilities as OpenAI's two APIs show them, and as vLLM shows those of a prompt."""

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.engine.detokenizer import Detokenizer, token_texts
from vllm_metal_lite.model.files.tokenizer import BYTES
from vllm_metal_lite.outputs import Logprob
from vllm_metal_lite.sampling_params import SamplingParams

_LOWEST = -9999.0  # JSON has no infinity; vLLM's value
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

Position = Mapping[int, Logprob]


class TokenNames:
    """Tokens as strings.  as_ids: "token_id:N" in place of the text, as vLLM has it."""

    def __init__(self, tokenizer: TokenizerWrapper, as_ids: bool = False) -> None:
        self.tokenizer, self._as_ids = tokenizer, as_ids

    def name(self, token_id: int, logprob: Logprob | None) -> str:
        """logprob: the token's, if it has been scored."""
        if self._as_ids:
            return f"token_id:{token_id}"
        text = logprob.decoded_token if logprob else token_texts(self.tokenizer)(token_id)
        return text or ""

    def bytes(self, token_id: int, logprob: Logprob) -> list[int]:
        """The token's own bytes, also if they are only a part of a character."""
        text = logprob.decoded_token or ""
        if "\ufffd" in text:
            token = self.tokenizer.convert_ids_to_tokens(token_id)
            if isinstance(token, str) and (byte := _BYTE.fullmatch(token)):
                return [int(byte[1], 16)]
            if isinstance(token, str) and all(c in BYTES for c in token):
                return [BYTES[c] for c in token]
        return list(text.encode())


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position] | None, *, top: int, names: TokenNames
) -> dict[str, Any] | None:
    """`logprobs` of a choice of chat completions.  top: how many tokens each position lists."""
    if positions is None:
        return None
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        ranked = [(p.rank or 0, t, p) for t, p in position.items() if (p.rank or 0) <= top]
        entry = _entry(token_id, position[token_id], names)
        entry["top_logprobs"] = [
            _entry(t, p, names) for _, t, p in sorted(ranked, key=itemgetter(0))
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _entry(token_id: int, logprob: Logprob, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token_id, logprob),
        "logprob": _finite(logprob.logprob),
        "bytes": names.bytes(token_id, logprob),
    }


class TextOffsets:
    """The offset of each token in the text, in characters.

    Tokens of one character share its offset.  prompt_token_ids: the tokens before.  start: the
    first token's offset.
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
) -> dict[str, Any]:
    """`logprobs` of a choice of completions.

    offsets: where each token begins in the choice's text.  A position is None at the first token of
    a prompt, which has no log-probabilities.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        scores = position or {}
        tokens.append(names.name(token_id, scores.get(token_id)))
        values.append(_finite(scores[token_id].logprob) if scores else None)
        top: dict[str, float] = {}
        for candidate, logprob in scores.items():  # the chosen token comes first
            top.setdefault(names.name(candidate, logprob), _finite(logprob.logprob))
        tops.append(top or None)
    result: dict[str, Any] = {"tokens": tokens, "token_logprobs": values}
    return result | {"top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(positions: Sequence[Position | None] | None) -> list[Any] | None:
    """`prompt_logprobs`, a field of vLLM's."""
    if positions is None:
        return None
    return [
        position and {str(t): _scored(p) for t, p in position.items()} for position in positions
    ]


def _scored(p: Logprob) -> dict[str, Any]:
    return {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}


def _finite(logprob: float) -> float:
    return max(_LOWEST, logprob)  # NaN is not larger
