"""An answer's events as blocks, one after the other: each is text, thoughts or a call."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from vllm_metal_lite.chat_formats.events import Arguments, Event, Reasoning, Text, ToolCall

T = TypeVar("T")


class Blocks(ABC, Generic[T]):
    """The blocks of an answer in the form of an API, which a subclass knows.

    kind: the kind of the block that grows, "text", "thoughts" or "call"; "" if none grows.
    """

    kind = ""

    def take(self, events: Iterable[Event]) -> list[T]:
        """The output for these events."""
        return [news for event in events for news in self._take(event)]

    def close(self, is_whole: bool = True) -> Iterator[T]:
        """End the block that grows, if there is one."""
        if self.kind:
            yield from self._end(is_whole)
            self.kind = ""

    def _take(self, event: Event) -> Iterator[T]:
        match event:
            case Text(text):
                yield from self._extend("text", text)
            case Reasoning(text):
                yield from self._extend("thoughts", text)
            case ToolCall(name):
                yield from self._begin("call", name)
            case Arguments(text):
                yield from self._grow(text)
            case _:
                yield from self.close(event.is_whole)

    def _extend(self, kind: str, text: str) -> Iterator[T]:
        if self.kind != kind:
            yield from self._begin(kind)
        yield from self._grow(text)

    def _begin(self, kind: str, name: str = "") -> Iterator[T]:
        yield from self.close()
        self.kind = kind
        yield from self._open(name)

    @abstractmethod
    def _open(self, name: str) -> Iterable[T]:
        """A block of `kind` begins.  name: the tool's name, if the block is a call."""

    @abstractmethod
    def _grow(self, text: str) -> Iterable[T]:
        """The block gets longer."""

    @abstractmethod
    def _end(self, is_whole: bool) -> Iterable[T]:
        """The block ends.  is_whole: False for a call that no client may run."""
