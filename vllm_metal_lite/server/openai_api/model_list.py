"""`/v1/models`: the models that requests may name."""

import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite.server.errors import ApiError, error_response, openai_shape
from vllm_metal_lite.server.server import Server


def routes(server: Server) -> list[Route]:
    created = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        """max_model_len is vLLM's name, None unless the model is loaded.  context_length is that of
        other servers: of a model that is not loaded, what its files say."""
        model = server.models.models[name]
        limit = model.client.facts.max_model_len if model.client else None
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm-metal-lite",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "root": model.spec.source,
            "max_model_len": limit,
            "context_length": limit or model.context,
            "state": model.state,
            "error": model.error,
        }

    async def models(request: Request) -> Response:
        names = list(server.models.specs)
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's
        return JSONResponse({"object": "list", "data": [entry(n) for n in names], **ends})

    async def model(request: Request) -> Response:
        try:
            return JSONResponse(entry(server.models.find(request.path_params["name"]).spec.name))
        except ApiError as e:
            return error_response(e, openai_shape)

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", model)]
