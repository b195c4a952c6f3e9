"""Runs checks in a process of their own, with a watchdog.

A kernel may hang, or end its process.  Then the kernel is reported, and a new process runs the
rest.  If no process can be started, the checks run in this one.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from multiprocessing import Pipe
from typing import IO, Any

from vllm_metal_lite import backend
from vllm_metal_lite.checks import run_check
from vllm_metal_lite.checks.check import Check, CheckResult
from vllm_metal_lite.checks.run_check import run as run_here
from vllm_metal_lite.errors import one_line

logger = logging.getLogger(__name__)

# Seconds until a process is ready: a slow disk may have to read Python and MLX.
_START = 120.0
# Seconds for one check.  A check compiles up to four instantiations, a few seconds each.
DEADLINE = 60.0

# A function that gets the number of checks done, their total, and the check that begins.
Progress = Callable[[int, int, Check], object]
# A function that runs a check, and times the kernel if its second argument is true.
Run = Callable[[Check, bool], CheckResult]


def command() -> list[str] | None:
    """How to start the process; None: run the checks here.

    An embedded Python has no program to start, and without a GPU only this process has kernels.
    """
    if backend.is_cpu() or not sys.executable:
        return None
    return [sys.executable, "-P", "-m", "vllm_metal_lite.checks.run_check"]


def results(
    checks: Sequence[Check],
    progress: Progress | None = None,
    *,
    timed: bool = False,
    known: Sequence[CheckResult] = (),
) -> Generator[CheckResult, None, None]:
    """Run checks in order; yields a result for each check that is not left out.

    A check is left out if a kernel that it needs failed before, or if its own kernel hung or ended
    the process before.  timed: time the correct kernels.  known: results of earlier starts;
    a failure among them also leaves checks out.
    """
    found: list[CheckResult] = []
    run: Run | None = None
    with ExitStack() as opened:
        for done, check in enumerate(checks):
            if progress is not None:
                progress(done, len(checks), check)
            if _skipped(check, [*known, *found]):
                continue
            run = run or _runner(opened)
            result = run(check, timed)
            found.append(result)
            yield result
            if result.ended:
                opened.close()
                run = None


def _skipped(check: Check, results: Sequence[CheckResult]) -> bool:
    return any(
        result.kernel in check.needs or (result.ended and result.kernel == check.kernel)
        for result in results
        if not result.passed
    )


def _runner(opened: ExitStack) -> Run:
    """A function that runs checks in a new process, or in this one if no process can start."""
    try:
        return opened.enter_context(closing(Child())).ask
    except (OSError, ValueError) as e:
        logger.info(f"kernels are checked without a watchdog: no process starts: {one_line(e)}")
        return run_here


class Child:
    """A process that calls functions.  Raises OSError if it cannot be started.

    variables: added to the environment of this process.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        words = command()
        if words is None:
            raise OSError("there is no program to start")
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._errors: IO[bytes] | None = None  # the output of the process, if the disk has room
        with ExitStack() as opened:
            with suppress(OSError):
                self._errors = opened.enter_context(tempfile.TemporaryFile())
            self._pipe, theirs = map(opened.enter_context, Pipe())
            self._process = opened.enter_context(
                subprocess.Popen(
                    [*words, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=self._errors or subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONPATH": path, **(variables or {})},
                )
            )
            opened.callback(self._process.kill)
            theirs.close()
            if (device := self._answer(_START)) != backend.describe():
                raise OSError(f"the child process uses {device}")
            self._opened = opened.pop_all()

    def ask(self, check: Check, timed: bool) -> CheckResult:
        """The result of one check.  A hang or a crash is a failure."""
        try:
            return self.call(DEADLINE, run_check.run, check, timed)
        except OSError as e:
            return CheckResult(check, failure=str(e), ended=True)

    def call(self, deadline: float, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function of a module; OSError if the process hangs or ends."""
        with suppress(BrokenPipeError):  # it has ended, and no answer will come
            self._pipe.send((function, args))
        return self._answer(deadline)

    def _answer(self, seconds: float) -> Any:
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise OSError(f"ends the process: {self._why()}") from None
        raise OSError(f"hangs: no result after {seconds:g} s")

    def close(self) -> None:
        self._opened.close()

    def _why(self) -> str:
        """How the process ended, and the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        how = f"exit code {code}"
        if code is not None and code < 0:
            with suppress(ValueError):
                how = signal.Signals(-code).name
        said = ""
        if self._errors is not None:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").splitlines()
            said = next((line for line in reversed(lines) if line.strip()), "")
        return f"{how} ({said.strip()[:200]})" if said else how
