"""`/tokenize` and `/detokenize`, as vLLM has them."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite.engine.prompts import tokenize
from vllm_metal_lite.server.errors import ApiError, openai_shape
from vllm_metal_lite.server.offload import offload
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields
from vllm_metal_lite.server.prompts import encode_prompt, render
from vllm_metal_lite.server.server import Body, Server, endpoint


class TokenizeRequest(ConversationFields):
    """messages, or a prompt.  add_special_tokens: of a prompt; templates add their own."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


async def tokenize_text(server: Server, request: Request, body: TokenizeRequest) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt or messages must be given, and not both", param="prompt")
    async with server.models.use(body.model) as (_, engine):
        if body.messages is not None:
            conversation, _ = body.conversation(body.messages)
            prompt = await render(engine, conversation, to_run=False)
            token_ids = prompt.token_ids
        else:
            special = body.add_special_tokens is not False
            token_ids = await offload(encode_prompt, engine, body.prompt or "", special)
        reply: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": engine.facts.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            reply["token_strs"] = engine.tokenizer.convert_ids_to_tokens(token_ids)
    return JSONResponse(reply)


async def detokenize(server: Server, request: Request, body: DetokenizeRequest) -> Response:
    async with server.models.use(body.model) as (_, engine):
        if body.tokens:
            tokenize(body.tokens, None, engine.facts.vocab_size)  # refuses unknown ids
        text = await offload(engine.tokenizer.decode, body.tokens)
    return JSONResponse({"prompt": text})


def routes(server: Server) -> list[Route]:
    return [
        Route(path, endpoint(server, body, handler, openai_shape), methods=["POST"])  # type: ignore
        for path, body, handler in (
            ("/tokenize", TokenizeRequest, tokenize_text),
            ("/detokenize", DetokenizeRequest, detokenize),
        )
    ]
