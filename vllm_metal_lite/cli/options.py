"""The flags that the commands share, and their conversion to EngineConfig and SamplingParams.

Every flag is named after its field: `--top-k` sets `top_k`.  The fields' annotations say their
metavar and their help (`rules.Flag`).
Nothing here imports MLX: a bad value is refused before a model is loaded.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import MetalLiteError, one_line, show
from vllm_metal_lite.rules import Flag, Rule, flags_of, integer
from vllm_metal_lite.sampling_params import SamplingParams

R = TypeVar("R")

# Defaults of `serve` that differ from EngineConfig's.
SERVER_DEFAULTS: dict[str, Any] = {"max_num_seqs": 32, "max_step_seconds": 0.5}
GENERATED_TOKENS = 256  # the default max_tokens of `generate`


class UsageError(MetalLiteError):
    """An invalid command line: exit code 2."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors, like all errors of this program.

    rest: the field that takes the arguments after `--`, which are for another program.
    """

    rest: str | None = None

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        args = list(sys.argv[1:] if args is None else args)
        if self.rest is not None and "--" in args:
            at = args.index("--")
            args, rest = args[:at], args[at + 1 :]
            self.set_defaults(**{self.rest: rest})
        namespace, extras = super().parse_known_args(args, namespace)
        if extras:
            hint = "" if self.rest is None else ": give those of the AGENT after --"
            self.error(f"unrecognized arguments: {' '.join(extras)}{hint}")
        return namespace, extras

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


# Flags of `serve` that may come several times; their names are singular.
_REPEATED = {
    "models": Flag("[NAME=]MODEL", "one more model, loaded when a request names it"),
    "pin": Flag("NAME", "load this model at the start, and never unload it"),
    "chat_formats": Flag(
        "[NAME=]FORMAT",
        "how a model writes thoughts and tool calls, if its chat template does not show it: "
        "hermes, qwen3_coder, ...",
    ),
    "allowed_hosts": Flag("NAME", "also accept this name in the Host header"),
    "allowed_origins": Flag("ORIGIN", "web pages of this origin may call the server; *: any"),
}
# This flag takes several values, as in vLLM.
_MEDIA_DOMAINS = Flag("HOST", "fetch pictures by http(s) URL from these hosts; *: from any")
_TEXTS = ("host", "api_key")  # kept as text, even if they look like numbers


def _add(group: Any, flags: Mapping[str, Flag], defaults: object = None) -> None:
    """Add the flags of these fields; defaults: an object with the fields."""
    for field, (metavar, text) in flags.items():
        default = getattr(defaults, field, None)
        if default is not None:
            shown = f"{default:g}" if isinstance(default, float) else _text(default)
            text = f"{text} (default: {shown})"
        kind = str if field in _TEXTS else _value
        group.add_argument(flag(field), type=kind, metavar=metavar, help=text, default=default)


def add_model(parser: argparse.ArgumentParser, name: str = "model", note: str = "") -> None:
    """Add the name of a model; "demo" by default."""
    nargs = None if name.startswith("--") else "?"
    text = f"'demo' (default{note}), a folder, or a Hugging Face name"
    parser.add_argument(name, default="demo", metavar="MODEL", help=text, nargs=nargs)


def local(name: str) -> Path | None:
    """The file or folder of this name; None if there is none."""
    with suppress(OSError, RuntimeError, ValueError):  # the name is too long, for example
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    return None


def name_of(source: str) -> str:
    """The name under which `serve` offers a model: the folder's name, or the name on the Hub."""
    path = local(source) if source != "demo" else None
    return path.resolve().name if path is not None else source


def add_engine_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the engine's flags; defaults: those of this command that differ from EngineConfig's."""
    group = parser.add_argument_group("engine options")
    _add(group, flags_of(EngineConfig), EngineConfig(**defaults))
    text = "compute every prompt from its first token"
    group.add_argument(
        "--no-prefix-caching", dest="enable_prefix_caching", action="store_false", help=text
    )
    text = "run Python code from the model's folder, if its tokenizer needs that"
    group.add_argument("--trust-remote-code", action="store_true", help=text)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's options from parsed flags; UsageError if one is out of range."""
    given = {field.name: getattr(args, field.name) for field in fields(EngineConfig)}
    return checked(EngineConfig, given, engine_flag)


def checked(make: Callable[..., R], given: dict[str, Any], spell: Callable[[str], str]) -> R:
    """Make a record of options.  Raises UsageError, with the options spelled by `spell`."""
    try:
        return make(**given)
    except MetalLiteError as e:
        raise UsageError(e.spelled(spell)) from None


def serve_flags(config: EngineConfig) -> list[str]:
    """The flags that give `serve` this configuration."""
    defaults = EngineConfig(**SERVER_DEFAULTS)
    flags = []
    for field in flags_of(EngineConfig):
        value = getattr(config, field)
        if value != getattr(defaults, field):
            flags += [flag(field), _text(value)]
    flags += [] if config.enable_prefix_caching else ["--no-prefix-caching"]
    return flags + (["--trust-remote-code"] if config.trust_remote_code else [])


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve`."""
    from vllm_metal_lite.server.settings import ServerConfig

    for field, (metavar, text) in _REPEATED.items():
        text = f"{text}; repeatable"
        parser.add_argument(flag(field), dest=field, action="append", metavar=metavar, help=text)
    name, (metavar, text) = flag("allowed_media_domains"), _MEDIA_DOMAINS
    parser.add_argument(name, nargs="+", action="extend", metavar=metavar, help=text)
    parser.add_argument("--served-model-name", metavar="NAME", help="what requests call MODEL")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--log-requests", action="store_true", help="print a line a request")
    group = parser.add_argument_group("server options")
    _add(group, flags_of(ServerConfig), ServerConfig())


def add_number(
    parser: Parser, name: str, metavar: str, text: str, default: object, kind: Callable[[str], Any]
) -> None:
    """Add a flag for numbers that `kind` parses."""
    text = f"{text} (default: {default})"
    parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: str) -> None:
    """Add the sampling flags; `max_tokens` describes this command's default in words."""
    group = parser.add_argument_group(
        "sampling options", "The defaults are the model's own (generation_config.json)."
    )
    same = "seed: the same tokens for the same prompt, whatever else runs"
    longest = f"longest answer (default: {max_tokens})"
    more = {"max_tokens": Flag("N", longest), "sample_seed": Flag("N", same)}
    _add(group, flags_of(SamplingParams) | more)
    text = "end an answer before TEXT; repeatable"
    group.add_argument("--stop", action="append", metavar="TEXT", help=text)
    text = 'form of the answers, such as \'{"choice": ["yes", "no"]}\''
    group.add_argument("--structured-outputs", type=_json, metavar="JSON", help=text)


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The SamplingParams fields set by flags; UsageError if one is out of range."""
    fields = [*flags_of(SamplingParams), "max_tokens", "stop", "structured_outputs"]
    given = {"seed": args.sample_seed, **{field: getattr(args, field) for field in fields}}
    given = {field: value for field, value in given.items() if value is not None}
    checked(SamplingParams, given, lambda f: flag("sample_seed" if f == "seed" else f))
    return given


def flag(field: str) -> str:
    """A field's flag, as the user types it."""
    return "--" + (field.removesuffix("s") if field in _REPEATED else field).replace("_", "-")


def engine_flag(field: str) -> str:
    """The name of a field in error messages: its flag if there is one, else the field's name."""
    kinds: list[Any] = [EngineConfig]
    with suppress(ModuleNotFoundError):  # the server is optional
        from vllm_metal_lite.server.settings import ServerConfig

        kinds.append(ServerConfig)
    return flag(field) if field in {f.name for kind in kinds for f in fields(kind)} else field


def _value(text: str) -> Any:
    """The number or the JSON object that a flag's text spells, otherwise the text itself.  The
    field's rule checks the value."""
    kinds: list[Callable[[str], Any]] = [json.loads] if text.startswith("{") else [int, float]
    for kind in kinds:
        with suppress(ValueError, RecursionError):
            return kind(text)
    return text


def _text(value: Any) -> str:
    """The text from which `_value` makes this value."""
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _json(text: str) -> Any:
    """A flag's value, decoded; the field's rule checks it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise argparse.ArgumentTypeError(f"not JSON: {one_line(e)}, got {show(text)}") from None


def ruled(rule: Rule) -> Callable[[str], Any]:
    """Parses a value that a rule allows."""

    def parse(text: str) -> Any:
        try:
            return rule.take(_value(text))
        except ValueError:
            why = f"must be {rule.allowed}, got {text!r}"
            raise argparse.ArgumentTypeError(why) from None

    return parse


COUNT = ruled(integer(1, 1_000_000))


def counts(text: str) -> list[int]:
    """Comma-separated integers, sorted, without duplicates."""
    return sorted({COUNT(part) for part in text.split(",")})
