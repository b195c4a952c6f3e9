"""Launches of the kernels of recurrent layers at the shapes of real models, for their texts alone.

Arrays are lazy zeros: nothing is computed, so real sizes cost nothing.
"""

from collections.abc import Callable
from functools import partial

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import new_ticket
from vllm_metal_lite.kernels.causal_conv import causal_conv
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.recurrence import GatedNorm, delta_gates, given, time_gates

ROWS, SLOTS = 16, 20
# Of k, of v; their sizes; a gate per column.
DELTA = {
    "Qwen3-Next": (16, 32, 128, 128, False),
    "Kimi Linear": (32, 32, 128, 128, True),
    "heads of 96 and 192": (30, 30, 96, 192, False),
    "heads of 256": (8, 16, 256, 256, False),
}
# Groups, heads, state and head size.
SSM = {"Mamba 2": (1, 80, 128, 64), "Nemotron-H": (8, 128, 128, 64), "Falcon-H1": (1, 24, 256, 128)}
# Channels, kernel size, bias, SiLU.
CONV = {
    "Qwen3-Next": (8192, 4, False, True),
    "Mamba 2": (5376, 4, True, True),
    "LFM2": (2048, 3, False, False),
}
# Size and number of groups; whether the gate comes first.
NORMS = {"Qwen3-Next": (128, 32, False), "Nemotron-H": (1024, 8, True), "Mamba 2": (5120, 1, True)}


def _segments() -> mx.array:
    return mx.zeros((ROWS + 1, 4), mx.int32)


def _columns(heads: int, dim: int, dtype: mx.Dtype) -> Columns:
    return Columns(mx.zeros((ROWS, heads * dim), dtype), 0)


def _recurrence(
    k_heads: int, heads: int, k_dim: int, dim: int, form: str, dtype: mx.Dtype, max_seqlen: int
) -> None:
    of_k, of_rows, of_heads = (
        _columns(k_heads, k_dim, dtype),
        mx.zeros((ROWS, heads)),
        mx.zeros(heads),
    )
    logits, bias = _columns(heads, 1, dtype), of_heads.astype(dtype)
    gates = {
        "delta": lambda: given(of_rows, of_rows.astype(dtype)),
        "vector": lambda: given(mx.zeros((ROWS, heads, k_dim)), of_rows.astype(dtype)),
        "ssm": lambda: given(of_rows, of_rows),
        "fused delta": lambda: delta_gates(logits, logits, of_heads, bias),
        "fused ssm": lambda: time_gates(logits, of_heads, bias, (0.0, 1.0)),
    }
    arrays = mx.zeros((SLOTS, heads, dim, k_dim)), _segments(), new_ticket()
    how = {"num_k_heads": k_heads, "max_seqlen": max_seqlen}
    how |= {"norm": GatedNorm(1e-6, k_dim**-0.5) if form == "fused delta" else None}
    how |= {"skip": {"ssm": of_heads, "fused ssm": bias}.get(form)}
    gated_delta(of_k, of_k, _columns(heads, dim, dtype), gates[form](), *arrays, **how)


def _norm(dim: int, groups: int, gate_first: bool, dtype: mx.Dtype) -> None:
    x, z = mx.zeros((ROWS, groups, dim), dtype), _columns(groups, dim, dtype)
    weight = mx.zeros(dim * groups if gate_first else dim, dtype)
    gated_rms_norm(x, z, weight, 1e-6, dim=dim, gate_first=gate_first)


def _conv(channels: int, size: int, bias: bool, silu: bool, dtype: mx.Dtype) -> None:
    weight, biases = mx.zeros((channels, size, 1), dtype), mx.zeros(channels, dtype)
    states, tiles = mx.zeros((SLOTS, size - 1, channels), dtype), mx.zeros((ROWS + 2, 2), mx.int32)
    x, where = Columns(mx.zeros((ROWS, channels), dtype), 0), (_segments(), tiles)
    causal_conv(x, weight, biases if bias else None, states, *where, new_ticket(), silu=silu)


def _cases() -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {}
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        name = str(dtype).removeprefix("mlx.core.")
        for model, shape in CONV.items():
            cases[f"causal_conv {model} {name}"] = partial(_conv, *shape, dtype)
        for model, norm in NORMS.items():
            cases[f"gated_rms_norm {model} {name}"] = partial(_norm, *norm, dtype)
        for form, rows in (("rows", 1), ("tiles", 512)):
            for model, (*shape, vector) in DELTA.items():
                key = f"gated_delta {model} {name} {form}"
                own = "vector" if vector else "delta"
                cases[key] = partial(_recurrence, *shape, own, dtype, rows)
                if not vector:
                    cases[f"{key} fused"] = partial(_recurrence, *shape, "fused delta", dtype, rows)
            for model, shape in SSM.items():
                key = f"gated_delta {model} {name} {form}"
                cases[key] = partial(_recurrence, *shape, "ssm", dtype, rows)
                cases[f"{key} fused"] = partial(_recurrence, *shape, "fused ssm", dtype, rows)
    return cases


CASES = _cases()
