#!/usr/bin/env python3
"""Decode tokens a second of one rank and of several ("tensor parallel"), and where a step goes.

    python -m tools.bench.ranks                              Qwen3-4B's shape, 64 requests, 2 ranks
    python -m tools.bench.ranks --dtype float32              tokens must be equal
    METAL_LITE_DEVICE=cpu python -m tools.bench.ranks --tiny   a dry run over the ring

Each rank is a process with the embedded engine and its shard of one random model; all ranks get the
same requests and so run the same steps.  On NVIDIA rank i has GPU i of those that are visible, and
the ranks are joined by NCCL, otherwise by the ring.  Prints a JSON line a run, then one that
compares them.

"step_ms": a step, one ahead.  "alone_ms": a step for whose end the host waits.  "without_sums_ms":
the same, with nothing summed over the ranks.  "sums_ms": as many sums of a step's shape, alone, one
behind the other.  In 16 bits a sum of shards rounds otherwise than a whole product, and random
weights have near ties, so tokens may part; "equal" counts those before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from tools.bench.lib.configs import random_config
from tools.bench.lib.models import random_weights
from tools.dev.run_main import parser_of, run_main
from vllm_metal_lite import EngineConfig, LLMEngine, MetalLiteError, SamplingParams, backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE, RankGroup, join, links, reserve
from vllm_metal_lite.model.loader import from_model
from vllm_metal_lite.model.shards import shard

# Seconds until the ranks must have ended.
_LIMIT = 540
_WARM_UP, _ALONE = 8, 12
_TINY = {"shape": "256x2", "batch": 4, "prompt": 16, "steps": 24, "dtype": "float32"}


class Run:
    """One rank of a run: the engine, and the times of its decode steps."""

    def __init__(self, args: argparse.Namespace, ranks: RankGroup) -> None:
        self.args, self.ranks = args, ranks
        model, config = random_weights(args.shape, getattr(mx, args.dtype), args.bits)
        if ranks.size > 1:
            shard(model, config["model_type"], ranks)
            mx.eval(model.parameters())
            mx.clear_cache()
        self.tokens: dict[str, list[int]] = {}
        self.tokens_each = _WARM_UP + args.steps + 2 * _ALONE + 8
        length = args.prompt + self.tokens_each
        loaded = from_model(model, None, config, args.shape, ranks=ranks)
        self.engine = LLMEngine(loaded, EngineConfig(
            max_num_seqs=args.batch, max_model_len=length, max_num_batched_tokens=2048,
            num_blocks=args.batch * (-(-length // 16) + 1) + 1, block_size=16,
            enable_prefix_caching=False,
        ))  # fmt: skip

    def start(self) -> None:
        """Requests of random prompts, all of which decode."""
        args, params = self.args, SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=self.tokens_each
        )  # fmt: skip
        vocab = self.engine.model.vocab_size
        for i in range(args.batch):
            prompt = [(7919 * i + 31 * n) % vocab for n in range(args.prompt)]
            self.engine.add_request(str(i), prompt, params)
        while self.engine.metrics()["decode_tokens"] < args.batch * _WARM_UP:
            self.engine.step()

    def seconds(self, steps: int) -> list[float]:
        """Of each step."""
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            outputs = self.engine.step()
            times.append(time.perf_counter() - started)
            self.tokens |= {o.request_id: o.outputs[0].token_ids for o in outputs}
        return times

    def measure(self) -> dict[str, Any]:
        self.start()
        started = time.perf_counter()
        steps = self.seconds(self.args.steps)
        rate = self.args.batch * self.args.steps / (time.perf_counter() - started)
        tokens = [self.tokens[str(i)] for i in range(self.args.batch)]
        found = {
            "ranks": self.ranks.size, "tokens_per_s": round(rate, 1), "step_ms": _ms(steps),
            "attention": self.engine.attention_reason, "device": backend.describe(),
            "compiled_steps": self.engine.runner.compiled.num_steps,
            "ahead": self.engine.pipeline.num_ahead, "tokens": tokens,
            "memory_gib": round(mx.get_peak_memory() / 2**30, 2),
        }  # fmt: skip
        self.engine.async_scheduling = False
        found["alone_ms"] = _ms(self.seconds(_ALONE)[2:])
        if self.ranks.size > 1:
            found |= {"sums_ms": self.sums(), "without_sums_ms": self.without_sums()}
        return found

    def sums(self) -> float:
        """Milliseconds of two sums a layer, each of which needs the one before."""
        times, config = [], random_config(self.args.shape)
        rows = mx.ones((self.args.batch, config["hidden_size"]), getattr(mx, self.args.dtype))
        for _ in range(_ALONE):
            started, x = time.perf_counter(), rows
            for _ in range(2 * config["num_hidden_layers"]):
                x = mx.distributed.all_sum(x, group=self.ranks.group) * 0.5
            mx.eval(x)
            times.append(time.perf_counter() - started)
        return _ms(times[2:])

    def without_sums(self) -> float:
        """Milliseconds of a step whose ranks do not wait for each other.  Its tokens are wrong."""
        all_sum, compiled = mx.distributed.all_sum, self.engine.runner.compiled
        mx.distributed.all_sum = lambda x, **_: x
        compiled._variants.clear()
        try:
            return _ms(self.seconds(_ALONE)[4:])
        finally:
            mx.distributed.all_sum = all_sum
            compiled._variants.clear()


def _ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def ranks_of(args: argparse.Namespace, size: int) -> dict[str, Any]:
    """Run `size` processes; rank 0's findings.  Raises MetalLiteError if one fails; all print what
    went wrong to stderr."""
    sockets = [reserve("127.0.0.1") for _ in range(size)]
    addresses = [[f"127.0.0.1:{s.getsockname()[1]}"] for s in sockets]
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(size)))).split(",")
    on_cuda = backend.name() == "cuda"
    if on_cuda and len(visible) < size:
        raise MetalLiteError(f"{size} ranks need as many GPUs, CUDA_VISIBLE_DEVICES has {visible}")
    processes, output = [], tempfile.TemporaryFile("w+")  # noqa: SIM115
    for rank in range(size):
        device = {"CUDA_VISIBLE_DEVICES": visible[rank]} if on_cuda else {}
        given = json.dumps([rank, addresses, vars(args)])
        processes.append(subprocess.Popen(
            [sys.executable, "-m", "tools.bench.ranks", "--as-rank", given],
            stdout=subprocess.DEVNULL if rank else output, env=os.environ | device,
        ))  # fmt: skip
    limit = time.monotonic() + _LIMIT
    try:
        while any(p.poll() is None for p in processes):
            if any(p.poll() for p in processes) or time.monotonic() > limit:
                break
            time.sleep(0.2)
        codes = [p.poll() for p in processes]
    finally:
        for p in processes:
            p.kill()
        for s in sockets:
            s.close()
    if any(code != 0 for code in codes):
        raise MetalLiteError(f"exit codes by rank (None: no end within {_LIMIT} s): {codes}")
    output.seek(0)
    found: dict[str, Any] = json.loads(output.read().splitlines()[-1])
    return found


def as_rank(rank: int, addresses: list[list[str]], options: dict[str, Any]) -> None:
    """One process of a run.  Rank 0 prints what it finds."""
    size = len(addresses)
    ranks = join(rank, addresses, links(size, None)) if size > 1 else ALONE
    found = Run(argparse.Namespace(**options), ranks).measure()
    if rank == 0:
        print(json.dumps(found), flush=True)
    ranks.gather(rank)  # none ends while another may still wait for its sums
    os._exit(0)  # MLX's ring may wait for its threads forever


def compare(one: dict[str, Any], several: dict[str, Any]) -> dict[str, Any]:
    """The tokens of each request before the first that differs, and the speeds."""
    equal = total = whole = 0
    for ours, theirs in zip(one["tokens"], several["tokens"], strict=True):
        count = min(len(ours), len(theirs))
        parted = next((n for n in range(count) if ours[n] != theirs[n]), count)
        equal, total, whole = equal + parted, total + count, whole + (parted == count)
    return {
        "ranks": several["ranks"], "equal": equal, "tokens": total, "equal_requests": whole,
        "speedup": round(several["tokens_per_s"] / one["tokens_per_s"], 3),
    }  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3-4b", help="of tools/bench/lib/shapes.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--bits", choices=("4", "8"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=100, help="decode steps to time")
    parser.add_argument("--tiny", action="store_true", help="a dry run: " + json.dumps(_TINY))
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        as_rank(*json.loads(args.as_rank))
    if args.tiny:
        vars(args).update(_TINY)
    if min(args.ranks) < 2 or min(args.batch, args.prompt, args.steps) < 1:
        parser.error("--ranks must be at least 2; --batch, --prompt and --steps at least 1")
    one = ranks_of(args, 1)
    print(json.dumps({k: v for k, v in one.items() if k != "tokens"}), flush=True)
    for size in args.ranks:
        several = ranks_of(args, size)
        print(json.dumps({k: v for k, v in several.items() if k != "tokens"}), flush=True)
        print(json.dumps(compare(one, several)), flush=True)
    return 0


if __name__ == "__main__":
    run_main(main)
