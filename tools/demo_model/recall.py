"""Measures how well the demo model recalls facts: greedy answers to held-out prompts.

    python -m tools.demo_model.recall --engine both --require 0.98

A prompt counts as right when the answer ends with the stated value.  Engines: `mlx-lm` (its own
generation, one prompt at a time), `ours`, or `both`; both together also compares the token ids.
"""

import argparse
import time
from pathlib import Path

from tokenizers import Tokenizer

from tools.demo_model import data
from tools.lib.frame import parser_of, run_main, say
from vllm_metal_lite import LLM, SamplingParams
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.files import DEMO_PATH

MAX_TOKENS = 64


def generate_mlx_lm(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    model, _ = load(str(folder))
    return [
        [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=MAX_TOKENS)]
        for prompt in prompts
    ]


def generate_ours(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    llm = LLM(model=str(folder))
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
    )
    return [list(result.outputs[0].token_ids) for result in results]


ENGINES = {"mlx-lm": generate_mlx_lm, "ours": generate_ours}


def is_right(text: str, value: str) -> bool:
    """Whether an answer ends with exactly the value."""
    return text.endswith(f" {value}.")


def until_end(answer: list[int]) -> list[int]:
    """The tokens before the end token; mlx-lm generates more after it."""
    return answer[: answer.index(data.END)] if data.END in answer else answer


def measure(length: int, args: argparse.Namespace) -> float:
    """Print a row of the table; returns the smallest share of right answers."""
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    tests = data.recall_prompts(tokenizer, length, args.num_prompts)
    row, shares, answers = f"{length:6}  {len(tests):7}", [], []
    for name in ENGINES if args.engine == "both" else [args.engine]:
        began = time.perf_counter()
        found = ENGINES[name](args.model, [test.prompt_ids for test in tests])
        seconds = time.perf_counter() - began
        answers.append([until_end(answer) for answer in found])
        right = 0
        for ids, test in zip(answers[-1], tests, strict=True):
            text = tokenizer.decode(ids)
            right += is_right(text, test.value)
            if not is_right(text, test.value):
                asked = test.messages[-1][1][-60:]
                say(f"{name}: {asked!r} -> {text!r}, not {test.value!r}")
        shares.append(right / len(tests))
        row += f"  {name}: {100 * shares[-1]:.1f} % in {seconds:.1f} s"
    if len(answers) == 2:
        same = sum(first == second for first, second in zip(*answers, strict=True))
        row += f"  identical token ids: {same} of {len(tests)}"
    print(row, flush=True)
    return min(shares)


def main() -> int:
    """Run the command line; returns 1 if an accuracy is below --require."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_PATH)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 3072])
    parser.add_argument("--num-prompts", type=int, default=100, help="prompts of each length")
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="mlx-lm")
    parser.add_argument("--require", type=float, default=0, help="fail below this accuracy")
    args = parser.parse_args()
    print("tokens  prompts")
    return int(min([measure(length, args) for length in args.lengths]) < args.require)


if __name__ == "__main__":
    run_main(main)
