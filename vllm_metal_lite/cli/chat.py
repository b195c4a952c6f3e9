"""`vllm-metal-lite chat`: a conversation in the terminal, or one answer in a pipe."""

import argparse

from vllm_metal_lite.cli import options
from vllm_metal_lite.cli.startup import build_engine, load_model
from vllm_metal_lite.cli.terminal import Terminal
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.sampling_params import SamplingParams


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    config, given = options.engine_config(args), options.sampling_flags(args)
    terminal = Terminal()
    message = "" if terminal.interactive else terminal.read_all()
    if not (terminal.interactive or message):
        raise RequestError("there is no message on stdin")
    model = load_model(args.model, config, terminal.status)
    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        raise RequestError(
            f"{args.model} has no chat template, so it cannot chat; `vllm-metal-lite generate` "
            "completes text with it"
        )
    engine = build_engine(model, config, terminal.status)
    from vllm_metal_lite.cli.conversation import Conversation, Session  # they import MLX

    params = SamplingParams(**{**model.sampling_defaults, "max_tokens": None, **given})
    # An argument that is not UTF-8 arrives with lone surrogates, which tokenizers reject.
    system = (args.system or "").encode(errors="surrogateescape").decode(errors="replace")
    conversation = Conversation(engine, params, system or None, thinking=not args.no_thinking)
    session = Session(conversation, terminal)
    return session.run() if terminal.interactive else session.answer_once(message)
