"""`vllm-metal-lite serve`: the HTTP server."""

import argparse
import asyncio
import os
import sys
import webbrowser
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_metal_lite import envs
from vllm_metal_lite.cli import log, options
from vllm_metal_lite.errors import ConfigError, MetalLiteError

if TYPE_CHECKING:
    from vllm_metal_lite.server.models import ModelSpec
    from vllm_metal_lite.server.server import Server
    from vllm_metal_lite.server.settings import ServerConfig

_DEMO = (
    "demo is a tiny model that is shipped to show that everything works.  For a real one, give its "
    "name or its folder: vllm-metal-lite serve mlx-community/Qwen3-0.6B-4bit"
)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    engine = options.engine_config(args)
    try:
        from vllm_metal_lite.server.models import Models
        from vllm_metal_lite.server.run import Stopping, serve, stop_on_signals
    except ModuleNotFoundError as e:
        raise MetalLiteError(
            f"the server needs {e.name}: pip install 'vllm-metal-lite[serve]'"
        ) from None
    config = _server_config(args)
    specs = _specs(args)

    async def main() -> int:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        stopping = Stopping()
        models = Models(specs, engine, config.memory_budget_gib)
        print(f"Loading {specs[0].source} ...", file=sys.stderr)
        with stop_on_signals(stopping) as came:
            await serve(config, models, stopping, lambda *ready: _greet(args, *ready))
        return 130 if came and came[0] == 2 else 0

    with log.progress():
        return asyncio.run(main())


def _greet(args: argparse.Namespace, server: "Server", url: str) -> None:
    log.clear()
    for name, engine in server.models.loaded.items():
        for line in engine.facts.description:
            print(line, file=sys.stderr)
        if name == "demo":
            print(_DEMO, file=sys.stderr)
    print(
        f"Server:    {url} - a chat and a view of the engine; OpenAI's API at {url}/v1, "
        f"Anthropic's at {url}"
    )
    sys.stdout.flush()
    if args.log_requests:
        server.log_requests()
    if args.open:
        webbrowser.open(url)


def _server_config(args: argparse.Namespace) -> "ServerConfig":
    """The server's options from parsed flags; UsageError if one is out of range."""
    from vllm_metal_lite.server.settings import ServerConfig

    given = {field.name: getattr(args, field.name) for field in fields(ServerConfig)}
    given["api_key"] = args.api_key if args.api_key is not None else envs.api_key()
    for name in "allowed_hosts", "allowed_origins":
        given[name] = tuple(given[name] or ())
    try:
        return ServerConfig(**given)
    except ConfigError as e:
        raise options.UsageError(e.spelled(options.flag)) from None


def _specs(args: argparse.Namespace) -> "list[ModelSpec]":
    """The models that were named, the main one first."""
    from vllm_metal_lite.server.models import ModelSpec

    sources: dict[str, str] = {}
    if args.model is not None or not args.models:
        source = args.model or "demo"
        sources[args.served_model_name or _name_of(source)] = source
    elif args.served_model_name:
        raise options.UsageError("--served-model-name names MODEL; use --model NAME=MODEL")
    for entry in args.models or ():
        name, equals, source = entry.partition("=")
        name, source = (name, source) if equals else (_name_of(entry), entry)
        if not name or not source:
            raise options.UsageError(f"--model must be MODEL or NAME=MODEL, got {entry!r}")
        if name in sources:
            raise options.UsageError(f"--model: there are two models of the name {name!r}")
        sources[name] = source
    pinned = set(args.pin or ())
    if unknown := sorted(pinned - set(sources)):
        raise options.UsageError(
            f"--pin {unknown[0]}: no such model; there is: {', '.join(sources)}"
        )
    return [ModelSpec(name, source, name in pinned) for name, source in sources.items()]


def _name_of(source: str) -> str:
    """A folder's own name; a name on the hub as it is."""
    folder = Path(source).expanduser()
    return folder.resolve().name if source != "demo" and folder.is_dir() else source
