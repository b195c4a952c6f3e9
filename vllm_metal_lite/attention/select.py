"""Selects a model's attention path on this device, with the reason."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.config import ATTENTION
from vllm_metal_lite.devices import profile
from vllm_metal_lite.errors import ConfigError, Option
from vllm_metal_lite.kernels.common import unsupported
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.specs import AttentionShape

logger = logging.getLogger(__name__)

# These kernels are optional: each has a fallback.
OPTIONAL_KERNELS = frozenset(
    ("varlen_prefill", "shared_prefix", "gather_rows", "rope_write", "add_rms_norm", "fused_decode",
     "skinny_gemm")
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Results of the kernel checks on this device.

    failures: kernel -> one line.  prefill: the faster path for prompts, "varlen" or "gather".
    """

    failures: dict[str, str]
    prefill: str = "gather"


def no_kernels(
    option: str, shapes: Sequence[AttentionShape], by_segment: str | None = None
) -> str | None:
    """Why the kernels cannot serve a model that attends with `shapes`; None: try them.

    option: "reference", "kernels" or "auto", else ConfigError.  by_segment: why the model attends
    one segment at a time; None if it does not.  Such a model reads K and V through MLX operations,
    which must not touch a store that kernels write.  ConfigError if option is "kernels" and the
    kernels cannot serve the model.
    """
    if option not in ATTENTION:
        raise ConfigError(Option("attention"), f" must be one of {list(ATTENTION)}, got {option!r}")
    if by_segment is not None:
        by_segment = f"this model's attention runs a segment at a time: {by_segment}"
    if option == "reference":
        return "asked for" if by_segment is None else f"asked for; {by_segment}"
    reason = by_segment or _unsupported(option, shapes)
    if reason is not None and option == "kernels":
        raise ConfigError(Option("attention"), f"='kernels' is not possible: {reason}")
    return reason


def select(
    option: str,
    store: PagedStore,
    shapes: Sequence[AttentionShape],
    verdict: Verdict,
    known: Collection[str] = (),
) -> tuple[Attention, str]:
    """The attention path for a model that the kernels can serve, and a short reason.

    A failed kernel that has a fallback is replaced.  Any other failure selects the reference under
    "auto" and raises ConfigError under "kernels".  "auto" also warns of failures beside `known`.
    """
    wrong = verdict.failures.keys()
    new = [line for kernel, line in verdict.failures.items() if kernel not in known]
    fatal = [k for k in verdict.failures if k not in OPTIONAL_KERNELS]
    if new and option == "auto":
        slower = "the reference attention, which is slower"
        instead = slower if fatal else "MLX's own operations instead"
        logger.warning(
            f"a kernel fails on this device: {new[0]}; "
            f"using {instead}. Please report what `vllm-metal-lite doctor` prints."
        )
    if fatal:
        reason = f"a kernel fails: {verdict.failures[fatal[0]]}"
        if option == "kernels":
            raise ConfigError(Option("attention"), f"='kernels' is not possible: {reason}")
        return ReferenceAttention(store), reason
    prefill = "gather" if "varlen_prefill" in wrong else verdict.prefill
    shares = "shared_prefix" not in wrong
    attention = KernelAttention(
        store,
        prefill,
        {s.num_heads // s.num_kv_heads for s in shapes},
        shares=shares,
        gathers_rows="gather_rows" not in wrong,
        rows_as_decodes=profile().rows_as_decodes if shares else 0,
    )
    checked = "the others right" if wrong else "right"
    how = {"varlen": "varlen_prefill", "gather": "MLX's SDPA"}[prefill]
    return attention, f"{checked} on this device; prompts by {how}"


def _unsupported(option: str, shapes: Sequence[AttentionShape]) -> str | None:
    if not shapes:
        return "no layer of this model attends"
    if option == "auto" and backend.is_cpu():
        return "kernels need a GPU"
    return next((reason for s in shapes if (reason := unsupported(s))), None)
