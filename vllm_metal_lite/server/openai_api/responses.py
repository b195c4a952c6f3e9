"""`/v1/responses`, without a store: each request brings the whole conversation."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.conversations import ChatRequest
from vllm_metal_lite.server.deltas import Positions
from vllm_metal_lite.server.errors import bad
from vllm_metal_lite.server.openai_api.logprobs import TokenNames, chat_logprobs
from vllm_metal_lite.server.openai_api.response_events import ResponseReply
from vllm_metal_lite.server.openai_api.response_items import input_messages
from vllm_metal_lite.server.openai_api.response_tools import ResponseTools
from vllm_metal_lite.server.params import SamplingFields, Unsupported
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.turns import answer
from vllm_metal_lite.server.whole_json import whole_json

_LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(BaseModel):
    """effort: a variable of the chat template.  summary: thoughts are shown as a summary."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the older name

    @property
    def shows_summary(self) -> bool:
        return (self.summary or self.generate_summary or "none") != "none"


class ResponsesRequest(SamplingFields):
    """Fields that no method reads have no effect; `echo` repeats some."""

    input: Any
    instructions: str | None = None
    max_output_tokens: Any = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    client_metadata: Any = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: Any = None
    user: str | None = None
    background: Unsupported = None
    conversation: Unsupported = None
    max_tool_calls: Any = None
    previous_response_id: str | None = None
    prompt: Unsupported = None

    def check(self) -> None:
        if self.previous_response_id is not None:
            why = "because no response is stored: send the whole conversation"
            raise bad("previous_response_id", f" is not supported, {why}")

    def form(self) -> tuple[Any, str]:
        return (self.text or {}).get("format"), "text.format"

    def sampling(self) -> dict[str, Any]:
        scored = self.top_logprobs or _LOGPROBS in (self.include or ())
        return {**super().sampling(), "logprobs": (self.top_logprobs or 0) if scored else None}

    def echo(self, model: str, params: SamplingParams, tools: ResponseTools) -> dict[str, Any]:
        """Fields of the response that repeat the request, with the values that are in effect."""
        return {
            "model": model,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": (self.reasoning or ReasoningOptions()).model_dump(),
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "background": False,
            "text": {"format": {"type": "text"}, **(self.text or {})},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": tools.definitions,
            "truncation": "disabled",
            "user": self.user,
        }


async def create_response(serving: Serving, body: ResponsesRequest) -> Response:
    parallel = body.parallel_tool_calls is not False
    tools = ResponseTools(body.tools, body.input, body.tool_choice, parallel)
    reasoning = body.reasoning or ReasoningOptions()
    messages = input_messages(body.input, body.instructions)
    given, choice, effort = list(tools.tools.values()), tools.choice, reasoning.effort
    conversation = ChatRequest(messages, tools=given, choice=choice, effort=effort)
    request, deltas = await answer(serving, body, conversation, "resp_")
    names, top = TokenNames(serving.model.tokenizer), body.top_logprobs or 0

    def scores(token_ids: list[int], positions: Positions | None) -> list[dict[str, Any]]:
        found = chat_logprobs(token_ids, positions, top=top, names=names)
        return [] if found is None else found["content"]

    echo = body.echo(serving.model_name, request.params, tools)
    reply = ResponseReply(request, deltas, tools.callees, reasoning.shows_summary, echo, scores)
    if body.stream:
        return serving.stream(reply.stream(), reply.keep_alive)
    whole = await reply.whole()
    return await whole_json(lambda: whole)
