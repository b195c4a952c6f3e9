"""A worker extension of vLLM's (`--worker-extension-cls`), for the tests of ranks that fail."""

from pathlib import Path

from vllm_metal_lite.runner.result import StepResult


class FailingRank:
    """Rank 1's steps fail where they are waited for, once the file `fail` is in the folder of its
    model."""

    def init_worker_extension(self):
        if self.rank != 1:
            return
        fail, wait = Path(self.model_config.model) / "fail", StepResult.wait

        def failing(result):
            if fail.exists():
                raise RuntimeError("device lost")
            return wait(result)

        StepResult.wait = failing
