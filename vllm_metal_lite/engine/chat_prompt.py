"""Conversations to token ids, under a model's chat template."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.engine.chat_checkpoints import Message, chat_checkpoints
from vllm_metal_lite.engine.prompt_ids import check_text
from vllm_metal_lite.errors import Option, RequestError, one_line, show

# Roles that chat templates know; a template may name others.
_ROLES = ("system", "user", "assistant", "tool")
# Variables of templates that say whether, and how much, a model thinks.
THINKING = frozenset(("enable_thinking", "reasoning_effort", "thinking"))
# Renders a conversation: (messages, add_generation_prompt, extra template variables) to text.
Render = Callable[[Sequence[Message], bool, Mapping[str, Any]], str]


@dataclass(frozen=True)
class ChatPrompt:
    """Makes the prompts of conversations.

    model: the model's name, for errors.  with_checkpoints: whether to look for checkpoints.
    render: renders conversations; None: the template of `tokenizer` does.
    encode_text: makes token ids, as a PieceEncoder does; None: `tokenizer` makes them.
    expand: adds the rows of pictures to a rendered text.
    """

    tokenizer: TokenizerWrapper | None
    model: str
    with_checkpoints: bool
    render: Render | None = None
    encode_text: Callable[[str], list[int]] | None = None
    expand: Callable[[str], str] = str

    def turn(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> tuple[list[int], tuple[int, ...]]:
        """(Token ids, `chat_checkpoints`) of a conversation.

        variables: extra template variables.  Raises RequestError, with the template's own words.
        """
        _check_arguments(messages, add_generation_prompt)
        tokenizer = self.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise RequestError(
                f"{self.model} has no chat template, so it takes no messages: "
                "give it a prompt (text or token ids)"
            )
        render = self.render or partial(by_template, tokenizer)
        encode_text = self.encode_text or partial(tokenizer.encode, add_special_tokens=False)
        try:
            _check_roles(tokenizer, messages)
            check_text("messages", messages)
            text = render(messages, add_generation_prompt, variables)
            if is_text := isinstance(text, str):
                text = self.expand(text)
            token_ids = encode_text(text) if is_text else None
        except RequestError:
            raise
        except Exception as e:  # templates raise any error, as for unknown roles
            raise RequestError(f"the chat template refuses these messages: {one_line(e)}") from e
        if token_ids is None:
            raise RequestError(f"the chat template returns {show(text)} for {show(variables)}")
        if not self.with_checkpoints:
            return token_ids, ()
        others = {k: v for k, v in variables.items() if k != "continue_final_message"}
        return token_ids, chat_checkpoints(
            text,
            token_ids,
            messages,
            add_generation_prompt,
            lambda alike: self.expand(render(alike, False, others)),
            encode_text,
        )


def by_template(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """A conversation as text, as transformers renders it.  Raises what the template raises.

    mlx-lm's wrapper itself sets `enable_thinking`, by the vocabulary, where the user does not.
    """
    given = dict(variables)
    if "enable_thinking" in given:  # Python code that comes with a model may have another name
        given[tokenizer._thinking_kwarg] = given.pop("enable_thinking")
    render = tokenizer._chat_template
    if render is None:  # without `partial`: a variable named `tokenize` must raise
        render, given = tokenizer._tokenizer.apply_chat_template, dict(tokenize=False, **given)
    text: str = render(list(messages), add_generation_prompt=add_generation_prompt, **given)
    return text


def template_source(tokenizer: TokenizerWrapper) -> str:
    """The text of the chat template, or of all of them; "" if Python code renders."""
    template = tokenizer.chat_template
    return "".join(
        map(str, template.values() if isinstance(template, Mapping) else [template or ""])
    )


def template_variables(tokenizer: TokenizerWrapper) -> frozenset[str]:
    """The variables that a chat template reads."""
    source = template_source(tokenizer)
    try:
        parsed = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError:  # transformers knows more tags, such as `generation`
        return frozenset(name for name in (*THINKING, "tools") if name in source)
    return frozenset(meta.find_undeclared_variables(parsed))


def thinking_switch(variables: Container[str], enabled: bool) -> dict[str, bool]:
    """The variables that turn thoughts on or off in a template that reads `variables`."""
    names = [name for name in ("enable_thinking", "thinking") if name in variables]
    return dict.fromkeys(names or ["enable_thinking"], enabled)


def _check_arguments(messages: Any, add_generation_prompt: Any) -> None:
    """Raise RequestError for arguments of the wrong type."""
    is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
    if not is_list or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str)
        for message in messages
    ):
        needed = "a list of at least one dict with role and content"
        raise RequestError(Option("messages"), f" must be {needed}, got {show(messages)}")
    if not isinstance(add_generation_prompt, bool):
        raise RequestError(
            f"add_generation_prompt must be true or false, got {show(add_generation_prompt)}"
        )


def _check_roles(tokenizer: TokenizerWrapper, messages: Sequence[Message]) -> None:
    """Raise RequestError for a role that the chat template does not name: many templates leave
    such messages out."""
    source = template_source(tokenizer)  # "": the Python code refuses by itself
    for role in dict.fromkeys(message["role"] for message in messages):
        if role not in _ROLES and source and f"'{role}'" not in source.replace('"', "'"):
            raise RequestError(
                f"the role of a message must be one of {', '.join(_ROLES)}, got {show(role)}"
            )
