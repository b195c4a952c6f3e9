"""How fast prefixes are read from the disk, and how fast they are computed."""

import time

from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

# Assumed until measured: bytes and tokens a second.
_READ, _COMPUTE = 5e8, 300.0
# Each prefix that is computed raises the assumed speed, so that a slow disk is tried again.
_DRIFT = 1.01


class Speeds:
    """As measured so far.  read: bytes a second.  compute: tokens of prompts a second."""

    # The time of smaller steps says little about long prompts.
    min_rows = 256

    def __init__(self) -> None:
        self.read, self.compute = _READ, _COMPUTE
        self._last_end = 0.0

    def prefer_reading(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether to read a prefix, because computing it takes longer."""
        if num_bytes / self.read < num_tokens / self.compute:
            return True
        if self.read < _READ:
            self.read *= _DRIFT
        return False

    def add_step(self, output: SchedulerOutput) -> None:
        """Time a step that has just ended, if most of its rows are of prompts."""
        now, rows = time.monotonic(), output.total_num_scheduled_tokens
        if rows >= self.min_rows and rows > 2 * output.num_decodes:
            seconds = now - max(output.launched_at, self._last_end) + 1e-6
            self.compute = _smooth(self.compute, rows / seconds)
        self._last_end = now

    def add_reads(self, num_bytes: int, seconds: float) -> None:
        self.read = _smooth(self.read, num_bytes / max(seconds, 1e-6))


def _smooth(speed: float, newest: float) -> float:
    return 0.7 * speed + 0.3 * newest
