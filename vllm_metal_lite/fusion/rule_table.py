"""The table of fused operations: a rule for each operation, by the origin of its first array.

A rule gets the value of the operation, which MLX has not computed yet, and the arguments.  It
returns the value with an origin, or the result of a launch that does more of the work.  If the
arguments do not fit, it returns the value as it is.  The rules apply while `hooks` are installed.
Rules are verbs, origins are nouns.

A launch may also compute an array that the model holds already: the sum before a norm, or the
indices of a router.  This array becomes the result of the launch (`Traced.become`).  Then nothing
uses the earlier launch, so MLX never runs it.

Traced itself has two more operations (traced.py), which make no launch: `@` keeps rows as rows, and
`/=` is `/` in place.
"""

from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.attention.pending_heads import Heads, Latents
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion import heads, norms, products, routing
from vllm_metal_lite.fusion.heads import Attended, Slice
from vllm_metal_lite.fusion.norms import Sum
from vllm_metal_lite.fusion.products import Activated, ExpertResults, Summed, Weighted
from vllm_metal_lite.fusion.routing import Choice, Partition, RouterScores, RouterWeights, Total
from vllm_metal_lite.fusion.traced import Function, Traced, origin_of
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.model.seam.hooks import Hook

# Matches every other origin, and none.
ANY = object

# The rule of each (operation, origin).  The comment above a group names its launches.
RULES: dict[tuple[str, type], Function] = {
    # From a product to attention: `rope_write`, `paged_decode`, `latent_write`
    ("reshape", ANY): heads.make_heads,
    ("reshape", Attended): heads.merge_heads,
    ("transpose", Heads): heads.keep_layout,
    ("transpose", Attended): heads.keep_layout,
    ("swapaxes", Heads): heads.keep_layout,
    ("swapaxes", Attended): heads.keep_layout,
    ("split", ANY): heads.split_columns,
    ("expand_dims", Latents): heads.keep_layout,
    ("rms_norm", Heads): heads.norm_heads,
    ("rms_norm", Slice): heads.norm_heads,
    ("mul", Heads): heads.scale_heads,
    ("at", Heads): heads.scale_heads_at,
    ("rope", ANY): heads.rotate_heads,
    # Around a product: `skinny_gemm`, `add_rms_norm`, `gated_rms_norm`
    ("rms_norm", ANY): norms.norm,
    ("rms_norm", Sum): norms.norm_sum,
    ("add", ANY): norms.add,
    ("clip_residual", ANY): norms.add_clipped,
    ("swiglu", Columns): products.apply_swiglu,
    ("gelu_approx", Columns): products.apply_gelu,
    ("mul", Activated): products.apply_gate,
    ("precise_swiglu", ANY): norms.norm_gated,
    # Behind a mixture of experts: `expert_sum`
    ("mul", ExpertResults): products.weigh,
    ("sum", Weighted): products.sum_up,
    ("astype", Summed): products.round_sum,
    # A router: `expert_topk`
    ("astype", ANY): routing.widen,
    ("softmax", ANY): routing.score_by_softmax,
    ("sigmoid", ANY): routing.score_by_sigmoid,
    ("add", RouterScores): routing.add_bias,
    ("neg", ANY): routing.negate,
    ("argpartition", ANY): routing.partition,
    ("getitem", Partition): routing.choose,
    ("stop_gradient", Partition): routing.keep,
    ("stop_gradient", Choice): routing.keep,
    ("take_along_axis", ANY): routing.gather,
    ("softmax", RouterWeights): routing.weigh_by_softmax,
    ("sum", RouterWeights): routing.total_weights,
    ("add", Total): routing.add_eps,
    ("truediv", RouterWeights): routing.renormalize,
    ("mul", RouterWeights): routing.scale_weights,
}


# The operations: methods of traced arrays, and functions of MLX.
_METHODS = {
    **{name: name for name in ("reshape", "transpose", "swapaxes", "sum", "astype", "at")},
    **{f"__{name}__": name for name in ("getitem", "neg", "add", "mul", "truediv")},
    **{f"__r{name}__": name for name in ("add", "mul")},
}
_FUNCTIONS = (
    (mx.fast, "rms_norm"),
    (mx.fast, "rope"),
    (nn, "gelu_approx"),
    *((mx, name) for name in ("split", "expand_dims", "sum", "softmax", "sigmoid")),
    *((mx, name) for name in ("argpartition", "take_along_axis", "stop_gradient")),
)


def hooks(named: Iterable[tuple[ModuleType, str]]) -> list[Hook]:
    """The operations with their rules.  named: (Python module, name) of mlx-lm's functions."""
    methods = [(Traced, name, operation) for name, operation in _METHODS.items()]
    functions = [(owner, name, name) for owner, name in (*_FUNCTIONS, *named)]
    return [
        (owner, name, partial(_by_rule, operation))
        for owner, name, operation in (*methods, *functions)
    ]


def _by_rule(operation: str, original: Function, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation, and then the rule for the origin of its first array."""
    value = original(x, *args, **kwargs)
    for kind in type(origin_of(x)).__mro__:
        rule = RULES.get((operation, kind))
        if rule is not None:
            return rule(value, x, *args, **kwargs)
    return value
