"""How much of a request the server has, so that messages hold only the rest."""

from typing import Any

from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.server.worker.messages import Delta, to_wire


class Progress:
    """How much of a request the server has.

    sends_text: deltas have text beside tokens.  scheduled_at: when its first step was launched.
    """

    def __init__(self, sends_text: bool) -> None:
        self.scheduled_at: float | None = None
        self._sends_text = sends_text
        # Index of an unfinished answer -> how many of its tokens and characters were sent.
        self._sent: dict[int, tuple[int, int]] = {}
        self.is_new = True  # nothing was sent

    def prefill(self, output: RequestOutput) -> tuple[Any, ...]:
        """The arguments of `EngineClient.prefilled` after the request's id.  Call first, once."""
        self.is_new = False
        self._sent = {answer.index: (0, 0) for answer in output.outputs}
        scored, cached = output.prompt_logprobs, output.num_cached_tokens
        positions = None if scored is None else [None if p is None else to_wire(p) for p in scored]
        return self.scheduled_at, cached, output.num_restored_tokens, positions, output.pooled

    def news(self, output: RequestOutput) -> list[Delta]:
        """The deltas since the last call."""
        deltas = []
        for answer in output.outputs:
            if (sent := self._sent.get(answer.index)) is None:
                continue  # the server has all of it
            num_tokens, num_characters = sent
            token_ids, scored = answer.token_ids[num_tokens:], answer.logprobs
            if not token_ids and not answer.finished:
                continue
            text = answer.text if self._sends_text else ""
            self._sent[answer.index] = len(answer.token_ids), len(text)
            if answer.finished:
                del self._sent[answer.index]
            deltas.append(
                Delta(
                    answer.index,
                    token_ids,
                    text[num_characters:] if self._sends_text else None,
                    answer.finish_reason,
                    answer.stop_reason,
                    answer.num_shown_tokens,
                    answer.error,
                    None if scored is None else list(map(to_wire, scored[num_tokens:])),
                )
            )
        return deltas
