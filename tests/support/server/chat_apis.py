"""Three chat APIs, asked the same through their official clients; what they say, in one form."""

import json
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

from tests.support.server.kit import OPTIONS
from tests.support.server.scripted import hermes_call

TOOLS = {"run": {"cmd": {"type": "string"}}, "wait": {"seconds": {"type": "integer"}}}
ASKED = {"role": "user", "content": "Go on."}
CMD = 'echo "</tool_call>" \u00e9'
SAID = f"Let me see.\n{hermes_call('run', cmd=CMD)}\n{hermes_call('wait', seconds=3)}"
ANSWER = f"<think>\nI look.\n</think>\n\n{SAID}"
PARTS = [("thoughts", "I look."), ("text", "Let me see.")]
PARTS += [("call", "run", {"cmd": CMD}), ("call", "wait", {"seconds": 3})]


@dataclass
class Reply:
    """parts: ("thoughts", text), ("text", text) and ("call", name, arguments), in order.

    end: "stop", "length" or "tool_calls".
    """

    parts: list[tuple[Any, ...]]
    end: str | None
    num_tokens: int = field(compare=False)

    def joined(self, kind: str) -> str:
        return "".join(part[1] for part in self.parts if part[0] == kind)


def object_of(arguments: str) -> Any:
    """Text that is no JSON stays as it is."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def schema_of(properties: dict) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties)}


class Api:
    """An API and its clients.

    sync, asynchronous: the official clients.  prefix: the end of their base URL.
    final: the name of a stream's method that gives the whole answer.
    """

    sync, asynchronous, prefix, final = openai.OpenAI, openai.AsyncOpenAI, "/v1", ""

    def __init__(self, url: str) -> None:
        self._options = {"base_url": url + self.prefix, **OPTIONS}
        self.client = self.sync(**self._options)

    def create(self, **fields) -> Any:
        """The client's own reply.  fields: more fields of the request."""
        return self.of(self.client).create(**{**self.request(), **fields})

    def whole(self, **how) -> Reply:
        return self.read(self.create(**self.request(**how)))

    def streamed(self, **how) -> Reply:
        """As the client adds the events up."""
        with self.of(self.client).stream(**self.request(**how)) as stream:
            return self.read(getattr(stream, self.final)())

    async def asked(self) -> list[Reply]:
        """Whole and streamed, by the asynchronous client."""
        async with self.asynchronous(**self._options) as client:
            whole = await self.of(client).create(**self.request())
            async with self.of(client).stream(**self.request()) as stream:
                return [self.read(whole), self.read(await getattr(stream, self.final)())]


class Chat(Api):
    final = "get_final_completion"

    def of(self, client):
        return client.chat.completions

    def request(self, tools=TOOLS, choice=None, parallel=True) -> dict:
        functions = [{"name": name, "parameters": schema_of(p)} for name, p in tools.items()]
        tools = [{"type": "function", "function": f} for f in functions]
        asked = {"model": "demo", "messages": [ASKED], "tools": tools}
        asked |= {"parallel_tool_calls": parallel}
        return asked | choice_of(choice, {"type": "function", "function": {"name": choice}})

    @staticmethod
    def read(completion) -> Reply:
        [choice], usage = completion.choices, completion.usage
        message, calls = choice.message, choice.message.tool_calls or []
        thoughts = getattr(message, "reasoning", None)
        assert message.role == "assistant"
        assert getattr(message, "reasoning_content", None) == thoughts
        assert {call.type for call in calls} <= {"function"}
        assert len({call.id for call in calls}) == len(calls)
        if usage and thoughts:
            thought = usage.completion_tokens_details.reasoning_tokens
            assert 0 < thought <= usage.completion_tokens
        parts = [part for part in (("thoughts", thoughts), ("text", message.content)) if part[1]]
        parts += [("call", c.function.name, object_of(c.function.arguments)) for c in calls]
        return Reply(parts, choice.finish_reason, usage.completion_tokens if usage else -1)

    def gathered(self, **how) -> Reply:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(self.of(self.client).create(**self.request(**how), **options))
        [found] = gathered(chunks)
        texts = ("thoughts", found["thoughts"]), ("text", found["content"])
        parts = [part for part in texts if part[1]]
        parts += [("call", name, object_of(arguments)) for name, arguments in found["calls"]]
        return Reply(parts, found["end"], chunks[-1].usage.completion_tokens)


def gathered(chunks) -> list[dict]:
    """The choices that chunks come to, as a client without a library of its own adds them up."""
    choices = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found = choices.setdefault(
                choice.index, {"content": "", "thoughts": "", "calls": [], "end": None}
            )
            assert found["end"] is None, "a chunk behind the last"
            delta = choice.delta
            found["content"] += delta.content or ""
            found["thoughts"] += getattr(delta, "reasoning_content", None) or ""
            for piece in delta.tool_calls or ():
                if piece.id is not None:
                    assert piece.index == len(found["calls"])
                    assert (piece.type, piece.function.arguments) == ("function", "")
                    found["calls"].append([piece.function.name, ""])
                else:
                    assert (piece.type, piece.function.name) == (None, None)
                    assert piece.index == len(found["calls"]) - 1
                    assert piece.function.arguments
                    found["calls"][-1][1] += piece.function.arguments
            found["end"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)]


class Responses(Api):
    final = "get_final_response"

    def of(self, client):
        return client.responses

    def request(self, tools=TOOLS, choice=None, parallel=True) -> dict:
        functions = [
            {"type": "function", "name": name, "parameters": schema_of(p)}
            for name, p in tools.items()
        ]
        asked = {"model": "demo", "input": [ASKED], "tools": functions}
        asked |= {"parallel_tool_calls": parallel}
        return asked | choice_of(choice, {"type": "function", "name": choice})

    def read(self, response) -> Reply:
        parts, end = [], {"completed": "stop", "incomplete": "length"}[response.status]
        for item in response.output:
            if item.type == "function_call":
                parts.append(("call", item.name, object_of(item.arguments)))
                end = "tool_calls" if (end, item.status) == ("stop", "completed") else end
            else:
                kind = "thoughts" if item.type == "reasoning" else "text"
                parts.append((kind, item.content[0].text))
        assert len({item.id for item in response.output}) == len(response.output)
        return Reply(parts, end, response.usage.output_tokens)

    def gathered(self, **how) -> Reply:
        events = list(self.of(self.client).create(**self.request(**how), stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == last.output
        deltas = "".join(event.delta for event in events if event.type.endswith(".delta"))
        texts = (i.arguments if i.type == "function_call" else i.content[0].text for i in done)
        assert deltas == "".join(texts)
        return self.read(last)


class Messages(Api):
    sync, asynchronous, prefix = anthropic.Anthropic, anthropic.AsyncAnthropic, ""
    final = "get_final_message"

    def of(self, client):
        return client.messages

    def request(self, tools=TOOLS, choice=None, parallel=True) -> dict:
        definitions = [{"name": name, "input_schema": schema_of(p)} for name, p in tools.items()]
        asked = {"model": "demo", "max_tokens": 1000, "messages": [ASKED], "tools": definitions}
        kinds = {None: "auto", "none": "none", "required": "any"}
        chosen = {"type": kinds[choice]} if choice in kinds else {"type": "tool", "name": choice}
        if choice != "none":
            chosen["disable_parallel_tool_use"] = not parallel
        return {**asked, "tool_choice": chosen}

    def read(self, message) -> Reply:
        parts = []
        for block in message.content:
            if block.type == "tool_use":
                assert block.id.startswith("toolu_")
                parts.append(("call", block.name, block.input.get("INVALID_JSON", block.input)))
            else:
                kind = {"thinking": "thoughts", "text": "text"}[block.type]
                parts.append((kind, getattr(block, block.type)))
        assert message.stop_sequence is None
        return Reply(parts, END[message.stop_reason], message.usage.output_tokens)

    def gathered(self, **how) -> Reply:
        blocks, open_at, kinds = [], None, []
        for event in self.of(self.client).create(**self.request(**how), stream=True):
            kinds.append(event.type)
            if event.type == "content_block_start":
                assert open_at is None
                assert event.index == len(blocks)
                open_at, block = event.index, event.content_block
                blocks.append([block.type, getattr(block, "name", ""), ""])
                assert block.type != "tool_use" or block.input == {}
            elif event.type == "content_block_delta":
                assert event.index == open_at
                name = event.delta.type.removesuffix("_delta").replace("input", "partial")
                blocks[-1][2] += getattr(event.delta, name)
            elif event.type == "content_block_stop":
                assert event.index == open_at
                open_at = None
            elif event.type == "message_delta":
                assert open_at is None
                end, num_tokens = END[event.delta.stop_reason], event.usage.output_tokens
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        parts = [
            ("call", name, object_of(text))
            if kind == "tool_use"
            else ("thoughts" if kind == "thinking" else kind, text)
            for kind, name, text in blocks
        ]
        return Reply(parts, end, num_tokens)


END = {"tool_use": "tool_calls", "max_tokens": "length", "end_turn": "stop"}
APIS = [Chat, Responses, Messages]


def choice_of(choice: str | None, named: dict) -> dict:
    if choice is None:
        return {}
    return {"tool_choice": choice if choice in ("none", "required") else named}
