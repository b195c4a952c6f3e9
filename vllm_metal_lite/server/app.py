"""The routes of the server."""

import uuid

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_metal_lite.errors import shorten
from vllm_metal_lite.server import live, metrics, openapi, page, status
from vllm_metal_lite.server.anthropic_api import messages
from vllm_metal_lite.server.errors import ApiError, error_response, shape_for, shown_error
from vllm_metal_lite.server.openai_api import chat, completions, model_list, responses, tokenize
from vllm_metal_lite.server.security import guards
from vllm_metal_lite.server.server import Server

_ROOMS = (chat, completions, model_list, tokenize, responses, messages, live, status, metrics, page)


def make_app(server: Server) -> ASGIApp:
    """The ASGI application of a server whose models have been started."""

    async def health(request: Request) -> Response:
        if server.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    routes = [Route("/health", health)]
    routes += [route for room in _ROOMS for route in room.routes(server)]
    app = Starlette(
        routes=[*routes, Route("/openapi.json", openapi.endpoint(routes))],
        middleware=guards(server.config),
        exception_handlers={HTTPException: _http_error, Exception: _server_error},
    )
    return _identified(app)


def _identified(app: ASGIApp) -> ASGIApp:
    """`app`, whose responses all have an x-request-id."""

    async def identified(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", f"req_{uuid.uuid4().hex}")
            await send(message)

        await app(scope, receive, send_with_id)

    return identified


async def _http_error(request: Request, e: Exception) -> Response:
    """404 and 405, as JSON."""
    assert isinstance(e, HTTPException)
    path = request.url.path
    message = f"{request.method} {shorten(path)}: {e.detail}"
    if e.status_code == 404:
        message = f"there is no {shorten(path)} here; /openapi.json lists the endpoints"
    return error_response(ApiError(e.status_code, message, headers=e.headers), shape_for(path))


async def _server_error(request: Request, e: Exception) -> Response:
    return error_response(shown_error(e), shape_for(request.url.path))
