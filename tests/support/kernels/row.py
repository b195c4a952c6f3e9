"""A kernel as the tests need it, and the uses of kernels by models that they try.

`attention_runs.py`, `product_runs.py` and `recurrent_runs.py` have a row for each kernel, and
`table.py` joins them.  Every list of kernels in the tests is made from these rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from vllm_metal_lite.backend import mx
from vllm_metal_lite.specs import (
    AttentionShape,
    ConvShape,
    ExpertShape,
    GatedNormShape,
    KernelUse,
    Quantisation,
    RecurrenceShape,
    RopeShape,
    WeightShape,
)

# What the checks try: in float32, where every fault shows, if the kernel serves it.
ROTATIONS = RopeShape(32, eps=1e-5), RopeShape(16, traditional=True, base=None)
SHAPE = AttentionShape(4, 2, 32, 32, mx.float32)
USE = KernelUse((SHAPE,), 16, ROTATIONS, (1000,))
NARROW = (replace(SHAPE, dtype=mx.bfloat16),)
PRODUCTS = KernelUse(NARROW, 16, weights=(WeightShape(100, 96), WeightShape(96, 1056)))
MXFP4, OF_8_BITS = Quantisation(4, 32, "mxfp4"), Quantisation(8, 64)
PACKED_EXPERTS = ExpertShape(5, 64, 64, "clamped_swiglu", True, MXFP4, OF_8_BITS)
EXPERTS = KernelUse(NARROW, 16, experts=(ExpertShape(6, 96, 64), PACKED_EXPERTS))
LATENT_SHAPE = AttentionShape(4, 1, 64, 16, mx.float32, latent=True)
LATENT = KernelUse((LATENT_SHAPE,), 16, (RopeShape(16, traditional=True),))
CONV, NORM = ConvShape(40, 4, False, True, mx.float32), GatedNormShape(8, 3, mx.float32)
RECURRENT = KernelUse((), 16, recurrences=(CONV, NORM, RecurrenceShape(1, 2, 16, 8, mx.float32)))
QUANTISED = KernelUse((replace(SHAPE, kv_bits=8),), 16)


@dataclass(frozen=True)
class ServingCase:
    """The engine that launches a kernel, and how tools/prove/break_in_serving.py breaks it.

    tiny: the architecture whose tiny model launches the kernel; None: any model.
    wrong: a condition on the kernel's template values under which the text does not compile.
    few_rows: the largest step whose contexts are split for its prompts.
    """

    prefill: str = "varlen"
    fused: bool = True
    kv_bits: int | None = None
    dtype: str = "float32"
    tiny: str | None = None
    wrong: str = "true"
    few_rows: int = 0


PLAIN = ServingCase("gather", fused=False)


@dataclass(frozen=True)
class KernelTest:
    """miscompiled: a text of the kernel, and a wrong text in its place: the check must notice it.

    runs: form -> a small launch; together they use all parts of the kernel.  "" is the plain form.
    faults: the kinds of faults that test_fallbacks.py tries; broken_machine.py names them.
    use: a model's use that has a check of the kernel.
    serving: an engine that launches the kernel.
    not_launched_by: tiny models of test_fallbacks.py that have this use, but other launches.
    store: whether the kernel "writes" or "reads" a store with a ticket; "writes if fused".
    """

    miscompiled: tuple[str, str]
    runs: Mapping[str, Callable] = field(default_factory=dict)
    faults: tuple[str, ...] = ("is wrong",)
    use: KernelUse = USE
    serving: ServingCase = ServingCase()
    not_launched_by: tuple[str, ...] = ()
    store: str = ""
