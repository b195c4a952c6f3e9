"""Metal kernels that are not ours, as text: MLX's own, and those that mlx-lm makes.

Every wheel of MLX carries the headers of its Metal kernels, on Linux too, so nothing is downloaded
and nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal.host import HostKernel, installed
from metal.host.mlx_source import INCLUDE, generated_source
from tests.support.kernels.arrays import seeded

_KERNELS = Path("mlx/backend/metal/kernels")


def instantiate(function: str, *arguments: object) -> str:
    """The line that makes a kernel named `function` of a template."""
    spelled = f"{function}<{', '.join(map(str, arguments))}>"
    return f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({spelled}) {spelled};\n'


def metal(header: str, *instances: str, before: tuple[str, ...] = ()) -> str:
    """A whole `.metal` text: MLX's prelude, what `header` expects, it, and instances of it."""
    includes = "".join(f'#include "{_KERNELS / name}"\n' for name in ("utils.h", *before))
    return includes + (INCLUDE / _KERNELS / header).read_text() + "".join(instances)


# Arguments of `metal`, for each of MLX's kernel families that the strict front end can read whole.
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


@dataclass(frozen=True)
class Call:
    """A call of a kernel of mlx-lm's: the kernel, to run on the host, and its arguments."""

    kernel: HostKernel
    arguments: dict[str, Any]

    @property
    def inputs(self) -> list[mx.array]:
        return self.arguments["inputs"]

    def source(self) -> str:
        """The Metal text that MLX makes of this call; nothing is computed."""
        template, dtypes = self.arguments.get("template") or (), self.arguments["output_dtypes"]
        return generated_source(self.kernel.definition, self.inputs, template, dtypes)


def calls_of(module_name: str, kernel_name: str, call: Callable[[ModuleType], Any]) -> Call:
    """The call that `call(module)` makes of the kernel `module.kernel_name`, which is not run.

    The module is loaded anew, so that MLX's own stays as it is.
    """
    original = import_module(module_name)
    spec = spec_from_file_location(f"{module_name}_on_host", original.__file__)
    module = module_from_spec(spec)
    with installed():
        spec.loader.exec_module(module)
    kernel, asked = getattr(module, kernel_name), Mock(side_effect=NotImplementedError)
    setattr(module, kernel_name, asked)
    with suppress(NotImplementedError):
        call(module)
    return Call(kernel, asked.call_args.kwargs)


def qk_norm_rope(dtype: mx.Dtype) -> Call:
    """RMS norm of 4 query and 2 key heads of 64, then rope at positions 3.. and 11..."""
    return calls_of(
        "mlx_lm.kernels.qk_norm_rope",
        "_qk_norm_rope_kernel",
        lambda module: module.qk_norm_rope(
            seeded(2, 5, 2 * (4 + 2) * 64, seed=1, dtype=dtype),
            n_heads=4,
            n_kv_heads=2,
            head_dim=64,
            eps=1e-5,
            query_scale=1.5,
            rope_base=1e4,
            offset=mx.array([3, 11]),
        ),
    )


def norm_add_norm(dtype: mx.Dtype) -> Call:
    """Two RMS norms of 3 rows of 640, with sums over threadgroups of 64."""
    wide = seeded(4, 640, seed=2)
    norm = nn.RMSNorm(640)
    norm.weight = wide[3]
    return calls_of(
        "mlx_lm.kernels.norm_add_norm",
        "_norm_add_norm_kernel",
        lambda module: module.norm_add_norm(
            seeded(3, 640, seed=3, dtype=dtype),
            seeded(3, 640, seed=4),
            alpha=wide[0],
            beta=wide[1],
            post_weight=wide[2],
            post_eps=1e-5,
            next_norm=norm,
        ),
    )


def expert_routing(dtype: mx.Dtype = mx.float32) -> Call:
    """The 6 best of 40 experts for 9 tokens."""
    return calls_of(
        "mlx_lm.kernels.expert_routing",
        "_routing_kernel",
        lambda module: module.expert_routing(
            seeded(9, 40, seed=5, dtype=dtype),
            seeded(40, seed=6),
            top_k=6,
            multiplier=1.25,
            score_eps=1e-6,
            route_scale=2.5,
        ),
    )


MLX_LM_CALLS = {f.__name__: f for f in (qk_norm_rope, norm_add_norm, expert_routing)}


def mlx_lm_call(name: str, dtype: mx.Dtype) -> Call:
    """One of MLX_LM_CALLS; skips the test by name if this mlx-lm has no such kernel."""
    pytest.importorskip(f"mlx_lm.kernels.{name}", reason=f"this mlx-lm has no kernel {name}")
    return MLX_LM_CALLS[name](dtype)
