"""Chooses the mode of a model at load time, by a trial against the model itself.

The modes (`Mode`) are tried in order, the fastest first.  A mode fails if it raises, or if its
logits differ from the model's own; the log has the traceback of an error of this package.  If all
fail, ModelLoadError names the architecture and the reason.

Rounding can move logits far: a token that rounding routes to another expert looks as wrong as a
token with a wrong context.  So errors are compared with the model's own noise.  mlx-lm runs the
same tokens in chunks of several sizes; the distance from a single forward is the effect of rounding
in this type on this device.  An attention error (a mask, a position, a block) moves nearly every
affected row by about the spread of the logits.  Rounding moves only some rows, and moves the
chunked rows just as often.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import NamedTuple

import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import leaves, mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import ModelLoadError, is_our_fault, one_line
from vllm_metal_lite.kernels.findings import Findings
from vllm_metal_lite.kernels.launch import KernelError
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.layout import Layout
from vllm_metal_lite.model.packed import NO_FUSION, Fusion, Mode, PackedForward, PackedModel
from vllm_metal_lite.model.usage import Usage

logger = logging.getLogger(__name__)

# Two requests of 9 and 14 tokens.  Each step: their computed tokens, their scheduled tokens.
# Prompts, then a decode beside a chunk, then decodes, then single decodes, because a step of one
# row may use other kernels.
LENGTHS = (9, 14)
STEPS = (
    ((0, 0), (4, 3)),
    ((4, 3), (1, 6)),
    ((5, 9), (1, 1)),
    ((6, 10), (1, 1)),
    *(((7, n), (0, 1)) for n in (11, 12, 13)),
    *(((n, 14), (1, 0)) for n in (7, 8)),
)
BLOCK = 8

# Chunk sizes for mlx-lm's own runs.  Latent attention uses other products for 1.
_CHUNKS = (1, 2, 5)

# Distances are relative to the spread of the logits.  This limit is added to the noise, because
# mlx-lm's chunks may all round alike where a packed step rounds otherwise.
_LIMIT = 0.25
# Without 16-bit weights, no row may exceed _EXACT_LIMIT plus _WORST times the worst noise.
_16_BIT = (mx.float16, mx.bfloat16)
_EXACT_LIMIT, _WORST = 0.05, 3
# A failed trial repeats with new tokens: a model that does not fit fails with any tokens.
_DRAWS = 4


class Row(NamedTuple):
    """A row of a packed step.

    kind: what its segment is: a prompt, a chunk, a decode, or one row (a decode alone in its
    step).  error: the distance of its logits.  request, position: where its token is.
    """

    kind: str
    error: float
    request: int
    position: int


class Draw:
    """Random tokens of two requests, and the model's own logits for them.

    ranks: all ranks use the leader's distances, and an error on one rank is raised on all.  So all
    decide alike.
    """

    def __init__(
        self, model: nn.Module, vocab_size: int, seed: int = 0, ranks: RankGroup = ALONE
    ) -> None:
        rng = np.random.default_rng(seed)
        self._model, self._ranks = model, ranks
        self.sequences = [rng.integers(0, vocab_size, n) for n in LENGTHS]
        self.own = [_native(model, s, len(s)) for s in self.sequences]

    @cached_property
    def noise(self) -> list[np.ndarray]:
        """Distances of the model's own chunked logits, (positions, chunk sizes) per request."""
        return [np.array(rows) for rows in self._of_all(self._own_noise)]

    def _own_noise(self) -> list[list]:
        noise = [
            np.transpose([list(map(_distance, _native(self._model, s, n), own)) for n in _CHUNKS])
            for s, own in zip(self.sequences, self.own, strict=True)
        ]
        return [n.tolist() for n in noise]

    def rows(
        self, packed: PackedForward, attention: Attention, fusion: Fusion = NO_FUSION
    ) -> list[Row]:
        """Run the steps through a packed model.  attention: must be over a store of 4 blocks."""
        own = partial(self._own_rows, packed, attention, fusion)
        return [Row(*row) for row in self._of_all(own)]

    def _own_rows(self, packed: PackedForward, attention: Attention, fusion: Fusion) -> list[Row]:
        rows: list[Row] = []
        steps = built_steps(packed, attention, self.sequences, fusion)
        for computed, scheduled, logits, state in steps:
            logits = logits.astype(mx.float32)
            mx.eval(logits, state, attention.store.states.arrays)
            got = iter(np.array(logits))
            for request, (start, count) in enumerate(zip(computed, scheduled, strict=True)):
                kind = "prompt" if start == 0 else "chunk" if count > 1 else "decode"
                kind = "one row" if len(logits) == 1 else kind
                for position in range(start, start + count):
                    error = _distance(next(got), self.own[request][position])
                    rows.append(Row(kind, error, request, position))
        return rows

    def _of_all(self, measure: Callable[[], list]) -> list:
        """The leader's measurement.  Raises on every rank if one fails: the others would wait."""
        if self._ranks.size == 1:
            return measure()
        measured: list = []
        failed: tuple[str | None, str] | None = None
        error: Exception | None = None
        try:
            measured = measure()
        except Exception as e:
            error = e
            failed = (e.kernel, e.why) if isinstance(e, KernelError) else (None, one_line(e))
        for kernel, why in filter(None, self._ranks.gather(failed)):
            cause = RuntimeError(why)
            raise (KernelError(kernel, cause) if kernel else cause) from error
        return self._ranks.from_leader(measured)


def built_steps(
    packed: PackedForward,
    attention: Attention,
    sequences: Sequence[np.ndarray],
    fusion: Fusion = NO_FUSION,
) -> Iterator[tuple[Sequence[int], Sequence[int], mx.array, list[mx.array]]]:
    """Build the graphs of STEPS over the tokens of two requests, unevaluated.

    attention: must be over a store of 4 blocks.  Yields each step's computed tokens, scheduled
    tokens, logits (rows, V) and the attention's state.
    """
    size = attention.store.block_size
    inputs = InputBatch(2, 2 * size, size)
    seats = np.array([inputs.add(s, len(s)) for s in sequences])
    for seat in seats:
        inputs.append_blocks(seat, [2 * seat + 1, 2 * seat])
    state = attention.new_state()
    for computed, scheduled in STEPS:
        counts = np.array(scheduled)
        now = counts > 0
        batch = inputs.pack(seats[now], np.array(computed)[now], counts[now])
        step = attention.prepare(batch, batch.num_tokens)
        bound = attention.begin(step, state)
        logits, _ = packed(bound, mx.arange(batch.num_tokens), fusion)
        state = bound.state
        yield computed, scheduled, logits, state


class Trial:
    """Compares modes of a packed model with the model itself, whose logits it keeps.

    A mode fits if no row is farther away than a limit.  It also fits if rows of no kind are farther
    away than noise explains, and, with exact weights, no row is far beyond the worst noise.
    """

    def __init__(self, model: nn.Module, vocab_size: int, ranks: RankGroup = ALONE) -> None:
        self._exact = all(w.dtype not in _16_BIT for w in leaves(model.parameters()))
        self._limit = _EXACT_LIMIT if self._exact else _LIMIT
        self._draw = cache(partial(Draw, model, vocab_size, ranks=ranks))
        self._draw(0)

    def problem(
        self, packed: PackedForward, attention: Attention, fusion: Fusion = NO_FUSION
    ) -> str | None:
        """Say in one line how the logits of a packed model differ; None if the model fits.

        attention: must be over a store of 4 blocks.  An exception is no answer: the caller gets it.
        """
        # Keys are kinds of rows.
        errors: dict[str, list[float]] = defaultdict(list)
        noise: dict[str, list[np.ndarray]] = defaultdict(list)
        for number in range(_DRAWS):
            draw = self._draw(number)
            rows = draw.rows(packed, attention, fusion)
            worst = max(row.error for row in rows)
            if worst <= self._limit:
                return None
            for row in rows:
                if row.position:  # the first token of a request has no context
                    errors[row.kind].append(row.error)
                    noise[row.kind].append(draw.noise[row.request][row.position])
            shares = {kind: _share_beyond(errors[kind], noise[kind]) for kind in errors}
            kind = max(shares, key=shares.__getitem__)
            is_rounding = shares[kind] <= 0.5
            most = max(np.max(n) for n in noise.values())
            is_close = not self._exact or worst <= _EXACT_LIMIT + _WORST * most
            if is_rounding and is_close:
                return None
        if is_rounding:
            text = f"a row of its packed logits is {worst:.2g} of their spread away from mlx-lm's"
            return f"{text} own, whose own chunks differ by at most {most:.2g}"
        return (
            f"its packed logits ({kind}) are {np.median(errors[kind]):.2g} of their spread away "
            f"from mlx-lm's own, whose own chunks differ by {np.median(noise[kind]):.2g}"
        )


def _share_beyond(errors: list[float], noise: list[np.ndarray]) -> float:
    """The share of (packed row, chunked row) pairs in which the packed row's distance is larger by
    more than _LIMIT.  With rounding alone it is at most half; with an attention error, nearly 1."""
    limits = np.sort(np.concatenate(noise)) + _LIMIT
    return float(np.mean(np.searchsorted(limits, errors)) / len(limits))


def _distance(got: np.ndarray, expected: np.ndarray) -> float:
    """RMS distance relative to the spread; 0 if the model's own logits are all NaN or infinite,
    infinite if `got` has a NaN."""
    finite = np.isfinite(expected)  # some models forbid tokens with -inf
    if not finite.any():
        return 0.0
    expected, difference = expected[finite], got[finite] - expected[finite]
    error = np.sqrt(np.mean(difference**2)) / max(expected.std(), np.finfo(np.float32).tiny)
    return float("inf") if np.isnan(error) else float(error)


def _native(model: nn.Module, tokens: np.ndarray, chunk: int) -> np.ndarray:
    """mlx-lm's logits (len(tokens), V) of one sequence, run in chunks of `chunk` tokens."""
    cache, parts = make_prompt_cache(model), []
    for start in range(0, len(tokens), chunk):
        logits = model(mx.array(tokens[start : start + chunk])[None], cache=cache)[0]
        parts.append(np.array(logits.astype(mx.float32)))
    return np.concatenate(parts)


def fit(
    model: nn.Module, layout: Layout, model_type: str, ranks: RankGroup = ALONE, files: str = ""
) -> tuple[PackedModel, Usage]:
    """Try the modes of a model in turn; raises ModelLoadError if no mode fits.

    Returns the model, ready for packed steps, and the shapes that the kernels must serve.
    files: identifies the model's files.  The mode that fits them is remembered, for this device and
    this code, and runs one step in place of the trial.  "": nothing is remembered.

    The trial also evaluates lazy arrays that are not parameters (RoPE's frequencies): MLX can
    evaluate them only in the thread that created them.
    """
    logger.info("reading the weights", extra={"transient": True})
    mx.eval(model.parameters())  # lazy ones of the files and of the adapters
    found, key = Findings(), f"mode of {model_type} {files}"
    packed, usage = _remembered(model, layout, model_type, found.known.get(key)) or (None, None)
    if packed is None or usage is None:
        logger.info("comparing the model with mlx-lm's", extra={"transient": True})
        try:
            trial = Trial(model, layout.vocab_size, ranks)
        except Exception as e:
            raise ModelLoadError(f"mlx-lm cannot run this {model_type} model: {one_line(e)}") from e
        packed, usage = _choose(model, layout, model_type, trial.problem)
        if files:
            found.add(key, json.dumps([packed.mode, packed.reason]))
    if packed.by_segment is not None:
        logger.warning(
            f"SLOW: attention of this {model_type} runs a segment at a time. Each step copies the "
            "context of every request, kernels are off, and even one request can run at half the "
            f"speed of mlx-lm alone. Reason: {packed.by_segment}. Answers are correct. Please "
            "report it, unless docs/models.md lists this type under attention by segment."
        )
    return packed, usage


def _remembered(
    model: nn.Module, layout: Layout, model_type: str, known: str | None
) -> tuple[PackedModel, Usage] | None:
    """The mode of an earlier trial; None if there was none, or if the mode does not run."""
    with suppress(ValueError, TypeError, ModelLoadError):
        mode, reason = json.loads(known or "")
        return _choose(model, layout, model_type, _first_step, [Mode(mode)], reason)
    return None


def _first_step(packed: PackedForward, attention: ReferenceAttention) -> None:
    """Build all steps, which records the shapes that kernels must serve, and run the first."""
    steps = built_steps(packed, attention, [np.zeros(n, np.int32) for n in LENGTHS])
    for number, (_, _, logits, state) in enumerate(steps):
        if number == 0:
            mx.eval(logits, state)


def foresee(
    model: nn.Module, layout: Layout, model_type: str, ranks: RankGroup = ALONE
) -> tuple[PackedModel, Usage]:
    """What `fit` will probably return, found without reading a weight: graphs are built and not
    evaluated.  `fit` also compares logits, so it may choose a later mode, or refuse the model."""
    return _choose(model, layout, model_type, _build)


def _build(packed: PackedForward, attention: ReferenceAttention) -> None:
    for _ in built_steps(packed, attention, [np.zeros(n, np.int32) for n in LENGTHS]):
        pass


def _choose(
    model: nn.Module,
    layout: Layout,
    model_type: str,
    problem_of: Callable[[PackedForward, ReferenceAttention], str | None],
    modes: Iterable[Mode] = Mode,
    reason: str | None = None,
) -> tuple[PackedModel, Usage]:
    """The first mode without a problem.  Raises ModelLoadError if all have one.

    reason: why the mode before the first one does not fit.
    """
    for mode in modes:
        if mode is Mode.IN_SEQUENCES and not layout.states:
            continue
        packed = PackedModel(model, layout, mode, reason)
        store = PagedStore(layout.specs, 4, BLOCK, states=packed.state_store(2))
        usage = Usage()
        try:
            reason = problem_of(usage.recorded(packed), ReferenceAttention(store))
        except Exception as e:  # a model may use what the seam's stand-ins do not have
            reason = f"{type(e).__name__}: {one_line(e)}"
            if is_our_fault(e):
                logger.exception(f"a fault of vllm-metal-lite: {model_type} does not run {mode}")
        if reason is None:
            return packed, usage
        packed.release()
    raise ModelLoadError(f"the architecture {model_type} is not supported: {reason}")
