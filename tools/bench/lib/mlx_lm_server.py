#!/usr/bin/env python3
"""mlx-lm's server as our benchmarks run it on an NVIDIA GPU or a CPU; takes its flags.

    python -m tools.bench.lib.mlx_lm_server --model FOLDER --port 8001

Two things differ from `python -m mlx_lm server`, both in its favour.  Recurrent layers get our
kernels where mlx-lm's are Metal's only (bench/lib/fair.py).  And memory is limited, or long prompts
exhaust the GPU: MLX keeps at most 4 GiB of freed buffers, whose sizes never repeat, and waits for
running work at 0.7 of the memory, where its own limit leaves no room for the scores of one layer.
"""

import importlib
import json
import sys
from pathlib import Path

from tools.bench.lib.fair import fair_kernels
from tools.dev.run_main import run_main
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx

# isort: split
from mlx_lm import server

_CACHE_LIMIT, _MEMORY_FRACTION = 4 << 30, 0.7


def main() -> int:
    folder = Path(sys.argv[sys.argv.index("--model") + 1])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    importlib.import_module(f"mlx_lm.models.{config['model_type']}")  # to be patched
    mx.set_cache_limit(_CACHE_LIMIT)
    mx.set_memory_limit(int(_MEMORY_FRACTION * backend.memory_limit()))
    with fair_kernels():
        server.main()
    return 0


if __name__ == "__main__":
    run_main(main)
