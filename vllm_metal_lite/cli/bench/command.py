"""`vllm-metal-lite bench`: how fast a model is here, alone and with many requests.

Exit code 0; 1 on an error, or if a case failed; 130 after Ctrl-C, which shows the results so far.
"""

import argparse
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

from vllm_metal_lite.cli import options
from vllm_metal_lite.cli.startup import start_engine
from vllm_metal_lite.cli.wrap import wrap
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    config = options.engine_config(args)
    if max(args.requests) > config.max_num_seqs:
        raise options.UsageError(
            f"--requests must be at most --max-num-seqs ({config.max_num_seqs}), "
            f"got {max(args.requests)}"
        )
    from vllm_metal_lite.cli import machine  # it imports MLX

    for name in filter(None, (args.report, args.plot)):
        machine.check_writable(name)
    if args.plot:
        from vllm_metal_lite.cli.bench.plot import check_plot

        check_plot(args.plot)
    return _Bench(args, config).run()


class _Bench:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace, config: EngineConfig) -> None:
        self._args, self._config = args, config
        self._peers: list[Any] = []

    def run(self) -> int:
        from vllm_metal_lite.cli import machine
        from vllm_metal_lite.cli.bench.load import Ours
        from vllm_metal_lite.cli.bench.suite import Suite
        from vllm_metal_lite.cli.bench.table import rows, table
        from vllm_metal_lite.engine.interrupt import DeferredInterrupt

        args = self._args
        engine = self._start()
        model = engine.model
        report = machine.new_report("bench")
        for line in machine.describe(report["machine"]):
            _say(line)
        _say(
            f"Measuring for at most {args.seconds:g} s.  Prompts are random.  A warm-up compiles "
            "kernels and is not counted.  Ctrl-C stops and shows the results so far."
        )
        first = engine.kv_groups[0]
        with DeferredInterrupt(_say_stopping) as interrupt:
            suite = Suite(
                [Ours(engine), *self._peers],
                _vocabulary(model),
                engine.config,
                first.num_blocks * engine.config.block_size,
                args.seconds,
                lambda: interrupt.pressed,
            )
            with suppress(KeyboardInterrupt):  # a second Ctrl-C, within a step
                suite.run(self._cases, args.new_tokens, sys.stderr.isatty())
            interrupted = interrupt.pressed
        report |= {
            "model": {
                "name": machine.public_name(args.model),
                "type": model.model_type,
                "parameters": model.num_parameters,
                "weight_bytes": model.weight_bytes,
                "dtype": str(model.dtype).removeprefix("mlx.core."),
            },
            "engine": {
                "attention": engine.runner.attention.name,
                "attention_reason": engine.attention_reason,
                "kv_bits": self._config.kv_bits,
                "max_num_batched_tokens": self._config.max_num_batched_tokens,
            },
            "interrupted": interrupted,
            "cases": rows(suite.results),
        }
        if suite.results:
            print("\n".join(table(suite.results, args.new_tokens)), flush=True)
        if args.report:
            machine.write(args.report, report)
            _say(f"The report is in {args.report}.")
        if args.plot and any(result.timings for result in suite.results):
            from vllm_metal_lite.cli.bench.plot import plot

            chip = report["machine"]["gpu"] or report["machine"]["chip"]
            plot(args.plot, suite.results, f"{report['model']['name']} on {chip}")
            _say(f"The picture is in {args.plot}.")
        failed = any(result.failed for result in suite.results)
        return 130 if interrupted else int(failed)

    def _start(self) -> Any:
        try:
            return start_engine(
                self._args.model, self._config, _say, "vllm-metal-lite bench", self._configure
            )
        except ConfigError as e:
            if self._config.max_model_len is not None:
                raise
            raise ConfigError(*e.parts, " (of the longest --context and its new tokens)") from None

    def _configure(self, model: Any, config: EngineConfig) -> EngineConfig:
        """The engine's options for a loaded model; sets the cases and the peers."""
        from vllm_metal_lite.cli.bench.cases import make_cases

        args = self._args
        limit = min(config.max_model_len or model.max_position, model.max_position)
        self._cases = make_cases(args.requests, args.context, args.new_tokens, limit, config)
        longest = max(case.context for case in self._cases)
        if longest < max(args.context):
            _say(
                f"Contexts are cut to {longest:,} tokens: prompt and answer must fit the "
                f"{limit:,} tokens of the context"
            )
        if config.max_model_len is None:
            needed = max(c.context + c.max_tokens(args.new_tokens, config) for c in self._cases)
            config = replace(config, max_model_len=min(needed, limit))
        if args.compare:
            from vllm_metal_lite.cli.bench.mlx_lm import MlxLm
            from vllm_metal_lite.devices import profile

            self._peers = [MlxLm(model.packed.model)]
            fraction = config.memory_fraction or profile().memory_fraction
            config = replace(config, memory_fraction=fraction / 2)
            _say("Memory:    each engine gets half of it (--compare)")
        return config


def _vocabulary(model: Any) -> Any:
    """Token ids that prompts are drawn from: special tokens are left out."""
    import numpy as np

    known = min(len(model.tokenizer), model.vocab_size) if model.tokenizer else model.vocab_size
    special = model.tokenizer.all_special_ids if model.tokenizer else []
    return np.setdiff1d(np.arange(known), special)


def _say_stopping() -> None:
    _say("\nStopping after the step that is under way ...")


def _say(text: str) -> None:
    print(wrap(text, sys.stderr), file=sys.stderr, flush=True)
