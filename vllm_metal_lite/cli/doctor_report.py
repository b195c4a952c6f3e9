"""The findings of `doctor`, and their JSON, which users attach to issues."""

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from vllm_metal_lite import devices
from vllm_metal_lite.checks.check import CheckResult
from vllm_metal_lite.checks.compare_tokens import Comparison
from vllm_metal_lite.checks.ordering import Outcome


@dataclass
class Report:
    """The fields are those of the JSON, too.

    no_kernels: why no kernel is checked.  model: its facts, and the context that fits.
    not_tried: checks for which there was no time.  of_checks: all checks.
    not_compared: why there are no answers.  error: why doctor failed.  seconds: by part.
    """

    engine_memory_bytes: int
    free_disk_bytes: int
    no_kernels: str | None
    model: dict[str, Any] | None = None
    checks: list[CheckResult] = field(default_factory=list)
    not_tried: int = 0
    of_checks: int = 0
    copy_bytes_per_second: float | None = None
    ordering: list[Outcome] = field(default_factory=list)
    answers: Comparison | None = None
    not_compared: str | None = None
    interrupted: bool = False
    error: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """Reasons for exit code 1."""
        found = [str(result) for result in self.checks if not result.passed]
        found += [
            f"order of launches, {o.buffers}: {o.problem}" for o in self.ordering if o.problem
        ]
        if self.answers and not self.answers.agrees:
            wrong = sum(not d.is_tie for d in self.answers.differences)
            found.append(
                f"answers: {wrong} of {self.answers.answers} differ from the reference's by more "
                "than rounding"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "profile": {"constants": asdict(devices.profile())},
            "checks": list(map(_check_as_json, self.checks)),
            "ordering": list(map(asdict, self.ordering)),
            "answers": self.answers and asdict(self.answers),
            "problems": self.problems,
        }


def _check_as_json(result: CheckResult) -> dict[str, Any]:
    error = result.error if isfinite(result.error) else None  # JSON has no infinity
    speed = result.speed and asdict(result.speed)
    text = {"kernel": result.kernel, "check": str(result.check), "passed": result.passed}
    return {**vars(result), **text, "error": error, "speed": speed}
