"""Token ids to text: lazily when text is read, or per token for stop strings."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import islice, product
from threading import Lock
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)

from vllm_metal_lite.engine.chat_checkpoints import num_common
from vllm_metal_lite.sampling_params import SamplingParams

_MAX_BYTES = 4  # in a character, which so has at most as many tokens
_BROKEN = "\ufffd"


class Detokenizer:
    """The text of one answer, whose token list grows.

    The text is mlx-lm's streamed text of prompt and answer, minus the prompt's text.  So the stream
    starts with the prompt's last tokens, as in vLLM.  An incomplete character at the prompt's end
    belongs to the answer if the answer completes it; otherwise it is a U+FFFD in the prompt.
    (mlx-lm's stream_generate starts an empty stream, which drops a leading space and shows U+FFFD
    for the bytes that complete a character of the prompt.)

    One thread may read the text while another adds tokens.
    shown: the text before a stop string, and before what may become one.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        params: SamplingParams,
        token_ids: list[int],
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._token_ids, self._num_read = token_ids, 0
        self._end: int | None = None  # how many tokens to show, once known
        self._lock = Lock()
        self._stop = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._hold_back = max(map(len, self._stop), default=1) - 1
        self._searched = 0
        self.shown = ""
        self._pieces = _pieces_of(tokenizer, params.skip_special_tokens)
        self._tokenizer, self._prompt_token_ids = tokenizer, prompt_token_ids
        self._stream: Any = None  # made when the text is first read
        self._settled = False  # the stream has text and holds nothing back
        self._text = ""

    def _read_prompt(self) -> None:
        """Feed the end of the prompt to a stream; its text so far belongs to the prompt."""
        self._stream = self._tokenizer.detokenizer
        known = (t for t in reversed(self._prompt_token_ids) if t < self._pieces.vocab_size)
        tail = list(islice(known, 2 * _MAX_BYTES))[::-1]
        # Start at whole characters: a partial one could corrupt the text after it.
        start, end = max(len(tail) - _MAX_BYTES, 0), len(tail)
        ends = range(end, max(end - _MAX_BYTES, 0), -1)
        for last, length in product(ends, range(1, _MAX_BYTES + 1)):
            first = max(last - length, 0)
            text = self._text_of(tail[first:last])
            if text.removeprefix(self._pieces.seed) and _BROKEN not in text:
                start, end = first, last
                break
        self._whole_text = self._text_of(tail[start:end])  # without an incomplete character
        self._prompt_text = self._text_of(tail[start:])
        self._restart_stream(tail[start:])

    def _restart_stream(self, token_ids: Sequence[int]) -> None:
        self._stream.reset()
        if self._pieces.seed:
            self._stream.text = self._pieces.seed
        for token_id in token_ids:
            self._stream.add_token(token_id)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        self._restart_stream(token_ids)
        self._stream.finalize()
        return self._stream.text

    def find_stop(self, may_stop: bool = True) -> str | None:
        """The stop string in the text, or None.  Call after each token, and after `end_at`."""
        text = self.text()
        if may_stop:
            searched = self._searched + 1
            starts = ((max(searched - len(s), 0), s) for s in self._stop)
            found = [(at, s) for start, s in starts if (at := text.find(s, start)) >= 0]
            if found:
                at, stop = min(found)
                self.shown = text[: at + len(stop)] if self._keep_stop else text[:at]
                return stop
        self._searched = len(text)
        hold_back = self._hold_back if self._end is None else 0
        self.shown = text[: max(len(text) - hold_back, 0)]
        return None

    def end_at(self, num_tokens: int) -> None:
        """Show only the first num_tokens tokens, then any text held back."""
        self._end = num_tokens

    def text(self) -> str:
        """All text, including stop strings and partial ones."""
        with self._lock:
            if self._stream is None:
                self._read_prompt()
            end, pieces = self._end, self._pieces
            for token_id in self._token_ids[self._num_read : end]:
                self._num_read += 1
                piece = pieces[token_id] if self._settled else None
                if piece is not None:
                    self._text += piece
                elif pieces.shows(token_id):
                    self._run_stream(token_id)
            if self._num_read == end:
                self._run_stream(None)
            return self._text

    def _run_stream(self, token_id: int | None) -> None:
        """Add a token to the stream; None: flush it."""
        stream, before = self._stream, len(self._stream.text)
        if token_id is None:
            stream.finalize()
        else:
            stream.add_token(token_id)
        text = stream.text
        # The text may differ from the prompt's: the answer completes, or may still complete, a
        # character of the prompt.  Tokenizers differ in what they show before that.
        start = max(num_common(known, text) for known in (self._prompt_text, self._whole_text))
        if self._pieces.known:
            self._text += text[max(start, before) :]
            self._settled = len(text) > before
        else:
            self._text = text[start:]


class _Pieces(dict[int, str | None]):
    """The text that a token adds to a stream that has text and holds nothing back.

    None: the stream holds the token back.

    Most tokens add the same characters everywhere, and a look-up is faster than a stream.
    known: the tokenizer's stream is of a class whose `text` only grows.
    """

    def __init__(self, tokenizer: TokenizerWrapper, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self.vocab_size = len(tokenizer)  # the model's vocabulary may be padded
        known = (BPEStreamingDetokenizer, SPMStreamingDetokenizer)
        self.known = isinstance(tokenizer.detokenizer, known)
        self.seed = "x" if self.known else ""  # prior text, so that a leading space is kept

    def shows(self, token_id: int) -> bool:
        return token_id not in self._skip and token_id < self.vocab_size

    def __missing__(self, token_id: int) -> str | None:
        piece: str | None = ""
        if self.shows(token_id):
            stream = self._tokenizer.detokenizer
            stream.text = self.seed
            stream.add_token(token_id)
            piece = stream.text[len(self.seed) :] or None
        self[token_id] = piece
        return piece


_pieces_of = lru_cache(maxsize=8)(_Pieces)  # slow to make; requests share it


@lru_cache(maxsize=8)
def token_texts(tokenizer: TokenizerWrapper) -> Callable[[int], str]:
    """A function that gives the text of a token by itself, as log-probabilities show it."""
    return cache(lambda token_id: str(tokenizer.decode([token_id])))


def _special_ids(tokenizer: TokenizerWrapper) -> frozenset[int]:
    """Markup tokens: the named ones (end of sequence, ...) and those marked special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
