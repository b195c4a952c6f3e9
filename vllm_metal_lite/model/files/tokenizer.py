"""A model's tokenizer: mlx-lm's, with the chat template and the decoder that its files ask for."""

import logging
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers.decoders import ByteLevel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model.files.find import find
from vllm_metal_lite.model.files.folder import loading, read_config, read_json, remote_code_error

logger = logging.getLogger(__name__)

# The bytes that the characters of a byte-level vocabulary, such as GPT-2's, represent.
BYTES: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}
_SPACE = bytes_to_unicode()[ord(" ")]


def load_tokenizer_only(name: str, trust_remote_code: bool = False) -> TokenizerWrapper:
    """The tokenizer of a model, without its weights; every failure is a ModelLoadError."""
    folder, name = find(name), str(name)
    config = read_config(folder, name)
    with loading(name, "its tokenizer"):
        return read_tokenizer(name, folder, config, trust_remote_code)


def read_tokenizer(
    name: str, folder: Path, config: dict[str, Any], trust_remote_code: bool
) -> TokenizerWrapper:
    """The tokenizer of a model's folder.  config: its config.json.

    Raises RemoteCodeError if the tokenizer is code that the user does not trust, or whatever the
    libraries raise.
    """
    # Never None: transformers would ask on stdin.
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if template := _template_of_processor(folder):
        options["chat_template"] = template
    try:
        tokenizer = load_tokenizer(folder, options, eos_token_ids=config.get("eos_token_id"))
    except Exception as e:
        # The exception type varies: transformers first tries a tokenizer of its own.
        if trust_remote_code or "auto_map" not in read_json(folder / "tokenizer_config.json"):
            raise
        raise remote_code_error(name, "tokenizer", folder) from e
    _decode_as_bytes(tokenizer)
    # Suppress transformers' warning: the engine reports its own limit.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _template_of_processor(folder: Path) -> str | None:
    """The template of chat_template.json, the only one that older multimodal models have."""
    file = folder / "chat_template.json"
    if (
        not file.is_file()
        or (folder / "chat_template.jinja").exists()
        or read_json(folder / "tokenizer_config.json").get("chat_template")
    ):
        return None
    try:
        template = read_json(file).get("chat_template")
    except ModelLoadError:
        template = None
    if not isinstance(template, str):
        logger.warning(f"{file} is ignored: it must be an object with the text chat_template")
        return None
    return template


def _decode_as_bytes(tokenizer: TokenizerWrapper) -> None:
    """Give a tokenizer with a byte-level vocabulary the right decoder and streaming detokenizer.

    Some converted models (Mistral's tekken) have such a vocabulary with a decoder for
    SentencePiece, so their text would show a space as "\\u0120".
    """
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
