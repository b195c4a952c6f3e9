"""Functions that run in several processes at once, as ranks that share a model.

    results = run("tests.model.test_shards:task", 2, "llama")

calls `task(ranks, "llama")` in two processes joined by a ring; the results, by rank, went through
JSON.
"""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_metal_lite.distributed import RankGroup
from vllm_metal_lite.links import join, read_links, reserve

ROOT = Path(__file__).parents[3]


def run(task: str, size: int, *args: Any, links: int = 1) -> list[Any]:
    """Run the task on all ranks; return their results.  If a rank fails, AssertionError has its
    output.  links: the number of connections between neighbours."""
    with_sockets = [reserve("127.0.0.1") for _ in range(size * links)]
    ports = [f"127.0.0.1:{s.getsockname()[1]}" for s in with_sockets]
    addresses = [ports[rank * links : (rank + 1) * links] for rank in range(size)]
    env = os.environ | {"METAL_LITE_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "tests.support.engine.rank_processes", task]
    job = json.dumps([addresses, args])
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen([*words, str(rank), job], env=env, cwd=ROOT, **how) for rank in range(size)
    ]
    try:
        outputs = [p.communicate(timeout=600)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
        for s in with_sockets:
            s.close()
    for rank, (p, output) in enumerate(zip(processes, outputs, strict=True)):
        assert p.returncode == 0, f"rank {rank}:\n{output[-3000:]}"
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    task, rank, rest = sys.argv[1:]
    addresses, args = json.loads(rest)
    module, _, name = task.partition(":")
    ranks = RankGroup(join(int(rank), addresses, read_links(len(addresses), None)))
    print(json.dumps(getattr(import_module(module), name)(ranks, *args)), flush=True)


if __name__ == "__main__":
    main()
