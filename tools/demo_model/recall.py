"""Measures how well the demo model recalls facts: greedy answers to held-out prompts.

    python -m tools.demo_model.recall --engine both --require 0.98

A prompt counts as right when the answer ends with the stated value. Engines: `mlx-lm` (its own
generation, one prompt at a time), `ours`, or `both`; both together also compares the token ids.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from vllm_metal_lite.backend import mx  # first: it prepares MLX

from tools.demo_model import data as data  # isort: skip
from tokenizers import Tokenizer  # isort: skip

MODEL = Path(__file__).resolve().parents[2] / "vllm_metal_lite" / "demo_model"
MAX_TOKENS = 64


def generate_mlx_lm(
    folder: Path, prompts: list[list[int]], kv_bits: int | None = None
) -> list[list[int]]:
    """Greedy answers by mlx_lm, without the end token.

    kv_bits: it keeps K and V as they are until its first pass over the prompt is through.
    """
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    model, _ = load(str(folder))
    how = {"kv_bits": kv_bits, "kv_group_size": model.args.head_dim, "quantized_kv_start": 0}
    answers = []
    for prompt in prompts:
        answer: list[int] = []
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=MAX_TOKENS, **how):
            if int(token) == data.END:
                break
            answer.append(int(token))
        answers.append(answer)
    return answers


def generate_ours(
    folder: Path, prompts: list[list[int]], kv_bits: int | None = None
) -> list[list[int]]:
    """Greedy answers by this package's engine, without the end token."""
    from vllm_metal_lite import LLM, SamplingParams

    llm = LLM(model=str(folder), kv_bits=kv_bits)
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
    )
    answers = [list(result.outputs[0].token_ids) for result in results]
    return [answer[:-1] if answer[-1:] == [data.END] else answer for answer in answers]


ENGINES = {"mlx-lm": generate_mlx_lm, "ours": generate_ours}


def is_right(text: str, value: str) -> bool:
    """Whether an answer ends with exactly the value."""
    return text.endswith(f" {value}.")


def measure(
    folder: Path,
    length: int,
    count: int,
    engines: list[str],
    show_wrong: bool = False,
    kv_bits: int | None = None,
) -> dict:
    """One row of the table: right answers and seconds of each engine."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tests = data.recall_prompts(tokenizer, length, count)
    row: dict = {"length": length, "prompts": count}
    answers = {}
    for name in engines:
        began = time.perf_counter()
        answers[name] = ENGINES[name](folder, [test.prompt_ids for test in tests], kv_bits)
        seconds = time.perf_counter() - began
        texts = [tokenizer.decode(ids) for ids in answers[name]]
        right = [is_right(text, test.value) for text, test in zip(texts, tests, strict=True)]
        row[name] = {"right": sum(right), "accuracy": sum(right) / count, "seconds": seconds}
        if show_wrong:
            for text, test, good in zip(texts, tests, right, strict=True):
                if not good:
                    asked = test.messages[-1][1][-60:]
                    print(f"  {name}: {asked!r} -> {text!r}, not {test.value!r}", file=sys.stderr)
    if len(engines) == 2:
        pairs = zip(*answers.values(), strict=True)
        row["identical"] = sum(first == second for first, second in pairs)
    return row


def main() -> int:
    """Measure, print a table (or JSON); 1 if an accuracy is below --require."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 3072])
    parser.add_argument("--num-prompts", type=int, default=100, help="prompts of each length")
    parser.add_argument("--engine", choices=("mlx-lm", "ours", "both"), default="mlx-lm")
    parser.add_argument("--kv-bits", type=int, choices=(8, 4), help="bits of a kept K or V value")
    parser.add_argument("--require", type=float, help="fail below this accuracy")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show-wrong", action="store_true", help="list wrong answers")
    args = parser.parse_args()
    engines = list(ENGINES) if args.engine == "both" else [args.engine]
    rows = [
        measure(args.model, length, args.num_prompts, engines, args.show_wrong, args.kv_bits)
        for length in args.lengths
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print("tokens  prompts" + "".join(f"  {name:>8}  seconds" for name in engines))
        for row in rows:
            line = f"{row['length']:6}  {row['prompts']:7}"
            for name in engines:
                line += f"  {100 * row[name]['accuracy']:6.1f} %  {row[name]['seconds']:7.1f}"
            if "identical" in row:
                line += f"  identical token ids: {row['identical']} of {row['prompts']}"
            print(line)
    worst = min(row[name]["accuracy"] for row in rows for name in engines)
    return int(args.require is not None and worst < args.require)


if __name__ == "__main__":
    sys.exit(main())
