#!/usr/bin/env python3
"""What forced tokens bring: the same JSON answers with and without packing of known tokens.

    python -m tools.bench.forced_tokens --model qwen3-4b                 a GPU
    python -m tools.bench.forced_tokens --model demo                     a CPU

Without packing, the engine's constraints see grammars that never name a token in advance, so each
token is sampled under its mask.  The embedded engine; the two take turns, and the first turn of
each warms up.  The share of forced tokens depends on the vocabulary: that of a random model is the
demo model's with made-up tokens.  Weights are random there, so strings have a limit of length.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tools.bench.server import STARTED, give_up, prepare
from tools.dev.run_main import run_main

SCHEMA: dict[str, Any] = {
    "type": "object", "additionalProperties": False,
    "required": ["command", "file_path", "replacement", "options"],
    "properties": {
        "command": {"enum": ["read_file", "edit_file", "run_command"]},
        "file_path": {"type": "string", "maxLength": 24},
        "replacement": {"type": "string", "maxLength": 60},
        "options": {
            "type": "object", "additionalProperties": False,
            "required": ["replace_all", "description"],
            "properties": {
                "replace_all": {"type": "boolean"},
                "description": {"type": "string", "maxLength": 30},
            },
        },
    },
}  # fmt: skip


class OneByOne:
    """A constraint whose tokens are never known in advance."""

    def __init__(self, constraint: Any) -> None:
        self._constraint = constraint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._constraint, name)

    def forced(self) -> list[int]:
        return []


def run(engine: Any, params: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """One turn: every answer's tokens, and the engine's counts."""
    before, started = engine.metrics(), time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    answers: dict[str, list[int]] = {}
    steps_of = dict.fromkeys(map(str, range(len(prompts))), 0)
    while engine.has_unfinished_requests():
        for output in engine.step():
            steps_of[output.request_id] += 1
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    seconds, after = time.perf_counter() - started, engine.metrics()
    return {
        "answers": answers, "seconds": seconds,
        "tokens": sum(map(len, answers.values())),
        "steps_an_answer": statistics.mean(steps_of.values()),
        "forced": after["forced_tokens"] - before["forced_tokens"],
    }  # fmt: skip


def measure(engine: Any, params: Any, prompts: list[list[int]], repeats: int) -> list[dict]:
    """[one by one, packed]: medians over the turns."""
    add, turns = engine.constraints.add, {"one by one": [], "packed": []}
    for number in range(repeats + 1):
        for name, counted in turns.items():
            if name == "one by one":
                engine.constraints.add = lambda request, constraint, params: add(
                    request, OneByOne(constraint), params
                )
            engine.reset_prefix_cache()
            turn = run(engine, params, prompts)
            engine.constraints.add = add
            say(f"{name}, turn {number}: {turn['tokens'] / turn['seconds']:,.0f} tokens/s")
            if number:
                counted.append(turn)
    same = sum(
        a["answers"][key] == b["answers"][key]
        for a, b in zip(*turns.values(), strict=True) for key in a["answers"]
    )  # fmt: skip
    say(f"{same} of {repeats * len(prompts)} answers are the same tokens")
    return [
        {
            "name": name, "same_answers": same / (repeats * len(prompts)),
            "tokens_per_second": statistics.median(t["tokens"] / t["seconds"] for t in counted),
            "tokens_an_answer": counted[0]["tokens"] / len(prompts),
            "forced_an_answer": counted[0]["forced"] / len(prompts),
            "steps_an_answer": statistics.mean(t["steps_an_answer"] for t in counted),
        }
        for name, counted in turns.items()
    ]  # fmt: skip


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bits", help="of random weights: 4, 6, 8 or mxfp4")
    parser.add_argument("--requests", default="1,16", help="answers at once, one row each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--deadline", type=float, default=300, help="then stacks and exit")
    args = parser.parse_args()
    deadline = threading.Timer(args.deadline, give_up)
    deadline.daemon = True
    deadline.start()
    from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams
    from vllm_metal_lite.structured_params import StructuredOutputsParams

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(args, Path(scratch))
        counts = [int(n) for n in args.requests.split(",")]
        engine = LLMEngine.from_name(str(folder), EngineConfig(max_num_seqs=max(counts)))
        for count in counts:
            prompts = [[5 + (i * 31 + k) % 500 for k in range(args.prompt)] for i in range(count)]
            for compact in (False, True):
                form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=compact)
                params = SamplingParams(temperature=0, max_tokens=300, structured_outputs=form)
                space = "none" if compact else "default"
                say(f"{count} at once, whitespace: {space}")
                for row in measure(engine, params, prompts, args.repeats):
                    rows.append({"requests": count, "whitespace": space, **row})
    print(f"Model: {args.model}; {args.repeats} counted turns")
    print("| at once | whitespace | forced tokens | tokens/s | tokens | forced | steps |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for r in rows:
        print(
            f"| {r['requests']} | {r['whitespace']} | {r['name']} | {r['tokens_per_second']:,.0f} "
            f"| {r['tokens_an_answer']:.0f} | {r['forced_an_answer']:.0f} "
            f"| {r['steps_an_answer']:.0f} |"
        )
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    run_main(main)
