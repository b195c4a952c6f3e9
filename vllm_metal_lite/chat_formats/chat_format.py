"""A format: the markers of thoughts and calls, and how calls are read and forced."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.events import Trimmed
from vllm_metal_lite.chat_formats.grammars import CallGrammar
from vllm_metal_lite.chat_formats.history import Adapt
from vllm_metal_lite.chat_formats.reader import Reader, Reading

# Reads the whole answer: passes texts to the two writers, of text and of thoughts.
ReadAnswer = Callable[[Reader, CallWriter, Trimmed, Trimmed], Reading[None]]


@dataclass(frozen=True)
class Thoughts:
    """The markers around thoughts.  in_channel: thoughts are messages, several in an answer, and
    the format's `grammar` includes them."""

    start: str
    end: str
    in_channel: bool = False


THINK = Thoughts("<think>", "</think>")


@dataclass(frozen=True)
class ChatFormat:
    """How a family of models writes.

    signs: texts by which `detect` knows the format: all are in the model's chat template.
    call_starts: markers that begin calls.  call_ends: markers after which reading resumes if a call
    is malformed.
    read_calls: reads calls after a marker, which is `reader.recorded`; raises Malformed, CutShort.
    grammar: makes the grammar of an answer after its thoughts: the calls that a ToolChoice demands,
    or in mode "auto" any calls and a text, which may be held to a term (the last argument).
    thoughts: None if the format has none.
    bare_start: an answer that begins with this character may be a call without a marker.
    adapt: changes earlier messages to the form that the model's templates take.
    read_answer: only for a format that is not text with markers.
    """

    name: str
    signs: tuple[str, ...] = ()
    call_starts: tuple[str, ...] = ()
    call_ends: tuple[str, ...] = ()
    read_calls: Callable[[Reader, CallWriter], Reading[None]] | None = None
    grammar: CallGrammar | None = None
    thoughts: Thoughts | None = THINK
    bare_start: str = ""
    adapt: Adapt | None = None
    read_answer: ReadAnswer | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the format has calls at all."""
        return self.read_calls is not None or self.read_answer is not None

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers.  The parsed text must contain them, also those that are special tokens."""
        thoughts = (self.thoughts.start, self.thoughts.end) if self.thoughts else ()
        return (*self.call_starts, *self.call_ends, *thoughts)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the marker that starts thoughts."""
        return self.thoughts is not None and prompt.rstrip().endswith(self.thoughts.start)

    def closes_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with closed thoughts, so the answer has none."""
        if self.thoughts is None or self.thoughts.in_channel:
            return False
        return prompt.rstrip().endswith(self.thoughts.end)

    def is_thinking(self, answer: str) -> bool:
        """Whether an answer, so far, ends within thoughts; text precedes no thoughts."""
        if (thoughts := self.thoughts) is None:
            return False
        while (answer := answer.lstrip()).startswith(thoughts.start):
            _, end, answer = answer.partition(thoughts.end)
            if not end:
                return True
        return False
