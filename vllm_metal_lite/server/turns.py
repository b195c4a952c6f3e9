"""A conversation made ready for its next answer, for all chat APIs."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial

from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.conversations import ChatRequest, RenderedPrompt, render
from vllm_metal_lite.server.deltas import Delta, deltas
from vllm_metal_lite.server.offload import offload
from vllm_metal_lite.server.params import SamplingFields, sampling_params
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.structured import answer_form, check_calls
from vllm_metal_lite.server.text_model import TextModel
from vllm_metal_lite.server.worker.request_state import RequestState
from vllm_metal_lite.structured_params import ThinkingParams

_TAIL = 16  # tokens at a prompt's end that may open thoughts


@dataclass(frozen=True)
class PreparedTurn:
    """A conversation made ready for its answer.  make_parser: makes the parser of an answer."""

    prompt: RenderedPrompt
    params: SamplingParams
    make_parser: Callable[[], ChatParser]


async def answer(
    serving: Serving, body: SamplingFields, conversation: ChatRequest, prefix: str
) -> tuple[RequestState, AsyncIterator[Delta]]:
    """The request for a conversation's next answer, and its deltas.  prefix: its id's start."""
    with serving.preparing():
        params = await sampling_params(serving, body)
        turn = await prepare(serving.model, conversation, params)
    request = await serving.generate(prefix, turn.prompt, turn.params, **body.scheduling())
    return request, deltas([request], turn.make_parser, conversation.choice.parallel)


async def prepare(
    model: TextModel, conversation: ChatRequest, params: SamplingParams
) -> PreparedTurn:
    """Render a conversation, and give its answer the form that `params` and its choice ask for.

    Raises ApiError (400) for calls that the model cannot be made to write, RequestError for what
    the template refuses.
    """
    chat_format, choice = model.chat_format, conversation.choice
    # Tools that are not allowed stay in the prompt, so that its cached prefix still fits.
    tools = [tool for tool in conversation.tools if choice.allows(tool)]
    asked = params.structured_outputs
    form = await offload(answer_form, chat_format, model.grammar_tokens, tools, choice, asked)
    if form is not None and form is not asked:
        await check_calls(form, tools)
    prompt = await render(model, conversation)
    in_reasoning, thoughts_over = _reasoning(model, conversation, prompt)
    params = replace(params, structured_outputs=form)
    if choice.mode == "none" and tools:
        tools = []
        banned = [*(params.bad_words or ()), *chat_format.call_starts]
        params = replace(params, bad_words=banned)
    budget = conversation.thinking_budget
    if chat_format.thinks_in_channel and conversation.thinks_not:
        budget = 0  # the templates of such formats cannot turn thoughts off
    if (form is not None or budget is not None) and not thoughts_over:
        params = replace(params, thinking=_thinking(model, in_reasoning, budget))
    special = model.special_tokens
    seen = {t for t in special if t and any(t in marker for marker in chat_format.markers)}
    # The parser must see the markers; other special tokens are as the client wants them.
    hidden = frozenset(special.keys() - seen if seen and params.skip_special_tokens else ())
    if seen:
        params = replace(params, skip_special_tokens=False)
    make_parser = partial(ChatParser, chat_format, tools, in_reasoning=in_reasoning, hidden=hidden)
    return PreparedTurn(prompt, params, make_parser)


def _reasoning(
    model: TextModel, conversation: ChatRequest, prompt: RenderedPrompt
) -> tuple[bool, bool]:
    """(The answer begins within thoughts, its thoughts are over before it begins)."""
    chat_format = model.chat_format
    if conversation.add_generation_prompt:
        tail = model.tokenizer.decode(prompt.token_ids[-_TAIL:])
        return chat_format.opens_reasoning(tail), chat_format.closes_reasoning(tail)
    last = conversation.messages[-1]
    return last["role"] == "assistant" and chat_format.is_thinking(last["content"]), False


def _thinking(model: TextModel, in_reasoning: bool, budget: int | None) -> ThinkingParams | None:
    """None if the model does not mark thoughts or has none: a form then holds from the start."""
    if budget is None and not in_reasoning and not model.thinks:
        return None
    is_channel = model.chat_format.thinks_in_channel
    markers = model.chat_format.think_start, model.chat_format.think_end
    if not all(markers) or (is_channel and budget is None):
        return None
    start, end = (model.tokenizer.encode(m, add_special_tokens=False) for m in markers)
    return ThinkingParams(start, end, in_reasoning, budget, is_channel)
