#!/usr/bin/env python3
"""Our engine beside mlx-lm's BatchGenerator: same weights, one process, interleaved, medians.

    python tools/bench_throughput.py                        the demo model
    python tools/bench_throughput.py --random 512x8         random weights, hidden size x layers
    python tools/bench_throughput.py --model FOLDER --json

mlx-lm runs with each of the prefill batch sizes given, and its best one counts.  Greedy, end of
sequence ignored.  Ratios above 1 mean that ours is faster.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite import EngineConfig, LLMEngine, MetalLiteError, SamplingParams, backend
from vllm_metal_lite.model.loader import LoadedModel, from_model, load

# isort: split
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import qwen3

mx = backend.mx


@dataclass
class Load:
    """Requests that all arrive at once."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]


@dataclass
class Result:
    seconds: float
    ttft: float  # median time to first token
    tokens: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def make_loads(count: int, scale: float, vocab_size: int) -> list[Load]:
    """Uniform, mixed and shared-prefix loads; scale 1: prompts up to 512, answers up to 64."""
    rng = np.random.default_rng(0)

    def tokens(n: int) -> list[int]:
        return rng.integers(0, vocab_size, n).tolist()

    long, out = int(512 * scale), int(64 * scale)
    lengths = rng.integers(long // 32, long + 1, count)
    prefix = tokens(long)
    return [
        Load("uniform", [tokens(long // 4) for _ in range(count)], [out] * count),
        Load(
            "mixed lengths",
            [tokens(int(n)) for n in lengths],
            rng.integers(out // 8, out + 1, count).tolist(),
        ),
        Load(
            "shared prefix",
            [prefix + tokens(long // 32) for _ in range(count)],
            [out // 2] * count,
        ),
    ]


def run_ours(model: LoadedModel, load: Load) -> Result:
    config = EngineConfig(max_num_seqs=max(len(load.prompts), 1))
    engine = LLMEngine(model, config)
    started = time.perf_counter()
    first: dict[str, float] = {}
    tokens: list[list[int]] = [[] for _ in load.prompts]
    for i, (prompt, n) in enumerate(zip(load.prompts, load.max_tokens, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - started)
            tokens[int(output.request_id)] = output.outputs[0].token_ids
    return Result(time.perf_counter() - started, statistics.median(first.values()), tokens)


def run_mlx_lm(model: LoadedModel, load: Load, prefill_batch_size: int) -> Result:
    generator = BatchGenerator(
        model.packed.model,
        completion_batch_size=len(load.prompts),
        prefill_batch_size=prefill_batch_size,
    )
    started = time.perf_counter()
    uids = generator.insert(load.prompts, load.max_tokens)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    first: dict[int, float] = {}
    while responses := generator.next_generated():
        now = time.perf_counter() - started
        for r in responses:
            first.setdefault(r.uid, now)
            tokens[r.uid].append(int(r.token))
    seconds = time.perf_counter() - started
    generator.close()
    return Result(seconds, statistics.median(first.values()), [tokens[u] for u in uids])


def random_config(shape: str) -> dict:
    """A Qwen3: HIDDENxLAYERS, vocabulary 8,192."""
    hidden, layers = map(int, shape.split("x"))
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(hidden // 128, 1),
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": 8192,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


def random_model(shape: str) -> LoadedModel:
    """`random_config` with random weights."""
    config = random_config(shape)
    model: nn.Module = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.random.seed(0)
    model.update(
        tree_map(lambda w: mx.random.normal(w.shape) * w.shape[-1] ** -0.5, model.parameters())
    )
    mx.eval(model.parameters())
    return from_model(model, None, config, name=f"random qwen3 {shape}")


def median_of(results: list[Result]) -> Result:
    return Result(
        statistics.median(r.seconds for r in results),
        statistics.median(r.ttft for r in results),
        results[0].tokens,
    )


def compare(model: LoadedModel, load: Load, batch_sizes: list[int], repeats: int) -> dict:
    """One load on both engines, turn by turn."""
    engines: dict[str, Callable[[], Result]] = {"ours": lambda: run_ours(model, load)}
    for size in batch_sizes:
        engines[f"mlx-lm/{size}"] = lambda size=size: run_mlx_lm(model, load, size)
    results: dict[str, list[Result]] = {name: [] for name in engines}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, engine in engines.items():
            print(f"\r{load.name}: {turn}/{repeats} {name:<12}", end="", file=sys.stderr)
            result = engine()
            if turn:
                results[name].append(result)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    medians = {name: median_of(r) for name, r in results.items()}
    ours = medians.pop("ours")
    best = max(medians, key=lambda name: medians[name].tokens_per_second)
    theirs = medians[best]
    same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True))
    return {
        "load": load.name,
        "requests": len(load.prompts),
        "tokens_in": sum(map(len, load.prompts)),
        "tokens_out": sum(load.max_tokens),
        "ours_tok_s": ours.tokens_per_second,
        "mlx_lm_tok_s": theirs.tokens_per_second,
        "mlx_lm_prefill_batch_size": int(best.split("/")[1]),
        "throughput_ratio": ours.tokens_per_second / theirs.tokens_per_second,
        "ttft_ratio": theirs.ttft / ours.ttft,
        "requests_with_equal_tokens": same,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--random", metavar="HIDDENxLAYERS", help="random weights instead")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="of prompt and answer lengths")
    parser.add_argument("--prefill-batch-sizes", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    model = random_model(args.random) if args.random else load(args.model)
    print(f"{model.name}, {model.num_parameters / 1e6:.1f} M parameters; {backend.describe()}")
    rows = [
        compare(model, one, args.prefill_batch_sizes, args.repeats)
        for one in make_loads(args.num_requests, args.scale, model.vocab_size)
    ]
    if args.json:
        print(json.dumps(rows))
        return 0
    print(
        "| load | in / out tokens | ours / mlx-lm, output tokens/s | TTFT, times shorter | equal |"
    )
    print("| --- | --- | --- | --- | --- |")
    for r in rows:
        best = f"its prefill batch {r['mlx_lm_prefill_batch_size']}"
        print(
            f"| {r['load']} | {r['tokens_in']:,} / {r['tokens_out']:,} "
            f"| **{r['throughput_ratio']:.2f}** ({best}) "
            f"| {r['ttft_ratio']:.2f} | {r['requests_with_equal_tokens']}/{r['requests']} |"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MetalLiteError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
