"""One step: a ForwardBatch in, sampled tokens out when read.

Layers below know no requests; layers above touch no `mx.array` of the model.
"""

from dataclasses import replace

import numpy as np

from vllm_metal_lite.attention.base import Attention, Step
from vllm_metal_lite.attention.sdpa.plan import power_of_two
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.model.packed import NO_FUSION, Fusion, PackedModel
from vllm_metal_lite.runner.compiled import CompiledSteps
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.sampling.masks import TokenMasks
from vllm_metal_lite.sampling.sampler import Sampler, prompt_logprobs


class ModelRunner:
    """Runs packed steps of one model over one store."""

    def __init__(
        self,
        model: PackedModel,
        attention: Attention,
        sampler: Sampler,
        fusion: Fusion = NO_FUSION,
    ) -> None:
        self.model, self.attention, self.sampler, self.fusion = model, attention, sampler, fusion
        self.compiled = CompiledSteps(model, attention, fusion)
        self._state = attention.new_state()
        self._last: StepResult | None = None

    def execute(
        self,
        batch: ForwardBatch,
        req_indices: np.ndarray,
        num_prompt_logprobs: int = 0,
        grammar: TokenMasks | None = None,
        after: StepResult | None = None,
    ) -> StepResult:
        """Submit a step.  req_indices: (T,), the table rows of the terminal segments.

        grammar: the tokens allowed in some of these T rows.  after: the previous step, which holds
        the tokens that are unknown on the host.  Raises if this step is invalid, or if the previous
        step failed and nobody waited for it.
        """
        batch.validate(*self.attention.store.num_blocks)
        step = self.attention.prepare(batch, bucket(batch.num_tokens))
        if after is not None:
            step = replace(step, token_ids=after.complete(step))
        logits, state = self._forward(step)

        num_sampled = len(batch.sample_segments)
        sampled = for_host = logprobs = scored = None
        if num_sampled:
            output = self.sampler(logits[:num_sampled], req_indices, grammar)
            sampled, logprobs, for_host = output.token_ids, output.logprobs, output.for_host
        if len(batch.prompt_targets):
            targets = mx.array(batch.prompt_targets)
            rows = logits[num_sampled : num_sampled + len(targets)]
            scored = prompt_logprobs(rows, targets, num_prompt_logprobs)
        # Where steps overlap, waiting for a step must not mean waiting for the next one too.
        written = state[:1] if self.attention.overlaps else ()
        result = StepResult(req_indices, sampled, logprobs, scored, for_host, written)
        self._submit(result, state)
        return result

    def _forward(self, step: Step) -> tuple[mx.array, list[mx.array]]:
        """Logits of the batch's `logits_indices`, in order, perhaps padded; the next state."""
        compiled = self.compiled(step, self._state)
        if compiled is not None:
            return compiled
        attention = self.attention.begin(step, self._state)
        logits = self.model(attention, step.logits_indices, self.fusion)
        return logits, attention.state

    def _submit(self, result: StepResult, state: list[mx.array]) -> None:
        last, self._last = self._last, None
        if last is not None and not self.attention.overlaps:
            last.wait()
        mx.async_eval(result.arrays, state, self.attention.store.states.arrays)
        # After the launch: the next step must not continue from a step that never launched.
        self._last, self._state = result, state

    def forget(self) -> None:
        """Drop the last step; its result will not be read."""
        self._last = None

    def synchronize(self) -> None:
        """Wait for all submitted steps."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()


def bucket(num_tokens: int) -> int:
    """Rows of a padded step.  Shapes must repeat: MLX only reuses buffers of similar size.

    See `DeviceProfile.row_grains`.
    """
    grain = next(grain for rows, grain in profile().row_grains if num_tokens <= rows)
    return -(-num_tokens // grain) * grain if grain else power_of_two(num_tokens)
