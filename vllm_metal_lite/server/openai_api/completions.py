"""`/v1/completions`."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from functools import cached_property
from json import dumps
from typing import Any

from starlette.responses import JSONResponse, Response

from vllm_metal_lite.engine.prompt_ids import tokenize
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.outputs import CompletionOutput
from vllm_metal_lite.server.conversations import RenderedPrompt, encode_prompt
from vllm_metal_lite.server.deltas import AnswerReader, Delta, deltas
from vllm_metal_lite.server.errors import ApiError, ContextOverflow, bad, must_be
from vllm_metal_lite.server.large_json import large_json
from vllm_metal_lite.server.offload import offload
from vllm_metal_lite.server.openai_api.completion_fields import CompletionFields
from vllm_metal_lite.server.openai_api.logprobs import (
    TextOffsets,
    TokenNames,
    echoed_offsets,
    legacy_logprobs,
    prompt_logprobs,
)
from vllm_metal_lite.server.openai_api.reply import Reply, ending
from vllm_metal_lite.server.params import Unsupported, sampling_params
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.worker.client import EngineClient
from vllm_metal_lite.server.worker.request_state import RequestState

Prompt = str | list[int]


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
            fields |= {"max_tokens": 1, "ignore_eos": True, "stop": None, "stop_token_ids": None}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            fields["prompt_logprobs"] = self.logprobs
        return fields


async def completions(serving: Serving, body: CompletionRequest) -> Response:
    prompts, engine = split_prompts(body.prompt), serving.engine
    with serving.preparing():
        params = await sampling_params(serving, body)
    if body.best_of not in (None, params.n):
        raise bad("best_of", f" must equal n ({params.n}), got {body.best_of}")
    most = engine.facts.max_num_seqs + serving.server.config.max_waiting
    if len(prompts) * params.n > most:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n={params.n} are more than the {most} answers that "
            "this server runs or lets wait",
            param="prompt",
        )
    special = body.add_special_tokens is not False
    try:
        token_ids = await offload(token_ids_of, prompts, engine, special)
        requests = await all_of(
            serving.generate("cmpl-", RenderedPrompt(ids), params, **body.scheduling())
            for ids in token_ids
        )
    except ContextOverflow as e:
        e.param = "prompt"
        raise
    names = TokenNames(engine.tokenizer, bool(body.return_tokens_as_token_ids))
    writers = [
        _Writer(body, request, prompt, names)
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    options, hides = body.stream_options, body.only_echoes
    reply = Reply("text_completion", serving.model, requests, options, hides_answers=hides)
    if body.stream:
        return serving.stream(reply.stream(_chunks(reply, deltas(requests), writers, params.n)))
    for request in requests:
        await request.complete()

    def whole() -> dict[str, Any]:
        answers = [(w, answer) for w in writers for answer in w.request.answers]
        readers = [(w, AnswerReader(i, answer)) for i, (w, answer) in enumerate(answers)]
        return reply.whole([writer.whole(reader.read()) for writer, reader in readers])

    if params.logprobs is None and params.prompt_logprobs is None:
        return JSONResponse(whole())
    return await large_json(whole)


def split_prompts(prompt: Any, param: str = "prompt") -> list[Prompt]:
    """The prompts of a request: a text, token ids, or a list of either.  Raises ApiError (400)."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise must_be(param, "a text, token ids, or a list of them", prompt)
    for i, item in enumerate(prompt):
        if not isinstance(item, str) and not _are_ids(item):
            raise must_be(f"{param}.{i}", "a text or token ids", item)
    return prompt


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)
    )


def token_ids_of(
    prompts: Sequence[Prompt], engine: EngineClient, special: bool, param: str = "prompt"
) -> list[list[int]]:
    def ids_of(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            prompt = encode_prompt(engine, prompt, special)
        return tokenize(prompt, None, engine.facts.vocab_size)[1]

    try:
        return [ids_of(prompt) for prompt in prompts]
    except RequestError as e:
        raise ApiError(400, str(e), param=param) from None


async def all_of(starts: Iterable[Coroutine[Any, Any, RequestState]]) -> list[RequestState]:
    """The results, in order.  If one fails, none is left running."""
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(start) for start in starts]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class _Writer:
    """Makes the choices of one prompt."""

    def __init__(
        self, body: CompletionRequest, request: RequestState, prompt: Prompt, names: TokenNames
    ) -> None:
        self._body, self.request, self._prompt = body, request, prompt
        self._names = names
        self._begun: set[int] = set()  # answers that have news
        self._offsets: dict[int, TextOffsets] = {}  # by answer

    def whole(self, delta: Delta) -> dict[str, Any]:
        """The choice of a finished answer.  delta: all of it."""
        text, scores = self._news(delta)
        choice = {"index": delta.choice, "text": text, "logprobs": scores}
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.request.prompt_logprobs)
        return {**choice, **ending(delta.answer, delta.finish_reason)}

    async def chunk(self, delta: Delta, reply: Reply) -> bytes | None:
        """The event of a Delta; None if the Delta has nothing to show."""
        if self._body.echo and delta.answer.index not in self._begun:
            return await offload(self._chunk, delta, reply)  # it echoes the whole prompt
        return self._chunk(delta, reply)

    def _chunk(self, delta: Delta, reply: Reply) -> bytes | None:
        text, scores = self._news(delta)
        answer = delta.answer
        if not (text or answer.finished or reply.sends_every_delta or (delta.token_ids and scores)):
            return None
        end = ending(answer, answer.finish_reason) if answer.finished else None
        return reply.chunk(delta.choice, f'"text":{dumps(text)}', end, scores)

    def _news(self, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """New text and its log-probabilities; those of an echoed prompt come first."""
        text, token_ids = delta.text, delta.token_ids
        positions: list[Any] = list(delta.logprobs or ())
        answer = delta.answer
        if self._body.only_echoes:
            text, token_ids, positions = "", [], []
        offsets = self._offsets_of(answer, token_ids)
        if self._body.echo and answer.index not in self._begun:
            text = self._echo + text
            prompt_ids = self.request.prompt_token_ids
            if self._body.logprobs is not None:
                offsets = echoed_offsets(self._names, prompt_ids, self._echo) + offsets
            token_ids = prompt_ids + token_ids
            positions = [*(self.request.prompt_logprobs or ()), *positions]
        self._begun.add(answer.index)
        if self._body.logprobs is None:
            return text, None
        return text, legacy_logprobs(token_ids, positions, offsets, self._names)

    def _offsets_of(self, answer: CompletionOutput, token_ids: list[int]) -> list[int]:
        """Where an answer's next tokens are in the text, if the client wants to know."""
        if self._body.logprobs is None:
            return []
        if answer.index not in self._offsets:
            tokenizer, prompt = self._names.tokenizer, self.request.prompt_token_ids
            made = TextOffsets(tokenizer, self.request.params, prompt, len(self._echo))
            self._offsets[answer.index] = made
        offsets = self._offsets[answer.index].add(token_ids)
        if answer.finished:  # tokens of a stop string have no text
            end = len(self._echo) + len(answer.text)
            return [min(offset, end) for offset in offsets]
        return offsets

    @cached_property
    def _echo(self) -> str:
        """The text of the prompt, if it is shown."""
        if not self._body.echo:
            return ""
        if isinstance(self._prompt, str):
            return self._prompt
        return str(self._names.tokenizer.decode(self.request.prompt_token_ids))


async def _chunks(
    reply: Reply, news: AsyncIterator[Delta], writers: Sequence[_Writer], n: int
) -> AsyncIterator[bytes]:
    async for delta in news:
        if chunk := await writers[delta.choice // n].chunk(delta, reply):
            yield chunk
