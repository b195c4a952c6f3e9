"""The deltas of answers with their thoughts and calls, from which each API makes its reply."""

from collections.abc import AsyncIterator, Callable, Sequence

from vllm_metal_lite.chat_formats.detect import PLAIN
from vllm_metal_lite.chat_formats.events import Event, Reasoning, ToolCallEnd
from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.engine.detokenizer import Detokenizer
from vllm_metal_lite.server.errors import check_ended
from vllm_metal_lite.server.worker.messages import Delta, add_delta, joined
from vllm_metal_lite.server.worker.request_state import RequestState, news_of


class AnswerReader:
    """Adds text, thoughts and calls to the deltas of an answer.

    choice: the number of the answer in the reply.  parallel: see `deltas`.
    """

    def __init__(
        self, request: RequestState, choice: int, parser: ChatParser, parallel: bool
    ) -> None:
        self._choice, self._parser, self._parallel = choice, parser, parallel
        self._token_ids: list[int] = []
        self._num_characters = 0
        params, prompt = request.params, request.prompt_token_ids
        # None: the engine finds stop strings, so the text comes from there.
        self._detokenizer: Detokenizer | None = None
        if not params.stop_strings:
            self._detokenizer = Detokenizer(request.tokenizer, params, self._token_ids, prompt)
        self._thinks = self._has_call = False
        self.is_over = False

    def read(self, delta: Delta) -> Delta:
        """The next delta of the answer, as an API needs it."""
        text = self._text(delta)
        reason, events = delta.finish_reason, self._parser.feed(text)
        kinds = [type(event) for event in events]
        has_thoughts = Reasoning in kinds if kinds else self._thinks
        if kinds:
            self._thinks = kinds[-1] is Reasoning
        # A malformed call before the answer's end counts: the client sees that its arguments are
        # not JSON, and tells the model.
        self._has_call |= ToolCallEnd in kinds
        if reason is not None:
            events += (last := self._parser.close())
            # A truncated call does not count, because the client must not run it.
            self._has_call |= ToolCallEnd(is_whole=True) in last
        self.is_over, is_whole = reason is not None, reason == "stop"
        if not self._parallel and (count := _up_to_first_call(events)):
            events, self.is_over = events[:count], True
            is_whole = reason in (None, "stop", "length")  # the answer ends with the call
        if is_whole and self._has_call:
            reason = "tool_calls"
        return Delta(
            self._choice,
            delta.token_ids,
            text,
            None if reason in ("error", "abort") else reason,
            delta.stop_reason,
            logprobs=delta.logprobs,
            events=events,
            num_reasoning_tokens=len(delta.token_ids) if has_thoughts else 0,
        )

    def _text(self, delta: Delta) -> str:
        if self._detokenizer is None:
            return delta.text or ""
        self._token_ids += delta.token_ids
        if delta.num_shown_tokens is not None:
            self._detokenizer.end_at(delta.num_shown_tokens)
        text, start = self._detokenizer.text(), self._num_characters
        self._num_characters = len(text)
        return text[start:]


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
    places = [(request, index) for request in requests for index in range(request.params.n)]
    readers = {
        (request.request_id, index): AnswerReader(request, choice, make_parser(), parallel)
        for choice, (request, index) in enumerate(places)
    }
    async for request, delta in news_of(requests):
        reader = readers[request.request_id, delta.choice]
        if reader.is_over:
            continue
        yield reader.read(delta)
        check_ended(delta)
        if reader.is_over and delta.finish_reason is None:
            request.finish_reasons[delta.choice] = "stop"  # the engine continues, and nobody reads
        if all(reader.is_over for reader in readers.values()):
            return


async def whole_answers(deltas: AsyncIterator[Delta]) -> list[Delta]:
    """Each answer as one delta, in order."""
    found: dict[int, list[Delta]] = {}
    async for delta in deltas:
        add_delta(found.setdefault(delta.choice, []), delta)
    return [joined(found[choice]) for choice in sorted(found)]
