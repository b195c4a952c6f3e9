"""A conversation with a model: the messages, and how to take a turn."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_metal_lite.engine.chat_prompt import template_variables, thinking_switch
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.interrupt import DeferredInterrupt
from vllm_metal_lite.errors import RequestError, one_line
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.sampling_params import SamplingParams


@dataclass(frozen=True)
class Turn:
    """The result of a turn.  max_model_len: tokens that the context holds."""

    output: RequestOutput
    seconds_to_first: float
    seconds: float
    max_model_len: int

    @property
    def end(self) -> str:
        """Why the answer ended: "stop"; a limit, "context" or "max_tokens"; or Ctrl-C, "stopped",
        or "dropped" before the first token."""
        answer = self.output.outputs[0]
        if answer.finish_reason == "length":
            num_tokens = len(self.output.prompt_token_ids) + len(answer.token_ids)
            return "context" if num_tokens >= self.max_model_len else "max_tokens"
        if answer.finish_reason == "stop":
            return "stop"
        return "stopped" if answer.token_ids else "dropped"

    def __str__(self) -> str:
        """One line: tokens, speed, and whether a limit cut the answer."""
        prompt, new = self.output.prompt_token_ids, len(self.output.outputs[0].token_ids)
        cached = self.output.num_cached_tokens
        line = f"[{len(prompt)} prompt tokens, {cached} of them cached, {new} new"
        later = self.seconds - self.seconds_to_first
        if new > 1 and later > 0:
            line += f", {(new - 1) / later:.1f} tokens/s"
        if new:
            line += f", first after {self.seconds_to_first:.2f} s"
        why = {
            "context": f" cut: the context of {self.max_model_len} tokens is full (/reset)",
            "max_tokens": " cut: max_tokens",
            "stopped": " stopped",
            "dropped": " stopped before its first token, message taken back",
        }
        return f"{line}]{why.get(self.end, '')}"


class Conversation:
    """Messages so far.  Every turn renders all of them; the prefix cache holds most of the text."""

    def __init__(
        self,
        engine: LLMEngine,
        params: SamplingParams,
        system: str | None = None,
        thinking: bool = True,
    ) -> None:
        self.engine, self.params, self.system = engine, params, system
        self._template: dict[str, bool] = {}
        if not thinking and engine.model.tokenizer is not None:
            variables = template_variables(engine.model.tokenizer)
            self._template = thinking_switch(variables, False)
        self._ids = itertools.count()
        self.reset()

    def reset(self) -> None:
        """Start over; the system prompt stays."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(
        self, text: str, write: Callable[[str], None], stopping: Callable[[], object] = lambda: None
    ) -> Turn:
        """Say something and stream the answer to `write`.

        stopping: called at once, from another thread, on Ctrl-C before the first token: a step of a
        long prompt can take seconds.

        Ctrl-C ends the answer; the conversation keeps the text so far.  If the message is refused
        or fails (RequestError), the conversation is unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt, checkpoints = self.engine.render_turn(messages, **self._template)
        if len(prompt) >= self.engine.max_model_len:
            raise RequestError(
                f"the conversation would have {len(prompt)} tokens, "
                f"and the context holds {self.engine.max_model_len}"
            )
        turn = self._run(prompt, checkpoints, write, stopping)
        answer = turn.output.outputs[0]
        if answer.error is not None:
            raise RequestError(answer.error)
        if turn.end != "dropped":
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return turn

    def _run(
        self,
        prompt: list[int],
        checkpoints: tuple[int, ...],
        write: Callable[[str], None],
        stopping: Callable[[], object],
    ) -> Turn:
        request_id = f"turn-{next(self._ids)}"
        start, first, shown = time.perf_counter(), 0.0, 0
        output: RequestOutput | None = None

        def pressed() -> None:
            if output is None:
                stopping()

        try:
            with DeferredInterrupt(pressed) as interrupt:
                self.engine.add_request(
                    request_id, {"prompt_token_ids": prompt}, self.params, checkpoints=checkpoints
                )
                while not (interrupt.pressed or (output and output.finished)):
                    for output in self._step():
                        text = output.outputs[0].text
                        first = first or time.perf_counter()
                        write(text[shown:])
                        shown = len(text)
        except KeyboardInterrupt:  # a second Ctrl-C, within a step
            pass
        finally:
            aborted = self.engine.abort(request_id)
        for output in aborted:
            write(output.outputs[0].text[shown:])
        if output is None:  # it was not added yet
            raise KeyboardInterrupt
        end = time.perf_counter()
        return Turn(output, (first or end) - start, end - start, self.engine.max_model_len)

    def _step(self) -> list[RequestOutput]:
        try:
            return self.engine.step()
        except Exception as e:
            if not self.engine.requests_at_fault:  # the next step is another try
                return []
            raise RequestError(f"a step of the engine failed: {one_line(e)}") from e
