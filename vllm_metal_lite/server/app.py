"""The routes of the server."""

import uuid
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_metal_lite.errors import shorten
from vllm_metal_lite.server import anthropic_api, live, openapi, page, status
from vllm_metal_lite.server.body import Body
from vllm_metal_lite.server.errors import ApiError, error_response
from vllm_metal_lite.server.openai_api import (
    chat,
    completions,
    model_list,
    pooling,
    responses,
    tokenize,
)
from vllm_metal_lite.server.security import guards
from vllm_metal_lite.server.server import Server, endpoint

POSTS: tuple[tuple[str, type[Body], Any], ...] = (
    ("/v1/chat/completions", chat.ChatCompletionRequest, chat.chat_completions),
    ("/v1/completions", completions.CompletionRequest, completions.completions),
    ("/v1/embeddings", pooling.EmbeddingRequest, pooling.embeddings),
    *(
        (path, pooling.RerankRequest, pooling.rerank)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    *((path, pooling.ScoreRequest, pooling.score) for path in ("/v1/score", "/score")),
    ("/v1/responses", responses.ResponsesRequest, responses.create_response),
    ("/v1/messages", anthropic_api.MessagesRequest, anthropic_api.create_message),
    ("/v1/messages/count_tokens", anthropic_api.CountTokensRequest, anthropic_api.count_tokens),
    ("/tokenize", tokenize.TokenizeRequest, tokenize.tokenize_text),
    ("/detokenize", tokenize.DetokenizeRequest, tokenize.detokenize),
)


def make_app(server: Server) -> ASGIApp:
    """The ASGI application of a server whose models have been started."""
    routes = [
        Route(path, endpoint(server, body, handler), methods=["POST"])
        for path, body, handler in POSTS
    ]
    bodies = {path: body for path, body, _ in POSTS}
    bodies |= dict.fromkeys(model_list.POSTS, Body)
    for module in model_list, live, status:
        routes += module.routes(server)
    routes.append(openapi.route(routes, bodies))
    app = Starlette(
        routes=[*routes, *page.ROUTES],
        middleware=guards(server.config),
        exception_handlers={HTTPException: _http_error, ApiError: _error, Exception: _error},
    )
    return _identified(app)


def _identified(app: ASGIApp) -> ASGIApp:
    """An application that adds a request id to every response, under both APIs' header names."""

    async def identified(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = f"req_{uuid.uuid4().hex}"
            await send(message)

        await app(scope, receive, send_with_id)

    return identified


async def _http_error(request: Request, e: Exception) -> Response:
    """Answer 404 and 405 as JSON."""
    assert isinstance(e, HTTPException)
    path = request.url.path
    message = f"{request.method} {shorten(path)}: {e.detail}"
    if e.status_code == 404:
        message = f"unknown path: {shorten(path)}"
    return error_response(ApiError(e.status_code, message, headers=e.headers), path)


async def _error(request: Request, e: Exception) -> Response:
    return error_response(e, request.url.path)
