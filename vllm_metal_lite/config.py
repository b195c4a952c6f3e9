"""Every option of the engine, validated when it is made."""

from dataclasses import dataclass

from vllm_metal_lite.errors import ConfigError, Option
from vllm_metal_lite.rules import apply_rules, choice, integer, number, switch

PREFILL_POLICIES = ("mixed", "whole")
BLOCK_SIZES = (8, 16, 32)
ATTENTION = ("auto", "reference", "kernels")
KV_BITS = (8, 4)
SPECULATE = ("off", "auto")
DTYPES = ("auto", "float32", "float16", "bfloat16")

# Most tokens of a chunk times tokens of context before it.  One step's attention grows with this
# product, and macOS kills GPU work that runs for seconds while a display is on.  A chunk of 2,048
# tokens is cut beyond a context of 32k.
MAX_CHUNK_TIMES_CONTEXT = 2048 * 32768

# Seats are rows of host tables, made at start.
MAX_NUM_SEQS = 16384

# Most drafts of a request in a step.
MAX_DRAFT = 31
# Most rows that a step with drafts samples: logits take memory, a vocabulary for each row.
_MAX_DRAFTED_ROWS = 256

ENGINE_RULES = {
    "block_size": choice(*BLOCK_SIZES),
    "num_blocks": integer(1, optional=True),
    "max_num_seqs": integer(1, MAX_NUM_SEQS),
    "max_num_batched_tokens": integer(1),
    "max_model_len": integer(1, optional=True),
    "long_prefill_token_threshold": integer(0),
    "prefill_policy": choice(*PREFILL_POLICIES),
    "enable_prefix_caching": switch(),
    "memory_fraction": number(0, 1, above=True, optional=True),
    "state_cache_gib": number(0, optional=True),
    "prefix_disk_gib": number(0),
    "dtype": choice(*DTYPES),
    "kv_bits": choice(*KV_BITS, optional=True),
    "attention": choice(*ATTENTION),
    "speculate": choice(*SPECULATE),
    "seed": integer(0),
    "trust_remote_code": switch(),
}


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine; `ConfigError` names the value and the limit if one is out of range.

    num_blocks None: as many as the memory holds (see `runner/memory.py`).
    max_model_len None: the model's own context length, or less if the store cannot hold it.
    long_prefill_token_threshold: most prompt tokens that one request gets in one step; 0 = no
    limit of its own.
    memory_fraction None: a safe value for the device (see `devices.py`).
    state_cache_gib: memory for state checkpoints of models with recurrent layers, beside one state
    for each of max_num_seqs; None: a share of the memory.
    prefix_disk_gib: quota of the folder that keeps cached prefixes across restarts; 0: none.
    dtype "auto": that of the weights on a GPU, float32 (quantised weights expanded) on a CPU.
    kv_bits: keep K and V in 8 or 4 bits a value (see `kv/row_format.py`); None: as they are.
    attention "auto": the kernels of metal/ on a GPU where they agree with the reference there.
    speculate "auto": compute several tokens of an answer in one step where it repeats earlier text
    and that is faster; the tokens stay the same (docs/speculation.md).
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
    state_cache_gib: float | None = None
    prefix_disk_gib: float = 0.0
    dtype: str = "auto"
    kv_bits: int | None = None
    attention: str = "auto"
    speculate: str = "auto"
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        apply_rules(self, ENGINE_RULES, ConfigError)
        threshold, name = self.long_prefill_token_threshold, Option("long_prefill_token_threshold")
        if threshold and threshold < self.block_size:
            size = f" ({self.block_size}), got {threshold}"
            raise ConfigError(name, " must be 0 or at least ", Option("block_size"), size)
        if threshold and self.max_model_len is not None and threshold > self.max_model_len:
            most = f" ({self.max_model_len}), got {threshold}"
            raise ConfigError(name, " must be at most ", Option("max_model_len"), most)

    @property
    def max_sampled_rows(self) -> int:
        """The most rows that a step samples: one for each request, or more with drafts."""
        most = self.max_num_seqs * (1 if self.speculate == "off" else 1 + MAX_DRAFT)
        return max(self.max_num_seqs, min(most, _MAX_DRAFTED_ROWS))
