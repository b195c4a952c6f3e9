"""Selects a model's attention path on this device, with the reason."""

import logging
from collections.abc import Collection, Mapping, Sequence

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.errors import ConfigError, Option
from vllm_metal_lite.kernels.registry import REFERENCE, REGISTRY, Prefill, Verdict, unused_kernels
from vllm_metal_lite.kernels.served_shapes import attention_problem, recurrence_problem
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.specs import AttentionShape, RecurrentShape

logger = logging.getLogger(__name__)


def no_kernels(
    option: str,
    shapes: Sequence[AttentionShape],
    by_segment: str | None = None,
    recurrences: Collection[RecurrentShape] = (),
) -> str | None:
    """Why a model that attends with `shapes` does not use the kernels; None: the model uses them.

    option: "reference", "kernels" or "auto".  by_segment: why the model attends one segment at a
    time; None: it attends to packed rows.  A model that attends by segment reads K and V through
    MLX operations, which must not touch a store that kernels write.
    recurrences: shapes of the recurrent layers that work on packed rows.
    Raises ConfigError for "kernels" if they cannot serve the model.
    """
    if by_segment is not None:
        by_segment = f"this model's attention runs a segment at a time: {by_segment}"
    if option == "reference":
        return "asked for" if by_segment is None else f"asked for; {by_segment}"
    reason = by_segment or _problem(option, shapes, recurrences)
    _check_option(option, reason)
    return reason


def select(
    option: str,
    store: PagedStore,
    shapes: Sequence[AttentionShape],
    verdict: Verdict,
    known: Collection[str] = (),
    fatal: str | None = None,
) -> tuple[Attention, str]:
    """The attention path for a model that the kernels can serve, and the reason for the choice.

    A fallback replaces each failed kernel (kernels/registry.py), with a warning unless the kernel
    is `known`.  fatal: a failed kernel that its fallback needs, so only the reference is left.  If
    only the reference is left, option "kernels" raises ConfigError.
    """
    failures = verdict.failures
    prefill, irreplaceable = _prefill(shapes, verdict)
    fatal = fatal or irreplaceable
    reason = None if fatal is None else f"a kernel fails: {failures[fatal]}"
    _check_option(option, reason)
    _warn(failures, known, fatal)
    if reason is not None:
        return ReferenceAttention(store), reason
    attention = KernelAttention(store, prefill, shapes, failed_kernels=failures)
    without = f"without {', '.join(sorted(failures))}, the others " if failures else ""
    varlen = "latent_attention" if any(s.latent for s in shapes) else "varlen_prefill"
    prompts = varlen if prefill == "varlen" else "MLX's SDPA"
    return attention, f"{without}correct on this device; prompts by {prompts}"


def _check_option(option: str, reason: str | None) -> None:
    """Raise ConfigError if a reason leaves only the reference, which the option forbids."""
    if reason is not None and option == "kernels":
        raise ConfigError(Option("attention"), f"='kernels' is not possible: {reason}")


def _warn(failures: Mapping[str, str], known: Collection[str], fatal: str | None) -> None:
    """Warn of each new failure, or of the fatal one alone: a fatal failure decides."""
    new = [kernel for kernel in failures if kernel not in known]
    for kernel in [fatal] if fatal in new else new:
        row = REGISTRY[kernel]
        fallback = row.fallback if fatal is None or row.essential else REFERENCE
        logger.warning(
            f"a kernel does not suit this device: {failures[kernel]}; {fallback}. Answers stay "
            "correct. Please report the output of `vllm-metal-lite doctor`."
        )


def _prefill(shapes: Sequence[AttentionShape], verdict: Verdict) -> tuple[Prefill, str | None]:
    """Returns (the path of prompts, the failed kernel that only the reference can replace, or
    None)."""
    unused = [row for row in REGISTRY.values() if row.name in unused_kernels(verdict.failures)]
    irreplaceable = [row.name for row in unused if row.essential]
    choices: set[Prefill] = {"varlen", "gather"}
    choices -= {row.prefill for row in unused if row.prefill}
    if any(attention_problem(shape, prefill=True) for shape in shapes):
        choices.discard("varlen")
    if not choices:
        irreplaceable += [row.name for row in unused if row.prefill == "gather"]
    faster = verdict.prefill
    prefill = faster if faster in choices or not choices else choices.pop()
    return prefill, next(iter(irreplaceable), None)


def _problem(
    option: str, shapes: Sequence[AttentionShape], recurrences: Collection[RecurrentShape]
) -> str | None:
    if not shapes and not recurrences:
        return "no layer of this model has a kernel"
    if option == "auto" and backend.is_cpu():
        return "kernels need a GPU"
    reasons = (*map(attention_problem, shapes), *map(recurrence_problem, recurrences))
    return next((reason for reason in reasons if reason is not None), None)
