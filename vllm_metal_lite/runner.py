"""One step: a ForwardBatch in, sampled tokens out.

Nothing below knows about requests; nothing above touches an `mx.array` of the model.
"""

from dataclasses import dataclass

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.attention.step import Attention, StepMetadata
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import ForwardBatch
from vllm_metal_lite.compiled import CompiledDecode
from vllm_metal_lite.constraints import TokenMasks
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.sampling import LogprobArrays, Sampler, prompt_logprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """On the host: token_ids, logprobs (rows, 1 + k), column 0 the chosen token; ranks (rows,)."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """token_ids: (T,) int32, one a terminal segment; the log-probabilities asked for, or None."""

    token_ids: np.ndarray
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None


class ModelRunner:
    """Runs packed steps of one model over one store."""

    def __init__(self, model: PackedModel, attention: Attention, sampler: Sampler) -> None:
        self.model, self.attention, self.sampler = model, attention, sampler
        self.compiled = CompiledDecode(model, attention)

    def execute(
        self,
        batch: ForwardBatch,
        req_indices: np.ndarray,
        num_prompt_logprobs: int = 0,
        grammar: TokenMasks | None = None,
    ) -> StepResult:
        """Run a step to its end; req_indices (T,): the table rows of the terminal segments.

        grammar: what some of these T may say.
        """
        batch.validate(self.attention.store.num_blocks)
        step = self.attention.prepare(batch, bucket(batch.num_tokens))
        num_sampled = len(batch.sample_segments)
        logits = self._forward(step)

        outputs: list[mx.array] = []
        sampled = logprobs = scored = None
        if num_sampled:
            output = self.sampler(logits[:num_sampled], req_indices, grammar)
            sampled, logprobs = output.token_ids, output.logprobs
            outputs.append(sampled)
        if len(batch.prompt_targets):
            targets = mx.array(batch.prompt_targets)
            scored = prompt_logprobs(logits[num_sampled:], targets, num_prompt_logprobs)
        for arrays in (logprobs, scored):
            if arrays is not None:
                outputs += [arrays.token_ids, arrays.logprobs, arrays.ranks]
        mx.eval(outputs, self.attention.state, self.attention.store.states.arrays)
        return StepResult(
            np.array(sampled) if sampled is not None else np.zeros(0, np.int32),
            _to_host(logprobs),
            _to_host(scored),
        )

    def _forward(self, step: StepMetadata) -> mx.array:
        """Logits of the step's `logits_indices`, in order; perhaps more behind them."""
        batch = step.batch
        if len(batch.sample_segments) == batch.num_tokens:  # every row is its segment's last
            logits = self.compiled(step)
            return self.model(step, self.attention, None) if logits is None else logits
        # A step of nothing but chunks wants no logits; lazily, asking for one row costs nothing.
        wanted = batch.logits_indices if len(batch.logits_indices) else np.zeros(1, np.int32)
        return self.model(step, self.attention, mx.array(wanted))


def bucket(num_tokens: int) -> int:
    """Rows a step is padded to, so that shapes repeat: MLX reuses buffers only of like size.

    On a CPU a padded row costs as much as a real one and buffers cost nothing: no padding.
    """
    if backend.is_cpu():
        return num_tokens
    if num_tokens <= 64:
        return 1 << (num_tokens - 1).bit_length()
    grain = 64 if num_tokens <= 512 else 256
    return -(-num_tokens // grain) * grain


def _to_host(arrays: LogprobArrays | None) -> Logprobs | None:
    if arrays is None:
        return None
    return Logprobs(*(np.array(a) for a in (arrays.token_ids, arrays.logprobs, arrays.ranks)))
