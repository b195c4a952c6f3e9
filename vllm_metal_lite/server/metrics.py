"""`/metrics`: what `prometheus.py` counts."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_metal_lite.server.server import Server


def routes(server: Server) -> list[Route]:
    async def metrics(request: Request) -> Response:
        text, content_type = server.metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    return [Route("/metrics", metrics)]
