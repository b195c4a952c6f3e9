"""Kernels that fail in mid-serving, as when MLX cannot compile an instantiation."""

from functools import partial

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import launch as launches
from vllm_metal_lite.kernels import registry
from vllm_metal_lite.kernels.launch import Kernel

MESSAGE = "[metal::Device] Unable to build metal library: unknown name 'malloc_size'"


class FailingKernels:
    """Once `armed`, launches of some kernels, or of all, fail.

    kernels: their names.  how: "call", the launch raises; "eval", evaluating its results raises,
    which host kernels do with what they take; "submit", `mx.async_eval` of the step raises, as on a
    GPU.  launched: how often they were launched.  failed: how often a launch failed.
    """

    def __init__(
        self, monkeypatch, *kernels: str, how: str = "submit", error: BaseException | None = None
    ) -> None:
        self.armed, self.launched, self.failed = False, 0, 0
        self.error = error or RuntimeError(MESSAGE)
        original = Kernel._launcher

        def launch(kernel, **given):
            outputs = original(kernel)(**given)
            name = registry.name_of_launch(kernel.name, dict(given["template"]))
            if kernels and name not in kernels:
                return outputs
            self.launched += 1
            if not self.armed:
                return outputs
            self.failed += 1
            if how == "call":
                raise self.error
            if how == "submit" and not launches._one_by_one.get():
                self._is_in_step = True
                return outputs
            return mx.depends(outputs, [raises_in_eval()])

        async_eval, self._is_in_step = mx.async_eval, False

        def submit(*arrays):
            fails, self._is_in_step = self._is_in_step, False
            async_eval(*arrays, *([raises_in_eval()] if fails else []))

        monkeypatch.setattr(Kernel, "_launcher", lambda kernel: partial(launch, kernel))
        monkeypatch.setattr(mx, "async_eval", submit)


def raises_in_eval() -> mx.array:
    """An array whose evaluation raises on the calling thread, as a compiler's error does on a GPU:
    MLX's CPU backend multiplies blocks in float32 only."""
    x = mx.ones((32, 32), mx.float16)
    return mx.block_masked_mm(x, x, 32, mx.ones((1, 1), mx.bool_), stream=mx.cpu)
