"""`/v1/chat/completions`."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from vllm_metal_lite.server.errors import bad
from vllm_metal_lite.server.large_json import large_json
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields
from vllm_metal_lite.server.openai_api.chat_reply import Scores, chunks, whole_choices
from vllm_metal_lite.server.openai_api.logprobs import TokenNames, prompt_logprobs
from vllm_metal_lite.server.openai_api.reply import Reply, StreamOptions, check_stream
from vllm_metal_lite.server.params import OnlyText, SamplingFields, Unsupported
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.turns import answer


class ChatCompletionRequest(ConversationFields, SamplingFields):
    messages: list[dict[str, Any]]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: Any = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    modalities: OnlyText = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    use_beam_search: Unsupported = None

    def check(self) -> None:
        check_stream(self.stream, self.stream_options, self.prompt_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise bad("top_logprobs", " needs logprobs to be true")

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        fields["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return fields

    def names(self) -> dict[str, str]:
        renamed = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        return renamed

    def form(self) -> tuple[Any, str]:
        return self.response_format, "response_format"


async def chat_completions(serving: Serving, body: ChatCompletionRequest) -> Response:
    conversation = replace(
        body.conversation(body.messages), thinking_budget=body.thinking_token_budget
    )
    generation, deltas = await answer(serving, body, conversation, "chatcmpl-")
    params, last = generation.params, conversation.messages[-1]
    echoed = last["content"] if body.echo and last["role"] == "assistant" else ""
    names = TokenNames(serving.engine.tokenizer, bool(body.return_tokens_as_token_ids))
    scores = Scores(body.top_logprobs or 0, names)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    reply = Reply(kind, serving.model, [generation], body.stream_options)
    if body.stream:
        return serving.stream(reply.stream(chunks(reply, deltas, echoed, scores)))
    whole = reply.whole(await whole_choices(reply, deltas, params.n, echoed, scores))
    if params.logprobs is None and params.prompt_logprobs is None:
        return JSONResponse(whole)

    def scored() -> dict[str, Any]:
        if params.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs)
        return whole

    return await large_json(scored)
