"""`vllm-metal-lite bench`: how fast a model is here, alone and with many requests.

Exit code 0; 1 on an error, or if a case failed; 130 after Ctrl-C, which shows the results so far.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite import benchmark
from vllm_metal_lite.benchmark import SETTLED, WARM_UPS, Engine, Load, Metrics, drive
from vllm_metal_lite.cli import log, machine, options, shared_report
from vllm_metal_lite.cli.files import check_writable, write_json
from vllm_metal_lite.cli.startup import build_engine, load_model
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.engine.interrupt import DeferredInterrupt
from vllm_metal_lite.errors import ConfigError, MetalLiteError, RequestError, one_line
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler import Scheduler

# (heading, field of a report, factor, whether more is better)
COLUMNS = (
    ("first token, ms", "seconds_to_first", 1e3, False),
    ("prompt tokens/s", "prompt_rate", 1, True),
    ("decode tokens/s", "decode_rate", 1, True),
)
_WIDTH = 9  # of a number in the table
_WARM_UP_TOKENS = 128  # the most of the first prompt, which no case counts
_MOST_TURNS = WARM_UPS + 3  # of a case
_CASE_SHARE = 1 / 40  # the share of the time limit after which a case gets no further turn
_MOST_TOKENS = 1 << 22  # of prompts, and of answers, for which the scheduler is asked

Row = dict[str, Any]  # of a case in the report


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    config = options.engine_config(args)
    if max(args.requests) > config.max_num_seqs:
        raise options.UsageError(
            f"--requests must be at most --max-num-seqs ({config.max_num_seqs}), "
            f"got {max(args.requests)}"
        )
    if args.report is not None:
        check_writable(args.report, replaces=False)

    model = load_model(args.model, config, log.say)
    limit = min(config.max_model_len or model.max_position, model.max_position)
    cases = make_cases(args.requests, args.context, args.new_tokens, limit, config)
    longest = max(case.context for case in cases)
    if longest < max(args.context):
        log.say(
            f"Contexts are cut to {longest:,} tokens: prompt and answer must fit the "
            f"{limit:,} tokens of the context"
        )
    needed = max(case.context + case.max_tokens for case in cases)
    config = replace(config, max_model_len=config.max_model_len or needed)
    engines: dict[str, Callable[[int], Engine]] = {}
    if args.compare:
        engines["mlx_lm"] = benchmark.mlx_lm(model)
        fraction = config.memory_fraction or profile().memory_fraction
        config = replace(config, memory_fraction=fraction / 2)
        log.say("Memory:    each engine gets half of it (--compare)")
    try:
        engine = build_engine(model, config, log.say)
    except ConfigError as e:
        if e.option == "max_model_len" and args.max_model_len is None:
            raise ConfigError(*e.parts, " (of the longest --context and its new tokens)") from None
        raise
    ours = benchmark.ThisEngine(engine)
    engines = {"ours": lambda requests: ours, **engines}

    report = shared_report.new_report("bench")
    for line in machine.describe(report["machine"]):
        log.say(line)
    log.say(
        f"Measuring for at most {args.seconds:g} s.  Prompts are random.  A warm-up compiles "
        "kernels and is not counted.  Ctrl-C stops and shows the results so far."
    )
    capacity = engine.kv_groups[0].num_blocks * config.block_size
    with DeferredInterrupt(partial(log.say, log.STOPPING)) as interrupt:
        suite = Suite(
            engines, model, args.new_tokens, capacity, args.seconds, lambda: interrupt.pressed
        )
        with suppress(KeyboardInterrupt):  # a second Ctrl-C, within a step
            suite.run(cases)
        interrupted = interrupt.pressed
    report |= {
        "model": shared_report.model_facts(args.model, model),
        "engine": {
            "attention": engine.runner.attention.name,
            "attention_reason": engine.runner.path.reason,
            "kv_bits": config.kv_bits,
            "max_num_batched_tokens": config.max_num_batched_tokens,
        },
        "new_tokens": args.new_tokens,
        "interrupted": interrupted,
        "cases": suite.rows,
    }
    if suite.rows:
        print("\n".join(table(suite.rows)), flush=True)
    if args.report is not None:
        write_json(args.report, shared_report.without_names(report, args.model))
        log.say(f"The report is in {args.report}.")
    return 130 if interrupted else int(suite.failed)


class BenchCase(NamedTuple):
    """`requests` prompts of `context` tokens each that arrive together, with `max_tokens` each."""

    requests: int
    context: int
    max_tokens: int


def make_cases(
    requests: Sequence[int],
    contexts: Sequence[int],
    new_tokens: int,
    limit: int,
    config: EngineConfig,
) -> list[BenchCase]:
    """Every pair of a number of requests and a context, the fewest prompt tokens first.

    A context that leaves no room for new tokens below `limit` is cut.  Raises RequestError if no
    token of a prompt fits.
    """

    def max_tokens(count: int, context: int) -> int:
        return SETTLED + new_tokens + tokens_ahead(count, context, config)

    wanted = [(count, min(context, limit)) for count in requests for context in contexts]
    longest = max(max_tokens(*pair) for pair in wanted)
    room = limit - longest
    if room < 1:
        raise RequestError(
            f"--new-tokens {new_tokens} needs {longest} tokens beside a prompt: more than the "
            f"context of {limit} tokens holds"
        )
    pairs = {(count, min(context, room)) for count, context in wanted}
    cases = [BenchCase(*pair, min(max_tokens(*pair), limit - pair[1])) for pair in pairs]
    return sorted(cases, key=lambda case: (case.requests * case.context, case.requests))


@cache
def tokens_ahead(count: int, context: int, config: EngineConfig) -> int:
    """How many tokens the first of `count` prompts has when the last one gets its first."""
    if count * context > _MOST_TOKENS:
        return 0
    # With a window of one token, and a step's blocks for each request, the store is no limit.
    blocks = count * (config.max_num_batched_tokens // config.block_size + 2)
    config = replace(config, enable_prefix_caching=False)
    scheduler = Scheduler(config, [KVGroup(window=1, num_blocks=blocks)], 2 * _MOST_TOKENS)
    ahead, queue = 0, [Request(str(i), range(context), _MOST_TOKENS) for i in range(count)]
    for request in queue:
        scheduler.add(request)
    # With more requests than tokens of a step, the last ones wait until others end.
    while (scheduler.waiting or scheduler.chunked) and ahead * count < _MOST_TOKENS:
        step = scheduler.schedule()
        scheduler.advance(step)
        scheduler.update(step, [0] * len(step.terminal), {})
        ahead = queue[0].num_tokens - context
    return ahead


@dataclass
class Suite:
    """Measures cases within a time limit: the engines in turns, each case several times.

    engines: by their names in the report, for a number of requests.  new_tokens: of each request,
    counted.  capacity: tokens that the KV store holds.  seconds: the time limit.
    stop: whether to end early, asked between steps.  failed: whether an engine failed in a case.
    """

    engines: Mapping[str, Callable[[int], Engine]]
    model: LoadedModel
    new_tokens: int
    capacity: int
    seconds: float
    stop: Callable[[], bool]
    rows: list[Row] = field(init=False, default_factory=list)
    failed: bool = field(init=False, default=False)

    def run(self, cases: Sequence[BenchCase]) -> None:
        """Fill `rows`.  An engine's failure ends its case alone; that of the warm-up raises
        MetalLiteError."""
        self._tokens = benchmark.vocabulary(self.model)
        self._random = np.random.default_rng(0)
        self._deadline = time.perf_counter() + self.seconds
        shortest = min(case.context for case in cases)
        warm_up = cases[0]._replace(requests=1, context=min(_WARM_UP_TOKENS, shortest))
        self._turn(warm_up, "warm-up")
        for case in cases:
            if self.stop():
                break
            row = {"requests": case.requests, "context": case.context}
            self.rows.append(row | self._measure(case))
        log.clear()

    def _measure(self, case: BenchCase) -> Row:
        need = case.requests * (case.context + case.max_tokens)
        if need > self.capacity:
            why = f"needs K and V of {need:,} tokens, and the memory holds {self.capacity:,}"
            return {"skipped": why}
        turns: list[dict[str, Metrics]] = []
        now, last = time.perf_counter(), 0.0  # seconds of the last turn
        end = min(now + self.seconds * _CASE_SHARE, self._deadline)
        while len(turns) < _MOST_TURNS and (not turns or now + last < end):
            try:
                turn = self._turn(case, f"turn {len(turns) + 1}")
            except MetalLiteError as e:
                self.failed = True
                return {"skipped": str(e)}
            if turn is None:
                break
            turns.append(turn)
            last = time.perf_counter() - now
            now += last
        if turns:
            return summary(turns)
        return {"skipped": "stopped" if self.stop() else "did not end within the time limit"}

    def _is_over(self) -> bool:
        return time.perf_counter() > self._deadline or self.stop()

    def _turn(self, case: BenchCase, note: str) -> dict[str, Metrics] | None:
        """Run every engine once, on the same prompts; None if stopped before the last result."""
        count, context, max_tokens = case
        prompts = self._random.choice(self._tokens, (count, context)).tolist()
        load = Load(prompts, [max_tokens] * count, [SETTLED + self.new_tokens] * count)
        turn = {}
        for key, engine in self.engines.items():
            name = key.replace("_", "-")
            log.progress(f"{name}: {count} x {context:,} tokens, {note}")
            try:
                run = drive(engine(count), load, self._is_over)
            except RuntimeError as e:  # MLX's error for everything
                raise MetalLiteError(f"{name} fails: {one_line(e)}") from e
            if not all(run.times):
                return None
            waits, pace = benchmark.firsts(run), benchmark.steady(run)
            turn[key] = {
                "seconds_to_first": median(waits),
                "prompt_rate": count * context / max(waits),
                **({"decode_rate": pace["steady_tokens_per_s"]} if pace else {}),
            }
        return turn


def summary(turns: Sequence[Mapping[str, Metrics]]) -> Row:
    """The medians of each engine over the turns that count, and how many times better ours is."""
    counted = turns[min(WARM_UPS, len(turns) - 1) :]
    row: Row = {"turns_counted": len(counted), "compiling_included": len(turns) <= WARM_UPS}
    for engine in turns[0]:
        medians = benchmark.median_of([turn[engine] for turn in counted])
        row[engine] = {name: medians.get(name) for _, name, *_ in COLUMNS}
    if peer := row.get("mlx_lm"):
        columns = ((name, row["ours"][name], peer[name], more) for _, name, _, more in COLUMNS)
        row["ratios"] = {name: benchmark.ratio(*values) for name, *values in columns}
    return row


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for people, by context and number of requests."""
    compared = any("ratios" in row for row in rows)
    names = {"ours": "ours", "mlx_lm": "mlx-lm", "ratios": "ratio"} if compared else {"ours": ""}
    width = _WIDTH * max(len(names), 2)
    lines = ["context reqs" + "".join(f"{heading:>{width}}" for heading, *_ in COLUMNS)]
    if compared:
        shown = "".join(f"{name:>{_WIDTH}}" for name in names.values())
        lines.append(" " * 12 + shown * len(COLUMNS))
    for row in sorted(rows, key=lambda row: (row["context"], row["requests"])):
        line = f"{row['context']:>7,} {row['requests']:>4}"
        if "skipped" in row:
            lines.append(f"{line}   skipped: {row['skipped']}")
            continue
        for _, metric, factor, _ in COLUMNS:
            for name in names:
                value, is_ratio = row[name][metric], name == "ratios"
                digits = ".2f" if is_ratio else ",.0f"
                text = "-" if value is None else format(value * (is_ratio or factor), digits)
                line += f"{text:>{width // len(names)}}"
        lines.append(line + " *" * row["compiling_included"])
    if any(row.get("compiling_included") for row in rows):
        lines.append("*: one or two runs, for lack of time; compiling kernels may be included")
    if compared:
        lines.append("ratio: how many times better ours is")
    return lines
