"""Every option of the engine, validated when it is made."""

from dataclasses import dataclass

from vllm_metal_lite.errors import ConfigError

PREFILL_POLICIES = ("mixed", "alternate", "whole")
BLOCK_SIZES = (8, 16, 32)
ATTENTION = ("auto", "reference", "kernels")
KV_BITS = (None, 8, 4)
DTYPES = ("auto", "float32", "float16", "bfloat16")

# Most tokens of a chunk times tokens of context before it.  One step's attention grows with this
# product, and macOS kills GPU work that runs for seconds while a display is on.  A chunk of 2,048
# tokens feels it beyond a context of 32k.
MAX_CHUNK_TIMES_CONTEXT = 2048 * 32768

# Seats are rows of host tables, made at start.
MAX_NUM_SEQS = 16384

# Longest pack of prompts that shares one block-diagonal mask: the mask grows with its square.
MAX_PACKED_PREFILL_TOKENS = 4096


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine; `ConfigError` names the value and the limit if one is out of range.

    num_blocks None: as many as the memory holds (see `kv/sizing.py`).
    max_model_len None: the model's own context length, or less if the store cannot hold it.
    long_prefill_token_threshold: most prompt tokens that one request gets in one step; 0 = no
    limit of its own.
    memory_fraction None: what is safe on the device (see `kv/sizing.py`).
    dtype "auto": what the weights have on a GPU, float32 (quantised weights expanded) on a CPU.
    kv_bits: keep K and V in 8 or 4 bits a value (see `kv/quantised.py`); None: as they are.
    attention "auto": the kernels of metal/ on a GPU where they agree with the reference there.
    trust_remote_code: run Python code that comes with a model, such as its tokenizer's.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    long_prefill_token_threshold: int = 0
    prefill_policy: str = "mixed"
    enable_prefix_caching: bool = True
    memory_fraction: float | None = None
    dtype: str = "auto"
    kv_bits: int | None = None
    attention: str = "auto"
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self._choice("block_size", BLOCK_SIZES)
        self._choice("prefill_policy", PREFILL_POLICIES)
        self._choice("dtype", DTYPES)
        self._choice("attention", ATTENTION)
        self._choice("kv_bits", KV_BITS)
        self._at_least("max_num_seqs", 1)
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ConfigError(f"max_num_seqs ({self.max_num_seqs}) is above {MAX_NUM_SEQS}")
        self._at_least("max_num_batched_tokens", 1)
        self._at_least("num_blocks", 1, optional=True)
        self._at_least("max_model_len", 1, optional=True)
        self._at_least("long_prefill_token_threshold", 0)
        self._at_least("seed", 0)
        threshold = self.long_prefill_token_threshold
        if threshold and threshold < self.block_size:
            raise ConfigError(
                f"long_prefill_token_threshold ({threshold}) must be 0 or at least "
                f"block_size ({self.block_size})"
            )
        if threshold and self.max_model_len is not None and threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold ({threshold}) is above "
                f"max_model_len ({self.max_model_len})"
            )
        fraction = self.memory_fraction
        if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
            raise ConfigError(f"memory_fraction must be in (0, 1], got {fraction!r}")
        self._bool("enable_prefix_caching")
        self._bool("trust_remote_code")

    def _choice(self, name: str, allowed: tuple) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {list(allowed)}, got {value!r}")

    def _bool(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")

    def _at_least(self, name: str, low: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
