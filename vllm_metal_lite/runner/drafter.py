"""Runs the drafter of a model: over the rows of each step, then a token at a time.

`follow` runs the drafter over the rows of a step that was just built, in the same slots of its own
layers.  So its K and V are in the model's blocks, which the scheduler manages.  A trained head
reads the next token of each row, which the step knows or samples; another model reads the rows'
own tokens.

`draft` continues a request's newest tokens.  The host need not know them: which drafts of the last
step were right may be known on the device alone.  The drafts' K and V go to the slots where the
next step puts those tokens, if they come true; else that step overwrites them.  After steps that
the drafter did not follow, K and V are stale or missing.  No answer changes: the model verifies
drafts.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.attention.base import Attention, DeviceBatch
from vllm_metal_lite.attention.step_arrays import upload_padded
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_DRAFT, ForwardBatch
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.runner.compiled import CompiledSteps, Result, State
from vllm_metal_lite.runner.result import StepResult

# Packs decodes: the position of each request -> a batch of one row for each.
Pack = Callable[[np.ndarray], ForwardBatch]
# Chooses a token of each request, (B,) int32: (logits (B, vocab_size), the drafts before).
Choose = Callable[[mx.array, list[mx.array]], mx.array]


class Wanted(NamedTuple):
    """Drafts that B requests want behind the last step.

    seats: (B,) the requests' seats.  num_drafts: the tokens that each wants.
    rows: (B,) the sampled row of the last step whose token the drafts follow.
    rejected: (B,) int32, by how many sampled rows the drafts follow an earlier one; None: by none.
    """

    seats: np.ndarray
    num_drafts: int
    rows: np.ndarray
    rejected: mx.array | None
    pack: Pack
    choose: Choose


class UnknownDrafts(NamedTuple):
    """Drafts that only the device has.  seats: (B,) the requests' seats.  token_ids: (B, K)
    int32."""

    seats: np.ndarray
    token_ids: mx.array

    def fill(self, step: DeviceBatch) -> mx.array:
        """The token_ids (num_rows,) of a step, with these drafts in place of UNKNOWN_DRAFT."""
        batch = step.batch
        rows = np.flatnonzero(batch.token_ids == UNKNOWN_DRAFT)
        if not len(rows):
            return step.token_ids
        segments, first, each = np.unique(
            np.searchsorted(batch.cu_seqlens_q, rows, side="right") - 1,
            return_index=True,
            return_inverse=True,
        )
        place = np.zeros(self.seats.max() + 1, np.int32)
        place[self.seats] = np.arange(len(self.seats))
        which = place[batch.req_indices[segments]][each]
        drafts = self.token_ids[mx.array(which), mx.array(np.arange(len(rows)) - first[each])]
        return mx.put_along_axis(step.token_ids, mx.array(rows), drafts, axis=0)


class _Followed(NamedTuple):
    """The drafter's results for a step.  logits: for the sampled rows, in order.  hidden: hidden
    states (num_rows, 1, hidden_size).  Both are lazy: only drafts make the device compute them."""

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
        """Whether the drafter has followed the last step."""
        return self._last is not None

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

    def _run(self, step: DeviceBatch, state: State) -> Result:
        own, size = self._model.layout.vocab_size, self._vocab_size
        if own < size:
            step = step._replace(token_ids=mx.minimum(step.token_ids, own - 1))
        logits, hidden, state = self._compiled(step, state) or self._compiled.build(step, state)
        if own < size:
            logits = mx.pad(logits, [(0, 0), (0, size - own)], constant_values=-mx.inf)
        return logits[:, :size], hidden, state

    def draft(self, wanted: Wanted, state: State) -> tuple[UnknownDrafts, State]:
        """Submit drafts of B requests; returns (the drafts, the attention's next state)."""
        assert self._last is not None, "drafts continue a step"
        (seats, num_drafts, rows, rejected, pack, choose), last = wanted, self._last
        packed = last.batch.logits_indices[rows]
        newest = last.batch.positions[packed] + 1 - self.takes_hidden
        back = mx.zeros(len(rows), mx.int32) if rejected is None else rejected
        at, hidden = mx.array(rows) - back, last.hidden[mx.array(packed) - back]
        token_ids, logits = last.sampled[at], last.logits[at]
        drafts: list[mx.array] = []
        if num_drafts > 1 or not self.takes_hidden:
            # Planned once, for the last draft.
            decodes = pack(newest + num_drafts - 1)
            step = self._attention.prepare(decodes, self._padded(len(rows)))
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
        made = UnknownDrafts(seats, mx.stack(drafts, axis=1))
        mx.async_eval(made.token_ids, state)
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
