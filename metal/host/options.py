"""How kernels run on the host."""

from collections.abc import Collection
from dataclasses import dataclass

FORWARD = "forward"
REVERSE = "reverse"


@dataclass(frozen=True)
class HostOptions:
    """How a kernel runs on the host.

    checked: watch every memory access; slower by about four times.
    schedule: the order in which threads and threadgroups run: "forward", "reverse", or a seed.
    writable_inputs: inputs that the kernel may write in place.

    New outputs and threadgroup memory start as 0xff bytes (NaN), unset variables as a pattern.
    """

    checked: bool = False
    schedule: str | int = FORWARD
    writable_inputs: Collection[str] = ()

    def __post_init__(self):
        if isinstance(self.schedule, str):
            if self.schedule not in (FORWARD, REVERSE):
                raise ValueError(
                    f"schedule is {self.schedule!r}: 'forward', 'reverse' or an integer seed"
                )
        elif self.schedule < 0:
            raise ValueError(f"schedule is {self.schedule}: a seed is at least 0")
