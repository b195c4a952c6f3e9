"""How steps get to the device: at once, or by a thread of their own.

`mx.async_eval` walks a step's graph and launches its kernels: on CUDA 1.5 to 2.5 ms of host time,
without Python's lock.  In another thread that goes on while Python builds the next step:

    engine   build 1 | build 2    | build 3, read 1 | build 4, read 2 ...
    thread           | launch 1   | launch 2        | launch 3 ...
    device             | step 1       | step 2          | step 3 ...

**The lock.**  The thread needs it to take a step, and not while it launches.  So `submit` waits
until the step is taken: who waits gives the lock away at once, and who only goes on keeps it for
5 ms.  Steps are taken one by one: when one is taken, the one before it has ended.

**Who owns what.**  A stream of MLX belongs to the thread that made it, but for those of
`mx.new_thread_unsafe_stream`, on which any may evaluate, one at a time.  There is one of them:
engines build on it (`building`), and this thread evaluates.  Building on arrays that are being
evaluated is safe, since it reads nothing that evaluation changes, but for three things:

- Evaluating takes arrays apart, and so does dropping the last name of one.  For an array by itself
  that is an atomic count, but outputs of one kernel look at each other.  So what the next step is
  built on passes through `alone`, and all else that a step made is held here (`alive`) until its
  submission has ended.
- Waiting for an array changes its event, and so does the launch of a step that reads the array; and
  on CUDA reading one moves it to other memory.  So what the host reads is never an input of a step:
  of the sampled tokens it gets a copy.
- The code of a model may evaluate something.  It runs while the thread is idle (`idle`); steps that
  are compiled run none of it.

**Errors** are raised where a step's result is waited for.  By then the next step may be built on
what was never computed, so both are dropped, and the runner comes back to what the last good step
left (`ModelRunner.forget`).
"""

import atexit
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ConfigError

VARIABLE = "METAL_LITE_SUBMIT_THREAD"


def alone(arrays: Sequence[mx.array]) -> list[mx.array]:
    """The same values, none of them one of several outputs of a kernel; that launches nothing."""
    return [mx.stop_gradient(a) for a in arrays]


class Submission:
    """A call on its way through the thread; alive: what must not be dropped before it has ended."""

    def __init__(self, call: Callable[[], Any], alive: Any = None) -> None:
        self._call, self._alive = call, alive
        self.taken, self.ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.reported = False

    def run(self) -> None:
        self.taken.set()
        try:
            self._call()
        except BaseException as e:  # raised where somebody waits
            self._error = e
        self._call = self._alive = None
        self.ended.set()

    def wait(self) -> None:
        """Return when all is launched, which is before it has run; raises what the call raised."""
        self.ended.wait()
        if self._error is not None:
            self.reported = True
            raise self._error

    def succeeds(self) -> bool:
        """Whether all is launched, once that is known."""
        self.ended.wait()
        return self._error is None

    def report(self) -> None:
        """Raise an error, if there is one by now of which nobody has heard."""
        if self._error is not None and not self.reported:
            self.wait()


class Submitter:
    """Submits in the caller's thread, on its stream."""

    threaded = False

    def building(self) -> AbstractContextManager:
        """Where arrays are made that are going to be submitted."""
        return nullcontext()

    def idle(self) -> AbstractContextManager:
        """Where they may be evaluated, too."""
        return nullcontext()

    def submit(self, arrays: Any, *alive: Any) -> Submission | None:
        """Have a tree of arrays evaluated.  None: all is launched."""
        mx.async_eval(arrays)


class SubmitThread(Submitter):
    """Submits by a thread, which evaluates what is built on its stream."""

    threaded = True

    def __init__(self) -> None:
        self.stream = mx.new_thread_unsafe_stream(mx.default_device())
        self._queue: queue.SimpleQueue[Submission] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of several engines one submits, or evaluates by itself
        threading.Thread(target=self._run, name="vllm-metal-lite-submit", daemon=True).start()
        atexit.register(self._drain)

    def building(self) -> AbstractContextManager:
        return mx.stream(self.stream)

    @contextmanager
    def idle(self) -> Iterator[None]:
        with self._lock:
            last = Submission(lambda: None)
            self._queue.put(last)
            last.ended.wait()
            yield

    def submit(self, arrays: Any, *alive: Any) -> Submission:
        return self._put(Submission(partial(mx.async_eval, arrays), alive))

    def _put(self, submission: Submission) -> Submission:
        with self._lock:
            self._queue.put(submission)
            submission.taken.wait()
        return submission

    def _run(self) -> None:
        mx.set_default_stream(self.stream)  # or MLX makes one for this thread
        while True:
            self._queue.get().run()

    def _drain(self) -> None:
        """At the end of the process nothing may be under way."""
        self._put(Submission(partial(mx.synchronize, self.stream))).ended.wait()


_making = threading.Lock()
_thread: SubmitThread | None = None


def choose(overlaps: bool) -> Submitter:
    """How an engine submits.  overlaps: a step may be submitted while the one before it runs.

    By the thread on CUDA, unless VARIABLE, "on" or "off", says otherwise.  Raises ConfigError if it
    says neither.  With an attention that does not overlap, "on" is for tests: the store is copied,
    for what the last good step left is kept.
    """
    global _thread
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "on", "off"):
        raise ConfigError(f"{VARIABLE} must be 'on' or 'off', got {wanted!r}")
    on = wanted == "on" if wanted else overlaps and backend.name() == "cuda"
    if not on or not hasattr(mx, "new_thread_unsafe_stream"):  # an older MLX
        return Submitter()
    with _making:
        if _thread is None:
            _thread = SubmitThread()
    return _thread
