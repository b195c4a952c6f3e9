"""The most rows of prompts and drafts in a step, from the seconds that earlier steps took."""

from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

_AIM = 0.8  # of the seconds: the time of a row varies
_LOWEST = 0.5  # times a step's rows, after it: it may have been slow by chance
_ALONE = 2  # times the rows, for a prompt that nothing else waits for
_ROW = 256  # the cost of a row in tokens of context, at least


class StepLimit:
    """seconds: how long a step may take.  compiles: the first steps of a width take longer.

    A row costs an unknown part for itself, and one for its context.  If the rows and the sum of
    (_ROW + context) over the rows grow at most n times, so does the time.
    """

    first = 128  # rows, until a step has been measured
    least = 32  # rows, however long they take

    def __init__(self, seconds: float, compiles: bool) -> None:
        self.seconds, self.compiles = seconds, compiles
        self._rows, self._work = float(self.first), 4.0 * self.first * _ROW
        self._widths: set[int] = set()

    def rows_left(self, out: SchedulerOutput, context: int, is_alone: bool) -> int:
        """How many rows behind `context` tokens may join the step."""
        rows, work = _size(out)
        times = _ALONE if is_alone else 1
        left = min(times * self._rows - rows, (times * self._work - work) / (_ROW + context))
        return max(int(left), self.least - rows, 0)

    def record(self, out: SchedulerOutput) -> None:
        """Learn from a step.  A short step says little about long ones, so it lowers nothing.  The
        time of a vision tower says nothing about rows."""
        if any(s.starts_picture for s in out.segments):
            return
        rows, work = _size(out)
        width = out.total_num_scheduled_tokens.bit_length()
        is_new = self.compiles and width not in self._widths
        self._widths.add(width)
        times = _AIM * self.seconds / max(out.seconds, 1e-6)
        if times >= 1 or is_new or not rows:
            self._rows, self._work = max(self._rows, times * rows), max(self._work, times * work)
        else:
            times = max(times, _LOWEST)
            self._rows, self._work = times * rows, times * work


def _size(out: SchedulerOutput) -> tuple[int, int]:
    """A step's rows of prompts and drafts, and the sum of (_ROW + context) over them."""
    sizes = [(s.num_scheduled, s.num_computed) for s in out.segments[out.num_decodes :]]
    return sum(n for n, _ in sizes), sum(n * (_ROW + start) for n, start in sizes)
