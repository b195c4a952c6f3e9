"""MLX's own kernels as texts for the chain: how they fare there is the measure of ours.

Their text is in MLX's wheel, that of rms_norm and rope is not.
"""

import re

from metal.host.mlx_source import INCLUDE
from metal.host.texts import KernelText
from metal.host.translate import expand_includes, without_comments

# Name: header, kernel, template arguments, threads of a threadgroup as MLX launches the kernel.
_ATTENTION = "steel/attn/kernels/steel_attention.h", "attention"
_RECURRENCE = "gated_delta_update.h", "gated_delta_seq"
_LAUNCHES = {
    "sdpa_vector 128": ("sdpa_vector.h", "sdpa_vector", "half, 128", 1024),
    "sdpa_vector 256": ("sdpa_vector.h", "sdpa_vector", "half, 256", 1024),
    "sdpa_vector_2pass_1 128, 8 heads": ("sdpa_vector.h", "sdpa_vector_2pass_1", "half, 128", 256),
    "attention 64": (*_ATTENTION, "half, 32, 32, 64, 64, 4, 1", 128),
    "attention 128": (*_ATTENTION, "half, 32, 16, 128, 128, 4, 1", 128),
    "qmv_fast 4 bits": ("quantized.h", "affine_qmv_fast", "half, 64, 4, false", 64),
    "qmv_fast 8 bits": ("quantized.h", "affine_qmv_fast", "half, 64, 8, false", 64),
    "qmm_t 4 bits": ("quantized.h", "affine_qmm_t", "half, 64, 4, true, false", 128),
    "gated_delta_seq": (*_RECURRENCE, "half, 128, 128, 16, 32, 1", 128),
}
_BEFORE = {"quantized.h": ("steel/gemm/gemm.h", "quantized_utils.h")}
# A prompt that is whole tiles, causal; no mask and no sinks.
_CONSTANTS = {"align_Q": "true", "align_K": "true", "do_causal": "true", "blocks": "32"}
_CONSTANT = re.compile(r"constant (\w+) (\w+) \[\[function_constant\(\d+\)\]\];")
_KERNEL = re.compile(
    r"template <[^{};]*?>\s*\[\[kernel[^\]]*\]\] void (\w+)\([^{}]*\) \{.*?^\}", re.S | re.M
)
_UTILS = re.compile(
    r'#line 1 "[^"]*/kernels/utils.h".*?(?=#line \d+ "[^"]*gated_delta_update.h")', re.S
)
_GIVEN = re.compile(r"#line[^\n]*|#pragma METAL[^\n]*")
_REWRITES = (
    (r"const thread noexcept|\(\) thread (?=\{\})", lambda m: m[0].replace("thread ", "")),
    (r"src \+= str_y;", "src += int(str_y);"),
    (r"const constant (\w+)& (\w+)", r"const \1 \2"),
    (r"(const )?constant (const )?(\w+)\*", r"const device \3*"),
    # Apple's compiler unrolls short loops by itself.
    (
        r"(?:(?:#pragma unroll|\w+_PRAGMA_UNROLL)\s+)?\bfor (\(\w+ (?:i|j|row|sc|v) = 0;)",
        r'_Pragma("unroll") for \1',
    ),
)


def texts() -> dict[str, KernelText]:
    """The texts by name."""
    return {f"MLX {name}": _text(*launch) for name, launch in _LAUNCHES.items()}


def _text(header: str, kernel: str, arguments: str, threads: int) -> KernelText:
    folder = "mlx/backend/metal/kernels"
    files = [f'#include "{folder}/{name}"' for name in (*_BEFORE.get(header, ()), header)]
    whole = expand_includes("\n".join(files), header, [INCLUDE])
    whole = _GIVEN.sub("", _UTILS.sub("", without_comments(whole)))
    whole = _CONSTANT.sub(_constant, whole)
    (own,) = (found[0] for found in _KERNEL.finditer(whole) if found[1] == kernel)
    rest = _KERNEL.sub("", whole)
    for pattern, instead in _REWRITES:
        rest = re.sub(pattern, instead, rest)
    own = re.sub(r"\[\[kernel[^\]]*\]\]", "[[kernel]]", own)
    spelled = f"{kernel}<{arguments}>"
    last = f'template [[host_name("{kernel}")]] [[kernel]] decltype({spelled}) {spelled};\n'
    return KernelText(f"mlx_{kernel}", "\n".join([rest, own, last]), threads)


def _constant(found: re.Match) -> str:
    return f"constexpr {found[1]} {found[2]} = {_CONSTANTS.get(found[2], 'false')};"
