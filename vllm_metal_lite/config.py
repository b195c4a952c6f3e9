"""Every option of the engine, validated when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from vllm_metal_lite.errors import ConfigError, Option, show
from vllm_metal_lite.rules import Flag, apply_rules, choice, counts, integer, number, switch, text

PREFILL_POLICIES = ("mixed", "alternate", "whole")
BLOCK_SIZES = (8, 16, 32)
ATTENTION = ("auto", "reference", "kernels")
KV_BITS = (8, 4)
SPECULATIVE_METHODS = ("ngram", "mtp", "draft_model")
DTYPES = ("auto", "float32", "float16", "bfloat16")

# The largest product of a chunk's tokens and the tokens of context before them.  One step's
# attention grows with this product, and macOS kills GPU work that runs for seconds while a display
# is on.  A chunk of 2,048 tokens is cut beyond a context of 32k.
MAX_CHUNK_TIMES_CONTEXT = 2048 * 32768

# Seats are rows of host tables that are made at start.
MAX_NUM_SEQS = 16384

# The most items of each kind in a prompt, by vLLM's names.  No model here takes audio or video.
MM_LIMITS = {"image": 100, "audio": 0, "video": 0}

# A request has at most this number of drafts in a step.
MAX_DRAFT = 31
# The most drafts that a drafter makes for a request in a step.
MAX_MODEL_DRAFTS = 7
# At most this number of rows get logits, unless more requests decode: a row's logits take a
# vocabulary of memory.
_MAX_LOGITS_ROWS = 256


def speculative_options(config: Any) -> dict[str, Any]:
    """The fields of EngineConfig for vLLM's `speculative_config`.  Raises ConfigError.

    config: a dict with "method" ("ngram", "mtp" or "draft_model"), and perhaps with "model" and
    "num_speculative_tokens".
    """
    name = Option("speculative_config")
    if not isinstance(config, Mapping):
        raise ConfigError(name, f" must be a dict, got {show(config)}")
    known = ("method", "model", "num_speculative_tokens")
    for key in config:
        if key not in known:
            raise ConfigError(name, f" has no {show(key)}, only {', '.join(known)}")
    method, model = config.get("method", "draft_model"), config.get("model")
    if method not in SPECULATIVE_METHODS:
        allowed = ", ".join(SPECULATIVE_METHODS)
        raise ConfigError(name, f": method must be one of {allowed}, got {show(method)}")
    if method == "draft_model" and model is None:
        raise ConfigError(name, ': method "draft_model" needs a model')
    options = {k: v for k, v in config.items() if k == "num_speculative_tokens"}
    if method == "ngram":
        return {**options, "speculate": "lookup"}
    return {**options, "draft_model": model}


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine; `ConfigError` names the value and the limit if one is out of range.

    The flags say what each option does; docs/configuration.md says more.

    num_blocks None: `runner/memory.py` computes it.
    max_model_len None: the model's own context length, or less if the store cannot hold it.
    long_prefill_token_threshold 0: a request has no limit of its own.
    max_step_seconds: the engine adapts chunks and drafts to the times that it measures.
    memory_fraction None: a safe value for the device (see `devices.py`).
    state_cache_gib: memory beside one state for each of max_num_seqs; None: a share of the memory.
    prefix_disk_gib 0: no folder keeps prefixes.
    dtype "auto": the weights' dtype on a GPU; float32 (quantised weights expanded) on a CPU.
    kv_bits: see `kv/row_format.py`.
    attention "auto": on a GPU, the kernels of metal/ that agree with the reference there.
    speculate "auto": where several tokens a step are faster; the tokens stay the same.
    draft_model None: trained heads in the model's folder draft, if there are any; see
    docs/speculation.md.
    limit_mm_per_prompt: by vLLM's names; {"image": 8} allows eight pictures a prompt.
    trust_remote_code: run Python code that comes with a model, such as its tokenizer's.
    """

    block_size: Annotated[
        int, choice(*BLOCK_SIZES), Flag("N", "tokens per block of the KV store: {allowed}")
    ] = 16
    num_blocks: Annotated[
        int | None, integer(1), Flag("N", "blocks of the KV store (default: what the memory holds)")
    ] = None
    max_num_seqs: Annotated[
        int, integer(1, MAX_NUM_SEQS), Flag("N", "requests that run at the same time")
    ] = 64
    max_num_batched_tokens: Annotated[int, integer(1), Flag("N", "most tokens of one step")] = 2048
    max_model_len: Annotated[
        int | None, integer(1), Flag("N", "longest context in tokens (default: the model's own)")
    ] = None
    long_prefill_token_threshold: Annotated[
        int, integer(0), Flag("N", "most prompt tokens of a request in a step; 0: any")
    ] = 0
    max_step_seconds: Annotated[
        float, number(0), Flag("S", "how long a step may take where others wait; 0: any time")
    ] = 0.0
    prefill_policy: Annotated[
        str, choice(*PREFILL_POLICIES), Flag("NAME", "prompts beside decodes: {allowed}")
    ] = "mixed"
    enable_prefix_caching: Annotated[bool, switch()] = True
    memory_fraction: Annotated[
        float | None,
        number(0, 1, above=True),
        Flag("F", "share of the memory to use (default: a safe value)"),
    ] = None
    state_cache_gib: Annotated[
        float | None,
        number(0),
        Flag("N", "GiB for state checkpoints of recurrent layers (default: a share)"),
    ] = None
    prefix_disk_gib: Annotated[
        float, number(0, 1 << 20), Flag("N", "GiB on the disk for prefixes that survive a restart")
    ] = 0.0
    dtype: Annotated[str, choice(*DTYPES), Flag("NAME", "{allowed}")] = "auto"
    kv_bits: Annotated[
        int | None,
        choice(*KV_BITS),
        Flag("N", "keep K and V in {allowed} bits a value (default: as they are)"),
    ] = None
    attention: Annotated[
        str, choice(*ATTENTION), Flag("NAME", "{allowed}; auto: on a GPU, kernels that pass checks")
    ] = "auto"
    speculate: Annotated[
        str,
        choice("off", "lookup", "auto"),
        Flag("NAME", "{allowed}: several tokens a step; lookup: only where text repeats"),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        text(),
        Flag("NAME", "model or trained heads that draft (default: heads in the model's folder)"),
    ] = None
    num_speculative_tokens: Annotated[
        int,
        integer(1, MAX_MODEL_DRAFTS),
        Flag("N", "most drafts of a request by heads or a draft model"),
    ] = 3
    limit_mm_per_prompt: Annotated[
        Mapping[str, int],
        counts(MM_LIMITS),
        Flag("JSON", "most pictures of a prompt; 0: the vision tower is not loaded"),
    ] = field(default_factory=lambda: dict(MM_LIMITS))
    seed: Annotated[int, integer(0), Flag("N", "seed of requests that have none of their own")] = 0
    trust_remote_code: Annotated[bool, switch()] = False

    def __post_init__(self) -> None:
        apply_rules(self, ConfigError)
        threshold, name = self.long_prefill_token_threshold, Option("long_prefill_token_threshold")
        if threshold and threshold < self.block_size:
            size = f" ({self.block_size}), got {threshold}"
            raise ConfigError(name, " must be 0 or at least ", Option("block_size"), size)
        if threshold and self.max_model_len is not None and threshold > self.max_model_len:
            most = f" ({self.max_model_len}), got {threshold}"
            raise ConfigError(name, " must be at most ", Option("max_model_len"), most)

    @property
    def max_logits_rows(self) -> int:
        """The limit of a step's rows with logits: sampled rows, and scored rows of prompts."""
        return max(self.max_num_seqs, min(self.max_num_seqs * (1 + MAX_DRAFT), _MAX_LOGITS_ROWS))
