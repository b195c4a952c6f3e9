"""Runs one load on this engine and on mlx-lm: same weights, one process, alternately, medians.

    python -m tools.bench.engine --load uniform --model qwen3-0.6b               a GPU
    python -m tools.bench.engine --load mixed users --model qwen3.5-4b --bits 4
    python -m tools.bench.engine --load short_even short_prefix                  a CPU
    python -m tools.bench.engine --load short_even --quick --scale 0.1           some seconds

--model: the demo model; or a key of bench/lib/shapes.json or HIDDENxLAYERS, with random weights; or
what the engine can load.

Decoding is greedy and ignores the end of sequence.  The first runs of each engine are warm-ups.  So
is the sweep over mlx-lm's settings: the best by tokens/s and the best by time to first token are
then timed, for each way to use mlx-lm, such as with prompt caches.  Ratios compare each number with
mlx-lm's best; above 1 means that this engine is better.  Prints Markdown; progress goes to stderr.
"""

import argparse
import json
import re
from typing import Any

from tools.bench.lib.agreement import agree
from tools.bench.lib.engines import FittedEngine
from tools.bench.lib.loads import CONTENT, LOADS, Sizes, WaveLoad
from tools.bench.lib.mlx_lm import MlxLmServer, Settings
from tools.bench.lib.models import add_model, model_of
from tools.bench.lib.roofline import step_bytes
from tools.bench.lib.runs import Pairs, Runs, medians
from tools.bench.lib.tables import print_medians
from tools.lib.frame import above_zero, at_least, parser_of, run_main, say
from tools.lib.trust import add_trusted, as_asked
from vllm_metal_lite import EngineConfig, MetalLiteError, backend
from vllm_metal_lite.benchmark import Engine, Metrics, MlxLmSingle, vocabulary
from vllm_metal_lite.checks.speed import copy_bandwidth
from vllm_metal_lite.config import PREFILL_POLICIES
from vllm_metal_lite.model.loader import LoadedModel

STEPS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens a step, decodes included


def peers(load: WaveLoad, model: LoadedModel) -> list[Engine]:
    """The settings of mlx-lm to try on a load, the likely best first."""
    n, largest = len(load.prompts), max(len(wave.prompts) for wave in load.waves)
    if n == 1:
        return [MlxLmSingle(model), MlxLmServer(model, Settings(1, 1))]
    if load.prefix_length:
        # A cache that is computed once holds the prefix; the server's hold whole conversations.
        has_turns = any(wave.follows for wave in load.waves)
        ways = ("server", "once") if has_turns else ("once", "server")
        sizes = dict.fromkeys((largest, n))
        settings = [Settings(size, n, prefix=way) for way in ways for size in sizes]
    else:
        first = n if load.is_even else n // 2  # even prompts need no padding
        sizes = dict.fromkeys((first, n // 2, n // 4, n, max(n // 8, 1)))
        settings = [Settings(size, n) for size in sizes] + [Settings(n // 2, n // 2)]
    return [MlxLmServer(model, s) for s in settings]


def run_load(name: str, load: WaveLoad, model: LoadedModel, args: argparse.Namespace) -> bool:
    """Run a load on this engine and on mlx-lm at its best; returns whether the tokens differ by no
    more than ties."""
    runs, best = Runs(name), list[Engine]()
    if load.ends_with_last_wave:
        engines = sharing(load, model, args)
        best = engines[-1:]
    else:
        engines = [FittedEngine(model, load, args.ours)]
    runs.warm_up({e.name: (e, load) for e in engines})
    if not load.ends_with_last_wave:
        candidates = peers(load, model)
        if args.settings and len(load.prompts) > 1:
            candidates = [MlxLmServer(model, s) for s in args.settings]
        found = sweep(runs, load, candidates, args.quick)
        best = best_of([e for e in candidates if e.name in found], found)
        engines += best
    pairs: Pairs = {e.name: (e, load) for e in engines}
    turns = runs.turns(pairs, args.repeats)
    values, last = medians(pairs, turns), {name: of_one[-1] for name, of_one in turns.items()}
    ours = last[engines[0].name]
    agreement = agree(model, ours, last[best[0].name]) if best else None
    tokens_in, tokens_out = (sum(map(len, of)) for of in (ours.prompts, ours.tokens))
    print(
        f"\n### {name}: {len(ours.prompts):,} requests, "
        f"{tokens_in:,} / {tokens_out:,} tokens in / out\n\n"
        f"Tokens: {agreement or 'mlx-lm failed in all settings'}.\n"
    )
    if load.is_even and (text := add_roofline(model, load, values)):
        print(f"{text}\n")
    print_medians(values)
    return agreement is None or agreement.within_ties


def sweep(runs: Runs, load: WaveLoad, candidates: list[Engine], quick: bool) -> dict[str, Metrics]:
    """The metrics of each engine that works.  quick: stops at the first that works."""
    found: dict[str, Metrics] = {}
    for engine in candidates:
        if not found and runs.tried(engine, load) is None:  # a warm-up for all
            continue
        if metrics := runs.tried(engine, load):
            found[engine.name] = metrics
        if quick and found:
            break
    return found


def best_of(candidates: list[Engine], found: dict[str, Metrics]) -> list[Engine]:
    """The fastest of each way to use mlx-lm, in order, and the one with the earliest token."""
    ranked = sorted(candidates, key=lambda e: -found[e.name]["output_tokens_per_s"])
    if not ranked:
        return []
    best = {e.kind: e for e in reversed(ranked)}.values()
    earliest = min(ranked, key=lambda e: found[e.name]["ttft_median"])
    return [e for e in ranked if e in best or e is earliest]


def add_roofline(model: LoadedModel, load: WaveLoad, medians: dict[str, Metrics]) -> str:
    """Add the share of a step that moving `step_bytes` takes at the bandwidth of a copy.  Returns
    both numbers as text, or "" if no engine has steady steps."""
    steady = [metrics for metrics in medians.values() if "steady_step_median" in metrics]
    if not steady:
        return ""
    contexts = [len(p) + n / 2 for p, n in zip(load.prompts, load.max_tokens, strict=True)]
    size = step_bytes(model, len(contexts), sum(contexts) / len(contexts))
    bandwidth = copy_bandwidth(1 << (27 if backend.is_cpu() else 30))
    for metrics in steady:
        metrics["roofline"] = size / bandwidth / metrics["steady_step_median"]
    return f"A step moves {size / 2**30:.2f} GiB at least; a copy, {bandwidth / 1e9:,.0f} GB/s."


def sharing(load: WaveLoad, model: LoadedModel, args: argparse.Namespace) -> list[Engine]:
    """Engines for a prompt that arrives while others decode, one for each way to share the steps;
    mlx-lm comes last."""
    steps = [n for n in (STEPS[:5:2] if args.quick else STEPS) if n < len(load.prompts[-1])]
    engines: list[Engine] = []
    for tokens in steps:
        options = {**args.ours, "max_num_batched_tokens": tokens}
        engines.append(FittedEngine(model, load, options, name=f"mixed, steps of {tokens}"))
    for policy in PREFILL_POLICIES:
        options = {**args.ours, "max_num_batched_tokens": 8192, "prefill_policy": policy}
        engines.append(FittedEngine(model, load, options, name=f"{policy}, in one step"))
    steps = (2048,) if args.quick else (2048, 512)
    return engines + [MlxLmServer(model, Settings(8, 32, prefill_step_size=s)) for s in steps]


def run_loads(model: LoadedModel, args: argparse.Namespace) -> list[str]:
    """Returns the names of the loads whose tokens differ by more than ties."""
    apart = []
    for name in args.load:
        load = LOADS[name](Sizes(vocabulary(model), args.scale))
        if load.longest > model.max_position:
            raise MetalLiteError(
                f"load {name} has requests of {load.longest} tokens, and {model.name} a context of "
                f"{model.max_position}: lower --scale"
            )
        if not run_load(name, load, model, args):
            apart.append(name)
    return apart


def _settings(text: str) -> Settings:
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)(?:/(none|once|server))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not PREFILL/COMPLETION[/PREFIX]")
    return Settings(int(found[1]), int(found[2]), prefix=found[3] or "none")


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name not in EngineConfig.__dataclass_fields__:
        raise argparse.ArgumentTypeError(f"{name!r} is not a field of EngineConfig")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> int:
    loads = "\n".join(f"- {name}: {content}" for name, content in CONTENT.items())
    parser = parser_of(f"{__doc__}\nLoads:\n\n{loads}")
    parser.add_argument("--load", nargs="+", choices=list(LOADS), required=True)
    add_model(parser)
    parser.add_argument("--scale", type=above_zero, default=1.0, help="of lengths and counts")
    parser.add_argument("--repeats", type=at_least(1), help="counted turns (default 3)")
    parser.add_argument("--quick", action="store_true", help="one turn, mlx-lm's likely best only")
    text = "mlx-lm's batch sizes to try, but for one request and for newcomer; PREFIX: none, once "
    text += "or server"
    names = "PREFILL/COMPLETION[/PREFIX]"
    parser.add_argument("--settings", nargs="+", type=_settings, metavar=names, help=text)
    fields = {"metavar": "NAME=VALUE", "help": "fields of EngineConfig"}
    parser.add_argument("--ours", nargs="+", type=_option, default=[], **fields)
    add_trusted(parser)
    args = parser.parse_args()
    args.ours = dict(args.ours)
    args.repeats = args.repeats or (1 if args.quick else 3)
    model = model_of(args)
    if model.packed.by_segment is not None:
        print(f"\nAttention runs by segment: {model.packed.by_segment}", flush=True)
    with as_asked(args):
        apart = run_loads(model, args)
    for name in apart:
        say(f"{name}: tokens differ by more than ties")
    return 1 if apart else 0


if __name__ == "__main__":
    run_main(main)
