"""The loop of a chat: messages and commands, until the user leaves."""

from functools import partial

from vllm_metal_lite.cli import log
from vllm_metal_lite.cli.conversation import Conversation, Turn
from vllm_metal_lite.cli.options import engine_flag
from vllm_metal_lite.cli.terminal import Terminal
from vllm_metal_lite.errors import MetalLiteError

_HELP = """\
/help           this list
/reset          forget the conversation
/system TEXT    set the system prompt and start over (alone: show it; /system -: remove it)
/quit           leave (also Ctrl-D)
A line that ends in a backslash continues in the next.  Ctrl-C stops an answer."""


class Session:
    """Ties a conversation to a terminal."""

    def __init__(self, conversation: Conversation, terminal: Terminal) -> None:
        self._conversation, self._terminal = conversation, terminal
        self._left = False

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
            log.say(f"error: the answer is cut: the context of {limit} tokens is full")
            return 1
        if turn.end == "max_tokens":
            max_tokens = self._conversation.params.max_tokens
            log.say(f"The answer is cut at {max_tokens} tokens (--max-tokens).")
        return 130 if turn.end in ("stopped", "dropped") else 0

    def _take(self, message: str) -> None:
        if message.startswith("/"):
            self._obey(*message.strip().split(maxsplit=1))
        elif message.strip():
            try:
                self._turn(message.strip())
            except MetalLiteError as e:
                self._terminal.notice(
                    f"error: {e.spelled(engine_flag)}\n"
                    "Your message was taken back; the conversation is as it was before (/reset "
                    "starts over)."
                )

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
            case "/system":
                self._system(text)
            case _:
                self._refuse(f"There is no command {command}; /help lists them.")

    def _refuse(self, why: str) -> None:
        self._terminal.notice(f"{why}  (To send this as a message, put a space before the slash.)")

    def _turn(self, message: str) -> Turn:
        stopping = partial(self._terminal.status, log.STOPPING)
        turn = self._conversation.ask(message, self._terminal.write, stopping)
        if not turn.output.outputs[0].text.endswith("\n"):
            self._terminal.write("\n")
        self._terminal.status(str(turn))
        return turn

    def _reset(self) -> None:
        self._conversation.reset()
        self._terminal.notice("The conversation starts over.")

    def _system(self, text: str) -> None:
        conversation = self._conversation
        if text:
            conversation.system = None if text == "-" else text
            self._reset()
        elif conversation.system:
            self._terminal.notice(f"The system prompt is: {conversation.system}")
        else:
            self._terminal.notice("There is no system prompt; /system TEXT sets one.")
