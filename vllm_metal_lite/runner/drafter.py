"""Runs the drafter of a model: over the rows of each step, then a token at a time.

`follow` runs the drafter over the rows of a step that was just built, in the same slots of its own
layers.  So its K and V are in the model's blocks, which the scheduler manages.  A draft model reads
the rows' own tokens.  A trained head takes the model's hidden state of each row (`takes_hidden`),
and reads the token after the row, which the step knows or samples.  So the head's forward over the
step has already made the first draft; a draft model needs another row for that.

`draft` continues a request's newest token.  The host need not know this token: which drafts of the
last step were right may be known on the device alone.  The K and V of drafts go to the slots where
the next step puts these tokens if they are right; otherwise that step overwrites them.

After steps that the drafter did not follow, its K and V are stale or missing.  A draft model
computes them later (`catch_up`); a head cannot, because it needs the model's hidden states.  No
answer changes, because the model verifies every draft.
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


class Wanted(NamedTuple):
    """Drafts that B requests want behind the last step.

    seats: (B,) int, the requests' seats.  num_drafts: K, the drafts of each.
    rows: (B,) int, the sampled row of the last step whose token the drafts continue.
    rejected: (B,) int32, how many sampled rows before this one they continue instead, because the
    drafts between were wrong; None: none were.
    pack: makes a batch of one row for each request, at its `Drafter.last_positions`.
    choose: (logits (B, vocab_size), the drafts before, (B,) each) -> the next drafts, (B,) int32.
    """

    seats: np.ndarray
    num_drafts: int
    rows: np.ndarray
    rejected: mx.array | None
    pack: Callable[[], ForwardBatch]
    choose: Callable[[mx.array, list[mx.array]], mx.array]


class _Followed(NamedTuple):
    """The drafter's results for a step with T sampled rows.

    sampled: (T,) int32, the tokens.  logits: (T or more, vocab_size).  hidden: (num_rows, 1,
    hidden_size).  The last two are lazy: only drafts make the device compute them.
    """

    batch: ForwardBatch
    sampled: mx.array
    logits: mx.array
    hidden: mx.array


class Drafter:
    """A drafter over the store of its model.

    vocab_size: the model's.  A draft model may have more or fewer tokens of padding behind the same
    vocabulary.  follows: whether the drafter runs over the next step.
    """

    follows = True

    def __init__(
        self,
        model: PackedModel,
        attention: Attention,
        padded: Callable[[int], int],
        vocab_size: int,
    ) -> None:
        self._model, self._attention, self._padded = model, attention, padded
        self._vocab_size = vocab_size
        self._compiled = CompiledSteps(model, attention)
        self._last: _Followed | None = None

    @property
    def takes_hidden(self) -> bool:
        return self._model.takes_hidden

    @property
    def can_draft(self) -> bool:
        """Whether the drafter has followed the last step, and the step has sampled rows."""
        return self._last is not None

    def last_positions(self, rows: np.ndarray, num_drafts: int) -> np.ndarray:
        """(B,) int, the last position that `draft` writes for each request; see Wanted."""
        assert self._last is not None, "drafts continue a step"
        batch = self._last.batch
        return batch.positions[batch.logits_indices[rows]] + num_drafts - self.takes_hidden

    def forget(self) -> None:
        """Drop the last step: its lazy arrays would keep the store's arrays alive."""
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
        if result.output is not None:
            self._last = _Followed(batch, result.output.token_ids, logits, mine)
        return state

    def catch_up(self, batch: ForwardBatch, state: State) -> State:
        """Run a draft model over tokens of steps that it did not follow.  Returns the attention's
        next state."""
        step = self._attention.prepare(batch, self._padded(batch.num_tokens))
        step = step._replace(returns_hidden=True, pictures=None)
        state = self._run(step, state)[-1]
        mx.async_eval(state)
        return state

    def _run(self, step: DeviceBatch, state: State) -> Result:
        own, size = self._model.layout.vocab_size, self._vocab_size
        if own < size:
            step = step._replace(token_ids=mx.minimum(step.token_ids, own - 1))
        logits, hidden, state = self._compiled(step, state) or self._compiled.build(step, state)
        if own < size:
            logits = mx.pad(logits, [(0, 0), (0, size - own)], constant_values=-mx.inf)
        return logits[:, :size], hidden, state

    def draft(self, wanted: Wanted, state: State) -> tuple[mx.array, State]:
        """Submit drafts; returns them, (B, K) int32, and the attention's next state."""
        assert self._last is not None, "drafts continue a step"
        (_, num_drafts, rows, rejected, pack, choose), last = wanted, self._last
        back = mx.zeros(len(rows), mx.int32) if rejected is None else rejected
        at, packed = mx.array(rows) - back, mx.array(last.batch.logits_indices[rows]) - back
        token_ids, logits, hidden = last.sampled[at], last.logits[at], last.hidden[packed]
        drafts: list[mx.array] = []
        if num_drafts > 1 or not self.takes_hidden:
            # Planned once, at the last positions: `back` moves each row to its own.
            step = self._attention.prepare(pack(), self._padded(len(rows)))
            step = step._replace(logits_indices=None, returns_hidden=True, pictures=None)
        for depth in range(num_drafts):
            if depth or not self.takes_hidden:
                padding = (0, step.num_rows - len(rows))
                step = step._replace(
                    token_ids=mx.pad(token_ids, padding),
                    back=mx.pad(back + (num_drafts - 1 - depth), padding),
                )
                if self.takes_hidden:
                    step = step._replace(hidden=mx.pad(hidden, [padding, (0, 0), (0, 0)]))
                logits, [hidden], state = self._run(step, state)
                logits, hidden = logits[: len(rows)], hidden[: len(rows)]
            drafts.append(token_ids := choose(logits, drafts))
        made = mx.stack(drafts, axis=1)
        mx.async_eval(made, state)
        return made, state


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
