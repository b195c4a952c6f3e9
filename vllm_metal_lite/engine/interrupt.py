"""Defers Ctrl-C until the end of a step."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None  # as signal.signal returns it


class DeferredInterrupt:
    """While open, the first Ctrl-C only sets `pressed`; a second one raises KeyboardInterrupt.

    on_press: called once, in its own thread, as soon as Ctrl-C is pressed.  Python itself handles
    a signal only when the main thread returns from MLX, at the end of a step.

    Does nothing outside the main thread: Python delivers signals only there.
    """

    def __init__(self, on_press: Callable[[], None] | None = None) -> None:
        self.pressed = False
        self._on_press = on_press
        self._previous: Handler = None
        self._active = False

    def __enter__(self) -> "DeferredInterrupt":
        self._active = (
            threading.current_thread() is threading.main_thread()
            # SIG_IGN marks a script's background job; Ctrl-C is not meant for it.
            and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        )
        if self._active:
            self._previous = signal.signal(signal.SIGINT, self._handle)
            if self._on_press is not None:
                self._watch(self._on_press)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            if self._on_press is not None:
                self._unwatch()
            foreign = self._previous is None  # not installed from Python
            handler = signal.default_int_handler if foreign else self._previous
            signal.signal(signal.SIGINT, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def _watch(self, on_press: Callable[[], None]) -> None:
        """Write every signal's number to a pipe, which a thread reads."""
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._read, args=(reader, on_press), daemon=True)
        self._watcher.start()

    def _unwatch(self) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._writer)  # ends the thread
        self._watcher.join()

    def _read(self, reader: int, on_press: Callable[[], None]) -> None:
        told = False
        while numbers := os.read(reader, 16):
            if signal.SIGINT in numbers and not told:
                told = True
                on_press()
        os.close(reader)
