"""The door to MLX: what it sets before MLX is there."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("mine", [None, "7"])
def test_command_buffers_do_not_end_at_the_store(mine):
    """A size that the user has set stays."""
    script = "import os, vllm_metal_lite.backend; print(os.environ['MLX_MAX_MB_PER_BUFFER'])"
    env = {k: v for k, v in os.environ.items() if k != "MLX_MAX_MB_PER_BUFFER"}
    env |= {} if mine is None else {"MLX_MAX_MB_PER_BUFFER": mine}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert int(done.stdout) == int(mine or 1_000_000), done.stderr
