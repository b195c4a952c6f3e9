"""Byte-level vocabularies, such as GPT-2's: each character of a token represents a byte.

Some converted models (Mistral's tekken) have such a vocabulary with a decoder for SentencePiece.
mlx-lm and transformers follow the decoder, so the text shows a space as "\\u0120".
"""

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers.decoders import ByteLevel
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}
_SPACE = bytes_to_unicode()[ord(" ")]


def decode_as_bytes(tokenizer: TokenizerWrapper) -> None:
    """Give a tokenizer with a byte-level vocabulary the right decoder and streaming detokenizer."""
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
