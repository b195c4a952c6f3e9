"""How attention makes scores, and which scores count."""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Template, bits


class Scores(NamedTuple):
    """scale: multiplies the products.  window: tokens that a query sees, including its own.
    softcap: scores become softcap * tanh(score / softcap).  sinks: (H,), one extra softmax logit
    per head, without a value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: mx.array | None = None

    @property
    def template(self) -> Template:
        template: Template = {"WINDOW": self.window or 0, "SCALE": bits(self.scale)}
        return template | {"SOFTCAP": bits(self.softcap or 0.0), "SINKS": self.sinks is not None}

    def sinks_as(self, dtype: mx.Dtype) -> mx.array | None:
        """The input sinks of a kernel."""
        return None if self.sinks is None else self.sinks.astype(dtype)
