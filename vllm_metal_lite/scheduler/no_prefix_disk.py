"""An engine's prefix disk if it keeps no prefixes on the disk."""

from vllm_metal_lite.scheduler.kv_manager import PrefixHit
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput


class NoPrefixDisk:
    """Keeps nothing.  `prefix_disk.disk.PrefixDisk` overrides every method, and explains it."""

    description: str | None = None

    @property
    def has_copies(self) -> bool:
        return False

    def must_wait(self, request: Request, hit: PrefixHit) -> bool:
        return False

    def restored_tokens(self, request: Request) -> int:
        return 0

    def step_finished(self, output: SchedulerOutput) -> None: ...

    def between_steps(self) -> None: ...

    def rest(self) -> bool:
        return False

    def wait(self) -> None: ...

    def reset(self) -> None: ...

    def metrics(self) -> dict[str, int]:
        return {}
