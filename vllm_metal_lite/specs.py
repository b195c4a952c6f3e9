"""AttentionShape, which attention, kernels, models and checks share."""

from dataclasses import dataclass

from vllm_metal_lite.backend import mx


@dataclass(frozen=True)
class AttentionShape:
    """Everything that distinguishes a model's attention calls, apart from the batch."""

    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False
    chunk: int | None = None
    kv_bits: int | None = None

    def __str__(self) -> str:
        dims = {self.k_head_dim: None, self.v_head_dim: None}
        text = f"{self.num_heads}/{self.num_kv_heads} heads of {'/'.join(map(str, dims))} "
        text += str(self.dtype).removeprefix("mlx.core.")
        text += f", window {self.window}" if self.window is not None else ""
        text += f", softcap {self.softcap:g}" if self.softcap is not None else ""
        text += f", chunks of {self.chunk}" if self.chunk is not None else ""
        text += f", KV in {self.kv_bits} bits" if self.kv_bits is not None else ""
        return text + (", sinks" if self.sinks else "") + (", latent" if self.latent else "")
