"""Compiles steps whose shapes repeat, so that Python builds each graph once.

The host can take longer to build a forward than a GPU to run it.  Two steps of one variant (the
shapes of their arrays, mostly powers of two) differ only in the arrays' values.  The step and the
attention's state are arguments; the logits and the next state are results.  Weights and the store
are captured without a copy; kernels write to the store in place.

Tracing costs more than building the graph once.  Steps of decodes usually repeat, so they are
traced at once.  A variant with prompts is traced the second time.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Attention, DeviceBatch
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import is_our_fault, one_line
from vllm_metal_lite.model.packed import NO_FUSION, Fusion, Mode, PackedModel

logger = logging.getLogger(__name__)

# The most variants that are kept; the least recently used goes first.  One load has a few.
_MAX_VARIANTS = 64

State = list[mx.array]
# What a forward returns: the logits (R, vocab_size) of `logits_indices`; a list with the hidden
# states (N, 1, hidden_size) of all rows if the step returns them, else an empty list; the state.
Result = tuple[mx.array, list[mx.array], State]
Forward = Callable[[DeviceBatch, State], Result]


class CompiledSteps:
    """Runs a model's forward, and compiles it for steps that repeat.

    reason: why steps run uncompiled, None if they may be compiled.  Whether a model can be traced
    is discovered on the first attempt.
    """

    def __init__(
        self, model: PackedModel, attention: Attention, fusion: Fusion = NO_FUSION
    ) -> None:
        self.model, self.attention, self.fusion = model, attention, fusion
        self.reason: str | None = None
        if backend.is_cpu():
            self.reason = "on a CPU"
        elif not isinstance(attention, KernelAttention):
            self.reason = f"the {attention.name} attention plans each step"
        elif model.mode is not Mode.PACKED:
            self.reason = "some layers of this model see sequences"
        self._variants: OrderedDict[tuple, Forward] = OrderedDict()
        # Variants that ran once and were not compiled.
        self._seen: OrderedDict[tuple, None] = OrderedDict()

    def build(self, step: DeviceBatch, state: State) -> Result:
        """Build the forward of a step."""
        attention = self.attention.begin(step, state)
        logits, hidden = self.model(attention, step.logits_indices, self.fusion)
        if not step.returns_hidden:
            return logits, [], attention.state
        if hidden is None:
            raise RuntimeError("this model's head takes no hidden states that can be read")
        return logits, [hidden], attention.state

    def __call__(self, step: DeviceBatch, state: State) -> Result | None:
        """Run a step by compiled code.  Returns None if the caller must `build` the step."""
        if self.reason is not None or not step.plan.repeats:
            return None
        # MLX keeps traces per thread.
        variant = threading.get_ident(), _variant_of(step[1:])
        forward = self._variants.get(variant)
        if forward is None:
            if self._must_repeat(step, variant):
                return None
            forward = mx.compile(self.build)
        _keep(self._variants, variant, forward)
        no_batch: Any = None  # traced code must not read the batch
        try:
            return forward(step._replace(batch=no_batch), state)
        except Exception as e:  # models can fail to trace in any way
            self.reason = f"{type(e).__name__}: {one_line(e)}"
            log = logger.exception if is_our_fault(e) else logger.info
            log(f"steps are no longer compiled: {self.reason}")
            self._variants.clear()
            return None

    def _must_repeat(self, step: DeviceBatch, variant: tuple) -> bool:
        """Whether a new variant must repeat before it is compiled."""
        if step.batch.num_decodes == step.batch.num_segments or variant in self._seen:
            self._seen.pop(variant, None)
            return False
        _keep(self._seen, variant, None)
        return True


def _variant_of(tree: Any) -> Any:
    """The step with the shape of each array in place of its values."""
    if isinstance(tree, mx.array):
        return tree.shape
    if isinstance(tree, dict):
        tree = tuple(tree.items())
    return tuple(map(_variant_of, tree)) if isinstance(tree, tuple) else tree


def _keep(entries: OrderedDict, key: tuple, value: Forward | None) -> None:
    """Make an entry the most recent; evict the oldest beyond the limit."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > _MAX_VARIANTS:
        entries.popitem(last=False)
