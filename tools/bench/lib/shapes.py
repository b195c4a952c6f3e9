"""Shapes of real models, and of tiny ones of the same form."""

import json
import re
from pathlib import Path
from typing import Any

from vllm_metal_lite import MetalLiteError

_READ = json.loads(Path(__file__).with_name("shapes.json").read_text("utf-8"))


def _config(name: str) -> dict[str, Any]:
    """like: the shape that gives a tiny one its other fields."""
    fields = {key: value for key, value in _READ[name].items() if key not in ("like", "note")}
    return {**(_config(_READ[name]["like"]) if "like" in _READ[name] else {}), **fields}


SHAPES = {name: _config(name) for name in _READ}


def random_config(name: str) -> dict[str, Any]:
    """name: a key of SHAPES, or HIDDENxLAYERS: qwen3, heads of 64, two a KV head, 8,192 tokens."""
    if name in SHAPES:
        return SHAPES[name]
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)
    if sizes is None or int(sizes[1]) % 64:
        known = f"HIDDENxLAYERS (HIDDEN is a multiple of 64), or one of: {', '.join(SHAPES)}"
        raise MetalLiteError(f"no shape is named {name!r}; give {known}")
    hidden, layers = map(int, sizes.groups())
    heads, kv_heads = hidden // 64, max(hidden // 128, 1)
    config = SHAPES["qwen3-0.6b"] | {"hidden_size": hidden, "num_hidden_layers": layers}
    config |= {"intermediate_size": 3 * hidden, "num_attention_heads": heads, "head_dim": 64}
    config |= {"num_key_value_heads": kv_heads, "vocab_size": 8192}
    return config | {"max_position_embeddings": 8192}
