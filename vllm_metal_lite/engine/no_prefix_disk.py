"""The prefix disk of an engine that keeps no prefixes on the disk."""

from vllm_metal_lite.scheduler.kv_manager import PrefixHit
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput


class NoPrefixDisk:
    """The interface of `prefix_disk.disk.PrefixDisk`, for an engine without one."""

    description: str | None = None
    has_copies = False

    def must_wait(self, request: Request, hit: PrefixHit) -> bool:
        return False

    def step_finished(self, output: SchedulerOutput) -> None: ...

    def between_steps(self) -> None: ...

    def rest(self) -> bool:
        return False

    def wait(self) -> None: ...

    def reset(self) -> None: ...

    def metrics(self) -> dict[str, int]:
        return {}
