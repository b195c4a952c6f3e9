"""Speculation by lookup: the same answers with and without drafts, by one engine each.

    python -m tools.bench.speculation --model qwen3-4b --bits 4        a GPU; random weights
    python -m tools.bench.speculation --tiny                           a CPU: its times say nothing

The model computes as always, but its logits are replaced: the token at each position of an answer
is prepared.  `edit`: the prompt is a text, and the answer says it again with every 20th token
changed.  `patch`: every 20th token is replaced, or one is inserted before or removed, in turn.
`json`: a schema forces about half of the answer; `unforced` is the engine that samples these tokens
like others.  `new`: no part of the answer was there before.  Prints Markdown: tokens a second,
median of the runs, and ratios; and the microseconds that a lookup takes.
"""

import json
import statistics
import time
import timeit
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tools.bench.lib.models import get_model
from tools.bench.lib.tables import table_head
from tools.bench.lib.trust import trusted
from tools.dev.run_main import parser_of
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams, backend
from vllm_metal_lite.config import MAX_DRAFT
from vllm_metal_lite.model.loader import LoadedModel, load
from vllm_metal_lite.speculation.lookup import look_up
from vllm_metal_lite.structured_params import StructuredOutputsParams

mx = backend.mx

LOADS = {"edit": (1, 8), "patch": (1, 8), "json": (1,), "new": (1, 8, 32)}
MODES = ("unforced", "off", "auto")
CONTEXTS = (1_000, 8_000, 32_000)
FIELDS = {"description": "string", "approximate_price": "integer", "is_available": "boolean"}
THING = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in FIELDS.items()},
    "required": list(FIELDS),
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": THING}
_HEADER = 40  # tokens of a prompt before its text


class Prepared:
    """A PackedModel whose logits name the prepared token of each row's next position."""

    def __init__(self, model: Any) -> None:
        self._model, self.tokens = model, mx.array([0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self, attention: Any, logits_indices: Any, fusion: Any
    ) -> tuple[mx.array, mx.array | None]:
        logits, hidden = self._model(attention, logits_indices, fusion)
        positions = attention.step.positions
        rows = positions if logits_indices is None else positions[logits_indices]
        said = self.tokens[mx.minimum(rows + 1, len(self.tokens) - 1)][:, None]
        quiet = logits * 1e-6  # the head's work stays
        loud = mx.full(said.shape, 100.0, quiet.dtype)
        return mx.put_along_axis(quiet, said, loud, axis=1), hidden


def texts(kind: str, length: int, model: LoadedModel) -> tuple[list[int], list[int]]:
    """(prompt, answer) of `length` tokens each."""
    rng = np.random.default_rng(7)
    draw = partial(rng.integers, 10, model.vocab_size - 10)
    text, header, fresh = (draw(n).tolist() for n in (length, _HEADER, length))
    answer: list[int] = fresh
    if kind in ("edit", "patch"):
        answer = []
        for i, (old, new) in enumerate(zip(text, fresh, strict=True)):
            change = i // 20 % 3 if kind == "patch" else 0
            answer += [old] if i % 20 else ([new], [new, old], [])[change]
        answer = [*answer, *fresh][:length]
    elif kind == "json":
        words = ["".join(map(chr, rng.integers(97, 123, 9))) for _ in range(length // 10)]
        things = [
            {"description": w, "approximate_price": int(rng.integers(1e6)), "is_available": True}
            for w in words
        ]
        answer = model.tokenizer._tokenizer.encode(json.dumps(things))[:length]
    return [*header, *text], answer


def measure(
    engine: LLMEngine, prepared: Prepared, kind: str, count: int, length: int, mode: str
) -> float:
    """Tokens a second of `count` answers, prompts not counted."""
    prompt, answer = texts(kind, length, engine.model)
    prepared.tokens = mx.array([0, *prompt[1:], *answer, 0])
    mx.eval(prepared.tokens)
    grammar = StructuredOutputsParams(json=SCHEMA) if kind == "json" else None
    params = SamplingParams(
        temperature=0,
        max_tokens=length,
        ignore_eos=True,
        structured_outputs=grammar,
    )
    for i in range(count):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    for entry in engine.constraints._of.values() if mode == "unforced" else ():
        entry.packs = False
    outputs: dict[str, list[int]] = {}
    started = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0].token_ids
        if started is None and len(outputs) == count:  # every prompt is computed
            started, known = time.perf_counter(), sum(map(len, outputs.values()))
    assert started is not None
    assert all(tokens == answer for tokens in outputs.values()), "another answer than prepared"
    return (count * length - known) / (time.perf_counter() - started)


def lookups() -> None:
    """Microseconds of a lookup by the length of the context."""
    table_head(("us a lookup", *(f"{n:,} tokens" for n in CONTEXTS)))
    kinds = {"finds nothing": CONTEXTS[-1], "finds a copy": 450, "finds itself everywhere": 1}
    for kind, period in kinds.items():
        cells = []
        for count in CONTEXTS:
            run = partial(look_up, np.arange(count, dtype=np.int32) % period, MAX_DRAFT)
            times = timeit.repeat(run, number=20, repeat=20)
            cells.append(f"{1e6 * statistics.median(times) / 20:.0f}")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


def make_engine(model: Any, length: int, count: int, mode: str) -> LLMEngine:
    size = 2 * length + _HEADER + 64
    sizes = {"num_blocks": count * (size // 16 + 4), "max_model_len": size, "state_cache_gib": 0}
    how = {"speculate": "auto" if mode == "auto" else "off", "enable_prefix_caching": False}
    config = EngineConfig(max_num_seqs=2 * count, **sizes, **how)
    with trusted():
        return LLMEngine(model, config)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen3-4b")
    parser.add_argument("--bits")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--only", nargs="+", choices=("lookups", *LOADS), default=("lookups", *LOADS)
    )
    parser.add_argument("--requests", nargs="+", type=int, default=(1, 8, 32))
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    name, length = ("128x2", 120) if args.tiny else (args.model, args.length)
    model = get_model(name, bits=args.bits)
    prepared = Prepared(model.packed)
    model = replace(model, packed=prepared)
    if "lookups" in args.only:
        lookups()
    print(f"\n### {model.name}: tokens a second, answers of {length} tokens\n")
    table_head(("answers", "requests", "unforced", "without", "with drafts", "ratio", "accepted"))
    for kind in (kind for kind in LOADS if kind in args.only):
        speaks = load("demo") if kind == "json" else model
        tokens = {"tokenizer": speaks.tokenizer, "eos_token_ids": speaks.eos_token_ids}
        answering = replace(model, **tokens)
        for count in (count for count in LOADS[kind] if count in args.requests):
            speeds = {}
            for mode in MODES[kind != "json" :]:
                engine = make_engine(answering, length, count, mode)
                found = [
                    measure(engine, prepared, kind, count, length, mode)
                    for _ in range(args.runs + 2)
                ]
                speeds[mode] = statistics.median(found[2:])
                counts = engine.metrics()
                del engine
                mx.clear_cache()
            cells = " | ".join(f"{speeds[mode]:.0f}" if mode in speeds else "" for mode in MODES)
            ratios = " ".join(
                f"**{speeds['auto'] / speed:.2f}**" for speed in list(speeds.values())[:-1]
            )
            share = f"{counts['accepted_tokens']} of {counts['draft_tokens']}"
            print(f"| {kind} | {count} | {cells} | {ratios} | {share} |", flush=True)


if __name__ == "__main__":
    main()
