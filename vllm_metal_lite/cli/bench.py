"""`vllm-metal-lite bench`: how fast a model is here, alone and with many requests.

Exit code 0; 1 on an error, or if a case failed; 130 after Ctrl-C, which shows the results so far.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from vllm_metal_lite import benchmark
from vllm_metal_lite.benchmark import SETTLED, WARM_UPS, Engine, Load, Metrics
from vllm_metal_lite.cli import log, options, shared_report
from vllm_metal_lite.cli.files import check_writable, write_json
from vllm_metal_lite.cli.startup import build_engine, load_model
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.engine.interrupt import DeferredInterrupt
from vllm_metal_lite.errors import ConfigError, MetalLiteError, RequestError, one_line

# (heading, field of a report, factor, whether more is better)
COLUMNS = (
    ("first token, ms", "seconds_to_first", 1e3, False),
    ("prompt tokens/s", "prompt_rate", 1, True),
    ("decode tokens/s", "decode_rate", 1, True),
)
_WIDTH = 9  # characters of a number in the table
_WARM_UP_TOKENS = 128  # tokens of the warm-up's prompt, if no case is shorter
_MOST_TURNS = WARM_UPS + 3  # turns of a case
_CASE_SHARE = 1 / 40  # the share of the time limit after which a case gets no further turn

Case = tuple[int, int]  # (requests that arrive together, tokens of each prompt)
Row = dict[str, Any]  # the result of a case, as the report has it


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
    cases, room = make_cases(args.requests, args.context, args.new_tokens, limit, config)
    longest = max(context for _, context in cases)
    if longest < max(args.context):
        log.say(
            f"Contexts are cut to {longest:,} tokens: prompt and answer must fit the "
            f"{limit:,} tokens of the context"
        )
    config = replace(config, max_model_len=config.max_model_len or longest + room)
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
            raise ConfigError(*e.parts, " (the longest --context and its new tokens)") from None
        raise
    ours = benchmark.ThisEngine(engine)
    engines = {"ours": lambda requests: ours, **engines}

    report = shared_report.new_report("bench")
    for line in shared_report.describe_machine(report["machine"]):
        log.say(line)
    log.say(
        f"Measuring for at most {args.seconds:g} s.  Prompts are random.  A warm-up compiles "
        "kernels and is not counted.  Ctrl-C stops and shows the results so far."
    )
    with DeferredInterrupt(partial(log.say, log.STOPPING)) as interrupt:
        capacity = engine.kv_groups[0].num_blocks * config.block_size
        tokens = benchmark.vocabulary(model)
        stop = lambda: interrupt.pressed  # noqa: E731
        suite = Suite(engines, tokens, args.new_tokens, room, capacity, args.seconds, stop)
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


def make_cases(
    requests: Sequence[int],
    contexts: Sequence[int],
    new_tokens: int,
    limit: int,
    config: EngineConfig,
) -> tuple[list[Case], int]:
    """Every pair of a number of requests and a context, the fewest prompt tokens first; and the
    room for new tokens that each request needs.

    A context that leaves less room below `limit` is cut.  Raises RequestError if no token of a
    prompt fits.
    """
    largest = max(requests), min(max(contexts), limit)
    room = SETTLED + new_tokens + benchmark.tokens_ahead(*largest, config, limit)
    if room >= limit:
        raise RequestError(
            f"--new-tokens {new_tokens} needs {room} tokens beside a prompt: more than the "
            f"context of {limit} tokens holds"
        )
    cases = {(count, min(context, limit - room)) for count in requests for context in contexts}
    return sorted(cases, key=lambda case: (case[0] * case[1], case)), room


@dataclass
class Suite:
    """Measures cases within a time limit: the engines in turns, each case several times.

    engines: makes an engine for a number of requests, by the engine's name in the report.
    vocabulary: the token ids that prompts are drawn from.  new_tokens: counted tokens of each
    request.  room: the most new tokens of a request.  capacity: the tokens that the KV store holds.
    seconds: the time limit.  stop: asked between steps whether to end early.
    failed: whether an engine failed in a case.
    """

    engines: Mapping[str, Callable[[int], Engine]]
    vocabulary: np.ndarray
    new_tokens: int
    room: int
    capacity: int
    seconds: float
    stop: Callable[[], bool]
    rows: list[Row] = field(default_factory=list)
    failed: bool = False

    def run(self, cases: Sequence[Case]) -> None:
        """Fill `rows`.  An engine's failure ends its case alone; that of the warm-up raises
        MetalLiteError."""
        self._random = np.random.default_rng(0)
        self._deadline = time.perf_counter() + self.seconds
        self._turn((1, min(_WARM_UP_TOKENS, *(context for _, context in cases))), "warm-up")
        for count, context in cases:
            if self.stop():
                break
            row = {"requests": count, "context": context}
            self.rows.append(row | self._measure((count, context)))
        log.clear()

    def _measure(self, case: Case) -> Row:
        need = case[0] * (case[1] + self.room)
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

    def _turn(self, case: Case, note: str) -> dict[str, Metrics] | None:
        """Run every engine once, on the same prompts; None if stopped before the last result."""
        count, context = case
        prompts = self._random.choice(self.vocabulary, case).tolist()
        load = Load(prompts, [self.room] * count, [SETTLED + self.new_tokens] * count)
        turn = {}
        for key, engine in self.engines.items():
            name = key.replace("_", "-")
            log.progress(f"{name}: {count} x {context:,} tokens, {note}")
            try:
                run = benchmark.drive(
                    engine(count),
                    load,
                    lambda: time.perf_counter() > self._deadline or self.stop(),
                )
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
