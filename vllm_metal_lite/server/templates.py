"""What a model's chat template accepts, found by a probe; and system messages in other places.

Some clients put a system message in the middle of a conversation.  Many templates refuse it there.
Moving it to the front would change the whole prompt, so that no cached prefix fits.  In a user's
turn it would have only the user's authority.  So this module renders the conversation without the
message, and inserts the message in its place, in the form of a system turn at the front.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.engine.chat_checkpoints import Message, num_common, num_systems
from vllm_metal_lite.engine.chat_prompt import (
    by_template,
    template_source,
    template_variables,
    thinking_switch,
)
from vllm_metal_lite.server.offload import check_wanted

Variables = Mapping[str, Any]
# A message's content: text, or parts of the types "text" and "image".
Content = str | list[dict[str, Any]]

_SYSTEM, _USER = "\u2042s\u2042", "\u2042u\u2042"
_OTHER: Message = {"role": "user", "content": _USER}
_ANSWER: Message = {"role": "assistant", "content": _USER}
# Names of the field that holds thoughts, in the order of preference.
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Other efforts than those that all templates know, with the nearest of these; "none" turns
# thoughts off by the template's switch.
_EFFORTS = {"none": None, "minimal": "low", "xhigh": "high", "max": "high"}


@dataclass(frozen=True)
class Template:
    """How a tokenizer's chat template renders conversations.

    system_in_middle: "native": the template takes such messages; "inserted": this module puts
    them in their place, between `head` and `tail`; "in user turn": the template has no system turns
    that could be copied, so they become text of the user.
    reasoning: the name of the message field that holds thoughts; empty if the template shows none.
    variables: the names of the variables that the template reads.
    efforts: the keys of _EFFORTS that the template names.
    """

    tokenizer: TokenizerWrapper
    system_in_middle: Literal["native", "inserted", "in user turn"]
    reasoning: str = ""
    variables: frozenset[str] = frozenset()
    efforts: frozenset[str] = frozenset()
    head: str = ""
    tail: str = ""
    user_head: str = ""

    def thinking(self, enabled: bool | None, effort: str | None) -> dict[str, Any]:
        """Variables of the template that say whether, and how much, a model thinks."""
        if effort == "none":
            enabled = False
        if effort not in self.efforts:
            effort = _EFFORTS.get(str(effort), effort)
        found: dict[str, Any] = {}
        if enabled is not None:
            found |= thinking_switch(self.variables, enabled)
        if effort is not None:
            found["reasoning_effort"] = effort
        return found

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Messages whose thoughts are where the template looks for them."""
        prepared: list[Message] = []
        for message in messages:
            thoughts = next((message[name] for name in _REASONING if message.get(name)), None)
            rest = {k: v for k, v in message.items() if k not in _REASONING}
            if thoughts is not None and self.reasoning:
                rest[self.reasoning] = thoughts
            prepared.append(rest)
        return prepared

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Variables
    ) -> str:
        """A conversation as text.  Raises what the template raises."""
        as_text = partial(by_template, self.tokenizer)
        front = num_systems(messages)
        kept, rest = list(messages[:front]), messages[front:]
        if self.system_in_middle == "native" or all(m.get("role") != "system" for m in rest):
            return as_text(messages, add_generation_prompt, variables)
        if self.system_in_middle == "in user turn":
            return as_text(_in_user_turns(messages), add_generation_prompt, variables)
        late: list[tuple[int, str]] = []  # messages before a system message, and its text
        for message in rest:
            if message["role"] == "system":
                late.append((len(kept), message["content"]))
            else:
                kept.append(message)
        text = as_text(kept, add_generation_prompt, variables)
        plain = {k: v for k, v in variables.items() if k != "continue_final_message"}
        for count, content in reversed(late):
            check_wanted()
            at = self._end(kept, count, text, plain)
            text = f"{text[:at]}{self.head}{content}{self.tail}{text[at:]}"
        return text

    def _end(self, messages: Sequence[Message], count: int, text: str, variables: Variables) -> int:
        """Where the first `count` messages end in `text`: after the longest prefix that `text`
        shares with other continuations of these messages.  Several are tried, because some
        templates render messages differently once a user's message follows."""
        longest = 0
        for continuation in ([], [_OTHER], [_ANSWER]) if count < len(messages) else ([],):
            begun = [*messages[:count], *continuation]
            whole = by_template(self.tokenizer, begun, False, variables)
            end = num_common(text, whole)
            if end < len(whole):
                common = text[:end]
                end = len(common.removesuffix(self.user_head))
                if self.tail:
                    end = common.rfind(self.tail) + len(self.tail)
            longest = max(longest, end)
        return longest


def _in_user_turns(messages: Sequence[Message]) -> list[Message]:
    """The messages with later system messages as text of the user; messages of the user in a row
    become one."""
    count = num_systems(messages)
    kept = list(messages[:count])
    for message in messages[count:]:
        role, content = message.get("role"), message["content"]
        if role == "system":
            role, content = "user", f"<system>\n{content}\n</system>"
            message = {"role": role, "content": content}
        if role == "user" and kept and kept[-1].get("role") == "user":
            last = kept.pop()
            message = {**last, "content": together(last["content"], content)}
        kept.append(message)
    return kept


def together(first: Content, second: Content) -> Content:
    """Two contents as one, with an empty line between texts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def probe(tokenizer: TokenizerWrapper) -> Template:
    """The features of a tokenizer's chat template."""
    source = template_source(tokenizer)
    reasoning = next((name for name in _REASONING if _reads(source, name)), "")
    variables = template_variables(tokenizer)
    named = {name for name in _EFFORTS if f"'{name}'" in source or f'"{name}"' in source}
    efforts = frozenset(named if "reasoning_effort" in variables else ())

    def render(*messages: Message) -> str | None:
        try:
            return by_template(tokenizer, messages, False, {})
        except Exception:  # templates raise any error
            return None

    system, user = {"role": "system", "content": _SYSTEM}, _OTHER
    before, middle = render(user), render(user, system, user)
    if before and middle and middle.startswith(before):
        rest = middle[len(before) :]
        if -1 < rest.find(_SYSTEM) < rest.find(_USER):
            return Template(tokenizer, "native", reasoning, variables, efforts)
    front = render(system, user)
    turns = _turns(front)
    if turns is None:
        return Template(tokenizer, "in user turn", reasoning, variables, efforts)
    return Template(tokenizer, "inserted", reasoning, variables, efforts, *turns)


def _turns(front: str | None) -> tuple[str, str, str] | None:
    """(head of a system turn, tail of both turns, head of a user turn); None if the turns differ in
    more than the role.

    front: the text of a system turn and a user turn.
    """
    if front is None or not -1 < front.find(_SYSTEM) < front.find(_USER):
        return None
    first, rest = front.split(_SYSTEM, 1)
    between, tail = rest.split(_USER, 1)
    if not between.startswith(tail) or between == tail:
        return None
    user_head = between[len(tail) :]
    head = user_head.replace("user", "system", 1)
    if head == user_head or not first.endswith(head):
        return None
    return head, tail, user_head


def _reads(source: str, name: str) -> bool:
    """Whether a template reads this field of messages."""
    return any(f in source for f in (f".{name}", f"'{name}'", f'"{name}"'))
