"""Queries, keys or values of packed rows, with their pending norm and rotation."""

from dataclasses import dataclass, replace

from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope


@dataclass(frozen=True, slots=True)
class Heads:
    """num_heads x head_dim columns of each row.

    norm, rope: still to be applied, in this order; None if there is none.
    stride: the columns from one head to the next, if these columns are parts of heads; None means
    head_dim.
    """

    columns: Columns
    num_heads: int
    head_dim: int
    norm: RMSNorm | None = None
    rope: Rope | None = None
    stride: int | None = None

    @property
    def plain(self) -> Columns | None:
        """The columns, if they are whole heads and nothing is pending."""
        pending = self.norm or self.rope or self.stride
        return None if pending else self.columns

    def normed(self, norm: RMSNorm) -> "Heads | None":
        """Add a norm; None if the kernels do not support it."""
        if self.norm or self.rope or not (norm.weight is None or norm.weight.size == self.head_dim):
            return None
        return replace(self, norm=norm)

    def rotated(self, rope: Rope) -> "Heads | None":
        """Add a rotation; None if one is already pending."""
        return None if self.rope else replace(self, rope=rope)


@dataclass(frozen=True, slots=True)
class Latents:
    """`kv_lora_rank` columns of each row, and their pending norm."""

    columns: Columns
    kv_lora_rank: int
    norm: RMSNorm


def same_rope(a: Rope | None, b: Rope | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.freqs is b.freqs and a._replace(freqs=None) == b._replace(freqs=None)
