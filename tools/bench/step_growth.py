#!/usr/bin/env python3
"""A decode step by batch and context, beside the roofline: a dense, an expert and a latent model.

    python -m tools.bench.step_growth --csv growth.csv --plot growth.svg --minutes 8       a GPU
    python -m tools.bench.step_growth --csv growth.csv --plot growth.svg                   goes on
    python -m tools.bench.step_growth --csv tiny.csv --plot tiny.svg --tiny                   a CPU

Contexts are not computed: requests are taken for prompts whose K and V the store has, and the store
holds zeros.  So a cell takes a few seconds.  A row of the CSV is written as soon as it is measured,
and cells that the CSV has are not measured again.  Steps are launched one ahead, greedy.
"""

import argparse
import csv
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib.alone import Alone
from tools.bench.lib.growth_plot import Cell, write_svg
from tools.bench.lib.models import get_model
from tools.bench.lib.parts import BY_NAME, Part
from tools.bench.lib.roofline import Rates, measured_rates, roofline
from tools.bench.lib.trust import trusted
from tools.dev.run_main import run_main
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.result import StepResult

_PARTS = ("qwen3-4b-4", "qwen3-30b-a3b-4", "glm-4.7-flash-4")
_BATCHES, _CONTEXTS = (1, 4, 16, 64, 256), (512, 2048, 8192, 32768)
_TINY_BATCHES, _TINY_CONTEXTS = (1, 4), (64, 128)
_WARM_UP, _STEPS, _BLOCK = 6, 20, 16


class _Skipped:
    """In the place of the runner: prompts cost nothing, and their first tokens are random."""

    def __init__(self, vocab_size: int) -> None:
        self._rng, self._vocab_size = np.random.default_rng(0), vocab_size

    def execute(self, batch: Any, req_indices: np.ndarray, *rest: Any) -> StepResult:
        tokens = self._rng.integers(0, self._vocab_size, len(req_indices), np.int32)
        return StepResult(req_indices, mx.array(tokens), None, None)


def engine_of(
    model: LoadedModel, cells: list[tuple[int, int]], options: dict[str, Any]
) -> LLMEngine:
    """An engine for the largest of some cells (batch, context).  options: of EngineConfig."""
    length = max(context for _, context in cells) + _WARM_UP + _STEPS + 8
    blocks = max(b * (-(-(c + _WARM_UP + _STEPS + 8) // _BLOCK)) for b, c in cells)
    config = EngineConfig(
        block_size=_BLOCK, num_blocks=blocks + 8, max_num_seqs=max(b for b, _ in cells),
        max_model_len=min(length, model.max_position), enable_prefix_caching=False,
        **{"max_num_batched_tokens": 8192, **options},
    )  # fmt: skip
    return LLMEngine(model, config)


@contextmanager
def skipped(engine: LLMEngine) -> Iterator[None]:
    """Steps of prompts are not computed."""
    runner = engine.pipeline.runner
    engine.pipeline.runner = _Skipped(engine.model.vocab_size)
    yield
    engine.pipeline.runner = runner


def fill(engine: LLMEngine, batch: int, context: int, tokens: int) -> list[str]:
    """`batch` requests that decode at `context`, for `tokens` tokens; returns their names."""
    rng = np.random.default_rng(1)
    vocab_size = engine.model.vocab_size
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    names = [f"{batch} {context} {i}" for i in range(batch)]
    for name in names:
        engine.add_request(name, rng.integers(0, vocab_size, context).tolist(), params)
    waiting = set(names)
    with skipped(engine):
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
    return names


def seconds_of(engine: LLMEngine, batch: int, context: int, steps: int = _STEPS) -> float:
    """The median of a step of `batch` decodes at `context`."""
    names, times = fill(engine, batch, context, _WARM_UP + steps + 4), []
    for _ in range(_WARM_UP + steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    engine.abort(names)
    while engine.has_unfinished_requests():
        engine.step()
    mx.synchronize()
    return statistics.median(times[_WARM_UP:])


def cells_of(model: LoadedModel, args: argparse.Namespace) -> list[tuple[int, int]]:
    """(batch, context) whose K and V fit into --gib."""
    most = args.gib * 2**30 / max(model.kv_bytes_per_token, 1)
    return [
        (batch, context)
        for context in args.context for batch in args.batch
        if batch * (context + 48) <= most and context + 64 <= model.max_position
    ]  # fmt: skip


def read(path: Path) -> list[Cell]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Cell(r["model"], int(r["batch"]), int(r["context"]), float(r["ms"]),
                 float(r["roofline_ms"]))
            for r in csv.DictReader(file)
        ]  # fmt: skip


def append(path: Path, cell: Cell) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(Cell._fields)
        writer.writerow([*cell[:3], f"{cell.ms:.4f}", f"{cell.roofline_ms:.4f}"])


def measure(part: Part, rates: Rates, end: float, args: argparse.Namespace) -> Iterator[Cell]:
    """The cells of a model that are missing, until the time is over."""
    name = part.tiny if args.tiny else part.name
    done = {(c.batch, c.context) for c in read(args.csv) if c.model == name}
    if time.monotonic() > end:
        return
    model = get_model(part.tiny if args.tiny else part.shape, bits=part.bits)
    missing = [cell for cell in cells_of(model, args) if cell not in done]
    if not missing:
        return
    with trusted() if args.trusted else nullcontext():
        engine = engine_of(model, missing, part.options)
    print(f"\n{name}: {engine.attention_reason}", file=sys.stderr, flush=True)
    if args.beside:  # what compiles for minutes
        for batch, context in missing:
            seconds_of(engine, batch, context, steps=2)
    with args.alone():
        for batch, context in missing:
            if time.monotonic() > end:
                print("the time is over: run this again to go on", file=sys.stderr)
                return
            seconds = seconds_of(engine, batch, context)
            yield Cell(name, batch, context, 1e3 * seconds,
                       1e3 * roofline(model, batch, context + _STEPS / 2, rates))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), default=_PARTS, metavar="PART")
    parser.add_argument("--batch", nargs="+", type=int)
    parser.add_argument("--context", nargs="+", type=int)
    parser.add_argument("--gib", type=float, default=30.0, help="most of K and V (default 30)")
    parser.add_argument("--minutes", type=float, default=8.0, help="no cell starts later")
    parser.add_argument("--trusted", action="store_true", help="as bench/serving.py has it")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="as bench/serving.py has it")
    parser.add_argument("--tiny", action="store_true", help="tiny models, batches and contexts")
    args = parser.parse_args()
    args.batch = args.batch or (_TINY_BATCHES if args.tiny else _BATCHES)
    args.context = args.context or (_TINY_CONTEXTS if args.tiny else _CONTEXTS)
    end = time.monotonic() + 60 * args.minutes
    args.alone = Alone(args.beside)
    with args.alone():
        rates = measured_rates()
    copy, products = rates.bytes_per_s / 1e9, rates.flops_per_s / 1e12
    print(f"Copy {copy:,.0f} GB/s, products {products:,.1f} TFLOP/s.\n")
    print("| model | batch | context | ms a step | tokens/s | of roofline |")
    print("| --- " * 6 + "|", flush=True)
    for name in args.only:
        for cell in measure(BY_NAME[name], rates, end, args):
            append(args.csv, cell)
            print(
                f"| {cell.model} | {cell.batch} | {cell.context:,} | {cell.ms:.2f} "
                f"| {1e3 * cell.batch / cell.ms:,.0f} | {cell.roofline_ms / cell.ms:.0%} |",
                flush=True,
            )
        gc.collect()
        mx.clear_cache()
    if args.plot and (cells := read(args.csv)):
        write_svg(cells, args.plot)
    return 0


if __name__ == "__main__":
    run_main(main)
