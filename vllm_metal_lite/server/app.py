"""The routes of the server."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite.server import page
from vllm_metal_lite.server.errors import openai_shape
from vllm_metal_lite.server.openai_api.chat import ChatCompletionRequest, chat_completions
from vllm_metal_lite.server.server import Server, endpoint


def make_app(server: Server) -> Starlette:
    """The ASGI application of a server whose models have been started."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "draining" if server.draining else "ok"})

    def post(path: str, body: type, handler: object, shape: object) -> Route:
        return Route(path, endpoint(server, body, handler, shape), methods=["POST"])  # type: ignore

    return Starlette(
        routes=[
            Route("/health", health),
            post("/v1/chat/completions", ChatCompletionRequest, chat_completions, openai_shape),
            *page.routes(server),
        ]
    )
