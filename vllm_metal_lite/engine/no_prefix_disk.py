"""The prefix disk of an engine that keeps no prefixes; `prefix_disk.disk` has the other."""

from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput


class NoPrefixDisk:
    """Keeps nothing, and has no work."""

    description: str | None = None
    wants_a_pause = False

    def note(self, output: SchedulerOutput) -> None: ...

    def between_steps(self) -> None: ...

    def rest(self) -> bool:
        return False

    def wait(self) -> None: ...

    def reset(self) -> None: ...

    def metrics(self) -> dict[str, int]:
        return {}
