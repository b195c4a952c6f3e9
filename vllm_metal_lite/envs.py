"""Every environment variable that the package reads.  Each is read when it is asked for."""

import os
from pathlib import Path


def device() -> str | None:
    """METAL_LITE_DEVICE: "cpu" keeps MLX off the GPU; "cpu" or "cuda" starts the plugin for vLLM
    on machines that are not Apple silicon."""
    return os.environ.get("METAL_LITE_DEVICE")


def attention() -> str:
    """METAL_LITE_ATTENTION: `EngineConfig.attention` under vLLM."""
    return os.environ.get("METAL_LITE_ATTENTION", "auto")


def kv_bits() -> str | None:
    """METAL_LITE_KV_BITS: `EngineConfig.kv_bits` under vLLM, None or empty for its default."""
    return os.environ.get("METAL_LITE_KV_BITS")


def cache_folder() -> Path:
    """XDG_CACHE_HOME: its folder `vllm_metal_lite` keeps findings about the kernels and the device,
    across processes."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm_metal_lite"


def no_color() -> bool:
    """NO_COLOR, or TERM=dumb: the command line prints plain text."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
