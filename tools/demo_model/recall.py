"""Measures how well the demo model recalls facts: greedy answers to held-out prompts.

    python -m tools.demo_model.recall --require 0.98                     20 minutes on two cores
    python -m tools.demo_model.recall --lengths 256 --num-prompts 5      some seconds

A prompt counts as right when the answer ends with the stated value.  Engines: mlx-lm's own
generation, one prompt at a time, and ours; their token ids are compared.
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer

from tools.demo_model import data
from tools.lib.frame import at_least, parser_of, print_table, run_main, say
from vllm_metal_lite import LLM, SamplingParams
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.files.find import DEMO_PATH

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


def row_of(length: int, args: argparse.Namespace) -> tuple[object, ...]:
    """The shares of right answers to the prompts of a length, and how many answers are equal."""
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    tests = data.recall_prompts(tokenizer, length, args.num_prompts)
    shares, answers = [], []
    for name, generate in ENGINES.items():
        found = generate(args.model, [test.prompt_ids for test in tests])
        answers.append([until_end(answer) for answer in found])
        texts = [tokenizer.decode(ids) for ids in answers[-1]]
        pairs = zip(texts, tests, strict=True)
        wrong = [(text, test) for text, test in pairs if not is_right(text, test.value)]
        for text, test in wrong:
            say(f"{name}: {test.messages[-1][1][-60:]!r} -> {text!r}, not {test.value!r}")
        shares.append(1 - len(wrong) / len(tests))
    equal = sum(first == second for first, second in zip(*answers, strict=True))
    return length, len(tests), *(f"{share:.1%}" for share in shares), equal, min(shares)


def main() -> int:
    """Returns 1 if an accuracy is below --require."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_PATH)
    parser.add_argument("--lengths", type=at_least(1), nargs="+", default=[256, 1024, 3072])
    parser.add_argument(
        "--num-prompts", type=at_least(1), default=100, help="prompts of each length"
    )
    parser.add_argument("--require", type=float, default=0, help="fail below this accuracy")
    args = parser.parse_args()
    if not 0 <= args.require <= 1:
        parser.error(f"argument --require: must be from 0 to 1, got {args.require:g}")
    heads = ("tokens", "prompts", *ENGINES, "equal answers", "least")
    found = print_table(heads, (row_of(length, args) for length in args.lengths))
    return 1 if min(row[-1] for row in found) < args.require else 0


if __name__ == "__main__":
    run_main(main)
