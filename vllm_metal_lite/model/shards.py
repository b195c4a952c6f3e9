"""A model's shard of one rank, by mlx-lm's own `shard`.

mlx-lm's sharded linear layers become plain ones, followed by a sum over the ranks where needed.  So
all code for plain linear layers (joined projections, kernels) works with a shard too.
"""

import mlx.nn as nn
from mlx.nn.layers import distributed as layers
from mlx.utils import tree_unflatten

from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import RankGroup
from vllm_metal_lite.errors import ModelLoadError, one_line

# Attributes of mlx-lm's attention modules that hold a number of heads.  It divides them all.
_HEADS = (
    "n_heads",
    "num_heads",
    "num_attention_heads",
    "num_v_heads",
    "num_k_heads",
    "n_kv_heads",
    "num_kv_heads",
    "num_key_value_heads",
)
_KV_HEADS = _HEADS[-3:]
# If there are fewer K/V heads than ranks, these models give each rank a copy of one.
_REPEATS_KV_HEADS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text")
_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "out_proj", "down_proj")

# Sharded layers, and the plain ones with the same parameters.
_PLAIN: dict[type, type] = {
    layers.AllToShardedLinear: nn.Linear,
    layers.ShardedToAllLinear: nn.Linear,
    layers.QuantizedAllToShardedLinear: nn.QuantizedLinear,
    layers.QuantizedShardedToAllLinear: nn.QuantizedLinear,
}
_SUMMED = (layers.ShardedToAllLinear, layers.QuantizedShardedToAllLinear)


def shard(model: nn.Module, model_type: str, ranks: RankGroup) -> None:
    """Keep this rank's part of each weight, in place; raises ModelLoadError, with the numbers.

    The weights may be unevaluated: then the other parts never stay in memory.
    """
    refusal = f"{model_type} cannot be shared by {ranks.size} ranks"
    if not hasattr(model, "shard"):
        raise ModelLoadError(f"{refusal}: mlx-lm cannot shard this architecture")
    if (problem := _undivided_heads(model, model_type, ranks.size)) is not None:
        raise ModelLoadError(f"{refusal}: {problem}")
    problem = _undivided_weight(model, ranks.size)
    try:
        model.shard(ranks.group)
    except Exception as e:  # whatever mlx-lm or MLX says of parts that do not divide
        raise ModelLoadError(f"{refusal}: {problem or one_line(e)}") from e
    sharded = ((path, m) for path, m in model.named_modules() if type(m) in _PLAIN)
    model.update_modules(tree_unflatten([(path, _plain(m, ranks)) for path, m in sharded]))


def _undivided_heads(model: nn.Module, model_type: str, size: int) -> str | None:
    """The first number of heads that `size` does not divide; mlx-lm would silently round down."""
    for path, module in model.named_modules():
        kind = path.rpartition(".")[2]
        if "attn" not in kind and "attention" not in kind:
            continue
        for name in _HEADS:
            count = getattr(module, name, None)
            if not isinstance(count, int) or count % size == 0:
                continue
            if name in _KV_HEADS and model_type in _REPEATS_KV_HEADS and size % count == 0:
                continue
            return f"{name} of {path} is {count}, not a multiple of {size}"
    return None


def _undivided_weight(model: nn.Module, size: int) -> str | None:
    """The first weight whose sharded axis is not a multiple of `size`."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if "weight" not in module:
            continue
        if name in _BY_OUTPUT and (count := module["weight"].shape[-2]) % size:
            return f"{path} has {count} outputs, not a multiple of {size}"
        if name not in _BY_INPUT:
            continue
        if "scales" not in module and (count := module["weight"].shape[-1]) % size:
            return f"{path} has {count} inputs, not a multiple of {size}"
        if "scales" in module and (count := module["scales"].shape[-1]) % size:
            return (
                f"the quantised inputs of {path} are {count} groups of {module.group_size}, "
                f"not a multiple of {size}"
            )
    return None


class SummedLinear(nn.Module):
    """A linear layer over this rank's inputs, and the sum over all ranks."""

    def __init__(self, linear: nn.Module, ranks: RankGroup) -> None:
        super().__init__()
        self.linear, self._ranks = linear, ranks
        if "bias" in linear:
            self.bias = linear.pop("bias")

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self.linear(x), group=self._ranks.group)
        return y + self["bias"] if "bias" in self else y


def _plain(module: nn.Module, ranks: RankGroup) -> nn.Module:
    """Make a sharded layer a plain one, in place.  Adds the sum over the ranks if the layer needs
    it."""
    kind = type(module)
    module.__class__ = _PLAIN[kind]
    return SummedLinear(module, ranks) if kind in _SUMMED else module
