"""`vllm-metal-lite serve`: the HTTP server."""

import argparse
import asyncio
import signal
import sys
import threading
import webbrowser
from collections.abc import Mapping
from dataclasses import fields

from vllm_metal_lite import envs
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.cli import log, options
from vllm_metal_lite.cli.startup import DEMO
from vllm_metal_lite.errors import MetalLiteError, install, show
from vllm_metal_lite.server.settings import ServerConfig


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    engine, config, named = options.engine_config(args), _server_config(args), _named(args)
    if engine.draft_model is not None and len(named) > 1:
        raise options.UsageError("--draft-model drafts for one model, and several are served")
    formats = _chat_formats(args, named)
    try:
        from vllm_metal_lite.server.lifecycle import Stopping, listen, serve, stop_on_signals
        from vllm_metal_lite.server.models import Models
        from vllm_metal_lite.server.output import never_waiting
        from vllm_metal_lite.server.served_model import ModelSpec
        from vllm_metal_lite.server.server import Server
    except ModuleNotFoundError as e:
        raise MetalLiteError(f"the server needs {e.name}: {install('serve')}") from None
    specs = [
        ModelSpec(name, source, name in (args.pin or ()), formats.get(name))
        for name, source in named.items()
    ]

    def greet(server: Server, url: str) -> None:
        log.clear()
        for name, client in server.models.loaded.items():
            for line in client.facts.description:
                print(line, file=sys.stderr)
            stages = server.models.by_name[name].stage_seconds
            shown = ", ".join(f"{stage} {took:.1f}" for stage, took in stages.items())
            print(f"Start:     {sum(stages.values()):.1f} s: {shown}", file=sys.stderr)
            if server.models.by_name[name].spec.source == "demo":
                print(DEMO, file=sys.stderr)
        print(
            f"Server:    {url} - a chat and a view of the engine; OpenAI's API at {url}/v1, "
            f"Anthropic's at {url}",
            flush=True,
        )
        server.logs_requests = args.log_requests
        if args.open:  # in a thread: a browser may run in this terminal until it is closed
            threading.Thread(target=webbrowser.open, args=[url], daemon=True).start()

    async def main() -> int:
        sys.setswitchinterval(0.001)  # the event loop waits less for work on threads
        bound, stopping = listen(config), Stopping()
        models = Models(specs, engine, config)
        with stop_on_signals(stopping) as came:
            print(f"Loading {specs[0].source} ...", file=sys.stderr)
            await serve(bound, config, models, stopping, greet)
        return 130 if signal.SIGINT in came[:1] else 0

    with never_waiting():
        return asyncio.run(main())


def _server_config(args: argparse.Namespace) -> ServerConfig:
    """The server's options from parsed flags; UsageError if one is out of range."""
    given = {field.name: getattr(args, field.name) for field in fields(ServerConfig)}
    given["api_key"] = args.api_key if args.api_key is not None else envs.api_key()
    for name in "allowed_hosts", "allowed_origins", "allowed_media_domains":
        given[name] = tuple(given[name] or ())
    return options.checked(ServerConfig, given, options.engine_flag)


def _named(args: argparse.Namespace) -> dict[str, str]:
    """The sources of the models by name, the main one first; UsageError if the flags contradict."""
    sources: dict[str, str] = {}
    if args.model is not None or not args.models:
        source = "demo" if args.model is None else args.model
        sources[args.served_model_name or options.name_of(source)] = source
    elif args.served_model_name:
        raise options.UsageError(
            "--served-model-name needs MODEL as an argument; with --model, write NAME=MODEL"
        )
    for entry in args.models or ():
        name, equals, source = entry.partition("=")
        if not equals or options.local(entry) is not None:
            name, source = options.name_of(entry), entry
        if not name or not source:
            raise options.UsageError(f"--model must be MODEL or NAME=MODEL, got {entry!r}")
        if name in sources:
            raise options.UsageError(f"--model: two models have the name {name!r}")
        sources[name] = source
    for text in (*sources, *sources.values()):
        if text != text.encode(errors="replace").decode():
            raise options.UsageError(f"models and their names must be UTF-8, got {show(text)}")
    if unknown := sorted(set(args.pin or ()) - set(sources)):
        raise options.UsageError(
            f"--pin {unknown[0]}: no such model; the models are: {', '.join(sources)}"
        )
    return sources


def _chat_formats(args: argparse.Namespace, named: Mapping[str, str]) -> dict[str, ChatFormat]:
    """Formats by the models' names; UsageError for unknown ones."""
    formats: dict[str, ChatFormat] = {}
    for entry in args.chat_formats or ():
        name, equals, chosen = entry.rpartition("=")
        name = name if equals else next(iter(named))
        if name not in named:
            raise options.UsageError(
                f"--chat-format {entry}: no such model; the models are: {', '.join(named)}"
            )
        if chosen not in FORMATS:
            known = ", ".join(sorted(FORMATS))
            raise options.UsageError(f"--chat-format must be one of {known}, got {chosen!r}")
        formats[name] = FORMATS[chosen]
    return formats
