"""Answers as deltas, which all APIs make their replies of: text, thoughts and calls."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from vllm_metal_lite.chat_formats.events import Event, Reasoning, ToolCallEnd
from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.outputs import CompletionOutput, Cursor, Logprob
from vllm_metal_lite.server.worker.request_state import RequestState, changes

Positions = list[dict[int, Logprob]]


@dataclass(slots=True)
class Delta:
    """What is new in an answer.

    choice: its number in the reply, which may hold the answers to several prompts.
    text: as the model wrote it.  events: what it says, if there is a parser; none for text that is
    held back, as it may become a marker.
    token_ids, logprobs: of all new tokens, also of those without an event.
    num_reasoning_tokens: how many of them are thoughts.  A delta of several tokens counts as a
    whole.
    finish_reason: of the last Delta: as the engine has it, or "tool_calls".
    """

    choice: int
    answer: CompletionOutput
    text: str
    events: list[Event]
    token_ids: list[int]
    logprobs: Positions | None
    num_reasoning_tokens: int
    finish_reason: str | None


class AnswerReader:
    """Reads an answer as it grows."""

    def __init__(
        self,
        choice: int,
        answer: CompletionOutput,
        parser: ChatParser | None = None,
        parallel: bool = True,
    ) -> None:
        self._choice = choice
        self._cursor, self._parser, self._parallel = Cursor(answer), parser, parallel
        self._thinks = self._has_call = False
        self.is_over = False

    def read(self) -> Delta:
        """What is new since the last call."""
        answer, (token_ids, logprobs) = self._cursor.answer, self._cursor.tokens()
        text, reason = self._cursor.text(), answer.finish_reason
        events = [] if self._parser is None else self._parser.feed(text)
        has_thoughts = self._thinks and not events
        for event in events:
            self._thinks = isinstance(event, Reasoning)
            has_thoughts = has_thoughts or self._thinks
            # A call that goes wrong in mid-answer counts: its arguments are no JSON, which the
            # client tells the model.
            self._has_call = self._has_call or isinstance(event, ToolCallEnd)
        if reason is not None and self._parser is not None:
            events += (last := self._parser.close())
            # A truncated call does not count, because the client must not run it.
            self._has_call = self._has_call or ToolCallEnd(is_whole=True) in last
        is_over, is_whole = reason is not None, reason == "stop"
        if not self._parallel and (count := _up_to_first_call(events)):
            events, is_over = events[:count], True
            is_whole = reason in (None, "stop", "length")  # what follows does not count
        if is_whole and self._has_call:
            reason = "tool_calls"
        self.is_over = is_over
        num_reasoning = len(token_ids) if has_thoughts else 0
        return Delta(self._choice, answer, text, events, token_ids, logprobs, num_reasoning, reason)


def _up_to_first_call(events: list[Event]) -> int:
    """How many events there are up to the end of the first call; 0: no call ends."""
    return next((i for i, event in enumerate(events, 1) if isinstance(event, ToolCallEnd)), 0)


async def deltas(
    requests: Sequence[RequestState],
    make_parser: Callable[[], ChatParser | None] = lambda: None,
    parallel: bool = True,
) -> AsyncIterator[Delta]:
    """Deltas of all answers, as they come.  Raises EngineLost.

    parallel: False if an answer is over after its first call.  The engine may still run then; it
    stops when the caller leaves `Server.generate`.
    """
    answers = [answer for request in requests for answer in request.answers]
    readers = [AnswerReader(i, answer, make_parser(), parallel) for i, answer in enumerate(answers)]
    async for choice in changes(requests):
        reader = readers[choice]
        if not reader.is_over:
            yield reader.read()
            if all(reader.is_over for reader in readers):
                return
