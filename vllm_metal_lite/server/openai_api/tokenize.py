"""`/tokenize` and `/detokenize`, as vLLM has them."""

from typing import Any

from starlette.responses import Response

from vllm_metal_lite.server.body import Body
from vllm_metal_lite.server.conversations import encode_prompt, render
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.offload import offload
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields
from vllm_metal_lite.server.openai_api.prompts import token_ids_of
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.whole_json import whole_json


class TokenizeRequest(ConversationFields):
    """The request has messages or a prompt.  add_special_tokens: applies to a prompt; templates add
    their own."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "prompt or messages must be given, and not both", param="prompt")


class DetokenizeRequest(Body):
    tokens: list[Any]  # its items are checked on a thread: there may be a million


async def tokenize_text(serving: Serving, body: TokenizeRequest) -> Response:
    model = serving.model
    if body.messages is not None:
        conversation = body.conversation(body.messages, serving.pictures())
        token_ids = (await render(model, conversation, to_run=False)).token_ids
    else:
        special = body.add_special_tokens is not False
        token_ids = await offload(encode_prompt, model, body.prompt or "", special)
    names = model.tokenizer.convert_ids_to_tokens if body.return_token_strs else None

    def whole() -> dict[str, Any]:
        return {
            "count": len(token_ids),
            "max_model_len": model.facts.max_model_len,
            "tokens": token_ids,
            "token_strs": names and names(token_ids),
        }

    return await whole_json(whole)


async def detokenize(serving: Serving, body: DetokenizeRequest) -> Response:
    model, tokens = serving.model, body.tokens

    def whole() -> dict[str, Any]:
        token_ids = token_ids_of([tokens], model, False, "tokens")[0] if tokens else []
        return {"prompt": model.tokenizer.decode(token_ids)}

    return await whole_json(whole)
