"""`/v1/completions`: texts or token ids, one prompt or several, and their continuations."""

from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.responses import Response

from vllm_metal_lite.server.deltas import deltas, whole_answers
from vllm_metal_lite.server.errors import ApiError, bad
from vllm_metal_lite.server.offload import offload
from vllm_metal_lite.server.openai_api.logprobs import (
    TextOffsets,
    TokenNames,
    echoed_offsets,
    legacy_logprobs,
    prompt_logprobs,
)
from vllm_metal_lite.server.openai_api.prompts import Prompt, all_of, split_prompts, token_ids_of
from vllm_metal_lite.server.openai_api.reply import Choice, ChoiceWriter, CompletionFields, Reply
from vllm_metal_lite.server.params import Unsupported, sampling_params
from vllm_metal_lite.server.request_limits import check_logprobs
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.whole_json import whole_json
from vllm_metal_lite.server.worker.messages import Delta
from vllm_metal_lite.server.worker.request_state import RequestState


class CompletionRequest(CompletionFields):
    prompt: Any
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: Unsupported = None
    prompt_embeds: Unsupported = None

    def check(self) -> None:
        super().check()
        split_prompts(self.prompt)

    @property
    def only_echoes(self) -> bool:
        """Whether the client wants only the prompt.  The engine still generates one token, which is
        not shown."""
        return bool(self.echo) and type(self.max_tokens) is int and self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.only_echoes:
            # Whatever the hidden token is, it does not end the text.
            fields |= dict.fromkeys(("min_tokens", "stop", "stop_token_ids"))
            fields |= {"max_tokens": 1, "ignore_eos": True}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            fields["prompt_logprobs"] = self.logprobs
        return fields


async def completions(serving: Serving, body: CompletionRequest) -> Response:
    prompts, model = split_prompts(body.prompt), serving.model
    with serving.preparing():
        params = await sampling_params(serving, body)
        if body.best_of not in (None, params.n):
            raise bad("best_of", f" must equal n ({params.n}), got {body.best_of}")
        most = model.facts.max_num_seqs + serving.server.config.max_waiting
        if (count := len(prompts) * params.n) > most:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n={params.n} need {count} answers, and at most "
                f"{most} may run or wait",
                param="prompt",
            )
        special = body.add_special_tokens is not False
        token_ids = await offload(token_ids_of, prompts, model, special, "prompt")
        check_logprobs([len(ids) for ids in token_ids], model.facts.max_model_len, params)
    starts = (serving.generate("cmpl-", ids, params, **body.scheduling()) for ids in token_ids)
    requests = await all_of(starts, len(token_ids))
    names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = await offload(_texts, prompts, requests, names)
    writers = [
        _CompletionWriter(body, request, echo, names)
        for echo, request in zip(echoes, requests, strict=True)
        for _ in range(params.n)
    ]
    news = deltas(requests)
    if body.only_echoes:
        news = (delta._replace(text="", token_ids=[], logprobs=[]) async for delta in news)
    model_name, options = serving.model_name, body.stream_options
    reply = Reply("text_completion", model_name, requests, writers, options)
    if body.stream:
        return serving.stream(reply.stream(news))
    answers = await whole_answers(news)
    return await whole_json(lambda: reply.whole(answers))


def _texts(
    prompts: Sequence[Prompt], requests: Sequence[RequestState], names: TokenNames
) -> list[str]:
    """The texts of the prompts."""
    return [
        prompt if isinstance(prompt, str) else names.tokenizer.decode(request.prompt_token_ids)
        for prompt, request in zip(prompts, requests, strict=True)
    ]


class _CompletionWriter(ChoiceWriter):
    """Makes the text of an answer.  echo: the text of its prompt, if the client wants to see it."""

    empty: ClassVar = {"text": ""}

    def __init__(
        self, body: CompletionRequest, request: RequestState, echo: str, names: TokenNames
    ) -> None:
        self._body, self._request, self._echo, self._names = body, request, echo, names
        self._num_characters = len(echo)  # the length of the text that was shown so far
        self._offsets: TextOffsets | None = None
        if body.logprobs is not None:
            before = request.prompt_token_ids
            self._offsets = TextOffsets(names.tokenizer, request.params, before, len(echo))

    async def head(self) -> Choice | None:
        # On a thread, because the log-probabilities of a whole prompt take long.
        return await offload(self._prompt) if self._body.echo else None

    def _prompt(self) -> Choice:
        """The prompt that is shown, and its log-probabilities."""
        scores = None
        if self._offsets is not None:
            ids, positions = self._request.prompt_token_ids, self._request.prompt_logprobs or ()
            offsets = echoed_offsets(self._names, ids, self._echo)
            scores = legacy_logprobs(ids, positions, offsets, self._names)
        return {"text": self._echo, "logprobs": scores}

    def news(self, delta: Delta) -> list[Choice]:
        return [{"text": delta.text}] if delta.text else []

    def scores(self, delta: Delta) -> dict[str, list[Any]] | None:
        if self._offsets is None:
            return None
        self._num_characters += len(delta.text or "")
        offsets = self._offsets.add(delta.token_ids)
        if delta.finish_reason is not None:  # tokens of a stop string have no text
            offsets = [min(offset, self._num_characters) for offset in offsets]
        return legacy_logprobs(delta.token_ids, delta.logprobs or (), offsets, self._names)

    def whole(self, delta: Delta) -> Choice:
        scores = self.scores(delta)
        if scores is not None and self._body.echo:
            of_prompt = self._prompt()["logprobs"]
            scores = {name: of_prompt[name] + values for name, values in scores.items()}
        choice: Choice = {"text": self._echo + (delta.text or ""), "logprobs": scores}
        if self._body.prompt_logprobs is not None:
            found = self._request.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(found, self._names)
        return choice
