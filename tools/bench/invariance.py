"""Count the answers that crowds, other chunks and drafts change, with greedy decoding.

    python -m tools.bench.invariance --model qwen3-0.6b --trusted      a GPU; random weights
    python -m tools.bench.invariance                                   a CPU: the demo model
    python -m tools.bench.invariance --prompts 40 --tokens 24          some seconds

--model: as in tools.bench.engine.  Each row runs all prompts and compares the answers with those of
a run in which each request had its steps for itself, without drafts and without a prefix cache.
`again` is that run once more; its row shows no difference, or the tool exits with 1.  `first`: the
place of the first token that differs.  `margin`: the distance, in log-probability, of the two best
tokens there in the run alone; rounding decides small ones.  Prints Markdown.
"""

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.bench.lib.loads import Sizes
from tools.bench.lib.models import add_model, model_of
from tools.lib.frame import at_least, parser_of, print_table, run_main, say
from tools.lib.trust import add_trusted, as_asked
from tools.repro_block_exhaustion import drain
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams
from vllm_metal_lite.benchmark import vocabulary
from vllm_metal_lite.model.loader import LoadedModel

# Name -> fields of EngineConfig.  All runs are compared with "alone".
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "again": {"max_num_seqs": 1},
    "crowd of 8": {"max_num_seqs": 8},
    "crowd of 32": {"max_num_seqs": 32},
    "alone, chunks of 48": {"max_num_seqs": 1, "max_num_batched_tokens": 48},
    "alone, drafts": {"max_num_seqs": 1, "speculate": "auto"},
    "crowd of 32, chunks, drafts": {
        "max_num_seqs": 32, "max_num_batched_tokens": 48, "speculate": "auto",
    },
}  # fmt: skip


class Answer(NamedTuple):
    """margins: of each token, the distance to the second best, in log-probability."""

    tokens: list[int]
    margins: list[float]


def run(
    model: LoadedModel, prompts: list[list[int]], num_tokens: int, **options: Any
) -> list[Answer]:
    """All prompts on an engine of its own."""
    longest = max(map(len, prompts)) + num_tokens
    seats = options["max_num_seqs"]
    blocks = (seats + 1) * (longest // EngineConfig.block_size + 2)
    fixed = {"max_model_len": longest, "num_blocks": blocks, "enable_prefix_caching": False}
    engine = LLMEngine(model, EngineConfig(**{**fixed, "speculate": "off", **options}))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    found = []
    for output in drain(engine):
        [answer] = output.outputs
        best = [sorted(x.logprob for x in of.values()) for of in answer.logprobs or ()]
        found.append(Answer(answer.token_ids, [values[-1] - values[-2] for values in best]))
    return found


def differences(alone: list[Answer], other: list[Answer]) -> list[tuple[int, float]]:
    """(The place of the first token that differs, its margin in the run alone) of each answer that
    differs."""
    found = []
    for a, b in zip(alone, other, strict=True):
        pairs = enumerate(zip(a.tokens, b.tokens, strict=True))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is not None:
            found.append((at, a.margins[at]))
    return found


def main() -> int:
    parser = parser_of(__doc__)
    add_model(parser)
    parser.add_argument("--prompts", type=at_least(1), default=200)
    parser.add_argument("--tokens", type=at_least(2), default=64, help="of an answer")
    parser.add_argument("--length", type=at_least(2), default=200, help="of the longest prompt")
    add_trusted(parser)
    args = parser.parse_args()
    model = model_of(args)
    sizes = Sizes(vocabulary(model), 1)
    lengths = sizes.between(max(args.length // 10, 1), args.length, args.prompts)
    prompts = [sizes.tokens(n) for n in lengths]
    print(f"{args.prompts} prompts, {args.tokens} tokens out\n", flush=True)
    is_equal = True

    def rows() -> Iterator[tuple[str, ...]]:
        nonlocal is_equal
        alone: list[Answer] = []
        for name, options in SETTINGS.items():
            with as_asked(args):
                other = run(model, prompts, args.tokens, **options)
            say(name)
            alone = alone or other
            apart = differences(alone, other)
            is_equal &= name != "again" or not apart
            places, margins = zip(*apart, strict=True) if apart else ((), ())
            yield (
                name,
                f"{len(apart)} of {len(prompts)}",
                f"{min(places)} to {max(places)}" if apart else "",
                f"{statistics.median(places):.0f}" if apart else "",
                f"{statistics.median(margins):.4f}" if apart else "",
                f"{max(margins):.4f}" if apart else "",
            )

    heads = ("", "answers that differ", "first", "median", "margin, median", "largest")
    print_table(heads, rows())
    return 0 if is_equal else 1


if __name__ == "__main__":
    run_main(main)
