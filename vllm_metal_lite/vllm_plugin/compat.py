"""What differs between vLLM 0.27.1 and 0.33: by what is there, not by version numbers.

vLLM imports the platform before most of itself is ready, so its names are imported in functions.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.outputs import LogprobsLists

    from vllm_metal_lite.runner import Logprobs


def get(root: Any, path: str, default: Any = None) -> Any:
    """An option by its dotted path; the default where this vLLM does not have it."""
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return default
    return root


def bad_request(message: str) -> Exception:
    """An error that the server answers with HTTP 400."""
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:
        return ValueError(message)
    return VLLMValidationError(message)


def disable_compilation(compilation_config: Any) -> None:
    """There is no torch model to compile."""
    from vllm.config import CompilationMode

    compilation_config.mode = CompilationMode.NONE
    compilation_config.cudagraph_capture_sizes = []


def attention_spec(window: int | None, head_size_v: int, **kwargs: Any) -> "KVCacheSpec":
    """vLLM's spec of one layer's K and V."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    cls = FullAttentionSpec if window is None else SlidingWindowSpec
    fields = {f.name for f in dataclasses.fields(cls)}
    if window is not None:
        kwargs["sliding_window"] = window
    if "head_size_v" in fields:
        kwargs["head_size_v"] = head_size_v
    elif head_size_v != kwargs["head_size"]:
        # This version counts two equal heads: one of the mean size is as large.
        kwargs["head_size"] = -(-(kwargs["head_size"] + head_size_v) // 2)
    return cls(**kwargs)


def compilation_times() -> Any:
    """What `compile_or_warm_up_model` returns: seconds, in older versions as one number."""
    try:
        from vllm.v1.worker.worker_base import CompilationTimes
    except ImportError:
        return 0.0
    return CompilationTimes(language_model=0.0, encoder=0.0)


def preempted(scheduler_output: Any) -> set[str] | None:
    """Requests that lost their blocks in this step; None: this version does not say."""
    return getattr(scheduler_output, "preempted_req_ids", None)


def logprobs_lists(logprobs: "Logprobs | None", counts: Iterable[int]) -> "LogprobsLists | None":
    """Log-probabilities of the tokens sampled; counts: how many each request of the step got."""
    from vllm.v1.outputs import LogprobsLists

    if logprobs is None:
        return None
    starts = list(itertools.accumulate(counts, initial=0))
    return LogprobsLists(logprobs.token_ids, logprobs.logprobs, logprobs.ranks, starts)


def guard_torch_accelerator() -> None:
    """vLLM empties torch's accelerator cache when it ends; without an accelerator torch raises."""
    import torch

    if not torch.accelerator.is_available():
        for name in ("empty_cache", "empty_host_cache"):
            setattr(torch.accelerator, name, lambda: None)
