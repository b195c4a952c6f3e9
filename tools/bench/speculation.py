"""Speculation by lookup: the same answers with and without drafts, by one engine each.

    python -m tools.bench.speculation --model qwen3-4b --bits 4        a GPU; random weights
    python -m tools.bench.speculation --tiny                           a CPU: its times say nothing

The model computes as always, but its logits are replaced: the token at each position of an answer
is prepared.  `edit`: the prompt is a text, and the answer says it again with every 20th token
changed.  `moved`: of these tokens one half is deleted, and a new token is put before the others.
`new`: no part of the answer was there before.  `json`: six tokens that a stand-in for a grammar
forces and six free ones alternate, beside an engine that samples the forced tokens one by one.
`widths`: milliseconds of a step by the number of its drafts.  `lookup`: microseconds of the host.
Prints Markdown: tokens a second, median of the runs, and ratios.
"""

import argparse
import faulthandler
import statistics
import time
import timeit
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from tools.bench.lib.models import get_model
from tools.bench.lib.tables import table_head
from tools.bench.lib.trust import trusted
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams, backend
from vllm_metal_lite.engine import constraints
from vllm_metal_lite.sampling.masks import pack_mask
from vllm_metal_lite.speculation.lookup import look_up

mx = backend.mx

WIDTHS = (1, 3, 7, 15, 31)
LOADS = {"edit": (1, 8), "moved": (1, 8), "new": (1, 8, 32), "json": (1,)}
_RUN = 6  # forced tokens of `json`, and free ones behind them
_HEADER = 40  # tokens of a prompt before its text


class Prepared:
    """A PackedModel whose logits name the prepared token of each row's next position."""

    def __init__(self, model: Any) -> None:
        self._model, self.tokens = model, mx.array([0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, attention: Any, logits_indices: Any, fusion: Any) -> mx.array:
        logits = self._model(attention, logits_indices, fusion)
        positions = attention.step.positions
        rows = positions if logits_indices is None else positions[logits_indices]
        said = self.tokens[mx.minimum(rows + 1, len(self.tokens) - 1)][:, None]
        quiet = logits * 1e-6  # the head's work stays
        return mx.put_along_axis(quiet, said, mx.full(said.shape, 100.0, quiet.dtype), axis=1)


def texts(kind: str, length: int, vocab_size: int) -> tuple[list[int], list[int]]:
    """(prompt, answer) of `length` tokens each."""
    rng = np.random.default_rng(7)
    text, header, fresh = (rng.integers(10, vocab_size - 10, n) for n in (length, _HEADER, length))
    answer = fresh.copy()
    if kind == "edit":
        answer = text.copy()
        answer[::20] = fresh[::20]
    if kind == "moved":
        kept = [[fresh[i], t] if i % 40 == 20 else [t] for i, t in enumerate(text) if i % 40]
        answer = np.concatenate([*kept, fresh])[:length]
    return [*header.tolist(), *text.tolist()], answer.tolist()


class Template:
    """A `Constraint`: every second run of _RUN tokens is forced."""

    def __init__(self, answer: list[int]) -> None:
        self._answer, self._known = answer, 0

    def fill(self, bits: np.ndarray) -> bool:
        bits[:] = ~np.uint32(0)
        if forced := self.forced():
            bits[:] = pack_mask(forced[:1], 32 * len(bits))
        return True

    def accept(self, token_id: int) -> None:
        self._known += 1

    def rollback(self, num_tokens: int) -> None:
        self._known -= num_tokens

    def forced(self) -> list[int]:
        run = self._known // _RUN
        return [] if run % 2 else self._answer[self._known : (run + 1) * _RUN]


def measure(engine: LLMEngine, prepared: Prepared, kind: str, count: int, length: int) -> float:
    """Tokens a second of `count` answers, prompts not counted."""
    prompt, answer = texts(kind, length, engine.model.vocab_size)
    prepared.tokens = mx.array([0, *prompt[1:], *answer, 0])
    mx.eval(prepared.tokens)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    for i in range(count):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        if kind == "json":
            engine.constraints.add(engine._answers[str(i)].request, Template(answer), params)
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


def widths(model: Any, prepared: Prepared, length: int) -> None:
    """Milliseconds a step by the number of drafts of each request; all drafts are right."""
    print(f"\n### {model.name}: ms a step behind {length} tokens, drafts that all come true\n")
    table_head(("requests", "one ahead", *(f"{k} drafts" for k in WIDTHS), "compiled"))
    for count in (1, 8):
        cells, compiled = [], []
        for k in (None, *WIDTHS):
            engine = make_engine(model, length, count, "off" if k is None else "auto")
            prompt, answer = texts("new", length, model.vocab_size)
            prepared.tokens = mx.array([0, *prompt[1:], *answer, 0])
            if k is not None:
                engine.speculator = Always(engine, prompt + answer, k)
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            for i in range(count):
                engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
            while engine.scheduler.num_waiting or len(engine.scheduler.decoding) < count:
                engine.step()
            times: list[float] = []
            while len(times) < 24 and engine.has_unfinished_requests():
                started = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - started)
            cells.append(1e3 * statistics.median(times[8:]) if times[8:] else float("nan"))
            compiled.append(engine.metrics()["compiled_steps"])
        ms = " | ".join(f"{cell:.1f}" for cell in cells)
        print(f"| {count} | {ms} | {compiled} |", flush=True)


def lookup(vocab_size: int) -> None:
    """Microseconds of a proposal, if the context ends like nothing before, and if all repeats."""
    print("\n### us of a lookup\n")
    table_head(("tokens", "nothing matches", "64 places match"))
    for count in (1 << 10, 1 << 13, 1 << 15):
        tokens = np.random.default_rng(7).integers(10, vocab_size, count).astype(np.int32)
        cells = []
        for known in (tokens, np.resize(tokens[:16], count)):
            times = timeit.repeat(partial(look_up, known, 31), number=100, repeat=5)
            cells.append(f"{1e4 * min(times):.0f}")
        print(f"| {count:,} | {' | '.join(cells)} |", flush=True)


class Always:
    """Replaces a Speculator: the same number of true drafts for every request."""

    num_drafted = num_accepted = 0

    def __init__(self, engine: LLMEngine, tokens: list[int], count: int) -> None:
        self._tokens, self._count = tokens, count
        self._known = engine._tokens_of

    def wants(self, decodes: Any) -> bool:
        return True

    def propose(self, wanted: Any) -> list[list[int]]:
        starts = [len(self._known(request)) for request, _ in wanted]
        return [self._tokens[at : at + self._count] for at in starts]

    def note(self, *_: Any) -> None: ...

    def forget(self, request: Any) -> None: ...


def make_engine(model: Any, length: int, count: int, speculate: str) -> LLMEngine:
    size = 2 * length + _HEADER + 64
    sizes = {"num_blocks": count * (size // 16 + 4), "max_model_len": size, "state_cache_gib": 0}
    how = {"speculate": speculate, "enable_prefix_caching": False}
    config = EngineConfig(max_num_seqs=2 * count, **sizes, **how)
    with trusted():
        return LLMEngine(model, config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-4b")
    parser.add_argument("--bits")
    parser.add_argument("--tiny", action="store_true")
    parts = ("widths", "lookup", *LOADS)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--requests", nargs="+", type=int, default=(1, 8, 32))
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=500, help="seconds")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.deadline, exit=True)
    name, length = ("128x2", 120) if args.tiny else (args.model, args.length)
    model = get_model(name, bits=args.bits)
    prepared = Prepared(model.packed)
    model = replace(model, fit=model.fit._replace(packed=prepared))
    if "widths" in args.only:
        widths(model, prepared, length)
    if "lookup" in args.only:
        lookup(model.vocab_size)
    print(f"\n### {model.name}: tokens a second, answers of {length} tokens\n")
    table_head(("answers", "requests", "without", "with drafts", "ratio", "accepted"))
    for kind in (kind for kind in LOADS if kind in args.only):
        for count in (count for count in LOADS[kind] if count in args.requests):
            speeds, share = {}, ""
            for speculate in ("off", "auto"):
                engine = make_engine(model, length, count, speculate)
                least = constraints.MIN_FORCED if speculate == "auto" else length
                with patch.object(constraints, "MIN_FORCED", least):
                    found = [
                        measure(engine, prepared, kind, count, length) for _ in range(args.runs + 2)
                    ]
                speeds[speculate] = statistics.median(found[2:])
                if (speculator := engine.speculator) is not None:
                    drafted, accepted = speculator.num_drafted, speculator.num_accepted
                    share = f"{accepted} of {drafted}"
                del engine
                mx.clear_cache()
            off, auto = speeds["off"], speeds["auto"]
            print(
                f"| {kind} | {count} | {off:.0f} | {auto:.0f} | **{auto / off:.2f}** | {share} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
