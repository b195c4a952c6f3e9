"""Steps of nothing but decodes, compiled: Python builds such a graph once a shape.

Building a forward can take the host longer than running it takes a GPU.  Two steps of one variant
(rows, width of the block tables, splits, all of them powers of two) differ only in arrays: the
step's metadata and the attention's state go in as arguments, logits and the next state come out.
Weights and the store are captured, which copies nothing; kernels write into the store in place.
"""

from collections import OrderedDict
from collections.abc import Callable

from vllm_metal_lite import backend
from vllm_metal_lite.attention.step import Attention, StepMetadata
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.packed import PackedModel

# Variants kept, the least recently used go first: rows and widths of one load are a few.
_MAX_VARIANTS = 64

# Of metadata arrays (or lists of them, one array a KV group) and the state.
Forward = Callable[[list, list[mx.array]], tuple[mx.array, list[mx.array]]]


class CompiledDecode:
    """A model's forward for steps that have a `variant`.

    reason: why steps run uncompiled, None if they do not.  A model that cannot be traced is found
    out by trying, once.  num_steps: how many were run compiled.
    """

    def __init__(self, model: PackedModel, attention: Attention) -> None:
        self.model, self.attention = model, attention
        self.num_steps = 0
        self.reason: str | None = None
        if backend.is_cpu():
            self.reason = "on a CPU"
        elif attention.name != "kernels":
            self.reason = f"the {attention.name} attention plans each step"
        elif model.sees_sequences:
            self.reason = "some layers of this model see sequences"
        self._variants: OrderedDict[tuple, Forward] = OrderedDict()

    def __call__(self, step: StepMetadata) -> mx.array | None:
        """Logits (num_rows, vocab_size) of all rows, padding included; None: run it uncompiled."""
        if self.reason is not None or step.variant is None:
            return None
        forward = self._variants.get(step.variant) or self._compile(step)
        self._variants.move_to_end(step.variant)
        arrays = [getattr(step, name) for name in step.arrays]
        try:
            logits, self.attention.state = forward(arrays, self.attention.state)
        except Exception as e:  # whatever a model does that cannot be traced
            self.reason = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            self._variants.clear()
            return None
        self.num_steps += 1
        return logits

    def _compile(self, step: StepMetadata) -> Forward:
        like = step.with_arrays(None)  # holds on to nothing

        def forward(arrays: list, state: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
            kept = self.attention.state
            self.attention.state = state
            try:
                logits = self.model(like.with_arrays(arrays), self.attention, None)
                return logits, self.attention.state
            finally:  # what is traced must not stay behind
                self.attention.state = kept

        if len(self._variants) == _MAX_VARIANTS:
            self._variants.popitem(last=False)
        self._variants[step.variant] = compiled = mx.compile(forward)
        return compiled
