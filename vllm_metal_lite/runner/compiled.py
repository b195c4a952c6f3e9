"""Steps whose shapes repeat, compiled: Python builds such a graph once a shape.

Building a forward can take the host longer than running it takes a GPU.  Two steps of one variant
(the shapes of their arrays, most of them powers of two) differ only in what the arrays hold: the
step's metadata and the attention's state go in as arguments, logits and the next state come out.
Weights and the store are captured, which copies nothing; kernels write into the store in place.

Tracing costs more than building the graph once.  A step of decodes is followed by its like, so it
is traced at once; a variant with prompts when it comes a second time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Attention, StepMetadata
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.packed import PackedModel

# Variants kept, the least recently used go first: those of one load are a few.
_MAX_VARIANTS = 64

# Of metadata arrays (or trees of them) and the state.
Forward = Callable[[list, list[mx.array]], tuple[mx.array, list[mx.array]]]


class CompiledSteps:
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
        self._seen: OrderedDict[tuple, None] = OrderedDict()  # once, and not compiled

    def __call__(self, step: StepMetadata) -> mx.array | None:
        """Logits (R, vocab_size) of the step's `logits_indices`; None: run it uncompiled."""
        if self.reason is not None or step.variant is None:
            return None
        forward = self._variants.get(_key(step))
        if forward is None:
            if self._waits(step):
                return None
            forward = self._compile(step)
        _keep(self._variants, _key(step), forward)
        arrays = [getattr(step, name) for name in step.arrays]
        try:
            logits, self.attention.state = forward(arrays, self.attention.state)
        except Exception as e:  # whatever a model does that cannot be traced
            self.reason = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            self._variants.clear()
            return None
        self.num_steps += 1
        return logits

    def _waits(self, step: StepMetadata) -> bool:
        """Whether a variant that is not compiled is to come once more before it is."""
        if step.batch.num_decodes == step.batch.num_segments or step.variant in self._seen:
            self._seen.pop(step.variant, None)
            return False
        _keep(self._seen, step.variant, None)
        return True

    def _compile(self, step: StepMetadata) -> Forward:
        like = step.with_arrays(None)  # holds on to nothing

        def forward(arrays: list, state: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
            kept = self.attention.state
            self.attention.state = state
            try:
                step = like.with_arrays(arrays)
                logits = self.model(step, self.attention, step.logits_indices)
                return logits, self.attention.state
            finally:  # what is traced must not stay behind
                self.attention.state = kept

        return mx.compile(forward)


def _key(step: StepMetadata) -> tuple:
    """MLX keeps what it has traced for each thread by itself."""
    return threading.get_ident(), step.variant


def _keep(entries: OrderedDict, key: tuple, value: Forward | None) -> None:
    """Make an entry the last to go."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > _MAX_VARIANTS:
        entries.popitem(last=False)
