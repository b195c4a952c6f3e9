"""From token ids to text: when somebody reads it, or, for stop strings, as the tokens come."""

from functools import lru_cache
from threading import Lock

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)

from vllm_metal_lite.sampling_params import SamplingParams


class Detokenizer:
    """The text of one answer, whose tokens are a list that grows.

    One thread may read it while another adds tokens.
    shown: with stop strings, the text up to where no part of one can be.
    last_prompt_token: the stream starts behind it, as streams drop the very first space.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        params: SamplingParams,
        token_ids: list[int],
        last_prompt_token: int,
    ) -> None:
        self._token_ids, self._num_read = token_ids, 0
        self._end: int | None = None  # how many tokens will be shown, once that is known
        self._lock = Lock()
        self._stop = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._hold_back = max(map(len, self._stop), default=1) - 1
        self._searched = 0
        self.shown = ""
        self._pieces = _pieces_of(tokenizer, params.skip_special_tokens)
        self._stream = tokenizer.detokenizer
        self._settled = False  # the stream has text, and holds nothing back
        self._text, self._start = "", 0
        if last_prompt_token < self._pieces.vocab_size:
            self._run_stream(last_prompt_token)
            self._text, self._start = "", len(self._stream.text)

    def find_stop(self, may_stop: bool = True) -> str | None:
        """To be called for each token: the stop string that now stands in the text, if any."""
        text = self.text()
        if may_stop:
            start = max(self._searched - self._hold_back, 0)
            found = [(at, s) for s in self._stop if (at := text.find(s, start)) >= 0]
            if found:
                at, stop = min(found)
                self.shown = text[: at + len(stop)] if self._keep_stop else text[:at]
                return stop
        self._searched = len(text)
        self.shown = text[: max(len(text) - self._hold_back, 0)]
        return None

    def end_at(self, num_tokens: int) -> None:
        """So many tokens will be shown, and then what was held back behind them."""
        self._end = num_tokens

    def text(self) -> str:
        """All of it, stop strings and parts of them too."""
        with self._lock:
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
        if self._pieces.known:
            grown = stream.text[before:]
            self._text += grown
            self._settled = bool(grown)
        else:
            self._text = stream.text[self._start :]


class _Pieces(dict[int, str | None]):
    """What a token adds to a stream that has text and holds nothing back; None if it is held back.

    Most tokens add the same characters wherever they stand, and a look-up is faster than a stream.
    known: the tokenizer's streams are of a kind whose `text` only grows, when all of it is out.
    """

    def __init__(self, tokenizer: TokenizerWrapper, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self.vocab_size = len(tokenizer)  # a model's may be padded beyond it
        known = (BPEStreamingDetokenizer, SPMStreamingDetokenizer)
        self.known = isinstance(tokenizer.detokenizer, known)

    def shows(self, token_id: int) -> bool:
        return token_id not in self._skip and token_id < self.vocab_size

    def __missing__(self, token_id: int) -> str | None:
        piece: str | None = ""
        if self.shows(token_id):
            stream = self._tokenizer.detokenizer
            stream.text = "x"
            stream.add_token(token_id)
            piece = stream.text[1:] or None
        self[token_id] = piece
        return piece


_pieces_of = lru_cache(maxsize=8)(_Pieces)  # slow to make, and the same for every request


def _special_ids(tokenizer: TokenizerWrapper) -> frozenset[int]:
    """Tokens that are markup: the named ones (end of sequence, ...) and those marked special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
