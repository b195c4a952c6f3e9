"""Time the start of the server by stage, beside MLX that only reads the weights.

    python -m tools.bench.start                      Qwen3-0.6B's shape, random weights
    python -m tools.bench.start --model 128x2 --starts 1

Each reading and each start is a process of its own; the files come from the warm disk, and the
checks and timings of the first start are remembered.  A start ends with the first token.
"""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tools.bench.lib.models import write_model
from tools.lib.frame import at_least, parser_of, run_main, say
from tools.lib.servers import ours, server

# The reading alone: the weights as the engine computes with them, in float32 on a CPU.
_READ = """
import sys, time
start = time.perf_counter()
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
weights = {}
for file in sys.argv[1:]:
    weights |= mx.load(file)
if backend.is_cpu():
    weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
mx.eval(weights)
print(time.perf_counter() - start)
"""


def read_seconds(folder: Path) -> float:
    """Seconds that a process needs to import MLX and to read the weights."""
    files = map(str, folder.glob("*.safetensors"))
    done = subprocess.run([sys.executable, "-c", _READ, *files], capture_output=True, check=True)
    return float(done.stdout)


def start_seconds(folder: Path, log: Path) -> dict[str, float]:
    """Seconds of a start, by stage.  "all" counts from the command to the first token."""
    began = time.monotonic()
    with (
        server(ours(folder), log) as (url, _),
        httpx.Client(base_url=url, timeout=600, trust_env=False) as http,
    ):
        body = {"prompt": "hi", "max_tokens": 1}
        http.post("/v1/completions", json=body).raise_for_status()
        ended = time.monotonic()
        (model,) = http.get("/status").json()["models"]
    stages = {**model["start_seconds"], "first token": model["first_token_seconds"]}
    rest = ended - began - sum(stages.values())
    return {"command and HTTP": rest, **stages, "all": ended - began}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape, such as qwen3-0.6b")
    parser.add_argument("--starts", type=at_least(1, 20), default=2)
    args = parser.parse_args()
    with TemporaryDirectory(prefix="vllm-metal-lite-start-") as temporary:
        folder = write_model(args.model, Path(temporary) / "model")
        readings = sorted(read_seconds(folder) for _ in range(3))
        print(f"reading the weights alone: {readings[0]:.2f} to {readings[-1]:.2f} s")
        for number in range(args.starts):
            say(f"start {number + 1}")
            stages = start_seconds(folder, Path(temporary) / "log")
            print(f"\nstart {number + 1}, {stages['all'] / readings[1]:.2f} times a reading")
            for stage, seconds in stages.items():
                print(f"{seconds:8.2f} s  {stage}")
    return 0


if __name__ == "__main__":
    run_main(main)
