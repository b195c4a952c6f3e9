"""Folders of scripted models (scripted/model.py), with a real tokenizer and a real template."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from tests.support.chat.real_parts import tokenizer_folder

Message = Mapping[str, Any]
TASKS = ["violin", "glacier", "walnut", "saturn", "velvet", "lantern", "tiger", "canyon"]
QUESTION = {"role": "user", "content": "?"}


def call(name: str, **arguments: Any) -> Message:
    """An answer that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def text(content: str) -> Message:
    return {"role": "assistant", "content": content}


def write_scripted(
    folder: Path,
    scripts: Mapping[str, Sequence[Message | str]],
    *,
    template: str = "Qwen-Qwen3-4B-Instruct-2507",
    hybrid: bool = False,
    sees: bool = False,
) -> Path:
    """Write a model folder.

    scripts: by the word that names the task (of TASKS): the answer after as many results of tools
    as its index says.  A string is written as it is.  Prompts without a task get a greeting.
    sees: the model takes pictures; a bright one moves the script to the next turn.
    """
    tokenizer_folder(folder, template)
    tokenizer = load_tokenizer(folder)
    words = list(scripts)
    task_tokens = []
    for word in words:
        (token,) = tokenizer.encode(f" {word}", add_special_tokens=False)
        task_tokens.append(token)
    header = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)
    (start,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    before = header[::-1].index(start)  # tokens between the start of the message and the answer
    answers = [["Hello."], *scripts.values()]
    said = [[_tokens(tokenizer, a) for a in turns] for turns in answers]
    shape = [len(said), max(map(len, said)), before + max(len(s) for t in said for s in t) + 1]
    eos = tokenizer.eos_token_id
    script = [
        [[eos] * before + tokens + [eos] * (shape[2] - before - len(tokens)) for tokens in turns]
        + [[eos] * shape[2]] * (shape[1] - len(turns))
        for turns in said
    ]
    weights = {"model.script": mx.array(script, mx.int32)}
    if sees:
        weights["model.embed_tokens.weight"] = mx.zeros((len(tokenizer), 2))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (count,) = tokenizer.encode("<tool_response>", add_special_tokens=False)
    config = {"model_type": "scripted", "model_file": "model.py", "vocab_size": len(tokenizer)}
    config |= {"shape": shape, "start_token": start, "count_token": count}
    config |= {"task_tokens": task_tokens, "hybrid": hybrid, "max_position_embeddings": 262144}
    config |= {"eos_token_id": eos, "torch_dtype": "float32"}
    if sees:
        config |= _write_tower(folder, tokenizer)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(Path(__file__).parent / "scripted" / "model.py", folder)
    return folder


def _write_tower(folder: Path, tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """Write a tower in Qwen3.5's form, which gives each row of a picture (1 if it is bright, 1).
    Returns fields of config.json."""
    patch, size, merge, frames = 8, 4, 2, 2
    sign = mx.array([1, -1, 0, 0])[:, None]
    embed = mx.broadcast_to(sign / (frames * 3 * patch**2), (size, frames * 3 * patch**2))
    first = mx.zeros((size * merge**2, size * merge**2))
    first[0] = mx.tile(mx.array([10.0, 0, 0, 0]), merge**2)  # after the norm, +-sqrt(2) a patch
    second = mx.zeros((2, size * merge**2))
    second[0, 0] = 1 / (10 * merge**2 * 2**0.5)
    weights = {
        "patch_embed.proj.weight": embed.reshape(size, 3, frames, patch, patch),
        "patch_embed.proj.bias": mx.zeros(size),
        "pos_embed.weight": mx.zeros((4, size)),
        "merger.norm.weight": mx.ones(size),
        "merger.norm.bias": mx.zeros(size),
        "merger.linear_fc1.weight": first,
        "merger.linear_fc1.bias": mx.zeros(len(first)),
        "merger.linear_fc2.weight": second,
        "merger.linear_fc2.bias": mx.array([0.0, 1.0]),
    }
    named = {f"visual.{name}": value for name, value in weights.items()}
    mx.save_safetensors(str(folder / "vision.safetensors"), named, {"format": "mlx"})
    processor = {"patch_size": patch, "temporal_patch_size": frames, "merge_size": merge}
    processor |= {"size": {"shortest_edge": 256, "longest_edge": 64 * 64}}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    vision = {"depth": 0, "hidden_size": size, "intermediate_size": size, "num_heads": 1}
    vision |= {"patch_size": patch, "temporal_patch_size": frames, "spatial_merge_size": merge}
    vision |= {"num_position_embeddings": 4, "out_hidden_size": 2}
    (image,) = tokenizer.encode("<|image_pad|>", add_special_tokens=False)
    return {
        "model_type": "qwen3_5",
        "image_token_id": image,
        "sees": True,
        "vision_config": vision,
        "rope_parameters": {"mrope_section": [1, 0, 0]},
    }


def _tokens(tokenizer: TokenizerWrapper, answer: Message | str) -> list[int]:
    """The tokens of an answer, as the model's own template writes the message."""
    if not isinstance(answer, str):
        render = lambda messages, **how: tokenizer.apply_chat_template(  # noqa: E731
            messages, tokenize=False, **how
        )
        header = render([QUESTION], add_generation_prompt=True)
        whole = render([QUESTION, answer])
        assert whole.startswith(header), "the template writes an answer behind another header"
        answer = whole[len(header) :].rstrip().removesuffix("<|im_end|>")
    return tokenizer.encode(answer, add_special_tokens=False)
