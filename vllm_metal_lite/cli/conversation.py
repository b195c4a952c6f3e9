"""A conversation in the terminal: its messages and turns, and the loop until the user leaves."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_metal_lite.cli import log
from vllm_metal_lite.cli.files import first_word, is_dropped, read_picture
from vllm_metal_lite.cli.options import engine_flag
from vllm_metal_lite.cli.terminal import Terminal
from vllm_metal_lite.engine.chat_prompt import template_variables, thinking_switch
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.interrupt import DeferredInterrupt
from vllm_metal_lite.errors import MetalLiteError, RequestError, one_line
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
        """Why the answer ended.

        "stop": the model ended it.  "context" and "max_tokens": it reached this limit.
        "stopped" and "dropped": Ctrl-C came, after or before the first token.
        """
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
        self.messages: list[dict[str, Any]] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    def ask(
        self,
        text: str,
        write: Callable[[str], None],
        stopping: Callable[[], object] = lambda: None,
        pictures: Sequence[Any] = (),
    ) -> Turn:
        """Say something and stream the answer to `write`.

        pictures: those before the text, as `engine.eyes.prepare` makes them.
        stopping: called at once, from another thread, on Ctrl-C before the first token: a step of a
        long prompt can take seconds.

        Ctrl-C ends the answer; the conversation keeps the text so far.  If the message is refused
        or fails (RequestError), the conversation is unchanged.
        """
        content: Any = text
        if pictures:
            content = [{"type": "image", "image": picture} for picture in pictures]
            content.append({"type": "text", "text": text})
        messages = [*self.messages, {"role": "user", "content": content}]
        prompt, checkpoints = self.engine.render_turn(messages, **self._template)
        num_tokens = len(prompt["prompt_token_ids"])
        if num_tokens >= self.engine.max_model_len:
            raise RequestError(
                f"the conversation would have {num_tokens} tokens, "
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
        prompt: dict[str, Any],
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
                self.engine.add_request(request_id, prompt, self.params, checkpoints=checkpoints)
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


_HELP = """\
/help           this list
/reset          forget the conversation
/system TEXT    set the system prompt and start over (alone: show it; /system -: remove it)
/image PATH [QUESTION]
                show the model a picture: it goes with QUESTION, else with the next message
                (/image -: take waiting pictures back).  Quote a path with spaces, or drop the
                file on the terminal.
/quit           leave (also Ctrl-D)
A line that ends in a backslash continues in the next.  Ctrl-C stops an answer."""


class Session:
    """Ties a conversation to a terminal."""

    def __init__(self, conversation: Conversation, terminal: Terminal) -> None:
        self._conversation, self._terminal = conversation, terminal
        self._left = False
        self._pictures: list[Any] = []  # they go with the next message

    def run(self) -> int:
        """Talk until the user leaves; returns the exit code."""
        self._terminal.status("Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands.")
        asked = False  # Ctrl-C at the empty prompt leaves when it is pressed twice
        while not self._left:
            try:
                message = self._terminal.read_message()
                if message is None:
                    self._terminal.notice("")
                    return 0
                asked = False
                self._take(message)
            except KeyboardInterrupt:
                self._terminal.notice("")
                if asked:
                    return 130
                self._terminal.status("(Ctrl-C again leaves; so do Ctrl-D and /quit)")
                asked = True
        return 0

    def answer_once(self, message: str) -> int:
        """One message, one answer; returns the exit code.

        A cut by --max-tokens is not an error, because the user asked for it.  A cut by the context
        limit is one, which a script must see.
        """
        turn = self._turn(message)
        if turn.end == "context":
            limit = turn.max_model_len
            log.say(f"error: the answer was cut off: the context of {limit} tokens is full")
            return 1
        if turn.end == "max_tokens":
            max_tokens = self._conversation.params.max_tokens
            log.say(f"The answer was cut off at {max_tokens} tokens (--max-tokens).")
        return 130 if turn.end in ("stopped", "dropped") else 0

    def _take(self, message: str) -> None:
        if is_dropped(message):
            message = f"/image {message}"
        if message.startswith("/"):
            self._obey(*message.strip().split(maxsplit=1))
        elif message.strip():
            self._ask(message.strip())

    def _ask(self, message: str) -> None:
        try:
            self._turn(message, self._pictures)
        except MetalLiteError as e:
            what = "message and its pictures were" if self._pictures else "message was"
            self._terminal.notice(
                f"error: {e.spelled(engine_flag)}\n"
                f"Your {what} taken back; the conversation is as it was before (/reset "
                "starts over)."
            )
        finally:
            self._pictures = []

    def _obey(self, command: str, text: str = "") -> None:
        if text and command in ("/help", "/quit", "/reset"):
            self._refuse(f"{command} takes no text after it.")
            return
        match command:
            case "/help":
                self._terminal.notice(_HELP)
            case "/quit":
                self._left = True
            case "/reset":
                self._reset()
            case "/image":
                self._image(text)
            case "/system":
                self._system(text)
            case _:
                self._refuse(f"There is no command {command}; /help lists them.")

    def _refuse(self, why: str) -> None:
        self._terminal.notice(f"{why}  (To send this as a message, put a space before the slash.)")

    def _turn(self, message: str, pictures: Sequence[Any] = ()) -> Turn:
        stopping = partial(self._terminal.status, log.STOPPING)
        turn = self._conversation.ask(message, self._terminal.write, stopping, pictures)
        if not turn.output.outputs[0].text.endswith("\n"):
            self._terminal.write("\n")
        self._terminal.status(str(turn))
        return turn

    def _reset(self) -> None:
        self._conversation.reset()
        self._pictures = []
        self._terminal.notice("The conversation starts over.")

    def _image(self, text: str) -> None:
        if text == "-":
            self._pictures = []
            self._terminal.notice("No picture waits for the next message.")
            return
        path, question = first_word(text)
        try:
            if not path:
                raise RequestError("/image needs the path of a picture")
            self._pictures += self._conversation.engine.eyes.prepare([read_picture(path)])
        except MetalLiteError as e:
            self._terminal.notice(f"error: {e}")
            return
        if question:
            self._ask(question)
        else:
            waiting = "The picture goes" if len(self._pictures) == 1 else "The pictures go"
            self._terminal.notice(f"{waiting} with your next message (/image -: take back).")

    def _system(self, text: str) -> None:
        conversation = self._conversation
        if text:
            conversation.system = None if text == "-" else text
            self._reset()
        elif conversation.system:
            self._terminal.notice(f"The system prompt is: {conversation.system}")
        else:
            self._terminal.notice("There is no system prompt; /system TEXT sets one.")
