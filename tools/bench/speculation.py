"""Speculation: the same answers with and without drafts, by one engine each.

    python -m tools.bench.speculation --model qwen3-4b --bits 4        a GPU; random weights
    python -m tools.bench.speculation --model 128x2 --length 120       a CPU: its times say nothing

The model computes as always, but its logits are replaced: the token at each position of an answer
is prepared.  `edit`: the prompt is a text, and the answer says it again with every 20th token
changed.  `patch`: every 20th token is replaced, or one is inserted before or removed, in turn.
`json`: a schema forces about half of the answer; `unforced` is the engine that samples these tokens
like others.  `new`: no part of the answer was there before.  `heads`: new text, and a trained head
of random weights, a share of whose drafts are right (`--right`); a share of 0 shows what drafts
that are not wanted cost.  Prints Markdown: tokens a second while all requests decode, median of the
runs, and ratios; and the microseconds of a lookup.
"""

import argparse
import json
import statistics
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tools.bench.lib.engines import FittedEngine
from tools.bench.lib.loads import Wave, WaveLoad
from tools.bench.lib.models import add_model, model_of, with_random_head
from tools.bench.lib.runs import Runs, medians_of
from tools.lib.frame import at_least, parser_of, print_table, run_main, say
from tools.lib.trust import trusted
from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.config import MAX_DRAFT
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.loader import load as load_model
from vllm_metal_lite.speculation.lookup import look_up
from vllm_metal_lite.structured_params import StructuredOutputsParams

mx = backend.mx

LOADS = {"edit": (1, 8), "patch": (1, 8), "json": (1,), "new": (1, 8, 32), "heads": (1, 4)}
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
    """A PackedModel whose logits name the prepared token `ahead` of each row."""

    def __init__(self, model: Any, ahead: int = 1) -> None:
        self._model, self.tokens, self._ahead = model, mx.array([0]), ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self, attention: Any, logits_indices: Any, fusion: Any
    ) -> tuple[mx.array, mx.array | None]:
        logits, hidden = self._model(attention, logits_indices, fusion)
        positions = attention.step.positions
        rows = positions if logits_indices is None else positions[logits_indices]
        said = self.tokens[mx.minimum(rows + self._ahead, len(self.tokens) - 1)][:, None]
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


class Unforced(FittedEngine):
    """Samples the tokens that a schema forces like others."""

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        super().add(first, prompts, max_tokens)
        for entry in self.engine.in_flight.constraints._of.values():
            entry.packs = False


def make_engine(model: LoadedModel, load: WaveLoad, kind: str, mode: str) -> FittedEngine:
    options = {
        "max_num_seqs": 8 * len(load.prompts),  # slots for recurrent states
        "state_cache_gib": 0,
        "enable_prefix_caching": False,
        "speculate": "auto" if mode == "auto" else "off",
    }
    grammar = StructuredOutputsParams(json=SCHEMA) if kind == "json" else None
    of = Unforced if mode == "unforced" else FittedEngine
    if mode != "auto":
        model = replace(model, drafter=None)  # otherwise it would follow each step
    with trusted():
        return of(model, load, options, params={"structured_outputs": grammar})


def drafted(tokens: Sequence[int], right: float, vocab_size: int) -> mx.array:
    """Tokens with this share of right ones; each of the rest differs from the right token."""
    rng = np.random.default_rng(3)
    known = np.array(tokens)
    others = (known + rng.integers(1, vocab_size, len(known))) % vocab_size
    return mx.array(np.where(rng.random(len(known)) < right, known, others).astype(np.int32))


def lookups() -> Iterator[Sequence[str]]:
    """Microseconds of a lookup by the length of the context."""
    kinds = {"finds nothing": CONTEXTS[-1], "finds a copy": 450, "finds itself everywhere": 1}
    for kind, period in kinds.items():
        runs = (
            partial(look_up, np.arange(count, dtype=np.int32) % period, MAX_DRAFT)
            for count in CONTEXTS
        )
        times = (timeit.repeat(run, number=20, repeat=20) for run in runs)
        yield kind, *(f"{1e6 * statistics.median(of_one) / 20:.0f}" for of_one in times)


def with_heads(model: LoadedModel, right: float, said: list[int], bits: str | None) -> LoadedModel:
    """The model with a prepared head."""
    if model.drafter is None:
        model = with_random_head(model, bits)
        assert model.drafter is not None
        model = replace(
            model, drafter=replace(model.drafter, packed=Prepared(model.drafter.packed, ahead=2))
        )
    assert model.drafter is not None
    head: Any = model.drafter.packed
    head.tokens = drafted(said, right, model.vocab_size)
    mx.eval(head.tokens)
    return model


def speeds(
    model: LoadedModel, prepared: Prepared, args: argparse.Namespace
) -> Iterator[Sequence[object]]:
    """A row for each kind of answers and number of requests."""
    for kind, counts in LOADS.items():
        if kind not in args.only:
            continue
        speaks = load_model("demo") if kind == "json" else model
        tokens = {"tokenizer": speaks.tokenizer, "eos_token_ids": speaks.eos_token_ids}
        answering = replace(model, **tokens)
        prompt, answer = texts(kind, args.length, answering)
        said = [0, *prompt[1:], *answer, 0]
        prepared.tokens = mx.array(said)
        mx.eval(prepared.tokens)
        shares = args.right if kind == "heads" else (None,)
        loads = ((n, share) for n in counts if n in args.requests for share in shares)
        for count, share in loads:
            if share is not None:
                try:
                    answering = model = with_heads(model, share, said, args.bits)
                except MetalLiteError as e:
                    say(f"left out: {e}")
                    return
            load = WaveLoad([Wave([prompt] * count, [args.length] * count)])
            modes = MODES[kind != "json" :]
            pairs = {mode: (make_engine(answering, load, kind, mode), load) for mode in modes}
            runs = Runs(f"{kind}, {count} requests")
            runs.warm_up(pairs)
            drafting = pairs["auto"][0].engine
            before = drafting.metrics()
            counted = runs.turns(pairs, args.runs)
            if any(t != answer for mode in modes for run in counted[mode] for t in run.tokens):
                raise MetalLiteError(f"{kind}: an answer is not the prepared one")
            speed = {m: medians_of(load, counted[m])["steady_tokens_per_s"] for m in modes}
            names = ("accepted_tokens", "draft_tokens")
            accepted, drafts = (drafting.metrics()[name] - before[name] for name in names)
            del pairs, drafting
            mx.clear_cache()
            yield (
                kind if share is None else f"{kind}, {share:.0%} right",
                count,
                *(f"{speed[mode]:.0f}" if mode in speed else "" for mode in MODES),
                " ".join(f"**{speed['auto'] / speed[m]:.2f}**" for m in speed if m != "auto"),
                f"{accepted} of {drafts}",
            )


def main() -> int:
    parser = parser_of(__doc__)
    add_model(parser, "qwen3-4b")
    parts = ("lookups", *LOADS)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument(
        "--requests", nargs="+", type=int, choices=(1, 4, 8, 32), default=(1, 4, 8, 32)
    )
    parser.add_argument("--right", nargs="+", type=float, default=(0.8, 0.6, 0.0))
    parser.add_argument("--length", type=at_least(100), default=2000)
    parser.add_argument("--runs", type=at_least(1), default=3)
    args = parser.parse_args()
    if "lookups" in args.only:
        print_table(("us a lookup", *(f"{n:,} tokens" for n in CONTEXTS)), lookups())
    if set(args.only) == {"lookups"}:
        return 0
    model = model_of(args)
    prepared = Prepared(model.packed)
    model = replace(model, packed=prepared)
    print(f"### tokens a second, answers of {args.length} tokens\n")
    heads = ("answers", "requests", "unforced", "without", "with drafts", "ratio", "accepted")
    print_table(heads, speeds(model, prepared, args))
    return 0


if __name__ == "__main__":
    run_main(main)
