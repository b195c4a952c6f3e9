"""Makes the answers of a user's request, or refuses it."""

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.answer import Answer
from vllm_metal_lite.engine.pooling import ONE_TOKEN, resolved, truncate
from vllm_metal_lite.engine.prompt_ids import (
    Prompt,
    cache_salt,
    encode,
    is_list,
    pictures_of,
    spans_of,
    tokenize,
)
from vllm_metal_lite.errors import Option, RequestError, SamplingError, one_line, show
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.runner.pictures import NoEyes
from vllm_metal_lite.sampling.masks import Constraint
from vllm_metal_lite.sampling.sampler import validate
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.request import Request


class Intake:
    """Makes answers from users' arguments.  num_requests: how many requests were accepted."""

    def __init__(
        self, model: LoadedModel, max_model_len: int, config: EngineConfig, eyes: NoEyes
    ) -> None:
        self._model, self._max_model_len, self._config = model, max_model_len, config
        self._eyes = eyes
        self.num_requests = 0

    def answers(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        priority: int,
        fair_round: int,
        checkpoints: Sequence[int],
    ) -> list[Answer]:
        """The `n` answers of a request (see `LLMEngine.add_request`), which share one output.
        Raises RequestError, SamplingError or BusyError."""
        model, pooling = self._model, None
        if isinstance(params, PoolingParams):
            pooling, params = resolved(params, model), ONE_TOKEN
        reads_head = pooling is None or pooling.score_token_ids is not None
        if reads_head and model.no_answers is not None:
            raise RequestError(f"{model.name} gives no answers: {model.no_answers}")
        params = SamplingParams(**model.sampling_defaults) if params is None else params
        _check_arguments(request_id, params, priority, fair_round)
        validate(params, model.vocab_size)
        if params.stop_strings and model.tokenizer is None:
            raise RequestError("stop needs a tokenizer, and this model was loaded without one")
        bad_words = bad_words_of(params, model)
        prepared = self._eyes.prepare(items) if (items := pictures_of(prompt)) else []
        expand = partial(self._eyes.expand, pictures=prepared)
        text, token_ids = tokenize(prompt, model.tokenizer, model.vocab_size, expand)
        if pooling is not None and pooling.truncate_prompt_tokens is not None:
            ends = [] if text is None else encode("", model.tokenizer)
            token_ids = truncate(token_ids, pooling, self._max_model_len, ends)
        salt, positions = cache_salt(prompt), _check_checkpoints(checkpoints, len(token_ids))
        spans, arrival = spans_of(prompt, len(token_ids)), self.num_requests
        pictures = self._eyes.place(token_ids, prepared) if prepared else None
        if pictures is not None and pictures.spans:
            if spans:
                raise RequestError("a prompt whose pictures are spans takes no other spans")
            spans = pictures.spans
        seed = params.seed if params.seed is not None else hash((self._config.seed, arrival))
        result = RequestOutput(request_id, text, token_ids, [])
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = [None]
        # A mean needs the hidden states of all rows.
        is_mean = pooling is not None and pooling.pooling == "mean"
        answers = []
        for index in range(params.n):
            scores_prompt = result.prompt_logprobs is not None and index == 0
            request = Request(
                request_id if params.n == 1 else f"{request_id}#{index}",
                token_ids,
                params.max_tokens or self._max_model_len,
                (priority, fair_round, arrival),
                skip_prefix_cache_read=scores_prompt or is_mean,
                only_reads=pooling is not None,
                # A scored row takes twice the memory of a sampled one.
                max_chunk=self._config.max_logits_rows // 2 if scores_prompt else 0,
                checkpoint_positions=positions,
                spans=spans,
                pictures=pictures,
                cache_salt=salt,
                parent_id=request_id,
            )
            answer = Answer(
                request,
                params,
                result,
                index,
                model,
                seed=seed + index,
                bad_words=bad_words,
                constraint=constraint_of(params, model),
                pooling=pooling,
            )
            answers.append(answer)
        result.outputs = [answer.output for answer in answers]
        return answers

    def one_token(self) -> Answer:
        """A request of one token, to find out whether any step succeeds."""
        prompt, name = {"prompt_token_ids": [0]}, "\0one token"  # no user's id
        return self.answers(name, prompt, ONE_TOKEN, 0, 0, ())[0]


def _check_arguments(request_id: Any, params: Any, priority: Any, fair_round: Any) -> None:
    """Raise RequestError for arguments of the wrong type."""
    for name, value, kind, allowed in (
        ("params", params, SamplingParams, "SamplingParams"),
        ("request_id", request_id, str, "a string"),
        ("priority", priority, Integral, "an integer"),
        ("fair_round", fair_round, Integral, "an integer"),
    ):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RequestError(f"{name} must be {allowed}, got {show(value)}")


def _check_checkpoints(checkpoints: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """The checkpoints as ints.  Raises RequestError for one outside a prompt of num_tokens."""
    if not is_list(checkpoints):
        raise RequestError(
            f"checkpoints must be a list of numbers of tokens, got {show(checkpoints)}"
        )
    for position in checkpoints:
        if isinstance(position, bool) or not isinstance(position, Integral):
            raise RequestError(f"checkpoints must be integers, got {show(position)}")
        if not 0 < position <= num_tokens:
            raise RequestError(
                f"checkpoint {show(position)} is outside the prompt of {num_tokens} tokens"
            )
    return tuple(map(int, checkpoints))


def bad_words_of(params: SamplingParams, model: LoadedModel) -> list[list[int]]:
    """Token ids of `params.bad_words`.  Raises RequestError."""
    if not params.bad_words:
        return []
    if model.tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and this model was loaded without one")
    try:
        return bad_word_ids(model.tokenizer, params.bad_words)
    except Exception as e:
        raise RequestError(f"the tokenizer refuses bad_words: {one_line(e)}") from e


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token ids of words, at the start of a text and after a space, as in vLLM.

    The second list counts only if its first token differs and its length is the same.
    """
    sequences = []
    for word in words:
        bare, spaced = (
            tokenizer.encode(lead + word.lstrip(), add_special_tokens=False) for lead in ("", " ")
        )
        if bare:
            sequences.append(list(bare))
        if spaced and bare and spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(list(spaced))
    return sequences


def constraint_of(params: SamplingParams, model: LoadedModel) -> Constraint | None:
    """The limits of one answer.  Raises SamplingError for a grammar that cannot be used, and
    BusyError."""
    if params.structured_outputs is None and params.thinking is None:
        return None
    try:
        from vllm_metal_lite.structured_outputs import build
    except ModuleNotFoundError as e:
        raise SamplingError(Option("structured_outputs"), f" needs {e.name}") from e
    return build(params, model.tokenizer, model.vocab_size, model.eos_token_ids)
