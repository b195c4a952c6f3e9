"""One kernel at one shape: a value that one process makes and another one runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.registry import REGISTRY
from vllm_metal_lite.specs import (
    AttentionShape,
    ConvShape,
    ExpertShape,
    GatedNormShape,
    Quantisation,
    RecurrenceShape,
    RecurrentShape,
    Rotation,
)

_RECURRENT = {kind.__name__: kind for kind in (ConvShape, RecurrenceShape, GatedNormShape)}


@dataclass(frozen=True)
class Check:
    """kernel: as in metal/; or "fused_decode", which is `paged_decode` with NewRows; or
    "latent_prefill", which is `latent_attention` of prompts; or "fused_recurrence", which is
    `gated_delta` with logits and keys as a layer's products are.

    block_size: 0 if blocks do not matter.  rotation: of the new rows; with `merge_partitions` and
    `shared_prefix` it selects the fused decode.  prefix: `merge_partitions` behind a shared prefix.
    sizes: of a kernel without attention: (hidden size,) or (rows, outputs, depth).  quantisation:
    of the weight.  recurrence: of a kernel of recurrent layers.  experts: of a kernel of mixtures
    of experts.  With sizes, recurrence or experts, only the type of `shape` matters.
    """

    kernel: str
    shape: AttentionShape
    block_size: int = 0
    rotation: Rotation | None = None
    prefix: bool = False
    sizes: tuple[int, ...] = ()
    recurrence: RecurrentShape | None = None
    quantisation: Quantisation | None = None
    experts: ExpertShape | None = None

    def __str__(self) -> str:
        if self.recurrence is not None:
            return f"{self.kernel} ({self.recurrence})"
        dtype = str(self.shape.dtype).removeprefix("mlx.core.")
        if self.experts is not None:
            return f"{self.kernel} ({self.experts}, {dtype})"
        if self.sizes:
            text = f"{self.kernel} ({' x '.join(map(str, self.sizes))} {dtype}"
            return text + (f", {self.quantisation})" if self.quantisation else ")")
        parts = [str(self.shape)]
        parts += [f"blocks of {self.block_size}"] if self.block_size else []
        parts += [str(self.rotation)] if self.rotation else []
        parts += ["behind a shared prefix"] if self.prefix else []
        return f"{self.kernel} ({', '.join(parts)})"

    @property
    def needs(self) -> tuple[str, ...]:
        """The other kernels that must be right before this check can say something."""
        needs = list(REGISTRY[self.kernel].needs)
        if self.rotation is not None and self.kernel in ("merge_partitions", "shared_prefix"):
            needs.append("fused_decode")
        if self.prefix:
            needs.append("shared_prefix")
        return tuple(needs)

    def encode(self) -> dict[str, Any]:
        """The check as JSON."""
        return {
            **vars(self),
            "shape": _encode(self.shape),
            "rotation": self.rotation and vars(self.rotation),
            "recurrence": self.recurrence
            and {"kind": type(self.recurrence).__name__, **_encode(self.recurrence)},
        }

    @classmethod
    def decode(cls, fields: dict[str, Any]) -> "Check":
        """The check that `encode` was called on."""
        rotation, recurrence = fields["rotation"], fields["recurrence"]
        if recurrence is not None:
            kind = _RECURRENT[recurrence["kind"]]
            rest = {name: value for name, value in recurrence.items() if name != "kind"}
            recurrence = kind(**_decode(rest))
        return cls(
            fields["kernel"],
            AttentionShape(**_decode(fields["shape"])),
            fields["block_size"],
            None if rotation is None else Rotation(**rotation),
            fields["prefix"],
            tuple(fields["sizes"]),
            recurrence,
            _quantisation(fields["quantisation"]),
            _experts(fields["experts"]),
        )


def _encode(shape: AttentionShape | RecurrentShape) -> dict[str, Any]:
    return {**vars(shape), "dtype": str(shape.dtype).removeprefix("mlx.core.")}


def _decode(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "dtype": getattr(mx, fields["dtype"])}


def _quantisation(fields: Sequence[Any] | None) -> Quantisation | None:
    return None if fields is None else Quantisation(*fields)


def _experts(fields: list[Any] | None) -> ExpertShape | None:
    if fields is None:
        return None
    shape = ExpertShape(*fields)
    how = _quantisation(shape.quantisation), _quantisation(shape.down)
    return shape._replace(quantisation=how[0], down=how[1])
