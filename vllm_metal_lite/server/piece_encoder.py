"""Token ids of long texts that share their beginnings: each piece is encoded once.

A turn of a conversation repeats all turns before it, and encoding 33,000 tokens takes 100 ms.  Fast
tokenizers first find the added tokens of a text, and encode each text between them by itself.  So a
text can be cut before any of these tokens, and its pieces can be encoded one by one.
"""

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from threading import Lock

from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.errors import PromptTooLong

# The pieces that are kept have at most this number of characters: about a million tokens.
_MAX_KEPT = 4_000_000
_SLICE = 1 << 16  # the tokens of a long piece are counted in slices of this length


class PieceEncoder:
    """Encodes text as `tokenizer.encode(text, add_special_tokens=False)` does.  Thread-safe.

    Texts are cut before added tokens that absorb no spaces (lstrip, rstrip) and that the tokenizer
    finds in the text itself, before normalization.  Tokenizers that are not fast, or whose added
    tokens depend on their neighbours (single_word), get the whole text.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._num_kept = 0
        self._lock = Lock()
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        # Two stages, as in the tokenizer: it looks for normalized tokens between the others.
        self._stages = [
            _any_of([t.content for t in added if t.normalized == normalized])
            for normalized in (False, True)
        ]
        as_it_is = _keeps_text(tokenizer)
        cuts = [t for t in added if not (t.lstrip or t.rstrip) and (as_it_is or not t.normalized)]
        if not getattr(tokenizer, "is_fast", False) or any(t.single_word for t in added):
            cuts = []
        self._cuts = frozenset(t.content for t in cuts)

    def __call__(
        self, text: str, most: int = sys.maxsize, check: Callable[[], None] = lambda: None
    ) -> list[int]:
        """The token ids of a text.

        most: a text of more tokens raises PromptTooLong, before all of it is encoded.
        check: a function that is called now and then, and may raise to end the work.
        """
        token_ids: list[int] = []
        num_read = 0
        for piece in self._pieces(text):
            self.check_size(piece, most, check)
            if len(token_ids) > most:
                raise PromptTooLong(len(token_ids) * len(text) // num_read, most)
            token_ids += self._encode(piece)
            num_read += len(piece)
        if len(token_ids) > most:
            raise PromptTooLong(len(token_ids), most)
        return token_ids

    def check_size(self, text: str, most: int, check: Callable[[], None]) -> None:
        """Raise PromptTooLong for a long text of too many tokens, without encoding all of it."""
        check()
        # Ordinary text has more than two characters a token, so this one may fit.
        if len(text) <= max(2 * most, _SLICE):
            return
        count = 0
        for at in range(0, len(text), _SLICE):
            check()
            end = at + _SLICE
            count += len(self._tokenizer.encode(text[at:end], add_special_tokens=False))
            # A cut may add tokens, and a tokenizer that puts a space in front may add one more.
            if count > 1.1 * most:
                raise PromptTooLong(count * len(text) // min(end, len(text)), most)

    def _pieces(self, text: str) -> Iterator[str]:
        found = sorted(self._found(text, 0, len(text), self._stages))
        starts = [start for start, token in found if start and token in self._cuts]
        for start, end in pairwise([0, *starts, len(text)]):
            yield text[start:end]

    def _found(
        self, text: str, start: int, end: int, stages: Sequence[re.Pattern[str]]
    ) -> Iterator[tuple[int, str]]:
        """The added tokens in text[start:end], and where they start."""
        if not stages:
            return
        for match in stages[0].finditer(text, start, end):
            yield match.start(), match[0]
            yield from self._found(text, start, match.start(), stages[1:])
            start = match.end()
        yield from self._found(text, start, end, stages[1:])

    def _encode(self, piece: str) -> "array[int]":
        with self._lock:
            if (known := self._kept.get(piece)) is not None:
                self._kept.move_to_end(piece)
                return known
        token_ids = array("i", self._tokenizer.encode(piece, add_special_tokens=False))
        with self._lock:
            if piece not in self._kept:
                self._kept[piece] = token_ids
                self._num_kept += len(piece)
            while self._num_kept > _MAX_KEPT:
                oldest, _ = self._kept.popitem(last=False)
                self._num_kept -= len(oldest)
        return token_ids


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    """A pattern of these names.  The longest one at a place wins."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _keeps_text(tokenizer: TokenizerWrapper) -> bool:
    """Whether the tokenizer has no normalizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and str(backend.normalizer) in ("None", "Sequence(normalizers=[])")
