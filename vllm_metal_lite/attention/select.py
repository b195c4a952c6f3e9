"""Selects a model's attention path on this device, with the reason."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.paged.attention import PROMPT_KERNELS, KernelAttention
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.config import ATTENTION
from vllm_metal_lite.devices import profile
from vllm_metal_lite.errors import ConfigError, Option
from vllm_metal_lite.kernels.common import unsupported
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.recurrence.kernels import recurrence_unsupported
from vllm_metal_lite.specs import AttentionShape, RecurrentShape

logger = logging.getLogger(__name__)

# The next best way of each kernel, as a warning words it.  The reference attention stands in for
# kv_write, for a store that no kernel reads for prompts, and for the kernels of recurrent layers:
# no MLX operation may touch a pool of states that kernels write.
_INSTEAD = {
    "paged_decode": "decodes are computed as prompts of one token",
    "merge_partitions": "contexts are not split",
    "shared_prefix": "a shared prefix is read by each request",
    "varlen_prefill": "prompts use kv_gather and MLX's SDPA",
    "latent_attention": "all rows use kv_gather and MLX's SDPA",
    "latent_prefill": "prompts use kv_gather and MLX's SDPA",
    "kv_gather": "prompts use varlen_prefill",
    "gather_rows": "MLX's own operations are used",
    "latent_write": "MLX's norm and rotation, and kv_write, are used",
    "rope_write": "prompts use MLX's norm and rotation, and kv_write",
    "fused_decode": "decodes use rope_write and paged_decode",
    "add_rms_norm": "MLX's sum and norm are used",
    "skinny_gemm": "MLX's product is used",
    "expert_topk": "MLX's operations choose experts",
    "expert_plan": "mlx-lm's experts are used",
    "expert_gemm": "mlx-lm's experts are used",
    "expert_sum": "mlx-lm's experts are used",
    "fused_recurrence": "MLX's operations make gates and norms for gated_delta",
    "gated_rms_norm": "MLX's norm and product are used",
}
_REFERENCE = "the reference attention is used, which is slower"
_OPERATIONS = "attention and recurrent layers use MLX operations, which is slower"
OPTIONAL_KERNELS = frozenset(_INSTEAD)
_STATES = ("causal_conv", "gated_delta")
_WRITES, _GATHERS = ("kv_write", "kv_write_quantised"), ("kv_gather", "kv_gather_quantised")


@dataclass(frozen=True)
class Verdict:
    """Results of the kernel checks on this device.

    failures: kernel -> one line.  prefill: the faster path for prompts, "varlen" or "gather".
    """

    failures: dict[str, str]
    prefill: str = "gather"

    @classmethod
    def of_all(cls, verdicts: Sequence["Verdict"]) -> "Verdict":
        """What suits each of several devices that take the same path."""
        failures = {kernel: line for v in reversed(verdicts) for kernel, line in v.failures.items()}
        prefills = {v.prefill for v in verdicts}
        return cls(failures, "varlen" if prefills == {"varlen"} else "gather")


def no_kernels(
    option: str,
    shapes: Sequence[AttentionShape],
    by_segment: str | None = None,
    recurrences: Sequence[RecurrentShape] = (),
) -> str | None:
    """Why the kernels cannot serve a model that attends with `shapes`; None: try them.

    recurrences: of the recurrent layers that work on packed rows.  option: "reference",
    "kernels" or "auto", else ConfigError.  by_segment: why the model attends one segment at a time;
    None if it does not.  Such a model reads K and V through MLX operations, which must not touch a
    store that kernels write.  ConfigError if option is "kernels" and the kernels cannot serve the
    model.
    """
    if option not in ATTENTION:
        raise ConfigError(Option("attention"), f" must be one of {list(ATTENTION)}, got {option!r}")
    if by_segment is not None:
        by_segment = f"this model's attention runs a segment at a time: {by_segment}"
    if option == "reference":
        return "asked for" if by_segment is None else f"asked for; {by_segment}"
    reason = by_segment or _unsupported(option, shapes, recurrences)
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

    Each failed kernel gives way to its next best way, with one warning; `known` ones without.  If
    that is the reference, option "kernels" raises ConfigError.
    """
    failures = verdict.failures
    prefill, fatal = _prefill(shapes, verdict)
    if fatal is not None and option == "kernels":
        raise ConfigError(
            Option("attention"), f"='kernels' is not possible: a kernel fails: {failures[fatal]}"
        )
    new = [kernel for kernel in failures if kernel not in known]
    for kernel in [fatal] if fatal in new else new:
        instead = _OPERATIONS if kernel in _STATES else _REFERENCE
        if fatal is None:
            instead = _INSTEAD[kernel.removesuffix("_quantised")]
        logger.warning(
            f"a kernel does not suit this device: {failures[kernel]}; {instead}. Answers stay "
            "right. Please report what `vllm-metal-lite doctor` prints."
        )
    if fatal is not None:
        return ReferenceAttention(store), f"a kernel fails: {failures[fatal]}"
    decodes = failures.keys().isdisjoint(("paged_decode", "latent_attention", "shared_prefix"))
    attention = KernelAttention(
        store,
        prefill,
        {s.num_heads // s.num_kv_heads for s in shapes},
        without=failures,
        rows_as_decodes=profile().rows_as_decodes if decodes else 0,
        latents=any(s.latent for s in shapes),
    )
    checked = f"without {', '.join(sorted(failures))}, the others right" if failures else "right"
    ours = "latent_attention" if any(s.latent for s in shapes) else "varlen_prefill"
    how = {"varlen": ours, "gather": "MLX's SDPA"}[prefill]
    return attention, f"{checked} on this device; prompts by {how}"


def _prefill(shapes: Sequence[AttentionShape], verdict: Verdict) -> tuple[str, str | None]:
    """The way of prompts; and the failed kernel, if any, that no other kernel can stand in for."""
    failed = verdict.failures.keys()
    fatal = next((kernel for kernel in (*_WRITES, *_STATES) if kernel in failed), None)
    if fatal is not None:
        return verdict.prefill, fatal
    gather = next((kernel for kernel in _GATHERS if kernel in failed), None)
    varlen = failed.isdisjoint(PROMPT_KERNELS)
    varlen = varlen and all(unsupported(shape, prefill=True) is None for shape in shapes)
    if gather is not None:
        return "varlen", None if varlen else gather
    return verdict.prefill if varlen else "gather", None


def _unsupported(
    option: str, shapes: Sequence[AttentionShape], recurrences: Sequence[RecurrentShape]
) -> str | None:
    if not shapes and not recurrences:
        return "no layer of this model has a kernel"
    if option == "auto" and backend.is_cpu():
        return "kernels need a GPU"
    reasons = (*map(unsupported, shapes), *map(recurrence_unsupported, recurrences))
    return next((reason for reason in reasons if reason is not None), None)
