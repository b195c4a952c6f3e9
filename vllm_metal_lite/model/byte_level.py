"""Byte-level vocabularies, as GPT-2's: each character of a token represents a byte.

Some converted models (Mistral's tekken) have such a vocabulary, and a decoder for SentencePiece's:
their text shows a space as "\\u0120".  mlx-lm and transformers choose by the decoder.
"""

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers.decoders import ByteLevel
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}
_SPACE = bytes_to_unicode()[ord(" ")]


def decode_as_bytes(tokenizer: TokenizerWrapper) -> None:
    """Give a tokenizer the decoder and the stream of its vocabulary, if that is byte-level."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    space, others_space = backend.token_to_id(_SPACE), backend.token_to_id("\u2581")
    if space is None or others_space is not None or _SPACE not in backend.decode([space]):
        return
    # Other vocabularies hold this letter too, but not only letters that represent bytes.
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    if set("".join(backend.get_vocab().keys() - added)) <= BYTES.keys():
        backend.decoder = ByteLevel()
        tokenizer._detokenizer = BPEStreamingDetokenizer(tokenizer._tokenizer)
