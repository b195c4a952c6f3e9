"""The measured speeds of reading prefixes from the disk, and of computing prefixes."""

from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

# Assumed until measured: bytes and tokens a second.
_READ, _COMPUTE = 5e8, 300.0
# The weight of the newest measurement.
_NEWEST = 0.3
# Each prefix that is computed raises the assumed speed, so that a slow disk is tried again.
_DRIFT = 1.01
# Smaller steps say little about the speed of long prompts.
_MIN_ROWS = 256


class Speeds:
    """As measured so far.  read: bytes a second.  compute: tokens of prompts a second."""

    def __init__(self) -> None:
        self.read, self.compute = _READ, _COMPUTE

    def prefer_reading(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether reading a prefix takes less time than computing it."""
        is_faster = num_bytes / self.read < num_tokens / self.compute
        if not is_faster and self.read < _READ:
            self.read *= _DRIFT
        return is_faster

    def add_reads(self, num_bytes: int, seconds: float) -> None:
        """Record a prefix of num_bytes, which all threads together read in `seconds`."""
        self.read += _NEWEST * (num_bytes / max(seconds, 1e-6) - self.read)

    def add_step(self, output: SchedulerOutput) -> None:
        """Record a step that has just ended, if most rows are of prompts."""
        rows = output.total_num_scheduled_tokens
        if rows >= _MIN_ROWS and rows > 2 * output.num_decodes:
            self.compute += _NEWEST * (rows / (output.seconds + 1e-6) - self.compute)
