"""The shapes that attention, kernels, models and checks share, and what a model uses of them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vllm_metal_lite.backend import dtype_name, mx


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
    attention_chunk: int | None = None
    kv_bits: int | None = None

    def __str__(self) -> str:
        dims = {self.k_head_dim: None, self.v_head_dim: None}
        text = f"{self.num_heads}/{self.num_kv_heads} heads of {'/'.join(map(str, dims))} "
        text += dtype_name(self.dtype)
        text += f", window {self.window}" if self.window is not None else ""
        text += f", softcap {self.softcap:g}" if self.softcap is not None else ""
        text += f", chunks of {self.attention_chunk}" if self.attention_chunk is not None else ""
        text += f", KV in {self.kv_bits} bits" if self.kv_bits is not None else ""
        return text + (", sinks" if self.sinks else "") + (", latent" if self.latent else "")


@dataclass(frozen=True)
class RopeShape:
    """How a model prepares the heads of a layer before attention.

    dims, traditional, base, scale: the arguments of mx.fast.rope; base None: frequencies are given.
    eps: the epsilon of an RMS norm of each head before the rotation; None: there is no norm.
    factor: multiplies the rotated elements before the rotation.
    """

    dims: int
    traditional: bool = False
    base: float | None = 10_000.0
    scale: float = 1.0
    eps: float | None = None
    factor: float = 1.0

    def __str__(self) -> str:
        pairs = "neighbours" if self.traditional else "halves"
        by = "given frequencies" if self.base is None else f"base {self.base:g}"
        text = f"{self.dims} dims rotated in {pairs} by {by}"
        text += f" times {self.scale:g}" if self.scale != 1 else ""
        text += f", scaled by {self.factor:g}" if self.factor != 1 else ""
        return text + (", normalised" if self.eps is not None else "")


@dataclass(frozen=True)
class ConvShape:
    """The short causal convolution of a recurrent layer.  silu: whether SiLU follows."""

    channels: int
    kernel_size: int
    bias: bool
    silu: bool
    dtype: mx.Dtype

    def __str__(self) -> str:
        text = f"{self.channels} channels by {self.kernel_size} rows {dtype_name(self.dtype)}"
        return text + (", bias" if self.bias else "") + (", SiLU" if self.silu else "")


@dataclass(frozen=True)
class RecurrenceShape:
    """A recurrence with a state (v_dim, k_dim) for each of v_heads heads.

    delta: the gated delta rule; otherwise Mamba 2's state space update, whose groups are k_heads
    and whose head is v_dim by a state of k_dim.  vector: whether each column of the state has its
    own gate, not each head.  dtype: the type of the rows; states are float32.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    dtype: mx.Dtype
    delta: bool = True
    vector: bool = False

    def __str__(self) -> str:
        text = "gated delta rule" if self.delta else "state space"
        text += f", {self.k_heads}/{self.v_heads} heads of {self.k_dim}x{self.v_dim} "
        text += dtype_name(self.dtype)
        return text + (", vector gates" if self.vector else "")


@dataclass(frozen=True)
class GatedNormShape:
    """The norm after a recurrence, with its gate, in one launch.  A row has groups of dim elements.

    gate_first: the gate is applied before the norm.  sigmoid: the gate's activation, not SiLU.
    """

    dim: int
    groups: int
    dtype: mx.Dtype
    gate_first: bool = False
    sigmoid: bool = False

    def __str__(self) -> str:
        text = f"{self.groups} groups of {self.dim} {dtype_name(self.dtype)}"
        text += ", gate first" if self.gate_first else ""
        return text + (", sigmoid" if self.sigmoid else "")


RecurrentShape = ConvShape | RecurrenceShape | GatedNormShape


class Quantisation(NamedTuple):
    """How `mx.quantize` made a weight."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.mode} of {self.bits} bits in groups of {self.group_size}"


class WeightShape(NamedTuple):
    """A weight of a linear layer.  quantisation: None for floats."""

    outputs: int
    depth: int
    quantisation: Quantisation | None = None


# The activations of experts.  "clamped_swiglu" is gpt-oss's; "relu2" squares one product, without
# a gate.
ExpertActivation = Literal["swiglu", "clamped_swiglu", "geglu", "relu2"]


class ExpertShape(NamedTuple):
    """A mixture of experts.  quantisation: how the weights of gate and up are quantised; down: how
    the weight of down is; None for floats."""

    experts: int
    hidden: int
    intermediate: int
    activation: ExpertActivation = "swiglu"
    biased: bool = False
    quantisation: Quantisation | None = None
    down: Quantisation | None = None

    def __str__(self) -> str:
        text = f"{self.experts} experts of {self.hidden} x {self.intermediate}"
        text += "" if self.activation == "swiglu" else f", {self.activation}"
        text += ", with biases" if self.biased else ""
        formats = dict.fromkeys(how for how in (self.quantisation, self.down) if how)
        return text + "".join(f", {how}" for how in formats)


@dataclass(frozen=True)
class KernelUse:
    """What one model asks of the kernels.

    hidden_sizes: the sizes of rows whose residual sum is normalised.  weights: the weights of
    linear layers that `skinny_gemm` could serve.  shares_prefix: whether requests may share blocks.
    recurrences: the operations of layers that keep states.  experts: the mixtures of experts.
    spans: where rows of a picture see each other: in "all" layers, in those with a "sliding"
    window, or in none ("").
    """

    shapes: tuple[AttentionShape, ...]
    block_size: int
    ropes: tuple[RopeShape, ...] = ()
    hidden_sizes: tuple[int, ...] = ()
    weights: tuple[WeightShape, ...] = ()
    shares_prefix: bool = True
    recurrences: tuple[RecurrentShape, ...] = ()
    experts: tuple[ExpertShape, ...] = ()
    spans: str = ""
