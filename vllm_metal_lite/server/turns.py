"""A conversation made ready for its next answer, for all chat APIs."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial

from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.conversations import ChatRequest, Rendered, render
from vllm_metal_lite.server.deltas import deltas
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.offload import offload
from vllm_metal_lite.server.params import SamplingFields, sampling_params
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.structured import answer_form, check_calls
from vllm_metal_lite.server.worker.messages import Delta
from vllm_metal_lite.server.worker.request_state import RequestState
from vllm_metal_lite.structured_params import ThinkingParams

_TAIL = 16  # tokens at a prompt's end that may open thoughts


@dataclass(frozen=True)
class PreparedTurn:
    """A conversation made ready for its answer.

    make_parser: makes the parser of an answer.
    """

    prompt: Rendered
    params: SamplingParams
    make_parser: Callable[[], ChatParser]


async def answer(
    serving: Serving, body: SamplingFields, conversation: ChatRequest, prefix: str
) -> tuple[RequestState, AsyncIterator[Delta]]:
    """The request for a conversation's next answer, and the answer's deltas.

    prefix: the start of the request's id.
    """
    with serving.preparing():
        params = await sampling_params(serving, body)
        turn = await prepare(serving.model, conversation, params)
    token_ids, checkpoints, pictures = turn.prompt
    options = {"checkpoints": checkpoints, "pictures": pictures, **body.scheduling()}
    request = await serving.generate(prefix, token_ids, turn.params, **options)
    return request, deltas([request], turn.make_parser, conversation.choice.parallel)


async def prepare(
    model: ModelText, conversation: ChatRequest, params: SamplingParams
) -> PreparedTurn:
    """Render a conversation, and give its answer the form that `params` and its choice ask for.

    Raises ApiError (400) for calls that the model cannot be made to write, RequestError for what
    the template refuses.
    """
    chat_format, choice = model.chat_format, conversation.choice
    # The prompt also shows tools that are not allowed, so that its cached prefix still fits.
    tools = [tool for tool in conversation.tools if choice.allows(tool)]
    form = asked = params.structured_outputs
    # A continued answer has its header, and the grammar of channels would ask for another.
    if (tools and choice.mode != "none") or "continue_final_message" not in conversation.template:
        form = await offload(answer_form, chat_format, model.grammar_tokens, tools, choice, asked)
    is_held = form is not None and form is not asked  # a grammar holds the calls
    if form is not None and is_held:
        await check_calls(form, [tool for tool in tools if choice.name in (None, tool.name)])
    prompt = await render(model, conversation)
    in_reasoning, thinking_closed = _reasoning(model, conversation, prompt.token_ids)
    thinking = _thinking(model, conversation, in_reasoning, form is not None)
    bad_words, skips, special = params.bad_words, params.skip_special_tokens, model.special_tokens
    if choice.mode == "none" and tools:
        tools, bad_words = [], [*(bad_words or ()), *chat_format.call_starts]
    if form is not None and not is_held:
        tools = []  # the form has no calls
    # The parser must see the markers.  The client decides about other special tokens.
    seen = {t for t in special if t and any(t in marker for marker in chat_format.markers)}
    hidden = frozenset(special.keys() - seen if seen and skips else ())
    params = replace(
        params,
        structured_outputs=form,
        thinking=None if thinking_closed else thinking,
        bad_words=bad_words,
        skip_special_tokens=skips and not seen,
    )
    make_parser = partial(
        ChatParser,
        chat_format,
        tools,
        hidden=hidden,
        in_reasoning=in_reasoning,
        is_held=is_held,
        calls_first=asked is not None,
        # No thoughts follow the text that an answer continues, and a form has none.
        may_think=not thinking_closed or (form is None and conversation.add_generation_prompt),
    )
    return PreparedTurn(prompt, params, make_parser)


def _reasoning(
    model: ModelText, conversation: ChatRequest, token_ids: list[int]
) -> tuple[bool, bool]:
    """(Whether the prompt ends inside a thinking block, whether it has closed one already)."""
    chat_format, begun = model.chat_format, ""
    if not conversation.add_generation_prompt:
        last = conversation.messages[-1]
        if last["role"] != "assistant":
            return False, False
        begun = last["content"].strip()
    # Four tokens a character, because a token may be a quarter of one.
    tail = model.tokenizer.decode(token_ids[-_TAIL - 4 * len(begun) :])
    head, thoughts = tail[: max(tail.rfind(begun), 0)], chat_format.thoughts
    if not begun or thoughts is None:
        return chat_format.opens_reasoning(head), chat_format.closes_reasoning(head)
    opened = thoughts.start if chat_format.opens_reasoning(head) else ""
    is_open = chat_format.is_thinking(opened + begun)
    return is_open, not is_open and not thoughts.in_channel


def _thinking(
    model: ModelText, conversation: ChatRequest, in_reasoning: bool, has_form: bool
) -> ThinkingParams | None:
    """The parameters of thoughts that come before the answer's form, or have a budget; None if
    neither is so."""
    thoughts, budget = model.chat_format.thoughts, conversation.thinking_budget
    if thoughts is None:
        return None
    is_off = conversation.effort == "none" or conversation.enable_thinking is False
    if thoughts.in_channel and is_off:
        budget = 0  # the templates of such formats cannot turn thoughts off
    thinks_first = has_form and not thoughts.in_channel and (in_reasoning or model.thinks)
    if budget is None and not thinks_first:
        return None
    markers = thoughts.start, thoughts.end
    start, end = (model.tokenizer.encode(m, add_special_tokens=False) for m in markers)
    return ThinkingParams(start, end, in_reasoning, budget, thoughts.in_channel)
