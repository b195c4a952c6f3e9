"""K and V in 8 or 4 bits a value: what is kept of one head's row, and how it is made and read.

A row of `dim` values is cut into groups.  Of each group the store keeps, in the dtype of the model,
its smallest value `low` and a `scale`, and of each value the integer q for which scale * q + low is
nearest: MLX's affine form.  What differs from `mx.quantize`, and why (errors measured on normal
values in bfloat16, docs/benchmarks.md):

- low is the smallest value itself, so that all 2^bits integers are used.  `mx.quantize` moves the
  scale until zero is exact, which weights want and K and V do not;
- q is found with the scale as it is kept, after its rounding, and scale * q + low is computed in
  float32 and rounded once.

Layout of a row, in 32-bit words: dim * bits / 32 words of values, the first value in the lowest
bits (as `mx.quantize` packs), then for each group its scale and low: two halves of one word in 16
bits, two words in float32.  All of a row lies together, so a kernel reads one run of memory a head;
the words of values come first, so that they are aligned for wide loads.
"""

from dataclasses import dataclass

from vllm_metal_lite.backend import mx

# Most values that share a scale.  Fewer cost more memory: a group costs 4 bytes in 16 bits.
MAX_GROUP = 64
# A group that is flatter than this is kept as `low` alone: 1 / scale must be finite.
TINY = 1e-30


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the store keeps one head's row of `dim` values of `dtype`.  bits None: as they are.

    Quantised: dim is a multiple of 8.
    """

    dim: int
    dtype: mx.Dtype
    bits: int | None = None

    @property
    def group_size(self) -> int:
        """Values that share a scale: the most, up to MAX_GROUP, that divide dim in eights."""
        return max(n for n in range(8, MAX_GROUP + 1, 8) if self.dim % n == 0)

    @property
    def value_words(self) -> int:
        """32-bit words of the values of a row."""
        return self.dim * (self.bits or 8 * self.dtype.size) // 32

    @property
    def width(self) -> int:
        """Elements of a row in the store: its values, or words of 32 bits."""
        if self.bits is None or not self.dim:
            return self.dim
        return self.value_words + self.dim // self.group_size * self.dtype.size // 2

    @property
    def kept_dtype(self) -> mx.Dtype:
        return self.dtype if self.bits is None else mx.uint32

    @property
    def nbytes(self) -> int:
        return self.width * self.kept_dtype.size

    def pack(self, rows: mx.array) -> mx.array:
        """Rows (..., dim) as the store keeps them, (..., width)."""
        if self.bits is None or not self.dim:
            return rows.astype(self.kept_dtype)
        rows = rows.astype(self.dtype).astype(mx.float32)
        groups = rows.reshape(*rows.shape[:-1], -1, self.group_size)
        low = groups.min(axis=-1, keepdims=True)
        most = (1 << self.bits) - 1
        spread = groups.max(axis=-1, keepdims=True) - low
        scale = (spread * (1.0 / most)).astype(self.dtype)
        wide = scale.astype(mx.float32)
        inverse = mx.where(wide > TINY, 1.0 / wide, 0.0)
        q = mx.clip(mx.round((groups - low) * inverse), 0, most).astype(mx.uint32)
        q = q.reshape(*rows.shape[:-1], -1, 32 // self.bits)
        words = (q << self._shifts).sum(axis=-1)
        kept = mx.concatenate([scale, low.astype(self.dtype)], axis=-1).view(mx.uint32)
        return mx.concatenate([words, kept.reshape(*rows.shape[:-1], -1)], axis=-1)

    def unpack(self, kept: mx.array) -> mx.array:
        """What `pack` gave, (..., width), as rows (..., dim)."""
        if self.bits is None or not self.dim:
            return kept.astype(self.dtype)
        shape = (*kept.shape[:-1], self.dim)
        words, scales = mx.split(kept, [self.value_words], axis=-1)
        q = (words[..., None] >> self._shifts) & ((1 << self.bits) - 1)
        q = q.reshape(*shape[:-1], -1, self.group_size)
        scales = mx.contiguous(scales).view(self.dtype).reshape(*q.shape[:-1], 2)
        scale, low = mx.split(scales.astype(mx.float32), 2, axis=-1)
        return (q * scale + low).astype(self.dtype).reshape(shape)

    def rounded(self, rows: mx.array) -> mx.array:
        """Rows (..., dim) as they are read back from the store."""
        return rows if self.bits is None else self.unpack(self.pack(rows))

    @property
    def _shifts(self) -> mx.array:
        return mx.arange(0, 32, self.bits, dtype=mx.uint32)
