"""One answer being generated: its tokens, text, log-probabilities and end conditions."""

import numpy as np

from vllm_metal_lite.engine.detokenizer import Detokenizer, token_texts
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.outputs import CompletionOutput, Logprob, RequestOutput
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.sampling import no_token
from vllm_metal_lite.sampling.logprobs import Logprobs
from vllm_metal_lite.sampling.masks import Constraint
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.request import Request


class Answer:
    """Connects the scheduler's Request to the output that the user sees.

    The `n` answers of a request share `result`, which is updated in place.
    bad_words: the token ids of the texts that must not appear.
    constraint: a grammar or another object that limits the tokens.
    pooling: the parameters of a request that only reads its prompt.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        result: RequestOutput,
        index: int,
        model: LoadedModel,
        *,
        seed: int,
        bad_words: list[list[int]],
        constraint: Constraint | None,
        pooling: PoolingParams | None,
    ) -> None:
        self.request, self.params, self.result, self.seed = request, params, result, seed
        self.bad_words, self.constraint, self.pooling = bad_words, constraint, pooling
        # The log-probabilities of these tokens become the result's `pooled`.
        self.score_token_ids = () if pooling is None else pooling.score_token_ids or ()
        self.output = CompletionOutput(index)
        self._token_ids = self.output.token_ids
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        tokenizer = model.tokenizer
        self._detokenizer = self._text_of = None
        if tokenizer is not None:
            self._text_of = token_texts(tokenizer)
            self._detokenizer = Detokenizer(
                tokenizer, params, self._token_ids, request.prompt_token_ids
            )
        # Searches for stop strings; None if the request has none.
        self._stop_finder = self._detokenizer if params.stop_strings else None
        if self._detokenizer and not self._stop_finder:
            self.output.text = self._detokenizer.text  # a method: text is made when read
        self._eos = frozenset() if params.ignore_eos else frozenset(model.eos_token_ids)
        stop_ids = params.stop_token_ids
        self._stop_ids = self._eos.union(stop_ids) if stop_ids else self._eos

    @property
    def prompt_logprobs_from(self) -> int | None:
        """The first prompt position whose next token has no score yet; None if none are wanted."""
        scored = self.result.prompt_logprobs
        if scored is None or self.output.index != 0:
            return None
        return len(scored) - 1

    def report_cached(self, num_restored: int) -> None:
        """Report how much of the prompt was cached.  All answers of a request share the prompt, so
        only the first answer reports it.  num_restored: the cached tokens that the disk brought."""
        if self.output.index == 0:
            self.result.num_cached_tokens = self.request.num_cached_tokens
            self.result.num_restored_tokens = num_restored

    def take(self, result: StepResult, rows: range) -> bool:
        """Take the tokens of a step's rows; True when one ends the answer."""
        try:
            return self._take(result, rows)
        except Exception as e:  # the other answers of the step must continue
            self.abort(f"the answer cannot be recorded: {one_line(e)}")
            return True

    def _take(self, result: StepResult, rows: range) -> bool:
        if len(rows) > 1:  # forced tokens may be known since before the step
            count = sum(row not in result.no_token for row in rows)
            if self._extend(len(self.request.token_ids) - count):
                return True
        for row in rows:
            if row in result.no_token:
                return self.fail(result.no_token[row])
            if result.logprobs is not None:
                self._append_logprobs(result.logprobs, row)
            # A single row may bring forced tokens, which the request already holds.  Several rows
            # are drafts.
            is_one = len(rows) == 1
            if self._extend() if is_one else self._append(int(result.token_ids[row])):
                return True
        return False

    def _extend(self, end: int | None = None) -> bool:
        """Take the request's new tokens before `end`, one by one; True when one ends the answer."""
        start = self.request.num_prompt_tokens + len(self._token_ids)
        return any(map(self._append, self.request.token_ids[start:end]))

    def _append(self, token_id: int) -> bool:
        """Take a sampled token; True when it ends the answer."""
        tokens = self._token_ids
        # Before min_tokens the sampler draws a stop token only if a grammar has ended.
        if token_id in self._stop_ids:
            is_eos = token_id in self._eos
            hidden = is_eos or not self.params.include_stop_str_in_output
            self._end_text(len(tokens) + 1 - hidden)  # before another thread can see the token
            tokens.append(token_id)
            return self._stops() or self._finish("stop", None if is_eos else token_id)
        tokens.append(token_id)
        if self._stops():
            return True
        if self.request.num_prompt_tokens + len(tokens) < self.request.max_length:
            return False
        self._end_text(len(tokens))
        return self._stops() or self._finish("length")

    def _end_text(self, num_tokens: int) -> None:
        self.output.num_shown_tokens = num_tokens
        if self._detokenizer:
            self._detokenizer.end_at(num_tokens)
            self.output.text = self._detokenizer.text

    def _stops(self) -> bool:
        """Whether a stop string ends the answer.  After `_end_text` the text that the stream held
        back is searched, too."""
        if (finder := self._stop_finder) is None:
            return False
        stop = finder.find_stop(len(self._token_ids) >= self.params.min_tokens)
        self.output.text = finder.shown
        if stop is None:
            return False
        self.output.num_shown_tokens = None
        return self._finish("stop", stop)

    def _finish(self, reason: str, stop_reason: int | str | None = None) -> bool:
        self.output.stop_reason, self.output.finish_reason = stop_reason, reason
        return True

    def abort(self, error: str = "") -> None:
        """End the answer with its current tokens.  error: the reason; "" for a wanted end."""
        self.output.error = error or None
        self._end_text(len(self._token_ids))
        self._finish("error" if error else "abort")

    def fail(self, reason: int) -> bool:
        """End the answer because no token can be sampled (see `no_token`); returns True."""
        has_grammar = self.params.structured_outputs is not None
        error = "" if self.constraint is None else self.constraint.error()
        count = len(self._token_ids)
        self.abort(no_token.why(reason, self.params, count, has_grammar, error))
        return True

    def _append_logprobs(self, logprobs: Logprobs[np.ndarray], row: int) -> None:
        """Report a sampled token's row of log-probabilities, if the request wants them."""
        output, k = self.output, self.params.logprobs
        if self.score_token_ids:  # column 0 is the sampled token
            self.result.pooled = logprobs.logprobs[row, 1 : 1 + len(self.score_token_ids)]
        if k is None or output.logprobs is None or output.cumulative_logprob is None:
            return
        output.logprobs.append(self._logprobs(logprobs, row, k))
        output.cumulative_logprob += float(logprobs.logprobs[row, 0])

    def append_prompt_logprobs(self, logprobs: Logprobs[np.ndarray], row: int) -> None:
        """Report the next prompt token's log-probabilities."""
        scored, k = self.result.prompt_logprobs, self.params.prompt_logprobs
        if scored is not None and k is not None:
            scored.append(self._logprobs(logprobs, row, k))

    def _logprobs(self, logprobs: Logprobs[np.ndarray], row: int, k: int) -> dict[int, Logprob]:
        ids = logprobs.token_ids[row, : k + 1].tolist()
        values = logprobs.logprobs[row, : k + 1].tolist()
        ranks = [int(logprobs.ranks[row]), *range(1, len(ids))]
        out: dict[int, Logprob] = {}  # the sampled token first, with its true rank, as in vLLM
        for token, value, rank in zip(ids, values, ranks, strict=True):
            if token not in out:
                text = None if self._text_of is None else self._text_of(token)
                out[token] = Logprob(value, rank, text)
        return out
