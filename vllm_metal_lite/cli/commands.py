"""The commands: their flags, help and examples."""

from argparse import HelpFormatter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from vllm_metal_lite import __version__
from vllm_metal_lite.cli import options
from vllm_metal_lite.errors import install
from vllm_metal_lite.rules import integer, number

_PORT = options.ruled(integer(1, 65535))
_SECONDS = options.ruled(number(1, 86_400))

_EXAMPLES = """\
examples:
  vllm-metal-lite chat                                 the demo, no download
  vllm-metal-lite chat mlx-community/Qwen3-0.6B-4bit   from the Hugging Face Hub
  vllm-metal-lite serve --open                         a server, and its page
  vllm-metal-lite launch claude --model ~/models/mine  a coding agent on a local model
  vllm-metal-lite generate prompts.jsonl -o answers.jsonl
  vllm-metal-lite doctor                               is this machine all right?
  vllm-metal-lite bench --compare                      how fast is it, beside mlx-lm?
"""
_CHAT_EXAMPLES = """\
examples:
  vllm-metal-lite chat
  vllm-metal-lite chat mlx-community/Qwen3-0.6B-4bit --system "Be brief."
  vllm-metal-lite chat ~/models/my-model --temperature 0 --max-model-len 8192
  echo "My name is Ada. What is my name?" | vllm-metal-lite chat
"""
_SERVE_EXAMPLES = """\
examples:
  vllm-metal-lite serve --open
  vllm-metal-lite serve mlx-community/Qwen3-4B-4bit --port 9000 --max-model-len 32768
  vllm-metal-lite serve --model big=~/models/big --model small=~/models/small --pin small
  METAL_LITE_API_KEY=secret vllm-metal-lite serve ~/models/mine --host 0.0.0.0
"""
_LAUNCH_EXAMPLES = """\
examples:
  vllm-metal-lite launch claude --model mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit
  vllm-metal-lite launch codex --model ~/models/mine --max-model-len 65536 -- exec "Fix the tests"
  vllm-metal-lite launch opencode --print
"""
_GENERATE_NOTES = """\
Each line of the input is a JSON object with one of
  "prompt": TEXT
  "prompt_token_ids": [IDS]
  "messages": [{"role": "user", "content": TEXT}, ...]
and optionally "id" (default: the line's number), "priority" (lower goes first),
"checkpoints" (numbers of prompt tokens after which later prompts may differ)
and any sampling parameter ("temperature", "max_tokens", "seed", "stop", "n",
...), which overrides its flag.

Each line of the output, in the order of the input, is an object with id,
text, token_ids, finish_reason, num_prompt_tokens and num_cached_tokens; with
"n" above 1, "outputs" is a list of text, token_ids and finish_reason.  A line
that is refused becomes {"id": ..., "error": ...}; an answer that fails has
finish_reason "error", and "error" says why.

examples:
  vllm-metal-lite generate prompts.jsonl -o answers.jsonl
  vllm-metal-lite generate prompts.jsonl --model ~/models/mine --temperature 0
  echo '{"prompt": "Once upon a time"}' | vllm-metal-lite generate - | jq -r .text
"""

_DOCTOR_EXAMPLES = """\
examples:
  vllm-metal-lite doctor
  vllm-metal-lite doctor mlx-community/Qwen3-0.6B-4bit
  vllm-metal-lite doctor --report report.json          to attach to an issue
"""
_MODELS_EXAMPLES = """\
examples:
  vllm-metal-lite models
  vllm-metal-lite models ~/models ~/.lmstudio/models
  vllm-metal-lite models --json | jq '.models[] | select(.supported) | .name'
"""

_BENCH_NOTES = """\
Prompts are random tokens; decoding is greedy, and the end of sequence is ignored.
  first token      from the arrival of all requests to the first token, median
  prompt tokens/s  until every request has its first token
  decode tokens/s  while all requests decode
Contexts longer than the model's are cut; cases that need too much memory or time
are skipped.  Cut contexts are named at the start; the table names skipped cases.
The report holds no name of a user, a host or a folder.

examples:
  vllm-metal-lite bench
  vllm-metal-lite bench mlx-community/Qwen3-0.6B-4bit --compare --report bench.json
  vllm-metal-lite bench ~/models/mine --requests 1,8 --context 2048 --seconds 60
"""


class _HelpFormatter(HelpFormatter):
    """Wraps descriptions, but not text with its own line breaks (the examples)."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def make_parser() -> options.Parser:
    """The parser of the whole command line."""
    parser = options.Parser(
        prog="vllm-metal-lite",
        description="A light LLM engine for Macs with Apple silicon, on MLX: many requests at once "
        "over a paged K/V store, from Python, over HTTP, or below vLLM.",
        epilog=_EXAMPLES,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-metal-lite {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # The server's package is optional: without it there is no `serve` and no `launch`.
    of_server = [_add_serve, _add_launch] if find_spec("vllm_metal_lite.server") else []
    others = _add_generate, _add_bench, _add_models, _add_cache, _add_doctor
    for add in (_add_chat, *of_server, *others):
        add(partial(commands.add_parser, formatter_class=_HelpFormatter))
    return parser


Command = Callable[..., options.Parser]


def _add_chat(command: Command) -> None:
    chat = command(
        "chat",
        help="talk to a model",
        description="Talk to a model.  With a pipe on stdin, all of it is one message, and only "
        "the answer is printed.",
        epilog=_CHAT_EXAMPLES,
    )
    options.add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    text = "turn thinking off, for a model that can think before it answers"
    chat.add_argument("--no-thinking", action="store_true", help=text)
    options.add_sampling_options(chat, max_tokens="what the context holds")
    # A conversation needs one seat, and seats determine the size of the store.
    options.add_engine_options(chat, max_num_seqs=1)


def _add_serve(command: Command) -> None:
    serve = command(
        "serve",
        help="serve models over HTTP",
        description="Serve models over HTTP: the API of OpenAI and of Anthropic, and a page with a "
        f"chat and a view of the engine.  Needs {install('serve')}.",
        epilog=_SERVE_EXAMPLES,
    )
    options.add_model(serve)
    options.add_server_options(serve)
    options.add_engine_options(serve, **options.SERVER_DEFAULTS)
    serve.set_defaults(model=None)  # so that --model can replace it


def _add_launch(command: Command) -> None:
    launch = command(
        "launch",
        help="start a coding agent on a local model",
        usage="%(prog)s [OPTIONS] AGENT [-- ARGS FOR THE AGENT]",
        description="Start a coding agent on a local model: Claude Code, Codex or OpenCode.  Uses "
        "the server that runs on the port, or starts one that ends with the agent.  Your own "
        "configuration of the agent is not changed.",
        epilog=_LAUNCH_EXAMPLES,
    )
    agents = ("claude", "codex", "opencode")
    launch.add_argument("agent", choices=agents, metavar="AGENT", help="%(choices)s")
    launch.rest = "agent_args"
    launch.set_defaults(agent_args=[])
    launch.add_argument(
        "--model",
        metavar="MODEL",
        help="a folder or a Hugging Face name; of a running server, the name that it serves "
        "(default: its first)",
    )
    options.add_number(launch, "--port", "N", "port of the server", 8000, _PORT)
    text = "print the agent's command and variables, and exit"
    launch.add_argument("--print", action="store_true", help=text)
    options.add_engine_options(launch, **options.SERVER_DEFAULTS)


def _add_generate(command: Command) -> None:
    generate = command(
        "generate",
        help="answer a file of prompts",
        description="Answer a file of prompts, many at a time.",
        epilog=_GENERATE_NOTES,
    )
    generate.add_argument("input", metavar="INPUT.jsonl", help="one JSON object a line; -: stdin")
    text = "default: stdout"
    generate.add_argument("-o", "--output", default="-", metavar="OUTPUT.jsonl", help=text)
    options.add_model(generate, "--model")
    options.add_sampling_options(generate, max_tokens=str(options.GENERATED_TOKENS))
    options.add_engine_options(generate, max_num_seqs=64)


def _add_bench(command: Command) -> None:
    bench = command(
        "bench",
        help="measure a model's speed",
        description="Measure prompt and decode speed with few and many requests.",
        epilog=_BENCH_NOTES,
    )
    options.add_model(bench, note="; tiny")
    text = "requests that arrive together"
    options.add_number(bench, "--requests", "N,N,...", text, "1,4,16,32", options.counts)
    text = "tokens of each prompt"
    options.add_number(bench, "--context", "N,N,...", text, "512,4096", options.counts)
    text = "counted tokens of each answer"
    options.add_number(bench, "--new-tokens", "N", text, 64, options.COUNT)
    text = "time for measuring, after the model is loaded"
    options.add_number(bench, "--seconds", "S", text, 140, _SECONDS)
    text = "also measure mlx-lm on the same weights, in turns"
    bench.add_argument("--compare", action="store_true", help=text)
    text = "write a JSON report to share; FILE must be new"
    bench.add_argument("--report", metavar="FILE", help=text)
    options.add_engine_options(bench, max_num_seqs=32)


def _add_models(command: Command) -> None:
    models = command(
        "models",
        help="list the models on this machine",
        description="List the models in the Hugging Face cache (HF_HUB_CACHE) and in folders: "
        "whether each is supported, how it would run, and how much context fits in this machine's "
        "memory.  Reads no weights and downloads nothing.",
        epilog=_MODELS_EXAMPLES,
    )
    text = "also look in this folder, 3 levels deep"
    models.add_argument("folders", nargs="*", metavar="FOLDER", help=text)
    models.add_argument("--json", action="store_true", help="print all facts as JSON")


def _add_cache(command: Command) -> None:
    cache = command(
        "cache",
        help="the prefixes that are kept on the disk",
        description="List what --prefix-disk-gib keeps on the disk, by model; verify every file, "
        "and drop damaged ones; or clear the folder.  Servers may run.",
    )
    actions = ("list", "verify", "clear")
    text = "list (default), verify or clear"
    cache.add_argument(
        "action", nargs="?", choices=actions, default="list", metavar="ACTION", help=text
    )


def _add_doctor(command: Command) -> None:
    doctor = command(
        "doctor",
        help="check this machine",
        description="Check every kernel against the reference on this machine, in a process of its "
        "own; time it beside its fallback; check that launches run in order; and "
        "compare the tokens of a model with the reference's.  Exit code 1 if a kernel is wrong, "
        "launches run out of order or tokens differ; 0 also without a GPU.",
        epilog=_DOCTOR_EXAMPLES,
    )
    doctor.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="check the shapes of this model: a folder or a Hugging Face name (default: the shapes "
        "that most models have, and the answers of the demo)",
    )
    options.add_number(doctor, "--seconds", "S", "time for the checks of kernels", 60, _SECONDS)
    text = "check many more shapes, without a time limit; takes minutes"
    doctor.add_argument("--full", action="store_true", help=text)
    text = "write a JSON report to attach to an issue; FILE must be new"
    doctor.add_argument("--report", metavar="FILE", help=text)
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
