"""The base of all endpoints: the models, admission, and the path of a request."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from vllm_metal_lite.errors import show
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.body import B, Body, read_body
from vllm_metal_lite.server.errors import ContextOverflow, error_event, error_response
from vllm_metal_lite.server.media import Media
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.models import Models
from vllm_metal_lite.server.offload import LARGE, REQUESTER, Requester, offload
from vllm_metal_lite.server.pictures import Pictures
from vllm_metal_lite.server.prometheus import Metrics
from vllm_metal_lite.server.request_limits import check_logprobs
from vllm_metal_lite.server.settings import ServerConfig
from vllm_metal_lite.server.stream import (
    KEEP_ALIVE,
    ClientGone,
    EventStream,
    cancel_if,
    discard,
    until_gone,
)
from vllm_metal_lite.server.worker.client import EngineClient
from vllm_metal_lite.server.worker.messages import Add
from vllm_metal_lite.server.worker.request_state import RequestState, ShuttingDown

logger = logging.getLogger(__name__)

# Names of unknown fields that the log shows: in all, and in one line.
_MOST_UNKNOWN, _MOST_SHOWN = 1000, 10


class Server:
    """The state that endpoints share: models, open requests, metrics, and whether it drains."""

    def __init__(self, config: ServerConfig, models: Models) -> None:
        self.config, self.models = config, models
        self.draining = False  # no further requests are taken
        self.ended = asyncio.Event()  # requests that are still open get an error
        self.num_accepted = 0  # requests that drain
        self.requests: dict[str, RequestState] = {}
        self.logs_requests = False  # print a line when a request ends, also when it is cut short
        self.metrics = Metrics(models)
        self.media = Media(config.allowed_media_domains, config.max_body_bytes)
        self._unknown_fields: set[tuple[str, str]] = set()  # by endpoint

    def check_open(self) -> None:
        """Raise ShuttingDown if the server stops."""
        if self.draining:
            raise ShuttingDown

    def end_all(self) -> None:
        """End all requests, because the server stops."""
        self.ended.set()
        for request in self.requests.values():
            if not request.finished:
                request.fail(ShuttingDown())

    def note_unknown(self, path: str, body: Body) -> None:
        """Log the fields of a body that no one reads: one line a request, once for each name."""
        left = _MOST_UNKNOWN - len(self._unknown_fields)
        unknown = ((path, show(name)) for name in body.unknown_fields())
        new = [field for field in unknown if field not in self._unknown_fields][:left]
        self._unknown_fields.update(new)
        if new:
            shown = ", ".join(name for _, name in new[:_MOST_SHOWN])
            more = f" and {len(new) - _MOST_SHOWN} more" if len(new) > _MOST_SHOWN else ""
            logger.warning(f"{path}: fields of requests are ignored: {shown}{more}")


def summary(request: RequestState) -> str:
    """A request in one line, for the log."""
    times, now = request.times, time.monotonic()
    reasons = [reason or "cut short" for reason in request.finish_reasons]
    parts = [
        f"{len(request.prompt_token_ids)} prompt tokens ({request.num_cached_tokens} cached)",
        f"{request.num_tokens} new in {now - times.arrived:.2f} s",
    ]
    if times.first_token is not None:
        parts.append(f"first after {times.first_token - times.arrived:.2f} s")
    return f"{request.request_id}: {', '.join([*parts, *dict.fromkeys(reasons)])}"


def client_of(request: Request) -> tuple[str, ...]:
    """A client's identity: address, program, key and path, so that chats and indexing differ."""
    host = request.client.host if request.client is not None else ""
    keys = ("user-agent", "authorization", "x-api-key")
    return (host, request.url.path, *(request.headers.get(key, "") for key in keys))


@dataclass(frozen=True)
class Serving:
    """A request while it is served.

    model_name: the name that requests use for the model.  resources: closed when the response ends.
    """

    server: Server
    model_name: str
    engine: EngineClient
    resources: AsyncExitStack

    @property
    def model(self) -> ModelText:
        return self.engine.model

    def pictures(self) -> Pictures:
        """Collects the pictures of this request."""
        facts = self.model.facts
        return Pictures(facts.no_pictures, facts.max_pictures, self.server.media)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count the request as one that waits, while its prompt and its grammar are made."""
        self.server.models.find(self.model_name).check_room()
        self.engine.num_preparing += 1
        try:
            yield
        finally:
            self.engine.num_preparing -= 1

    async def generate(
        self,
        prefix: str,
        token_ids: list[int],
        params: SamplingParams | PoolingParams,
        **options: Any,
    ) -> RequestState:
        """A request that the engine has accepted; it ends with the response at the latest.

        prefix: the start of the request's id.  options: other fields of Add.
        Raises ApiError, MetalLiteError or EngineLost.
        """
        self.server.check_open()
        num_tokens, limit = len(token_ids), self.model.facts.max_model_len
        if num_tokens >= limit + isinstance(params, PoolingParams):
            raise ContextOverflow(num_tokens, limit)
        self.server.models.find(self.model_name).check_room()
        if isinstance(params, SamplingParams):
            check_logprobs([num_tokens], limit, params)
        add = Add(f"{prefix}{uuid.uuid4().hex}", token_ids, params, **options)
        return await self.resources.enter_async_context(self._running(add))

    @asynccontextmanager
    async def _running(self, add: Add) -> AsyncIterator[RequestState]:
        server = self.server
        server.num_accepted += 1
        try:
            with server.metrics.counting(self.model_name, self.engine) as count:
                async with self.engine.generate(add, count.update) as request:
                    count.request = server.requests[add.request_id] = request
                    yield request
        finally:
            server.num_accepted -= 1
            ended = server.requests.pop(add.request_id, None)
            if ended is not None and server.logs_requests:
                print(summary(ended), flush=True)

    def stream(
        self, events: AsyncIterator[bytes], keep_alive: bytes | Callable[[], bytes] = KEEP_ALIVE
    ) -> EventStream:
        seconds = self.server.config.keep_alive
        return EventStream(events, keep_alive, seconds, self.resources.pop_all())


Handler = Callable[[Serving, B], Awaitable[Response]]


def endpoint(
    server: Server, body_type: type[B], handler: Handler[B]
) -> Callable[[Request], Awaitable[Response]]:
    """A Starlette endpoint: it reads the body, loads the model and calls the handler.

    The work ends when the client goes.
    """

    async def answer(request: Request) -> Response:
        server.check_open()
        raw = await request.body()
        requester = Requester(client_of(request), len(raw))
        REQUESTER.set(requester)
        return await until_gone(request.receive, respond(request.url.path, raw, requester))

    async def respond(path: str, raw: bytes, requester: Requester) -> Response:
        large = len(raw) >= LARGE
        body = await offload(read_body, body_type, raw) if large else read_body(body_type, raw)
        if isinstance(body.user, str):
            REQUESTER.set(replace(requester, client=(requester.client, body.user)))
        server.note_unknown(path, body)
        body.check()
        model, seconds = server.models.find(body.model), server.config.keep_alive
        if model.state == "loaded" or not getattr(body, "stream", False):
            return await handle(body)
        handled = cancel_if(server.ended.wait(), ShuttingDown, handle(body))
        handling = asyncio.ensure_future(handled)
        try:
            await asyncio.wait([handling], timeout=seconds)
        except asyncio.CancelledError:
            await discard(handling)
            raise
        if handling.done():
            return handling.result()
        # The stream begins while the model is loaded: clients and proxies end silent connections.
        failed = partial(error_event, path=path)
        return EventStream.late(handling, lambda: model.progress, failed, seconds)

    async def handle(body: B) -> Response:
        async with AsyncExitStack() as resources:
            using = server.models.use(body.model, body.keep_alive)
            model, engine = await resources.enter_async_context(using)
            try:
                return await handler(Serving(server, model.name, engine, resources), body)
            except ContextOverflow as e:
                e.param = body.prompt_field
                raise
        raise AssertionError("the resources hide no exception")

    async def serve(request: Request) -> Response:
        try:
            return await cancel_if(server.ended.wait(), ShuttingDown, answer(request))
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)
        except Exception as e:
            return error_response(e, request.url.path)

    return serve
