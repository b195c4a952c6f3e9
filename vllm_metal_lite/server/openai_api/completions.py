"""`/v1/completions`."""

from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.responses import Response

from vllm_metal_lite.server.conversations import RenderedPrompt
from vllm_metal_lite.server.deltas import Delta, deltas, whole_answers
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
from vllm_metal_lite.server.openai_api.reply import ChoiceWriter, CompletionFields, Reply, Scores
from vllm_metal_lite.server.params import Unsupported, sampling_params
from vllm_metal_lite.server.request_limits import check_logprobs
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.whole_json import whole_json
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
        """Whether only the prompt is wanted.  The engine still generates one token, hidden here."""
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
    starts = (
        serving.generate("cmpl-", RenderedPrompt(ids), params, **body.scheduling())
        for ids in token_ids
    )
    requests = await all_of(starts, len(token_ids))
    names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
    texts = await offload(_echoed, prompts, requests, names) if body.echo else [""] * len(prompts)
    writers = [
        _CompletionWriter(body, request, text, names)
        for text, request in zip(texts, requests, strict=True)
        for _ in request.answers
    ]
    options, hides = body.stream_options, body.only_echoes
    reply = Reply("text_completion", serving.model_name, requests, writers, options, hides)
    if body.stream:
        return serving.stream(reply.stream(deltas(requests)))
    answers = await whole_answers(deltas(requests))
    return await whole_json(lambda: reply.whole(answers))


def _echoed(
    prompts: Sequence[Prompt], requests: Sequence[RequestState], names: TokenNames
) -> list[str]:
    """The texts of the prompts."""
    return [
        prompt if isinstance(prompt, str) else names.tokenizer.decode(request.prompt_token_ids)
        for prompt, request in zip(prompts, requests, strict=True)
    ]


class _CompletionWriter(ChoiceWriter):
    """echo: the text of the answer's prompt, if that is shown."""

    empty: ClassVar = {"text": ""}

    def __init__(
        self, body: CompletionRequest, request: RequestState, echo: str, names: TokenNames
    ) -> None:
        self._body, self._request, self._echo, self._names = body, request, echo, names
        self._is_echoing = bool(body.echo)  # the next news begins with the prompt
        self._offsets: TextOffsets | None = None
        if body.logprobs is not None:
            before = request.prompt_token_ids
            self._offsets = TextOffsets(names.tokenizer, request.params, before, len(echo))

    async def take(self, delta: Delta) -> tuple[list[dict[str, Any]], Scores]:
        # A whole prompt that is echoed takes long.
        news = await offload(self._news, delta) if self._is_echoing else self._news(delta)
        return ([{"text": news[0]}] if news[0] else []), news[1]

    def whole(self, delta: Delta) -> dict[str, Any]:
        text, scores = self._news(delta)
        choice: dict[str, Any] = {"text": text, "logprobs": scores}
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._request.prompt_logprobs)
        return choice

    def _news(self, delta: Delta) -> tuple[str, Scores]:
        """New text and its log-probabilities; those of an echoed prompt come first."""
        text, token_ids = delta.text, delta.token_ids
        positions: list[Any] = list(delta.logprobs or ())
        if self._body.only_echoes:
            text, token_ids, positions = "", [], []
        is_echoing, self._is_echoing = self._is_echoing, False
        if is_echoing:
            text = self._echo + text
        if self._offsets is None:
            return text, None
        offsets = self._offsets.add(token_ids)
        if delta.answer.finished:  # tokens of a stop string have no text
            end = len(self._echo) + len(delta.answer.text)
            offsets = [min(offset, end) for offset in offsets]
        if is_echoing:
            prompt_ids = self._request.prompt_token_ids
            offsets = echoed_offsets(self._names, prompt_ids, self._echo) + offsets
            token_ids = prompt_ids + token_ids
            positions = [*(self._request.prompt_logprobs or ()), *positions]
        return text, legacy_logprobs(token_ids, positions, offsets, self._names)
