"""`vllm-metal-lite generate`: a file of prompts in, a file of answers out."""

import argparse
import sys
from contextlib import closing

from vllm_metal_lite.cli import log, options
from vllm_metal_lite.cli.files import (
    LineReader,
    OrderedWriter,
    check_output,
    count_lines,
    open_input,
)
from vllm_metal_lite.cli.startup import build_engine, load_model

# Requests in the engine per seat: enough to keep every seat busy, in bounded memory.
_WINDOW = 4


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    config, given = options.engine_config(args), options.sampling_flags(args)
    source = open_input(args.input)
    check_output(args.output, source)
    model = load_model(args.model, config, log.say)
    engine = build_engine(model, config, log.say)
    from vllm_metal_lite.cli.batch import Batch  # it imports MLX

    defaults = {**model.sampling_defaults, "max_tokens": options.GENERATED_TOKENS, **given}
    window = _WINDOW * config.max_num_seqs
    total = count_lines(source)
    on_screen = args.output == "-" and sys.stdout.isatty()
    with closing(OrderedWriter(args.output)) as writer:
        batch = Batch(engine, LineReader(source, window), writer, defaults, window)
        interrupted = batch.run(total, sys.stderr.isatty() and not on_screen)
    log.say(batch.summary())
    if interrupted:
        log.say(f"interrupted: {writer.num_written} results are kept")
        return 130
    if batch.num_refused:
        log.say(
            f"error: {batch.num_refused} of {writer.num_written} lines were refused or failed; "
            f"the first: {batch.first_refusal}"
        )
        return 1
    return 0
