#!/usr/bin/env python3
"""What vLLM costs around our runner: the plugin beside the embedded engine, same weights and load.

    METAL_LITE_DEVICE=cpu python -m tools.bench.plugin
    METAL_LITE_DEVICE=cpu python -m tools.bench.plugin --random 512x8 --repeats 5

Both run in this process (vLLM without its engine process), turn by turn; medians.  Greedy, end of
sequence ignored, no prefix caching, so that every turn computes the same.  Needs vLLM.

"host" is this thread's CPU time outside of the runner, a step: scheduling, translating, reporting.
Unlike tokens a second it means something on a busy machine too.  "ahead": steps that were launched
before the host had waited for the one before, of all steps.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams, backend

# isort: split
from mlx.utils import tree_flatten

from tools.bench.lib.loads import Load, Sizes, three_kinds
from tools.bench.lib.models import random_weights
from tools.dev.run_main import run_main
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.files import DEMO_PATH
from vllm_metal_lite.model.loader import LoadedModel, load

MAX_NUM_BATCHED_TOKENS = 2048
NUM_BLOCKS = 2048


def write_random(shape: str, path: Path) -> Path:
    """The random model of serving_models as a folder, with the demo model's tokenizer."""
    model, config = random_weights(shape)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config["architectures"] = ["Qwen3ForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text((DEMO_PATH / name).read_text())
    return path


def embedded(model: LoadedModel, seats: int, max_model_len: int) -> LLMEngine:
    config = EngineConfig(
        num_blocks=NUM_BLOCKS, max_num_seqs=seats, max_model_len=max_model_len,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, enable_prefix_caching=False,
    )  # fmt: skip
    return LLMEngine(model, config)


def under_vllm(folder: Path, seats: int, max_model_len: int, is_async: bool) -> Any:
    from vllm import LLM

    return LLM(
        str(folder), num_gpu_blocks_override=NUM_BLOCKS + 1, max_num_seqs=seats,
        max_model_len=max_model_len, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=False, async_scheduling=is_async, skip_tokenizer_init=True,
    ).llm_engine  # fmt: skip


class Stopwatch:
    """This thread's CPU time inside of a runner's `execute`."""

    def __init__(self, runner: Any) -> None:
        self.inside, self.steps, self.execute = 0.0, 0, runner.execute
        runner.execute = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        result = self.execute(*args, **kwargs)
        self.inside += time.thread_time() - started
        self.steps += 1
        return result


def runner_of(engine: Any) -> Any:
    if isinstance(engine, LLMEngine):
        return engine.runner
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.runner


def pipeline_of(engine: Any) -> Any:
    if isinstance(engine, LLMEngine):
        return engine.pipeline
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.pipeline


def run(engine: Any, load: Load, watch: Stopwatch) -> tuple[float, float, float, list[list[int]]]:
    """(seconds, host seconds a step, part of the steps that were ahead, tokens)."""
    under_vllm = not isinstance(engine, LLMEngine)
    if under_vllm:
        from vllm import SamplingParams as Params
    else:
        Params = SamplingParams
    tokens: list[list[int]] = [[] for _ in load.prompts]
    watch.inside, watch.steps = 0.0, 0
    ahead = pipeline_of(engine).num_ahead
    started, cpu = time.perf_counter(), time.thread_time()
    for i, (prompt, n) in enumerate(zip(load.prompts, load.max_tokens, strict=True)):
        params = Params(temperature=0, max_tokens=n, ignore_eos=True)
        if under_vllm:
            params.detokenize = False
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        else:
            engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    seconds, host = time.perf_counter() - started, time.thread_time() - cpu - watch.inside
    ahead = pipeline_of(engine).num_ahead - ahead
    return seconds, host / watch.steps, ahead / watch.steps, tokens


def compare(engines: dict[str, Any], load: Load, repeats: int) -> dict:
    results: dict[str, list] = {name: [] for name in engines}
    watches = {name: Stopwatch(runner_of(engine)) for name, engine in engines.items()}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, engine in engines.items():
            print(f"\r{load.name}: {turn}/{repeats} {name:<12}", end="", file=sys.stderr)
            result = run(engine, load, watches[name])
            if turn:
                results[name].append(result)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    seconds = {name: statistics.median(r[0] for r in rs) for name, rs in results.items()}
    host = {name: statistics.median(r[1] for r in rs) for name, rs in results.items()}
    ahead = {name: statistics.median(r[2] for r in rs) for name, rs in results.items()}
    for name, engine in engines.items():
        runner_of(engine).execute = watches[name].execute
    expected = results["embedded"][0][3]
    return {
        "load": load.name,
        "requests": len(load.prompts),
        "tokens_in": sum(map(len, load.prompts)),
        "tokens_out": sum(load.max_tokens),
        "tokens_per_second": {n: sum(load.max_tokens) / s for n, s in seconds.items()},
        "host_ms": {n: 1e3 * s for n, s in host.items()},
        "ahead": ahead,
        "ratio": {n: seconds["embedded"] / s for n, s in seconds.items()},
        "equal": all(r[3] == expected for rs in results.values() for r in rs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", metavar="HIDDENxLAYERS", help="random weights instead of demo")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="of prompt and answer lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random(args.random, Path(scratch)) if args.random else DEMO_PATH
        model = load(str(folder))
        max_model_len = min(model.max_position, 2048)
        print(f"{model.num_parameters / 1e6:.1f} M parameters; {backend.describe()}")
        loads = three_kinds(Sizes(model.vocab_size, args.scale), args.num_requests)
        engines = {
            "embedded": embedded(model, args.num_requests, max_model_len),
            "vLLM": under_vllm(folder, args.num_requests, max_model_len, False),
            "vLLM, async": under_vllm(folder, args.num_requests, max_model_len, True),
        }
        rows = [compare(engines, one, args.repeats) for one in loads]
    if args.json:
        print(json.dumps(rows))
        return 0
    print("| load | in / out tokens | " + " | ".join(engines) + ", output tokens/s |")
    for r in rows:
        cells = [
            f"{r['tokens_per_second'][n]:.0f} ({r['ratio'][n]:.2f}; host {r['host_ms'][n]:.2f} ms; "
            f"ahead {r['ahead'][n]:.0%})"
            for n in engines
        ]
        print(f"| {r['load']} | {r['tokens_in']:,} / {r['tokens_out']:,} | " + " | ".join(cells))
        if not r["equal"]:
            print(f"tokens differ in {r['load']}", file=sys.stderr)
    return 0 if all(r["equal"] for r in rows) else 1


if __name__ == "__main__":
    run_main(main)
