"""Conversations to token ids, off the event loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.engine.chat_checkpoints import Message, num_systems
from vllm_metal_lite.engine.chat_prompt import ChatPrompt
from vllm_metal_lite.engine.prompt_ids import encode
from vllm_metal_lite.errors import PromptTooLong
from vllm_metal_lite.images.family import Prepared
from vllm_metal_lite.images.prompts import expand
from vllm_metal_lite.server.errors import ContextOverflow
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.offload import check_wanted, offload
from vllm_metal_lite.server.pictures import TEXT_ONLY, Pictures, place
from vllm_metal_lite.server.request_limits import num_characters
from vllm_metal_lite.server.templates import Template

_ANY = ToolChoice()


@dataclass(frozen=True)
class ChatRequest:
    """A conversation, in one form for the three chat APIs.

    messages: messages in the form of chat templates: role ("system", "user", "assistant", "tool"),
    content (text, or parts if it has pictures), tool_calls, reasoning_content, ...
    template: more variables for the template.
    enable_thinking, effort: whether, and how much, to think; None: the template's default.
    thinking_budget: the largest number of tokens of thoughts.
    choice: the calls that the answer may or must make.
    pictures: those of the messages.
    """

    messages: Sequence[Message]
    template: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    tools: Sequence[Tool] = ()
    choice: ToolChoice = _ANY
    enable_thinking: bool | None = None
    effort: str | None = None
    thinking_budget: int | None = None
    pictures: Pictures = field(default_factory=lambda: TEXT_ONLY)

    def variables(self, template: Template) -> dict[str, Any]:
        """The variables that the template is rendered with."""
        tools = [tool.for_template() for tool in self.tools]
        return {
            **template.thinking(self.enable_thinking, self.effort),
            **self.template,
            **({"tools": tools} if tools else {}),
        }


class Rendered(NamedTuple):
    """A rendered prompt.

    checkpoints: numbers of tokens that other prompts may share before they differ.
    pictures: the prompt's pictures, whose tokens are among token_ids.
    """

    token_ids: list[int]
    checkpoints: tuple[int, ...]
    pictures: Sequence[Prepared] = ()


def join_systems(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages at the front, because most templates take only one."""
    num_first = num_systems(messages)
    if num_first < 2:
        return list(messages)
    texts = (message["content"] for message in messages[:num_first])
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[num_first:]]


async def render(model: ModelText, conversation: ChatRequest, *, to_run: bool = True) -> Rendered:
    """Render a conversation with the model's chat template.  Raises RequestError with the
    template's message, ContextOverflow for a conversation that is far too long.

    to_run: False if the caller needs only the tokens, and no checkpoints.
    """
    await conversation.pictures.fetch()
    with_checkpoints = to_run and model.facts.uses_checkpoints
    return await offload(render_prompt, model, conversation, with_checkpoints)


def render_prompt(model: ModelText, conversation: ChatRequest, with_checkpoints: bool) -> Rendered:
    """`render` on the caller's thread.  Raises ApiError (400) for a picture that cannot be read.

    with_checkpoints: also find checkpoints, for models whose requests can start at some positions
    only.
    """
    if (adapt := model.chat_format.adapt) is not None:
        conversation = replace(conversation, messages=adapt(conversation.messages))
    check_length(model, (conversation.messages, conversation.template))
    template, most = model.template, model.max_prompt_tokens
    messages: Sequence[Message] = template.prepare(conversation.messages)
    how = conversation.add_generation_prompt, conversation.variables(template)
    pictures: list[Prepared] = []
    with_pictures: Callable[[str], str] = str
    found = conversation.pictures.found
    if found and (processor := model.processor) is not None:
        messages, pictures = place(
            processor, found, messages, lambda given: template.render(given, *how)
        )
        with_pictures = partial(expand, family=processor.family, pictures=pictures)
    with overflow(model):
        prompt = ChatPrompt(
            model.tokenizer,
            model.facts.name,
            with_checkpoints,
            render=template.render,
            encode_text=partial(model.encode_text, most=most, check=check_wanted),
            expand=with_pictures,
        )
        return Rendered(*prompt.turn(messages, *how), pictures)
    raise AssertionError("`overflow` hides no exception")


@contextmanager
def overflow(model: ModelText) -> Iterator[None]:
    """Raises ContextOverflow for a prompt whose tokens are too many to count."""
    try:
        yield
    except PromptTooLong as e:
        raise ContextOverflow(e.num_tokens, model.facts.max_model_len) from None


def check_length(model: ModelText, texts: Any) -> None:
    """Raise ContextOverflow for texts that no tokenizer could make fit the context."""
    if (size := num_characters(texts)) > model.max_characters:
        why = f" It has {size} characters, and no more than {model.max_characters} can fit."
        raise ContextOverflow(size // model.longest_token, model.facts.max_model_len, why)


def encode_prompt(model: ModelText, prompt: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a plain text.  Raises RequestError or ContextOverflow."""
    check_length(model, prompt)
    with overflow(model):
        model.encode_text.check_size(prompt, model.max_prompt_tokens, check_wanted)
    return encode(prompt, model.tokenizer, add_special_tokens=add_special_tokens)
