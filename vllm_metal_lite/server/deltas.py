"""Answers as deltas of text, thoughts and calls, from which each API makes its reply."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from vllm_metal_lite.chat_formats.detect import PLAIN
from vllm_metal_lite.chat_formats.events import Event, Reasoning, ToolCallEnd
from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.outputs import CompletionOutput, Logprob
from vllm_metal_lite.server.cursor import Cursor
from vllm_metal_lite.server.errors import check_ended
from vllm_metal_lite.server.worker.request_state import RequestState, changes

Positions = list[dict[int, Logprob]]


@dataclass(slots=True)
class Delta:
    """The new part of an answer.

    choice: index of the answer in the reply; one reply may answer several prompts.
    text: as the model wrote it.  events: the parsed text; text that may become a marker is held
    back.
    token_ids, logprobs: of all new tokens, with or without events.
    num_reasoning_tokens: all new tokens if any of them belongs to thoughts, else 0.
    finish_reason: in the last Delta, "stop", "length" or "tool_calls"; None before, and if the
    answer fails.
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
        self, choice: int, answer: CompletionOutput, parser: ChatParser, parallel: bool
    ) -> None:
        self._choice = choice
        self._cursor, self._parser, self._parallel = Cursor(answer), parser, parallel
        self._thinks = self._has_call = False
        self.is_over = False

    def read(self) -> Delta:
        """The new part since the last call."""
        answer, (token_ids, logprobs) = self._cursor.answer, self._cursor.tokens()
        text, reason = self._cursor.text(), answer.finish_reason
        events = self._parser.feed(text)
        has_thoughts = self._thinks and not events
        for event in events:
            self._thinks = isinstance(event, Reasoning)
            has_thoughts = has_thoughts or self._thinks
            # A malformed call before the answer's end counts: the client sees that its arguments
            # are not JSON, and tells the model.
            self._has_call = self._has_call or isinstance(event, ToolCallEnd)
        if reason is not None:
            events += (last := self._parser.close())
            # A truncated call does not count, because the client must not run it.
            self._has_call = self._has_call or ToolCallEnd(is_whole=True) in last
        self.is_over, is_whole = reason is not None, reason == "stop"
        if not self._parallel and (count := _up_to_first_call(events)):
            events, self.is_over = events[:count], True
            is_whole = reason in (None, "stop", "length")  # the rest of the answer does not count
            answer.finish_reason = reason or "stop"
        if is_whole and self._has_call:
            reason = "tool_calls"
        if reason in ("error", "abort"):
            reason = None
        num_reasoning = len(token_ids) if has_thoughts else 0
        return Delta(self._choice, answer, text, events, token_ids, logprobs, num_reasoning, reason)


def _up_to_first_call(events: list[Event]) -> int:
    """The number of events up to the end of the first call; 0 if no call ends."""
    return next((i for i, event in enumerate(events, 1) if isinstance(event, ToolCallEnd)), 0)


async def deltas(
    requests: Sequence[RequestState],
    make_parser: Callable[[], ChatParser] = lambda: ChatParser(PLAIN),
    parallel: bool = True,
) -> AsyncIterator[Delta]:
    """Deltas of all answers, as they come.  Raises EngineLost, ApiError for an answer that fails.

    parallel: False to end an answer after its first call.  The engine continues the answer until
    the response ends.
    """
    answers = [answer for request in requests for answer in request.answers]
    readers = [AnswerReader(i, answer, make_parser(), parallel) for i, answer in enumerate(answers)]
    async for choice in changes(requests):
        reader = readers[choice]
        if not reader.is_over:
            yield reader.read()
            check_ended(answers[choice])
            if all(reader.is_over for reader in readers):
                return


async def whole_answers(deltas: AsyncIterator[Delta]) -> list[Delta]:
    """Each answer as one delta, in order."""
    found: dict[int, Delta] = {}
    async for delta in deltas:
        whole = found.setdefault(delta.choice, delta)
        if whole is not delta:
            whole.events += delta.events
            whole.finish_reason = delta.finish_reason
            whole.num_reasoning_tokens += delta.num_reasoning_tokens
    for whole in found.values():
        answer = whole.answer
        whole.text, whole.token_ids, whole.logprobs = answer.text, answer.token_ids, answer.logprobs
    return [found[choice] for choice in sorted(found)]
