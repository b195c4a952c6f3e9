"""`/v1/embeddings` as OpenAI has it, `/v1/rerank` and `/v1/score` as vLLM has them, `/v2/rerank` as
Cohere has it."""

import base64
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
from starlette.responses import JSONResponse, Response

from vllm_metal_lite.engine.pooling import checked, truncate
from vllm_metal_lite.engine.prompt_ids import as_list, encode
from vllm_metal_lite.engine.scoring import plan_scores
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.server.conversations import check_length
from vllm_metal_lite.server.errors import ApiError, ContextOverflow, must_be
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.offload import offload
from vllm_metal_lite.server.openai_api.prompts import all_of, places_of, split_prompts, token_ids
from vllm_metal_lite.server.params import ScheduledBody
from vllm_metal_lite.server.request_limits import MAX_POOLED_CHARACTERS, MAX_POOLED_TOKENS
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.whole_json import whole_json
from vllm_metal_lite.server.worker.request_state import RequestState

_STEPS_AHEAD = 2  # full steps of prompts that one request may queue in the engine


class PoolingBody(ScheduledBody):
    """truncate_prompt_tokens: the length to which longer prompts are cut.  -1 means the context;
    None refuses longer prompts."""

    prompt_fields: ClassVar[tuple[str, ...]] = ("input",)
    truncate_prompt_tokens: int | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(truncate_prompt_tokens=self.truncate_prompt_tokens)

    def check(self) -> None:
        self.params()
        self.scheduling()

    @property
    def prompt_field(self) -> str:
        """The field to name if a prompt is refused: one with an empty text, or the longest."""

        def size(name: str) -> tuple[bool, int]:
            sizes = list(map(len, as_list(getattr(self, name))))
            return 0 in sizes, max(sizes, default=0)

        return max(self.prompt_fields, key=size)


class EmbeddingRequest(PoolingBody):
    """prompt_name: the name of the model's prompt that goes before each text."""

    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(
            dimensions=self.dimensions,
            normalize=self.normalize is not False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    def check(self) -> None:
        super().check()
        split_prompts(self.input, "input")


class RerankRequest(PoolingBody):
    """documents: texts, or objects with a text.  top_n: how many results to give; 0 and None mean
    all.  instruction: the task of a reranker."""

    prompt_fields: ClassVar = ("query", "documents")
    query: str
    documents: list[Any]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    def check(self) -> None:
        super().check()
        self.documents = [
            d["text"] if isinstance(d, Mapping) and d.keys() == {"text"} else d
            for d in self.documents
        ]
        split_prompts(self.documents, "documents", ids=False)
        if self.top_n is not None and self.top_n < 0:
            raise must_be("top_n", "at least 0", self.top_n)


class ScoreRequest(PoolingBody):
    prompt_fields: ClassVar = ("text_1", "text_2")
    text_1: Any
    text_2: Any
    instruction: str | None = None

    def check(self) -> None:
        super().check()
        for field in self.prompt_fields:
            split_prompts(getattr(self, field), field, ids=False)


async def embeddings(serving: Serving, body: EmbeddingRequest) -> Response:
    before = serving.model.facts.pooling.prompt(body.prompt_name)
    inputs = split_prompts(body.input, "input")
    prompts = [before + text if isinstance(text, str) else text for text in inputs]
    special = body.add_special_tokens is not False
    places = places_of("input", inputs)
    requests, values = await _pool(serving, body, prompts, places, body.params(), special)

    def whole() -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": i, "embedding": _encoded(body, value)}
            for i, value in enumerate(values)
        ]
        return {"object": "list", **_common(serving, requests), "data": data}

    return await whole_json(whole)


async def rerank(serving: Serving, body: RerankRequest) -> Response:
    scores, common = await _scores(serving, body, body.query, body.documents)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    results: list[dict[str, Any]] = [
        {"index": i, "relevance_score": scores[i]}
        | ({} if body.return_documents is False else {"document": {"text": body.documents[i]}})
        for i in best
    ]
    return JSONResponse({**common, "results": results})


async def score(serving: Serving, body: ScoreRequest) -> Response:
    scores, common = await _scores(serving, body, body.text_1, body.text_2)
    data = [{"object": "score", "index": i, "score": value} for i, value in enumerate(scores)]
    return JSONResponse({"object": "list", **common, "data": data})


async def _scores(
    serving: Serving, body: RerankRequest | ScoreRequest, queries: Any, documents: Any
) -> tuple[list[float], dict[str, Any]]:
    model, facts, params = serving.model, serving.model.facts, body.params()
    fields = dict(zip(body.prompt_fields, map(as_list, (queries, documents)), strict=True))
    (num_queries, num_pairs), texts = map(len, fields.values()), [*chain(*fields.values())]
    size = sum(map(len, texts))
    if facts.pooling.score_token_ids is not None:  # each pair is a prompt
        of_queries = sum(map(len, texts[:num_queries]))
        size += of_queries * num_pairs // num_queries + len(body.instruction or "") * num_pairs
        del fields[body.prompt_fields[0]]
    if size > MAX_POOLED_CHARACTERS:
        why = f"the prompts of all pairs have {size:,} characters, and at most"
        raise ApiError(400, f"{why} {MAX_POOLED_CHARACTERS:,} are allowed", param=body.prompt_field)
    for text in texts if params.truncate_prompt_tokens is None else ():
        check_length(model, text)
    most = facts.max_model_len
    plan = plan_scores(
        facts.pooling, model.tokenizer, queries, documents, params, most, body.instruction
    )
    places = [place for field, texts in fields.items() for place in places_of(field, texts)]
    requests, values = await _pool(serving, body, plan.prompts, places, plan.params, True)
    return await offload(plan.scores, values), _common(serving, requests)


async def _pool(
    serving: Serving,
    body: PoolingBody,
    prompts: Iterable[Any],
    places: Sequence[str],
    params: PoolingParams,
    special: bool,
) -> tuple[list[RequestState], list[np.ndarray]]:
    """The finished requests of the prompts, in order, and their results.

    places: names of the prompts in errors.  special: add special tokens.
    """
    model = serving.model
    with serving.preparing():
        token_ids = await offload(_token_ids, model, prompts, places, params, special)
    seats = model.facts.max_num_seqs
    most = min(_STEPS_AHEAD * seats, seats + serving.server.config.max_waiting)

    async def run(ids: list[int]) -> RequestState:
        request = await serving.generate("embd-", ids, params, **body.scheduling())
        await request.complete()
        return request

    # The shortest goes first: attention pads the prompts of a step to like lengths.
    order = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
    done = await all_of((run(token_ids[i]) for i in order), most)
    requests = [request for _, request in sorted(zip(order, done, strict=True))]
    return requests, await offload(lambda: [checked(r.pooled, params) for r in requests])


def _token_ids(
    model: ModelText,
    prompts: Iterable[Any],
    places: Sequence[str],
    params: PoolingParams,
    special: bool,
) -> list[list[int]]:
    """Token ids of the prompts, cut as the parameters say.  The first prompt that is too long
    raises ContextOverflow, before the next one is encoded."""
    found: list[list[int]] = []
    count, most = 0, model.facts.max_model_len
    ends = encode("", model.tokenizer, add_special_tokens=special)
    for prompt, where in zip(prompts, places, strict=True):
        is_text = isinstance(prompt, str)
        ids = token_ids(prompt, model, special, where, params.truncate_prompt_tokens is not None)
        ids = truncate(ids, params, most, ends if is_text else [])
        if len(ids) > most:
            raise ContextOverflow(len(ids), most, f" It is {where}.")
        if (count := count + len(ids)) > MAX_POOLED_TOKENS:
            why = f"the prompts up to {where} have {count:,} tokens, and at most"
            raise ApiError(400, f"{why} {MAX_POOLED_TOKENS:,} are allowed", param=where)
        found.append(ids)
    return found


def _encoded(body: EmbeddingRequest, value: np.ndarray) -> str | list[float]:
    """Base64 of little-endian float32, or a list."""
    if body.encoding_format == "base64":
        return base64.b64encode(value.astype("<f4").tobytes()).decode()
    return value.tolist()


def _common(serving: Serving, requests: Sequence[RequestState]) -> dict[str, Any]:
    count = sum(len(request.prompt_token_ids) for request in requests)
    cached = sum(request.num_cached_tokens for request in requests)
    return {
        "id": f"embd-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": serving.model_name,
        "usage": {
            "prompt_tokens": count,
            "total_tokens": count,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }
