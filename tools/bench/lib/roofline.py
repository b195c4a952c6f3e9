"""The least that a decode step moves and computes, and how fast a device moves and computes."""

from collections.abc import Iterator
from typing import NamedTuple

from tools.count.reads import used_experts
from vllm_metal_lite import backend
from vllm_metal_lite.checks.measure import copy_bandwidth, matmul_rate
from vllm_metal_lite.model.loader import LoadedModel

# isort: split
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

mx = backend.mx


class Rates(NamedTuple):
    """bytes_per_s: of a copy.  flops_per_s: of a product of large bfloat16 matrices."""

    bytes_per_s: float
    flops_per_s: float


def measured_bandwidth() -> float:
    return copy_bandwidth(1 << (27 if backend.is_cpu() else 30))


def measured_rates() -> Rates:
    if backend.is_cpu():
        return Rates(measured_bandwidth(), matmul_rate(mx.float32, 1024))
    return Rates(measured_bandwidth(), matmul_rate())


class _Matrix(NamedTuple):
    """nbytes: with scales.  values: weights.  experts, top_k: 1 and 1 of a matrix that every token
    uses."""

    nbytes: int
    values: int
    experts: int = 1
    top_k: int = 1


def _matrices(model: LoadedModel) -> Iterator[_Matrix]:
    """The weights of a step; an embedding only where it is the head's weight too."""
    net = model.packed.model
    modules = dict(net.named_modules())
    has_head = any(path.endswith("lm_head") for path in modules)
    top_k = getattr(getattr(net, "args", None), "num_experts_per_tok", 1)
    for module in modules.values():
        own = [a for a in module.values() if isinstance(a, mx.array)]
        if not own or (has_head and isinstance(module, nn.Embedding | nn.QuantizedEmbedding)):
            continue
        nbytes, values = sum(a.nbytes for a in own), sum(a.size for a in own)
        if "scales" in module:
            values = module.weight.size * 32 // module.bits
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            yield _Matrix(nbytes, values, module.num_experts, top_k)
        else:
            yield _Matrix(nbytes, values)


def step_bytes(model: LoadedModel, batch: int, context: float) -> float:
    """Bytes that a decode step moves at least: weights and K/V once, recurrent states in and out.

    Of experts those that `batch` tokens use, if every token takes any of them.
    """
    weights = sum(
        m.nbytes * used_experts(batch, m.experts, m.top_k) / m.experts for m in _matrices(model)
    )
    seen = sum(s.bytes_per_token * min(context, s.window or context) for s in model.kv_specs)
    return weights + batch * (seen + 2 * model.state_bytes)


def step_flops(model: LoadedModel, batch: int, context: float) -> float:
    """Of products with weights, and of scores and their sums; the cheaper form of latents is not
    taken: all heads read the latent."""
    active = sum(m.values * m.top_k / m.experts for m in _matrices(model))
    attention = 0.0
    for spec in model.kv_specs:
        form = (spec.k_head_dim, spec.v_head_dim, spec.window)
        shape = next(
            s for s in model.attention_shapes if (s.k_head_dim, s.v_head_dim, s.window) == form
        )
        width = spec.k_head_dim + spec.v_head_dim + (spec.k_head_dim if shape.latent else 0)
        attention += shape.num_heads * width * min(context, spec.window or context)
    return 2 * batch * (active + attention)


def roofline(model: LoadedModel, batch: int, context: float, rates: Rates) -> float:
    """The least seconds of a decode step."""
    moved = step_bytes(model, batch, context) / rates.bytes_per_s
    return max(moved, step_flops(model, batch, context) / rates.flops_per_s)
