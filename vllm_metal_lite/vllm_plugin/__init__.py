"""The vLLM platform plugin: vLLM's server and scheduler, our runner.  See docs/plugin.md.

vLLM calls `register` in each of its processes, before it uses any other module of this package.
This module imports neither torch, vLLM nor MLX.
"""

import logging
import os
import platform as host  # `platform` is a module of this package, once it is imported
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm_metal_lite import envs

OLDEST, NEWEST = (0, 27, 1), (0, 33)
_WARNED = "METAL_LITE_WARNED"
_PLATFORM = "vllm_metal_lite.vllm_plugin.platform.MetalLitePlatform"

# A child of vLLM's logger, so that vLLM's configuration applies.
logger = logging.getLogger("vllm.metal_lite")


def register() -> str | None:
    """Entry point `vllm.platform_plugins`: the path of our platform class, or None to stay out.

    vLLM may call it several times per process.  On an exception vLLM would silently use its CPU
    platform, so `register` logs every error and returns None.
    """
    try:
        if not wanted():
            return None
        problem = version_problem(version("vllm"))
        if problem is not None and os.environ.get(_WARNED) != problem:
            os.environ[_WARNED] = problem  # once: the processes that this one starts inherit it
            logger.warning("vllm-metal-lite: %s", problem)
        # The user's settings win.  MLX does not survive a fork.  Both formats of vLLM's scheduler
        # output work; the V1 model runner's is smaller.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        return _PLATFORM
    except PackageNotFoundError:
        return None
    except Exception as e:
        logger.warning("vllm-metal-lite is not active: %s: %s", type(e).__name__, e)
        return None


def wanted() -> bool:
    """Whether this process should use our runner.

    True on Apple silicon; elsewhere only if METAL_LITE_DEVICE is "cpu" or "cuda".
    """
    if envs.device() in ("cpu", "cuda"):
        return True
    return sys.platform == "darwin" and host.machine() == "arm64"


def log_through_vllm() -> None:
    """Send our records to vLLM's handlers, so that the user configures only vLLM's logging."""
    ours = logging.getLogger("vllm_metal_lite")
    ours.parent = logger
    ours.setLevel(logging.INFO)  # vLLM's handlers decide; at the first start INFO tells of checks


def version_problem(found: str) -> str | None:
    """A one-line warning if this vLLM version is outside the tested range, or None."""
    numbers = tuple(map(int, re.findall(r"\d+", found.split("+")[0])[:3]))
    if numbers >= OLDEST and numbers[:2] <= NEWEST:
        return None
    return (
        f"vLLM {found} is outside of the range this plugin was tried with, "
        f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}.x: expect errors"
    )


def get(root: Any, path: str) -> Any:
    """An option or a field of vLLM by its dotted path; None if this version of vLLM lacks it.

    So the versions' differences are found by attribute, not by version number.  An option that has
    moved is read at both places.
    """
    for name in path.split("."):
        root = getattr(root, name, None)
    return root
