"""Runs the drafter of a model: over the rows of each step, then a token at a time.

`follow` runs the drafter over the rows of a step that was just built, in the same slots of its own
layers.  So its K and V are in the blocks of the model's, with no care of their own.  A trained head
reads the next token of each row, which the step knows or samples; another model reads the rows'
own tokens.

`draft` continues a request's newest tokens.  The drafts' K and V go to the slots where the next
step puts those tokens, if they come true; else that step overwrites them.  K and V may also be
stale or missing, behind steps without the drafter: the model verifies each draft.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.attention.base import Attention, DeviceBatch
from vllm_metal_lite.attention.step_arrays import upload_padded
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.runner.compiled import CompiledSteps, Result, State
from vllm_metal_lite.runner.result import StepResult

# Packs decodes: (the requests' indices (A,), the positions (A,)) -> a batch of one row for each.
Pack = Callable[[np.ndarray, np.ndarray], ForwardBatch]
# Chooses tokens (A,) int32: (logits (A, vocab_size), the requests' indices (A,), their drafts).
Choose = Callable[[mx.array, np.ndarray, list[mx.array]], mx.array]


class _Followed(NamedTuple):
    """What the drafter made of a step.  logits: of its sampled rows, in order.  hidden: its hidden
    states (num_rows, 1, hidden_size).  Both are lazy: computed only if drafts follow."""

    batch: ForwardBatch
    logits: mx.array
    hidden: mx.array


class Drafter:
    """A drafter over the store of its model."""

    def __init__(self, model: PackedModel, attention: Attention, padded: Callable[[int], int]):
        self._model, self._attention, self._padded = model, attention, padded
        self._compiled = CompiledSteps(model, attention)
        self._last: _Followed | None = None

    @property
    def takes_hidden(self) -> bool:
        return self._model.takes_hidden

    def forget(self) -> None:
        """Drop the last step: its lazy arrays would hold the store's."""
        self._last = None

    def follow(self, step: DeviceBatch, built: Result, result: StepResult) -> State:
        """Run the drafter over a step; returns the attention's next state.

        built: the model's forward.  result: holds the sampled tokens, still on the device.
        """
        _, hidden, state = built
        batch = step.batch
        step = step._replace(returns_hidden=True, pictures=None)
        if self.takes_hidden:
            step = step._replace(token_ids=_next_tokens(step, result), hidden=hidden[0])
        logits, [mine], state = self._run(step, state)
        self._last = _Followed(batch, logits, mine)
        return state

    def _run(self, step: DeviceBatch, state: State) -> Result:
        return self._compiled(step, state) or self._compiled.build(step, state)

    def draft(
        self, rows: np.ndarray, limits: np.ndarray, pack: Pack, choose: Choose, state: State
    ) -> tuple[list[list[int]], State]:
        """Returns (the drafts of each request, the attention's next state).

        rows: (B,) the sampled row of the last step behind whose token each request is drafted.
        limits: (B,) the most drafts of each; the slots for their K and V must be the request's.
        """
        assert self._last is not None, "drafts continue a step"
        batch, logits, hidden = self._last
        packed_rows = batch.logits_indices[rows]
        first = batch.positions[packed_rows] + 1 - self.takes_hidden
        # `alive`: the requests that get one more draft.
        alive, drafts, logits = np.arange(len(rows)), list[mx.array](), logits[mx.array(rows)]
        hidden, made = hidden[mx.array(packed_rows)], list[tuple[np.ndarray, mx.array]]()
        for depth in range(int(limits.max(initial=0))):
            if (fewer := limits[alive] > depth).sum() < len(alive):
                kept = mx.array(np.flatnonzero(fewer))
                alive, logits, hidden = alive[fewer], logits[kept], hidden[kept]
                drafts = [tokens[kept] for tokens in drafts]
            if depth or not self.takes_hidden:
                decodes = pack(alive, first[alive] + depth)
                step = self._attention.prepare(decodes, self._padded(len(alive)))
                step = step._replace(logits_indices=None, returns_hidden=True, pictures=None)
                rest = step.num_rows - len(alive)
                if drafts:
                    step = step._replace(token_ids=mx.pad(drafts[-1], (0, rest)))
                if self.takes_hidden:
                    padded = mx.pad(hidden, [(0, rest), (0, 0), (0, 0)])
                    step = step._replace(hidden=padded)
                logits, [hidden], state = self._run(step, state)
                logits, hidden = logits[: len(alive)], hidden[: len(alive)]
            drafts = [*drafts, choose(logits, alive, drafts)]
            made.append((alive, drafts[-1]))
        mx.async_eval(state, self._attention.store.states.arrays)
        found: list[list[int]] = [[] for _ in rows]
        for alive, tokens in made:
            for i, token in zip(alive.tolist(), np.array(tokens).tolist(), strict=True):
                found[i].append(token)
        return found, state


def _next_tokens(step: DeviceBatch, result: StepResult) -> mx.array:
    """(num_rows,) int32, the token after each row."""
    batch = step.batch
    if result.output is None:
        return upload_padded(batch.next_token_ids, step.num_rows)
    sampled = result.output.token_ids
    if len(sampled) == batch.num_tokens:
        return mx.pad(sampled, (0, step.num_rows - len(sampled)))
    tokens = upload_padded(batch.next_token_ids, step.num_rows)
    rows = mx.array(batch.logits_indices[: len(sampled)])
    return mx.put_along_axis(tokens, rows, sampled, axis=0)
