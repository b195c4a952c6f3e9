"""The vLLM platform plugin: vLLM's server and scheduler, our runner.  See docs/plugin.md.

vLLM calls `register` in every process of its own; nothing else of this package is imported before
it answers.  Neither torch, vLLM nor MLX is imported here.
"""

import logging
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version

from vllm_metal_lite import envs

OLDEST, NEWEST = (0, 27, 1), (0, 33)
_PLATFORM = "vllm_metal_lite.vllm_plugin.platform.MetalLitePlatform"

# Below vLLM's logger, so that its configuration applies to our lines.
logger = logging.getLogger("vllm.metal_lite")


def register() -> str | None:
    """The entry point `vllm.platform_plugins`: our platform class's path, or None to stay out.

    Called more than once in a process.  An exception here would make vLLM fall back to its CPU
    platform without a word, so whatever goes wrong is said and means None.
    """
    try:
        if not wanted():
            return None
        if (problem := version_problem(version("vllm"))) is not None:
            logger.warning("vllm-metal-lite: %s", problem)
        # Names that vLLM knows; whoever sets them decides.  MLX must not be carried over a fork,
        # and both dialects of the scheduler's output work, so take the one with less in it.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        return _PLATFORM
    except PackageNotFoundError:
        return None
    except Exception as e:
        logger.warning("vllm-metal-lite stays out: %s: %s", type(e).__name__, e)
        return None


def wanted() -> bool:
    """Whether this process should run on our runner.

    On Apple silicon yes; elsewhere only if METAL_LITE_DEVICE asks for MLX's "cpu" or "cuda".
    """
    if envs.device() in ("cpu", "cuda"):
        return True
    return sys.platform == "darwin" and platform.machine() == "arm64"


def version_problem(found: str) -> str | None:
    """One line if this vLLM is outside of the range that was tried."""
    numbers = tuple(map(int, re.findall(r"\d+", found.split("+")[0])[:3]))
    if numbers >= OLDEST and numbers[:2] <= NEWEST:
        return None
    return (
        f"vLLM {found} is outside of the range this plugin was tried with, "
        f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}.x: expect errors"
    )
