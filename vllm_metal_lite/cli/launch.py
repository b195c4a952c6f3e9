"""`vllm-metal-lite launch`: a coding agent on a local model.

The agent gets the server's address from environment variables and flags.  The user's own
configuration is not changed.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from vllm_metal_lite import envs
from vllm_metal_lite.cli import log, options
from vllm_metal_lite.errors import MetalLiteError, one_line, show

_DIRECT = build_opener(ProxyHandler({}))  # a proxy does not know our loopback
# How to start an agent: the command without the user's arguments, and added variables.
Setup = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class ServedModel:
    """A model of a running server.

    context: its length in tokens, if the server says so.  sees: whether it takes pictures.
    """

    url: str
    name: str
    context: int | None
    key: str
    sees: bool = False


def claude(model: ServedModel) -> Setup:
    """Claude Code, with this model in the role of each of its models.

    Most variables go into `--settings`, which override the user's environment and settings.json.
    The key goes into the environment, because all users of a machine can see a command.
    """
    kinds = "", "SMALL_FAST_", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_"
    names = [f"ANTHROPIC_{kind}MODEL" for kind in kinds] + ["CLAUDE_CODE_SUBAGENT_MODEL"]
    # Do not send the user's key to this server, and do not let the user's cloud answer instead.
    clouds = (f"CLAUDE_CODE_USE_{cloud}" for cloud in ("BEDROCK", "VERTEX", "FOUNDRY"))
    env = {
        **dict.fromkeys(names, model.name),
        **dict.fromkeys(("ANTHROPIC_API_KEY", *clouds), ""),
        "ANTHROPIC_BASE_URL": model.url,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
    }
    if model.context is not None:
        env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(model.context)
    settings = json.dumps({"env": env})
    return ["claude", "--settings", settings], {"ANTHROPIC_AUTH_TOKEN": model.key}


def codex(model: ServedModel) -> Setup:
    """Codex.  `-c` overrides its configuration for one run."""
    provider = {
        "name": "vllm-metal-lite",
        "base_url": f"{model.url}/v1",
        "wire_api": "responses",
        "env_key": "METAL_LITE_AGENT_KEY",
    }
    toml = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = {
        "model": json.dumps(model.name, ensure_ascii=False),  # an emoji's escapes are not TOML's
        "model_provider": '"metal_lite"',
        "model_providers.metal_lite": f"{{ {toml} }}",
    }
    if model.context is not None:
        settings["model_context_window"] = str(model.context)
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return ["codex", *flags], {"METAL_LITE_AGENT_KEY": model.key}


def opencode(model: ServedModel) -> Setup:
    """OpenCode.  The variable extends the user's files; its present value is kept."""
    own = os.environ.get("OPENCODE_CONFIG_CONTENT") or "{}"
    try:
        config = dict(json.loads(own))
        providers = dict(config.get("provider", {}))
    except (ValueError, TypeError):
        raise MetalLiteError(f"OPENCODE_CONFIG_CONTENT is not JSON: {show(own)}") from None
    limit: dict[str, Any] = {}
    if model.context is not None:
        output = min(8192, model.context // 4)
        limit = {"limit": {"context": model.context, "output": output}}
    vision: dict[str, Any] = {}
    if model.sees:
        modalities = {"input": ["text", "image"], "output": ["text"]}
        vision = {"attachment": True, "modalities": modalities}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "vllm-metal-lite",
        "options": {"baseURL": f"{model.url}/v1", "apiKey": model.key},
        "models": {model.name: {"name": model.name, **limit, **vision}},
    }
    name = f"metal-lite/{model.name}"
    providers["metal-lite"] = provider
    config |= {"provider": providers, "model": name, "small_model": name}
    return ["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


AGENTS: dict[str, tuple[Callable[[ServedModel], Setup], str]] = {
    "claude": (claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": (codex, "npm install -g @openai/codex"),
    "opencode": (opencode, "npm install -g opencode-ai"),
}


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the agent's exit code."""
    make, install = AGENTS[args.agent]
    program = shutil.which(args.agent)
    source = "demo" if args.model is None else args.model
    if program is None and not args.print:
        raise MetalLiteError(f"{args.agent} is not installed: {install}")
    url = f"http://127.0.0.1:{args.port}"
    key = envs.api_key() or "none"
    flags = options.serve_flags(options.engine_config(args))
    serve = ["serve", "--port", str(args.port), source, *flags]
    log.progress(f"waiting for the server at {url}")
    running = _find_model(url, key, args.model)
    log.clear()
    if running is not None:
        log.say(f"Using the server at {url}")
        if flags:
            log.say(
                f"warning: that server keeps its own options and ignores {shlex.join(flags)}: "
                "stop it, or give another --port"
            )
    elif args.print:
        start = shlex.join(["vllm-metal-lite", *serve])
        log.say(f"No server runs at {url}; start one first: {start}")
    if args.print:  # for a shell
        command, env = make(running or ServedModel(url, options.name_of(source), None, key))
        words = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
        print(" \\\n  ".join([*words, shlex.join([*command, *args.agent_args])]))
        return 0
    for number in signal.SIGTERM, signal.SIGHUP:  # so that the agent and the server end, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with nullcontext(running) if running else _started(url, key, args.model, serve) as model:
        command, env = make(model)
        command = [str(program), *command[1:], *args.agent_args]
        with _process(command, 5, env={**os.environ, **env}) as agent:
            # Ctrl-C goes to the agent, which is in this terminal too; we wait for its end.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                code = agent.wait()
            finally:
                signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code  # a signal, in a shell's exit code


def _find_model(url: str, key: str, name: str | None) -> ServedModel | None:
    """A model of the server at a URL, once the server has loaded it; None: there is no server.

    Raises MetalLiteError if the server refuses, or has no such model.
    """
    request = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with _DIRECT.open(request) as reply:
            models: list[dict[str, Any]] = json.load(reply)["data"]
        names = [model["id"] for model in models]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as e:
        status = getattr(e, "code", None)  # of an HTTPError
        if isinstance(e, OSError) and status is None:
            return None
        why = f"{url} does not serve models: {one_line(e)}"
        if status == 401:
            why = f"the server at {url} needs its API key: set METAL_LITE_API_KEY"
        raise MetalLiteError(why) from None
    found = next((m for m in models if name in (None, m["id"], m.get("root"))), None)
    if found is None:
        raise MetalLiteError(
            f"the server at {url} serves {', '.join(names)}, not {name}: stop it, or give another "
            "--port"
        )
    context = found.get("max_model_len") or found.get("context_length")
    sees = "image" in (found.get("input_modalities") or ())
    return ServedModel(url, found["id"], context, key, sees)


@contextmanager
def _started(url: str, key: str, name: str | None, serve: list[str]) -> Iterator[ServedModel]:
    """The model of a server at a URL that is started, and ends with the block."""
    command = [sys.executable, "-m", "vllm_metal_lite", *serve]
    # In a group of its own: Ctrl-C is the agent's.
    with _process(command, 30, stdout=subprocess.DEVNULL, start_new_session=True) as server:
        while (model := _find_model(url, key, name)) is None:
            if server.poll() is not None:
                raise MetalLiteError("the server did not start; the lines above say why")
            time.sleep(0.2)
        yield model


@contextmanager
def _process(command: list[str], seconds: float, **how: Any) -> Iterator[subprocess.Popen]:
    """A process that `end_process` ends at the end of the block.  how: more options of Popen."""
    # A signal that came before Popen returns would leave the process running.
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    unblock = partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
    process = subprocess.Popen(command, preexec_fn=unblock, **how)
    try:
        unblock()
        yield process
    finally:
        end_process(process, seconds)


def end_process(process: subprocess.Popen, seconds: float) -> None:
    """End a process: by SIGTERM, or by SIGKILL if it runs for `seconds` more."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
