"""Metal kernels that are not ours, as text: MLX's own, and those that mlx-lm makes.

Every wheel of MLX carries the headers of its Metal kernels, on Linux too, so nothing is downloaded
and nothing is copied here.  MLX keeps rms_norm and rope in `.metal` files, which no wheel has:
those two run if METAL_LITE_MLX_SOURCE names a checkout of MLX.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

INCLUDE = Path(mx.__file__).parent / "include"
_KERNELS = Path("mlx/backend/metal/kernels")


def text(header: str) -> str:
    """One of MLX's kernel headers, or `.metal` files; skips the test by name if it is not there."""
    roots = [INCLUDE, Path(os.environ.get("METAL_LITE_MLX_SOURCE", "/nonexistent"))]
    for root in roots:
        if (path := root / _KERNELS / header).exists():
            return path.read_text()
    pytest.skip(f"this MLX wheel has no {header} (a checkout: METAL_LITE_MLX_SOURCE)")


def instantiate(function: str, *arguments: object) -> str:
    """The line that makes a kernel named `function` of a template."""
    spelled = f"{function}<{', '.join(map(_spell, arguments))}>"
    return f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({spelled}) {spelled};\n'


def _spell(argument: object) -> str:
    return str(argument).lower() if isinstance(argument, bool) else str(argument)


def metal(header: str, *instances: str, before: tuple[str, ...] = ()) -> str:
    """A whole `.metal` text: MLX's prelude, what `header` expects, it, and instances of it."""
    includes = "".join(f'#include "{_KERNELS / name}"\n' for name in ("utils.h", *before))
    return includes + text(header) + "".join(instances)


# One text for each of MLX's kernel families that the strict front end can read whole.
MLX_KERNELS = {
    "softmax": (
        "softmax.h",
        instantiate("softmax_single_row", "bfloat16_t", "float"),
        instantiate("softmax_looped", "half", "float"),
    ),
    "logsumexp": ("logsumexp.h", instantiate("logsumexp", "bfloat16_t", "float")),
    "cross_entropy": ("cross_entropy.h",),
    "hadamard": ("hadamard.h",),
    "gated_delta_update": ("gated_delta_update.h",),
    "sdpa_vector": (
        "sdpa_vector.h",
        instantiate("sdpa_vector", "bfloat16_t", 128),
        instantiate("sdpa_vector_2pass_1", "half", 64),
        instantiate("sdpa_vector_2pass_2", "float", 64),
    ),
}


def mlx_source(name: str) -> str:
    """The whole `.metal` text of one of MLX_KERNELS."""
    return metal(*MLX_KERNELS[name])


@dataclass(frozen=True)
class Call:
    """A call of a kernel that `mx.fast.metal_kernel` made, and what it was called with."""

    kernel: Callable[..., list[mx.array]]
    options: dict[str, Any]

    def source(self) -> str:
        """The Metal text that MLX makes of this call; nothing is computed."""
        return traced_source(lambda: self.kernel(**self.options, verbose=True))


def traced_source(call: Callable[[], list[mx.array]]) -> str:
    """What MLX prints when a custom kernel is traced with `verbose=True`."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(f"{folder}/traced.mlxfn", call)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        printed.seek(0)
        return printed.read().decode().split("```\n")[1].rstrip("`\n") + "\n"


def record(module: ModuleType, attribute: str, function: Callable[[], Any]) -> Call:
    """The call that `function` makes of the kernel `module.attribute`, which is not run."""
    kernel, seen = getattr(module, attribute), {}

    class Seen(Exception):
        pass

    def kernel_call(**options: Any) -> None:
        seen.update(options)
        raise Seen

    setattr(module, attribute, kernel_call)
    try:
        function()
    except Seen:
        return Call(kernel, seen)
    finally:
        setattr(module, attribute, kernel)
    raise AssertionError(f"{attribute} was not called")


def mlx_lm_calls(dtype: mx.Dtype = mx.bfloat16) -> dict[str, Call]:
    """Calls of kernels that mlx-lm ships for its models, with small random inputs."""
    pytest.importorskip("mlx_lm.kernels", reason="this mlx-lm has no kernels of its own")
    names = ("qk_norm_rope", "norm_add_norm", "expert_routing")
    qk_norm_rope, norm_add_norm, expert_routing = (
        import_module(f"mlx_lm.kernels.{name}") for name in names
    )
    mx.random.seed(0)
    heads, kv_heads, dim, tokens = 4, 2, 64, 5
    qkvg = mx.random.normal((2, tokens, 2 * (heads + kv_heads) * dim)).astype(dtype)
    stream, wide = mx.random.normal((3, 640)), mx.random.normal((4, 640))
    norm = nn.RMSNorm(640)
    norm.weight = wide[3]
    return {
        "qk_norm_rope": record(
            qk_norm_rope,
            "_qk_norm_rope_kernel",
            lambda: qk_norm_rope.qk_norm_rope(
                qkvg,
                n_heads=heads,
                n_kv_heads=kv_heads,
                head_dim=dim,
                eps=1e-5,
                query_scale=1.5,
                rope_base=1e4,
                offset=mx.array([3, 11]),
            ),
        ),
        "norm_add_norm": record(
            norm_add_norm,
            "_norm_add_norm_kernel",
            lambda: norm_add_norm.norm_add_norm(
                mx.random.normal((3, 640)).astype(dtype),
                stream,
                alpha=wide[0],
                beta=wide[1],
                post_weight=wide[2],
                post_eps=1e-5,
                next_norm=norm,
            ),
        ),
        "expert_routing": record(
            expert_routing,
            "_routing_kernel",
            lambda: expert_routing.expert_routing(
                mx.random.normal((9, 40)),
                mx.random.normal((40,)),
                top_k=6,
                multiplier=1.25,
                score_eps=1e-6,
                route_scale=2.5,
            ),
        ),
    }


def generated_sources() -> dict[str, str]:
    return {name: call.source() for name, call in mlx_lm_calls().items()}
