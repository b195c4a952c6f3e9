"""The texts at the shapes of models that people run, in both types of 16 bits."""

from collections import Counter
from collections.abc import Iterator, Sequence

from metal.host.texts import KernelText
from tests.support.kernels import production_shapes as shapes
from tests.support.kernels.production_shapes import (
    BF16,
    HALF,
    QWEN3,
    attention,
    experts,
    norms,
    products,
)
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.kernels.registry import REGISTRY
from vllm_metal_lite.specs import Quantisation

# The tests have the others: Qwen3 to 8B, Llama, Gemma 3, gpt-oss.
_HEADS = (
    (12, 4, 128),  # Granite 4 tiny
    (40, 8, 128),  # Qwen3 14B
    (64, 8, 128),  # Qwen3 32B
    (32, 2, 128),  # Nemotron 3 Nano
    (16, 4, 256),  # Qwen3.5 4B and 9B
    (24, 4, 256),  # Qwen3.5 27B
    (16, 2, 256),  # Qwen3.6 35B-A3B
    (16, 2, 512),  # Gemma 4
)
_AFFINE = Quantisation(4, 64)


def checks() -> Iterator[Check]:
    yield from shapes.CHECKS.values()
    for dtype in (HALF, BF16):
        for heads in (QWEN3, *shapes.OTHERS, shapes.PHI, shapes.GEMMA3, *_HEADS):
            yield from checks_for(attention(heads, dtype, shares=True))
        for rows in (1, 4, 8, 16, 64):
            for how in (None, _AFFINE):
                yield from products(rows, 9728, 2560, dtype, how)
        yield from experts(256, 2048, 512, "swiglu", False, _AFFINE, _AFFINE, dtype=dtype)
        for size in (1024, 2048, 4096, 5120, 8192, 12288, 16384):
            yield from norms(size, dtype)


def named_texts(words: Sequence[str] = ()) -> dict[str, KernelText]:
    """The texts of all checks, or of those that may have a name with one of the words.

    A name is the check's, then the kernel's if that is another, then #2, #3, ... for the further
    texts of a kernel.
    """
    found: dict[str, KernelText] = {}
    for check in dict.fromkeys(checks()):
        if words and not _may_have(check, words):  # a check takes half a second
            continue
        numbers: Counter[str] = Counter()
        for text in shapes.texts_of(check):
            kernel = text.kernel.removeprefix("metal_lite_")
            numbers[kernel] += 1
            name = str(check) if check.kernel == kernel else f"{check}: {kernel}"
            found[name + (f" #{numbers[kernel]}" if numbers[kernel] > 1 else "")] = text
    return found


def _may_have(check: Check, words: Sequence[str]) -> bool:
    """Whether a text's name may hold one of the words.  A check launches what it needs."""
    names = [f"{check}: {REGISTRY[kernel].file}" for kernel in (check.kernel, *check.needs)]
    return any(word.partition("#")[0].strip() in name for word in words for name in names)
