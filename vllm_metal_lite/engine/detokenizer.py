"""From token ids to text as they come, and where a stop string ends it."""

from functools import lru_cache

from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.sampling_params import SamplingParams


class Detokenizer:
    """The text of one answer.

    `text` never shows a part that could still turn out to be the start of a stop string.
    last_prompt_token: the stream starts behind it, as streams drop the very first space.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, params: SamplingParams, last_prompt_token: int
    ) -> None:
        self._stream = tokenizer.detokenizer
        self._skip = _special_ids(tokenizer) if params.skip_special_tokens else frozenset()
        self._vocab_size = len(tokenizer)  # a model's vocabulary may be padded beyond it
        self._stop = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._hold_back = max(map(len, self._stop), default=1) - 1
        self._searched = 0
        self.text = ""
        self._start = 0
        if last_prompt_token < self._vocab_size:
            self._stream.add_token(last_prompt_token)
            self._start = len(self._stream.text)

    def add(self, token_id: int, may_stop: bool = True) -> str | None:
        """Add a token; returns the stop string that now stands in the text, if one does."""
        if token_id in self._skip or token_id >= self._vocab_size:
            return None
        self._stream.add_token(token_id)
        text = self._stream.text[self._start :]
        if not self._stop:
            self.text = text
            return None
        if may_stop:
            start = max(self._searched - self._hold_back, 0)
            found = [(at, s) for s in self._stop if (at := text.find(s, start)) >= 0]
            if found:
                at, stop = min(found)
                self.text = text[: at + len(stop)] if self._keep_stop else text[:at]
                return stop
        self._searched = len(text)
        self.text = text[: max(len(text) - self._hold_back, 0)]
        return None

    def finish(self) -> None:
        """Flush what was held back; not after a stop string was found."""
        self._stream.finalize()
        self.text = self._stream.text[self._start :]


@lru_cache(maxsize=4)  # slow to ask for, and the same for every request
def _special_ids(tokenizer: TokenizerWrapper) -> frozenset[int]:
    """Tokens that are markup: the named ones (end of sequence, ...) and those marked special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
