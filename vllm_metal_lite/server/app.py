"""The routes of the server."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from vllm_metal_lite.server import live, metrics, status
from vllm_metal_lite.server.anthropic_api import messages
from vllm_metal_lite.server.errors import ApiError, error_response, shape_for
from vllm_metal_lite.server.openai_api import chat, completions, model_list, responses, tokenize
from vllm_metal_lite.server.security import secured
from vllm_metal_lite.server.server import Server

_ROOMS = (chat, completions, model_list, tokenize, responses, messages, live, status, metrics)


def make_app(server: Server) -> ASGIApp:
    """The ASGI application of a server whose models have been started."""

    async def health(request: Request) -> Response:
        if server.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    routes = [route for room in _ROOMS for route in room.routes(server)]
    app = Starlette(
        routes=[Route("/health", health), *routes],
        exception_handlers={HTTPException: _http_error},
    )
    return secured(app, server.config)


async def _http_error(request: Request, e: Exception) -> Response:
    """404 and 405, as JSON."""
    assert isinstance(e, HTTPException)
    path = request.url.path
    message = f"{request.method} {path}: {e.detail}"
    if e.status_code == 404:
        message = f"there is no {path} here; docs/server.md lists the endpoints"
    return error_response(ApiError(e.status_code, message, headers=e.headers), shape_for(path))
