"""`/health`, `/version`, `/metrics` and `/status`: the server, its models, and the latest metrics
of their engines.  No answer waits for an engine.
"""

import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite import __version__
from vllm_metal_lite.engine.chat_prompt import THINKING
from vllm_metal_lite.server.served_model import Model
from vllm_metal_lite.server.server import Server


def model_status(model: Model) -> dict[str, Any]:
    """A model's state; for a loaded one, also its facts and its engine's metrics."""
    client = model.client
    status: dict[str, Any] = {
        **(dataclasses.asdict(client.facts) if client is not None else {}),
        "name": model.spec.name,
        "source": model.spec.source,
        "state": model.state,
        "pinned": model.spec.pinned,
        "error": model.error,
    }
    if client is not None:
        template, chat_format = client.model.template, client.model.chat_format
        status |= {
            "pid": client.pid,
            "start_seconds": model.stage_seconds,
            "first_token_seconds": client.first_token_seconds,
            "stuck": client.is_stuck,
            "metrics": client.metrics,
            "chat_format": chat_format.name,
            "tool_calls": chat_format.has_calls,
            "chat_template": {
                "system_in_middle": template.system_in_middle,
                "reasoning": template.reasoning,
                "variables": sorted(template.variables & {*THINKING, "tools"}),
            },
        }
    return status


def routes(server: Server) -> list[Route]:
    started = time.monotonic()

    async def status(request: Request) -> Response:
        clients = server.models.loaded.values()
        # Answers, if each engine runs as many as it has seats.
        running = sum(min(c.num_unfinished, c.facts.max_num_seqs) for c in clients)
        return JSONResponse(
            {
                "version": __version__,
                "uptime": round(time.monotonic() - started, 3),
                "draining": server.draining,
                "models": [model_status(model) for model in server.models.by_name.values()],
                "server": {
                    "running": running,
                    "waiting": sum(c.num_unfinished for c in clients) - running,
                    "max_waiting": server.config.max_waiting,
                },
            }
        )

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def health(request: Request) -> Response:
        if server.draining:
            return JSONResponse({"status": "draining"}, 503)
        if stuck := [name for name, c in server.models.loaded.items() if c.is_stuck]:
            return JSONResponse({"status": "stuck", "models": stuck}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        text, content_type = server.metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    return [Route(f"/{f.__name__}", f) for f in (health, version, metrics, status)]
