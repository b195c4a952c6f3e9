"""The stored format of one head's row of K or V: as it is, or quantised to 8 or 4 bits per value.

A quantised row of `dim` values is split into groups.  The store keeps each group's smallest value
`low` and a `scale` in the model's dtype, and each value as the integer q for which scale * q + low
is nearest, as in MLX's affine mode.  Differences from `mx.quantize`, whose errors are larger
(measured: docs/notes.md):

- low is exactly the smallest value, so all 2^bits integers are used.  `mx.quantize` adjusts the
  scale to represent zero exactly, which helps weights but not K and V;
- q is computed with the rounded scale that is stored; scale * q + low is computed in float32 and
  rounded once.

Row layout, in 32-bit words: dim * bits / 32 words of values, the first value in the lowest bits (as
in `mx.quantize`), then scale and low of each group: the two halves of one word for 16-bit dtypes,
two words for float32.  A row is contiguous, so a kernel reads one memory range per head.  The
values come first, aligned for wide loads.
"""

from dataclasses import dataclass

from vllm_metal_lite.backend import mx

# Most values per scale.  Smaller groups cost memory: 4 bytes per group for 16-bit dtypes.
MAX_GROUP = 64
# At or below this scale, all q of a group are 0: 1 / scale must be finite.
TINY = 1e-30


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Stored format of one head's row of `dim` values of `dtype`.  bits None: not quantised.

    If quantised, dim is a multiple of 8.
    """

    dim: int
    dtype: mx.Dtype
    bits: int | None = None

    @property
    def group_size(self) -> int:
        """Values per scale: the largest multiple of 8 up to MAX_GROUP that divides dim."""
        return max(n for n in range(8, MAX_GROUP + 1, 8) if self.dim % n == 0)

    @property
    def value_words(self) -> int:
        """32-bit words that hold the values of a row."""
        return self.dim * (self.bits or 8 * self.dtype.size) // 32

    @property
    def width(self) -> int:
        """Elements of a stored row: values, or 32-bit words if quantised."""
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
        """Convert rows (..., dim) to their stored format (..., width)."""
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
        scales = mx.concatenate([scale, low.astype(self.dtype)], axis=-1).view(mx.uint32)
        return mx.concatenate([words, scales.reshape(*rows.shape[:-1], -1)], axis=-1)

    def unpack(self, stored: mx.array) -> mx.array:
        """Convert stored rows (..., width) back to rows (..., dim)."""
        if self.bits is None or not self.dim:
            return stored.astype(self.dtype)
        shape = (*stored.shape[:-1], self.dim)
        words, scales = mx.split(stored, [self.value_words], axis=-1)
        q = (words[..., None] >> self._shifts) & ((1 << self.bits) - 1)
        q = q.reshape(*shape[:-1], -1, self.group_size)
        scales = mx.contiguous(scales).view(self.dtype).reshape(*q.shape[:-1], 2)
        scale, low = mx.split(scales.astype(mx.float32), 2, axis=-1)
        return (q * scale + low).astype(self.dtype).reshape(shape)

    def rounded(self, rows: mx.array) -> mx.array:
        """Rows (..., dim) after a round trip through the store."""
        return rows if self.bits is None else self.unpack(self.pack(rows))

    @property
    def _shifts(self) -> mx.array:
        return mx.arange(0, 32, self.bits, dtype=mx.uint32)
