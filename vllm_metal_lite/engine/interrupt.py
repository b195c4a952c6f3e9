"""Ctrl-C at a moment of our choosing: between two steps."""

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """While open, the first Ctrl-C only sets `pressed`; a second one raises KeyboardInterrupt.

    Does nothing outside the main thread, where Python delivers no signals.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._previous = None
        self._active = False

    def __enter__(self) -> "DeferredInterrupt":
        self._active = (
            threading.current_thread() is threading.main_thread()
            # Ignored: a background job of a script, which Ctrl-C is not meant for.
            and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        )
        if self._active:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._previous or signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
