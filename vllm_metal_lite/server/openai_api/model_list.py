"""`/v1/models`: the models that requests may name."""

import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite.server.body import Body, read_body
from vllm_metal_lite.server.served_model import Model
from vllm_metal_lite.server.server import Server, Serving, endpoint

POSTS = "/v1/models/load", "/v1/models/unload"


def routes(server: Server) -> list[Route]:
    created = int(time.time())

    def entry(model: Model) -> dict[str, Any]:
        """A model as clients see it.

        max_model_len: vLLM's name of the context's length; None before the model's first load.
        context_length: the name in other servers; the value comes from the model's files before the
        first load.
        thinking: whether the chat template knows of thoughts; None unless the model is loaded.
        capabilities: ["completion"], or ["embedding"] for a model of embeddings or scores.
        input_modalities: ["text"], or ["text", "image"]; None before the first load.
        """
        name = model.spec.name
        facts = model.facts
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm-metal-lite",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "root": model.spec.source,
            "max_model_len": facts and facts.max_model_len,
            "context_length": facts.max_model_len if facts else model.context,
            "capabilities": ["embedding" if model.only_pools else "completion"],
            "thinking": model.client.model.can_think if model.client else None,
            "input_modalities": facts and ["text", *["image"] * (facts.no_pictures is None)],
            "state": model.state,
            "error": model.error,
        }

    async def models(request: Request) -> Response:
        data = [entry(model) for model in server.models.by_name.values()]
        # Anthropic's client reads these fields.
        page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return JSONResponse({"object": "list", "data": data, **page})

    async def model(request: Request) -> Response:
        return JSONResponse(entry(server.models.find(request.path_params["name"])))

    async def unload(request: Request) -> Response:
        body = read_body(Body, await request.body())
        return JSONResponse(entry(await server.models.unload(body.model)))

    async def load(serving: Serving, body: Body) -> Response:
        return JSONResponse(entry(server.models.find(serving.model_name)))

    return [
        Route("/v1/models", models),
        Route(POSTS[0], endpoint(server, Body, load), methods=["POST"]),
        Route(POSTS[1], unload, methods=["POST"]),
        Route("/v1/models/{name:path}", model),
    ]
