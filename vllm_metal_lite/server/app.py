"""The routes of the server."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite.server.anthropic_api import messages
from vllm_metal_lite.server.openai_api import chat, completions, model_list, responses, tokenize
from vllm_metal_lite.server.server import Server


def make_app(server: Server) -> Starlette:
    """The ASGI application of a server whose models have been started."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "draining" if server.draining else "ok"})

    rooms = (chat, completions, model_list, tokenize, responses, messages)
    routes = [route for room in rooms for route in room.routes(server)]
    return Starlette(routes=[Route("/health", health), *routes])
