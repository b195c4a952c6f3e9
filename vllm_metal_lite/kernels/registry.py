"""All kernels: their needs, their replacements, their checks and timings, and the verdict on them.

One row for each kernel of metal/, and one for each use of a kernel that can fail by itself.  The
choice of an attention path, the checks, `doctor`, the fallback in a step, the table in
docs/kernels.md and the tools read these rows.  CONTRIBUTING.md lists the files of a new kernel.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# A path for prompts: `varlen_prefill`, or `kv_gather` and MLX's SDPA.
Prefill = Literal["varlen", "gather"]
# Replaces all kernels if a kernel without a fallback of its own fails.
REFERENCE = "the reference attention is used, which is slower"
_OPERATIONS = "attention and recurrent layers use MLX operations, which is slower"
_GATHER = "prompts use kv_gather and MLX's SDPA"
_EXPERTS = "mlx-lm's experts are used"


@dataclass(frozen=True)
class KernelRow:
    """name: the name in results and warnings.  A kernel is named like its file in metal/.

    fallback: the replacement, as a warning words it.
    check: "module.function" in checks/.
    timed: the function timed_NAME of that module times the kernel beside its fallback; "": the
        kernel is not timed.
    needs: the kernels without which this one is neither used nor checked.  They need none.
    base: the kernel that this is a use of; template: the values that the use sets.
    essential: nothing but the reference replaces the kernel, because no MLX operation may touch
        what kernels write.
    prefill: the path of prompts that uses the kernel, if only one path does.
    """

    name: str
    fallback: str
    check: str
    timed: str = ""
    needs: tuple[str, ...] = ()
    base: str = ""
    template: tuple[str, ...] = ()
    essential: bool = False
    prefill: Prefill | None = None

    @property
    def file(self) -> str:
        """The name of its file in metal/, without a suffix."""
        return self.base or self.name


_ROWS = (
    KernelRow("kv_write", REFERENCE, "attention.write", essential=True),
    KernelRow("kv_write_quantised", REFERENCE, "attention.write", essential=True),
    KernelRow("kv_gather", "prompts use varlen_prefill", "attention.gather", prefill="gather"),
    KernelRow(
        "kv_gather_quantised", "prompts use varlen_prefill", "attention.gather", prefill="gather"
    ),
    KernelRow(
        "paged_decode", "decodes are computed as prompts of one token", "attention.decode", "decode"
    ),
    KernelRow(
        "latent_attention", "all rows use kv_gather and MLX's SDPA", "attention.decode", "decode"
    ),
    KernelRow(
        "merge_partitions",
        "contexts are not split",
        "attention.decode",
        "merge",
        needs=("paged_decode", "latent_attention"),
    ),
    KernelRow(
        "latent_prefill",
        _GATHER,
        "attention.prefill",
        "prefill",
        needs=("latent_attention",),
        base="latent_attention",
        prefill="varlen",
    ),
    KernelRow("varlen_prefill", _GATHER, "attention.prefill", "prefill", prefill="varlen"),
    KernelRow(
        "shared_prefix",
        "a shared prefix is read by each request",
        "attention.decode",
        "prefix",
        needs=("paged_decode", "varlen_prefill"),
        base="varlen_prefill",
        template=("PREFIX",),
    ),
    KernelRow(
        "split_prefill",
        "rows of a request with drafts are computed as decodes, or as a prompt in one split",
        "attention.prefill",
        "split",
        needs=("varlen_prefill",),
        base="varlen_prefill",
        template=("SPLIT",),
    ),
    KernelRow("gather_rows", "MLX's own operations are used", "attention.reorder", "reorder"),
    KernelRow(
        "rope_write", "prompts use MLX's norm and rotation, and kv_write", "new_rows.write", "write"
    ),
    KernelRow(
        "fused_decode",
        "decodes use rope_write and paged_decode",
        "attention.decode",
        "fused_decode",
        needs=("paged_decode",),
        base="paged_decode",
        template=("FUSED",),
    ),
    KernelRow(
        "latent_write", "MLX's norm and rotation, and kv_write, are used", "new_rows.write", "write"
    ),
    KernelRow("add_rms_norm", "MLX's sum and norm are used", "products.add_norm", "add_norm"),
    KernelRow("skinny_gemm", "MLX's product is used", "products.product"),
    KernelRow("expert_topk", "MLX's operations choose experts", "products.topk"),
    KernelRow("expert_plan", _EXPERTS, "products.expert_plan"),
    KernelRow("expert_gemm", _EXPERTS, "products.mixture", needs=("expert_plan", "expert_sum")),
    KernelRow("expert_sum", _EXPERTS, "products.weighted_sum"),
    KernelRow("causal_conv", _OPERATIONS, "recurrent.convolution", essential=True),
    KernelRow("gated_delta", _OPERATIONS, "recurrent.recurrence", essential=True),
    KernelRow(
        "gated_rms_norm", "MLX's norm and product are used", "recurrent.gated_norm", "gated_norm"
    ),
)
REGISTRY: dict[str, KernelRow] = {row.name: row for row in _ROWS}


def name_of_launch(kernel: str, template: Mapping[str, Any]) -> str:
    """The name of a launch's row: a use of the kernel, if the launch sets the use's values."""
    uses = (row for row in _ROWS if row.base == kernel and any(map(template.get, row.template)))
    return next((use.name for use in uses), kernel)


def unused_kernels(failed_kernels: Collection[str]) -> frozenset[str]:
    """The kernels that are not used if these fail: these, and those that need one of them."""
    needing = (row.name for row in _ROWS if not set(failed_kernels).isdisjoint(row.needs))
    return frozenset((*failed_kernels, *needing))


@dataclass(frozen=True)
class Verdict:
    """Results of the kernel checks on this device.

    failures: kernel -> why it is replaced, in one line.
    prefill: the faster path for prompts.
    """

    failures: dict[str, str]
    prefill: Prefill = "gather"

    @classmethod
    def of_all(cls, verdicts: Sequence["Verdict"]) -> "Verdict":
        """The verdict for several devices that must take the same path."""
        failures = {kernel: line for v in reversed(verdicts) for kernel, line in v.failures.items()}
        prefills = {v.prefill for v in verdicts}
        return cls(failures, "varlen" if prefills == {"varlen"} else "gather")
