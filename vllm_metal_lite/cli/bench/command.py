"""`vllm-metal-lite bench`: how fast a model is here, alone and with many requests.

Exit code 0; 1 on an error, or if a case failed; 130 after Ctrl-C, which shows the results so far.
"""

import argparse
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from vllm_metal_lite.cli import log, machine, options, shared_report
from vllm_metal_lite.cli.bench.cases import BenchCase, make_cases
from vllm_metal_lite.cli.bench.engines import Engine, MlxLm, ThisEngine
from vllm_metal_lite.cli.bench.suite import Suite
from vllm_metal_lite.cli.bench.table import rows, table
from vllm_metal_lite.cli.files import check_writable, write_json
from vllm_metal_lite.cli.startup import build_engine, load_model
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.engine.interrupt import DeferredInterrupt
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.model.loader import LoadedModel


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
    cases = _cases(args, model, config)
    needed = max(case.context + case.max_tokens for case in cases)
    config = replace(config, max_model_len=config.max_model_len or needed)
    engines: list[Engine] = []
    if args.compare:
        engines.append(MlxLm(model.packed.model))
        fraction = config.memory_fraction or profile().memory_fraction
        config = replace(config, memory_fraction=fraction / 2)
        log.say("Memory:    each engine gets half of it (--compare)")
    try:
        engine = build_engine(model, config, log.say)
    except ConfigError as e:
        if e.option == "max_model_len" and args.max_model_len is None:
            raise ConfigError(*e.parts, " (of the longest --context and its new tokens)") from None
        raise
    engines.insert(0, ThisEngine(engine))

    report = shared_report.new_report("bench")
    for line in machine.describe(report["machine"]):
        log.say(line)
    log.say(
        f"Measuring for at most {args.seconds:g} s.  Prompts are random.  A warm-up compiles "
        "kernels and is not counted.  Ctrl-C stops and shows the results so far."
    )
    capacity = engine.kv_groups[0].num_blocks * config.block_size
    suite = Suite(engines, _vocabulary(model), args.new_tokens, capacity, args.seconds)
    stopping = partial(log.say, log.STOPPING)
    with DeferredInterrupt(stopping) as interrupt:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C, within a step
            suite.run(cases, stop=lambda: interrupt.pressed)
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
        "cases": rows(suite.results),
    }
    if suite.results:
        print("\n".join(table(suite.results)), flush=True)
    if args.report is not None:
        write_json(args.report, shared_report.without_names(report, args.model))
        log.say(f"The report is in {args.report}.")
    failed = any(result.failed for result in suite.results)
    return 130 if interrupted else int(failed)


def _cases(args: argparse.Namespace, model: LoadedModel, config: EngineConfig) -> list[BenchCase]:
    """The cases to run.  Contexts are cut to the model's limit and to --max-model-len."""
    limit = min(config.max_model_len or model.max_position, model.max_position)
    cases = make_cases(args.requests, args.context, args.new_tokens, limit, config)
    longest = max(case.context for case in cases)
    if longest < max(args.context):
        log.say(
            f"Contexts are cut to {longest:,} tokens: prompt and answer must fit the "
            f"{limit:,} tokens of the context"
        )
    return cases


def _vocabulary(model: LoadedModel) -> np.ndarray:
    """Token ids that prompts are drawn from: special tokens are left out."""
    known = min(len(model.tokenizer), model.vocab_size) if model.tokenizer else model.vocab_size
    special = model.tokenizer.all_special_ids if model.tokenizer else []
    return np.setdiff1d(np.arange(known), special)
