"""The part of a request that the server has, so that messages hold only the rest."""

from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.server.cursor import Cursor
from vllm_metal_lite.server.worker.messages import AnswerUpdate, to_wire


class Progress:
    """The part of a request that the server has.

    sends_text: updates have text beside tokens.  scheduled_at: when its first step began.
    """

    def __init__(self, sends_text: bool) -> None:
        self.scheduled_at: float | None = None
        self._sends_text = sends_text
        self._unfinished: dict[int, Cursor] | None = None  # by index of the answer

    def news(self, output: RequestOutput) -> list[AnswerUpdate]:
        """The updates since the last call."""
        is_first = self._unfinished is None
        if self._unfinished is None:
            self._unfinished = {answer.index: Cursor(answer) for answer in output.outputs}
        updates = []
        for index, cursor in list(self._unfinished.items()):
            answer, (token_ids, logprobs) = cursor.answer, cursor.tokens()
            if answer.finished:
                del self._unfinished[index]
            elif not token_ids:
                continue
            updates.append(
                AnswerUpdate(
                    index,
                    token_ids,
                    cursor.text() if self._sends_text else None,
                    answer.finish_reason,
                    answer.stop_reason,
                    answer.num_shown_tokens,
                    answer.error,
                    None if logprobs is None else list(map(to_wire, logprobs)),
                )
            )
        if is_first:
            scored = output.prompt_logprobs
            updates[0] = updates[0]._replace(
                scheduled_at=self.scheduled_at,
                num_cached_tokens=output.num_cached_tokens,
                num_restored_tokens=output.num_restored_tokens,
                pooled=output.pooled,
                prompt_logprobs=None
                if scored is None
                else [None if p is None else to_wire(p) for p in scored],
            )
        return updates
