"""The package's own environment variables (METAL_LITE_*), and those for its cache and colours.

Each call reads the variable again.
"""

import os
from pathlib import Path

from vllm_metal_lite.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda", "gpu")


def device() -> str | None:
    """METAL_LITE_DEVICE: "cpu" keeps MLX off the GPU; "cpu" or "cuda" starts the plugin for vLLM
    on machines that are not Apple silicon.  "cuda" needs a checkout on NVIDIA.  "auto", "gpu" or
    empty: MLX's choice.

    Raises ConfigError for any other value.
    """
    value = os.environ.get("METAL_LITE_DEVICE")
    if value and value not in DEVICES:
        raise ConfigError(f"METAL_LITE_DEVICE must be one of {', '.join(DEVICES)}, got {value!r}")
    return value


def attention() -> str:
    """METAL_LITE_ATTENTION: `EngineConfig.attention` under vLLM, "auto" if empty."""
    return os.environ.get("METAL_LITE_ATTENTION") or "auto"


def kv_bits() -> str | None:
    """METAL_LITE_KV_BITS: `EngineConfig.kv_bits` under vLLM, None or empty for its default."""
    return os.environ.get("METAL_LITE_KV_BITS") or None


def hostfile() -> str | None:
    """METAL_LITE_HOSTFILE: how the ranks of a model are connected, under vLLM (links.py)."""
    return os.environ.get("METAL_LITE_HOSTFILE") or None


def api_key() -> str | None:
    """METAL_LITE_API_KEY: the key that the server demands; None or empty: no key."""
    return os.environ.get("METAL_LITE_API_KEY") or None


def cache_folder() -> Path:
    """XDG_CACHE_HOME: its folder `vllm_metal_lite`, where processes share findings about the
    kernels and the device."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm_metal_lite"


def prefix_folder() -> Path:
    """The folder of cached prefixes, in `cache_folder`.  Spotlight skips names that end in
    `.noindex`."""
    return cache_folder() / "prefixes.noindex"


def no_color() -> bool:
    """NO_COLOR, or TERM=dumb: the command line prints plain text."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
