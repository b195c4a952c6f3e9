"""Drive the block pool to exhaustion, and prove that no token changed.

A crowd of requests runs twice over the same weights: in a pool that cannot hold them, and in one
that can.  The pool's size follows from the crowd (demand / oversubscription), not from the machine,
so exhaustion is certain.  Exit status 0 only if requests were preempted AND every token is equal.

    python tools/repro_block_exhaustion.py
    python tools/repro_block_exhaustion.py --oversubscribe 6 --num-requests 48 --json
    python tools/repro_block_exhaustion.py --model mlx-community/Qwen3-0.6B-4bit
    METAL_LITE_DEVICE=cpu python tools/repro_block_exhaustion.py --engine vllm

--engine vllm does the same under vLLM, with vLLM's scheduler; the expected tokens come from this
engine, with room for all.  --tensor-parallel-size 2 shares the model among two ranks.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.lib.frame import above_zero, at_least, parser_of, print_table, run_main
from vllm_metal_lite import EngineConfig, LLMEngine, MetalLiteError, SamplingParams
from vllm_metal_lite.config import MAX_NUM_SEQS
from vllm_metal_lite.model.files.find import find
from vllm_metal_lite.model.loader import LoadedModel, load

BLOCK, STEP = 16, 256  # tokens per block; maximum tokens per step


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo", help="demo, a folder, or a Hugging Face name")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    ranks = "ranks that share the model under vLLM"
    parser.add_argument("--tensor-parallel-size", type=at_least(1, 64), default=1, help=ranks)
    # Each has a seat, so that nothing but blocks is short.
    parser.add_argument("--num-requests", type=at_least(2, MAX_NUM_SEQS), default=24)
    parser.add_argument(
        "--oversubscribe", type=above_zero, default=3.0, help="demand for blocks / size of the pool"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.tensor_parallel_size != 1 and args.engine != "vllm":
        parser.error(f"--tensor-parallel-size {args.tensor_parallel_size} needs --engine vllm")
    if not args.oversubscribe > 1:
        parser.error(f"--oversubscribe must be above 1, got {args.oversubscribe:g}")
    return args


def make_crowd(args: argparse.Namespace, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Short prompts and long answers: many requests are admitted, and all of them grow.

    A prompt fills 1 to 3 blocks, an answer 6 to 8.  Every other request is greedy, the rest sample
    with seeds of their own.
    """
    rng = np.random.default_rng(0)
    crowd = []
    for i in range(args.num_requests):
        prompt = rng.integers(0, vocab_size, rng.integers(1, 3 * BLOCK + 1))
        max_tokens = int(rng.integers(6 * BLOCK, 8 * BLOCK + 1))
        params = SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=max_tokens, ignore_eos=True
        )
        crowd.append((prompt.tolist(), params))
    return crowd


def blocks_of(prompt: list[int], params: SamplingParams) -> int:
    """Blocks a request holds at its end; the last token sampled is never written."""
    return -(-(len(prompt) + params.max_tokens - 1) // BLOCK)


def drain(engine: Any, watch: Callable[[], None] = lambda: None) -> list[Any]:
    """Step until all requests have ended; returns their last outputs in order.  watch: called
    after each step."""
    ended = []
    while engine.has_unfinished_requests():
        ended += [output for output in engine.step() if output.finished]
        watch()
    return sorted(ended, key=lambda output: int(output.request_id))


def tokens_of(ended: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in ended]


def run(
    model: LoadedModel, config: EngineConfig, crowd: list
) -> tuple[list[list[int]], dict[str, int]]:
    """Run the crowd to its end; returns each request's tokens, and the engine's metrics."""
    engine = LLMEngine(model, config)
    for i, (prompt, params) in enumerate(crowd):
        engine.add_request(str(i), prompt, params)
    return tokens_of(drain(engine)), engine.metrics()


def run_vllm(
    args: argparse.Namespace, crowd: list, num_blocks: int, max_model_len: int
) -> tuple[list[list[int]], dict[str, int]]:
    """The same under vLLM, in this process: its scheduler, its block pool, our plugin's worker."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout has the report
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    sizes = {"block_size": BLOCK, "max_model_len": max_model_len, "max_num_seqs": args.num_requests}
    # vLLM keeps one block as its null block.
    sizes |= {"num_gpu_blocks_override": num_blocks + 1}
    sizes |= {"max_num_batched_tokens": max(STEP, args.num_requests)}
    size = args.tensor_parallel_size
    llm = LLM(str(find(args.model)), disable_log_stats=False, tensor_parallel_size=size, **sizes)
    engine = llm.llm_engine
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    for i, (prompt, p) in enumerate(crowd):
        how = {name: getattr(p, name) for name in ("temperature", "seed", "max_tokens")}
        params = VllmParams(**how, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    free: list[int] = []
    ended = drain(engine, lambda: free.append(pool.get_num_free_blocks()))
    counters = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    return tokens_of(ended), {
        "blocks_peak_owned": num_blocks - min(free),
        "preemptions": counters["vllm:num_preemptions"],
        "prefix_cache_hit_tokens": sum(output.num_cached_tokens or 0 for output in ended),
    }


def main() -> int:
    args = parse_args()
    if args.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise MetalLiteError("--engine vllm needs vLLM, which is not installed: see docs/plugin.md")
    model = load(args.model)
    crowd = make_crowd(args, model.vocab_size)
    needs = [blocks_of(p, s) for p, s in crowd]
    demand = sum(needs)
    pool = max(int(demand / args.oversubscribe), max(needs))
    sizes = {"num_blocks": demand, "max_num_seqs": args.num_requests}
    roomy = EngineConfig(block_size=BLOCK, max_num_batched_tokens=STEP, **sizes)
    tight = dataclasses.replace(roomy, num_blocks=pool)
    expected, _ = run(model, roomy, crowd)
    if args.engine == "vllm":
        tokens, metrics = run_vllm(args, crowd, pool, max(needs) * BLOCK)
    else:
        tokens, metrics = run(model, tight, crowd)

    different = [i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]
    report = {
        "model": args.model,
        "engine": args.engine,
        "ranks": args.tensor_parallel_size,
        "requests": args.num_requests,
        "tokens_compared": sum(map(len, expected)),
        "blocks_demanded": demand,
        "blocks_in_pool": pool,
        "blocks_peak": metrics["blocks_peak_owned"],
        "preemptions": metrics["preemptions"],
        "recomputed_tokens": metrics.get("recomputed_tokens"),  # vLLM does not count them
        "prefix_cache_hit_tokens": metrics["prefix_cache_hit_tokens"],
        "requests_that_differ": different,
        "passed": metrics["preemptions"] > 0 and not different,
    }
    if args.json:
        print(json.dumps(report))
    else:
        print_table(("", ""), [(name.replace("_", " "), value) for name, value in report.items()])
    for i in different[:3]:
        pairs = zip(tokens[i], expected[i], strict=False)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), "end")
        print(f"request {i} differs first at its token {at}", file=sys.stderr)
    if not metrics["preemptions"]:
        print("nothing was preempted: the pool was not exhausted", file=sys.stderr)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    run_main(main)
