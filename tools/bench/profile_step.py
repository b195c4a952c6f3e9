"""Where the time of a step goes on the host, by parts.

    python -m tools.bench.profile_step --only qwen3-30b-a3b-4 --batch 1 32 --context 512 8192
    python -m tools.bench.profile_step --model qwen3-0.6b --bits 4 --batch 1 --context 512
    python -m tools.bench.profile_step --model qwen3.5-4b --context 16000 --prompt 2048    prompts

--only: rows of the table of shapes (bench/lib/shapes.json).  Greedy, random weights.  Contexts are
not computed: requests are taken for prompts whose K and V the store has, and the store holds zeros.
Steps are decodes, or, with --prompt, each is the next chunk of one prompt, so that the context
grows.  "execute" is the runner's part of a step: "forward" builds the graph, "submit" hands it to
MLX, which launches it.  In steps that are not one ahead of each other ("alone") the host waits for
the device, so nothing overlaps.  "of roofline": the share of a step that its bytes take at the
speed of a copy.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np

from tools.bench.lib.configs import BY_NAME
from tools.bench.lib.host import NoModel, timed
from tools.bench.lib.models import BITS, get_model
from tools.bench.lib.roofline import measured_bandwidth, step_bytes
from tools.bench.lib.tables import table_head
from tools.bench.lib.trust import trusted
from tools.dev.run_main import parser_of, run_main
from vllm_metal_lite import EngineConfig, LLMEngine, MetalLiteError, SamplingParams
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.loader import LoadedModel

_BLOCK = 16


class Counts(NamedTuple):
    """Steps of each part of a profile."""

    warm_up: int
    steps: int
    alone: int

    @property
    def all(self) -> int:
        return self.warm_up + self.steps + 2 * self.alone + 16


_DECODES, _CHUNKS = Counts(12, 40, 15), Counts(3, 5, 4)


@contextmanager
def skipped(engine: LLMEngine) -> Iterator[None]:
    """Steps of prompts are not computed."""
    runner = engine.pipeline.runner
    tokens = np.random.default_rng(0).integers(0, engine.model.vocab_size, 1 << 12)
    engine.pipeline.runner = NoModel(tokens.tolist())
    yield
    engine.pipeline.runner = runner


def decoding(engine: LLMEngine, batch: int, context: int) -> list[str]:
    """Requests that all decode, at `context` tokens and a few more; returns their names."""
    rng = np.random.default_rng(1)
    vocab_size = engine.model.vocab_size
    params = SamplingParams(temperature=0, max_tokens=_DECODES.all, ignore_eos=True)
    names = [f"{batch} {context} {i}" for i in range(batch)]
    for name in names:
        engine.add_request(name, rng.integers(0, vocab_size, context).tolist(), params)
    waiting = set(names)
    with skipped(engine):
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
    for _ in range(_DECODES.warm_up):
        engine.step()
    return names


def prefilling(engine: LLMEngine, rows: int, context: int) -> list[str]:
    """A prompt that is computed `rows` at a time, behind `context` tokens; returns its name."""
    engine.async_scheduling = False
    num_skipped = -(-context // rows)
    prompt = np.random.default_rng(1).integers(
        0, engine.model.vocab_size, (num_skipped + _CHUNKS.all) * rows
    )
    engine.add_request("prompt", prompt.tolist(), SamplingParams(temperature=0, max_tokens=1))
    with skipped(engine):
        for _ in range(num_skipped):
            engine.step()
    engine.async_scheduling = True
    for _ in range(_CHUNKS.warm_up):
        engine.step()
    return ["prompt"]


def measure(engine: LLMEngine, counts: Counts) -> dict[str, float]:
    """The medians of a step and of its parts, in milliseconds."""
    runner = engine.runner
    parts: dict[str, list[float]] = {"step": []}
    originals = {name: getattr(runner, name) for name in ("execute", "_forward", "_submit")}
    for name, call in originals.items():
        times = parts[name.strip("_")] = []
        setattr(runner, name, timed(call, times, time.perf_counter))
    step = timed(engine.step, parts["step"], time.perf_counter)
    for _ in range(counts.steps):
        step()
    for name, call in originals.items():
        setattr(runner, name, call)
    engine.async_scheduling = False
    alone: list[float] = []
    step = timed(engine.step, alone, time.perf_counter)
    for _ in range(counts.alone):
        step()
    engine.async_scheduling = True
    parts["alone"] = alone[2:]  # the first ends what was one ahead
    return {name: 1e3 * statistics.median(times) for name, times in parts.items()}


_PARTS = ("step", "execute", "forward", "submit", "alone")


def report(engine: LLMEngine, bandwidth: float, args: argparse.Namespace) -> None:
    """A row for each batch and context that fits."""
    model, counts = engine.model, _CHUNKS if args.prompt else _DECODES
    what = f"chunk of {args.prompt}" if args.prompt else "requests"
    table_head([what, "context", *(f"{part}, ms" for part in _PARTS), "tokens/s", "of roofline"])
    for batch, context in cells_of(args, model):
        if args.prompt:
            names = prefilling(engine, args.prompt, context)
        else:
            names = decoding(engine, batch, context)
        ms = measure(engine, counts)
        least = step_bytes(model, batch, context + counts.all / 2) / bandwidth
        share = "" if args.prompt else f"{1e3 * least / ms['step']:.0%}"
        cells = " | ".join(f"{ms[part]:.2f}" for part in _PARTS)
        rate = 1e3 * (args.prompt or batch) / ms["step"]
        print(f"| {batch} | {context:,} | {cells} | {rate:,.0f} | {share} |", flush=True)
        engine.abort(names)
        while engine.has_unfinished_requests():
            engine.step()


def cells_of(args: argparse.Namespace, model: LoadedModel) -> list[tuple[int, int]]:
    """(batch, context) that the model can have, and whose K and V fit into --gib."""
    most = args.gib * 2**30 / max(model.kv_bytes_per_token, 1)
    return [
        (batch, context)
        for context in args.context for batch in args.batch
        if length(args, context) <= min(model.max_position, most / batch)
    ]  # fmt: skip


def length(args: argparse.Namespace, context: int) -> int:
    """Tokens of a request in the end."""
    if args.prompt:
        return context + (_CHUNKS.all + 1) * args.prompt
    return context + _DECODES.all


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), metavar="PART")
    parser.add_argument("--tiny", action="store_true", help="tiny models in place of --only's")
    parser.add_argument("--model", default="demo", help="in place of --only")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--bits", choices=BITS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--context", nargs="+", type=int, default=[700])
    parser.add_argument("--prompt", type=int, metavar="ROWS", help="chunks of so many rows")
    parser.add_argument("--gib", type=float, default=30.0, help="most of K and V (default 30)")
    parser.add_argument("--trusted", action="store_true", help="as bench/serving.py has it")
    parser.add_argument("--prefill", choices=("varlen", "gather"), help="of --trusted's prompts")
    args = parser.parse_args()
    if min(*args.batch, *args.context, args.prompt or 1) < 1:
        parser.error("--batch, --context and --prompt must be at least 1")
    args.batch = [1] if args.prompt else args.batch
    bandwidth = measured_bandwidth()
    for part in [BY_NAME[name] for name in args.only] if args.only else [None]:
        if part is None:
            model, options = get_model(args.model, args.dtype, args.bits), {}
        else:
            shape = part.tiny if args.tiny else part.shape
            model, options = get_model(shape, args.dtype, part.bits), part.options or {}
        cells = cells_of(args, model)
        if not cells:
            raise MetalLiteError(f"no batch and context fits the model and --gib {args.gib:g}")
        config = EngineConfig(
            block_size=_BLOCK, max_num_seqs=max(batch for batch, _ in cells),
            num_blocks=max(b * (-(-length(args, c) // _BLOCK)) for b, c in cells) + 8,
            max_model_len=max(length(args, context) for _, context in cells),
            enable_prefix_caching=False, max_num_batched_tokens=args.prompt or 8192, **options,
        )  # fmt: skip
        with trusted(args.prefill) if args.trusted else nullcontext():
            engine = LLMEngine(model, config)
        print(f"\n## {part.name if part else model.name}: {engine.attention_reason}\n", flush=True)
        report(engine, bandwidth, args)
        del engine, model
        gc.collect()
        mx.clear_cache()
    return 0


if __name__ == "__main__":
    run_main(main)
