"""A conversation made ready for its next answer, for all chat APIs."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial

from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.conversations import ChatRequest, RenderedPrompt, render
from vllm_metal_lite.server.deltas import Delta, deltas
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.offload import offload
from vllm_metal_lite.server.params import SamplingFields, sampling_params
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.structured import answer_form, check_calls
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
    model: ModelText, conversation: ChatRequest, params: SamplingParams
) -> PreparedTurn:
    """Render a conversation, and give its answer the form that `params` and its choice ask for.

    Raises ApiError (400) for calls that the model cannot be made to write, RequestError for what
    the template refuses.
    """
    chat_format, choice = model.chat_format, conversation.choice
    # Tools that are not allowed stay in the prompt, so that its cached prefix still fits.
    tools = [tool for tool in conversation.tools if choice.allows(tool)]
    asked = params.structured_outputs
    form = asked
    # A continued answer is past its header, which the grammar of channels would ask for again.
    if (tools and choice.mode != "none") or "continue_final_message" not in conversation.template:
        form = await offload(answer_form, chat_format, model.grammar_tokens, tools, choice, asked)
    is_held = form is not None and form is not asked  # a grammar holds the calls
    if form is not None and is_held:
        await check_calls(form, [tool for tool in tools if choice.name in (None, tool.name)])
    prompt = await render(model, conversation)
    in_reasoning, thinking_closed = _reasoning(model, conversation, prompt)
    thinking = _thinking(model, conversation, in_reasoning, form is not None)
    bad_words, skips, special = params.bad_words, params.skip_special_tokens, model.special_tokens
    if choice.mode == "none" and tools:
        tools, bad_words = [], [*(bad_words or ()), *chat_format.call_starts]
    if form is not None and not is_held:
        tools = []  # the form has no calls
    # The parser must see the markers; other special tokens are as the client wants them.
    seen = {t for t in special if t and any(t in marker for marker in chat_format.markers)}
    hidden = frozenset(special.keys() - seen if seen and skips else ())
    params = replace(
        params,
        structured_outputs=form,
        thinking=None if thinking_closed else thinking,
        bad_words=bad_words,
        skip_special_tokens=skips and not seen,
    )
    rules = {"in_reasoning": in_reasoning, "is_held": is_held, "calls_first": asked is not None}
    # No thoughts follow the text that an answer continues, nor are they part of a form.
    may_think = not thinking_closed or (form is None and conversation.add_generation_prompt)
    rules["may_think"] = may_think
    make_parser = partial(ChatParser, chat_format, tools, hidden=hidden, **rules)
    return PreparedTurn(prompt, params, make_parser)


def _reasoning(
    model: ModelText, conversation: ChatRequest, prompt: RenderedPrompt
) -> tuple[bool, bool]:
    """(The prompt ends inside a thinking block, the prompt has already closed it)."""
    chat_format, begun = model.chat_format, ""
    if not conversation.add_generation_prompt:
        last = conversation.messages[-1]
        if last["role"] != "assistant":
            return False, False
        begun = last["content"].strip()
    # A token may be a quarter of a character.
    tail = model.tokenizer.decode(prompt.token_ids[-_TAIL - 4 * len(begun) :])
    head, thoughts = tail[: max(tail.rfind(begun), 0)], chat_format.thoughts
    if not begun or thoughts is None:
        return chat_format.opens_reasoning(head), chat_format.closes_reasoning(head)
    opened = thoughts.start if chat_format.opens_reasoning(head) else ""
    is_open = chat_format.is_thinking(opened + begun)
    return is_open, not is_open and not thoughts.in_channel


def _thinking(
    model: ModelText, conversation: ChatRequest, in_reasoning: bool, has_form: bool
) -> ThinkingParams | None:
    """The thoughts that come before the answer's form, or have a budget; None: neither."""
    thoughts, budget = model.chat_format.thoughts, conversation.thinking_budget
    if thoughts is None:
        return None
    if thoughts.in_channel and conversation.thinking_off:
        budget = 0  # the templates of such formats cannot turn thoughts off
    thinks_first = has_form and not thoughts.in_channel and (in_reasoning or model.thinks)
    if budget is None and not thinks_first:
        return None
    markers = thoughts.start, thoughts.end
    start, end = (model.tokenizer.encode(m, add_special_tokens=False) for m in markers)
    return ThinkingParams(start, end, in_reasoning, budget, thoughts.in_channel)
