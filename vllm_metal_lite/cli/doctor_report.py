"""The findings of `doctor`, and their JSON, which users attach to issues."""

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from vllm_metal_lite import devices
from vllm_metal_lite.checks.compare_tokens import Comparison
from vllm_metal_lite.checks.ordering import Outcome
from vllm_metal_lite.checks.result import CheckResult


@dataclass(frozen=True)
class ModelFacts:
    """A model, with the context and the KV store that it gets with default options.

    problem: why it gets neither.
    """

    name: str
    type: str
    dtype: str
    weight_bytes: int
    max_model_len: int | None = None
    state_bytes: int = 0
    kv_store_bytes: int = 0
    kv_store_tokens: int | None = None
    problem: str | None = None


@dataclass
class Report:
    """machine: its facts, and the fields that every report begins with.

    no_kernels: why no kernel is checked.  not_tried: checks for which there was no time.
    of_checks: their number with those that were tried.  answers: or why they are not compared.
    """

    machine: dict[str, Any]
    engine_memory_bytes: int
    free_disk_bytes: int
    no_kernels: str | None
    model: ModelFacts | None = None
    checks: list[CheckResult] = field(default_factory=list)
    not_tried: int = 0
    of_checks: int = 0
    copy_bytes_per_second: float = 0.0
    ordering: list[Outcome] = field(default_factory=list)
    answers: Comparison | str | None = None
    interrupted: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # by part

    @property
    def model_name(self) -> str:
        """Of the model that gives the answers."""
        return self.model.name if self.model else "demo"

    @property
    def problems(self) -> list[str]:
        """Reasons for exit code 1."""
        found = [str(result) for result in self.checks if not result.passed]
        found += [
            f"order of launches, {o.buffers}: {o.problem}" for o in self.ordering if o.problem
        ]
        if isinstance(self.answers, str):
            found.append(f"answers: {self.answers}")
        elif self.answers and not self.answers.agrees:
            wrong = sum(not d.is_tie for d in self.answers.differences)
            found.append(
                f"answers: {wrong} of {self.answers.answers} differ from the reference's by more "
                "than rounding"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            **self.machine,
            "model": self.model and asdict(self.model),
            "engine_memory_bytes": self.engine_memory_bytes,
            "free_disk_bytes": self.free_disk_bytes,
            "profile": {"constants": asdict(devices.profile())},
            "no_kernels": self.no_kernels,
            "checks": list(map(_check_as_json, self.checks)),
            "not_tried": {"checks": self.not_tried, "of_checks": self.of_checks},
            "interrupted": self.interrupted,
            "copy_bytes_per_second": self.copy_bytes_per_second or None,
            "ordering": list(map(asdict, self.ordering)),
            "answers": self._answers_as_json(),
            "problems": self.problems,
            "seconds": self.seconds,
        }

    def _answers_as_json(self) -> dict[str, Any] | None:
        if self.answers is None:
            return None
        if isinstance(self.answers, str):
            return {"model": None, "problem": self.answers}
        more = {"model": self.model_name, "problem": None, "agrees": self.answers.agrees}
        return {**asdict(self.answers), **more}


def _check_as_json(result: CheckResult) -> dict[str, Any]:
    speed = result.speed
    return {
        "kernel": result.kernel,
        "check": str(result.check),
        "error": result.error if isfinite(result.error) else None,  # JSON has no infinity
        "tolerance": result.tolerance,
        "passed": result.passed,
        "failure": result.failure,
        "seconds": speed and speed.seconds,
        "alternative_seconds": speed and speed.fallback_seconds,
        "is_slow": bool(speed and speed.is_slow),
    }
