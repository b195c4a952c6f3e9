"""Pictures on this engine and on mlx-vlm: same random weights, one process, alternately, medians.

    python -m tools.bench.pictures --trusted                                a GPU
    python -m tools.bench.pictures --model qwen3-vl-tiny --side 256         a CPU, a minute

- turns: a picture with 200 tokens of text, then a second turn about it; mlx-vlm computes all again.
- many: requests with a picture each, 32 tokens out, all at once; mlx-vlm runs one by one.
- beside: pictures that come at once while others decode, and texts of the same length, at once and
  one after another.

No engine knows the pictures of a run from the run before, and the sizes of all runs are equal.
Runs do not count until two in a row take the same time.  mlx-vlm is left out if it cannot be
imported.  --mlx-vlm: the package's folder, for example in an unpacked wheel; only its models are
imported.  A picture is prepared before a run.  Prints Markdown; progress goes to stderr.  After
--deadline no run begins, and the rest is left out.
"""

import statistics
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools.bench.lib.loads import Sizes, Wave, WaveLoad
from tools.bench.lib.mlx_vlm import MlxVlm, empty_model
from tools.bench.lib.models import print_model, random_model
from tools.bench.lib.pictures import Pictures, SeeingEngine, random_eyes
from tools.bench.lib.runs import Pairs, Runs, medians
from tools.bench.lib.tables import print_medians
from tools.lib.frame import above_zero, at_least, parser_of, run_main, say
from tools.lib.trust import add_trusted, as_asked
from vllm_metal_lite import EngineConfig, MetalLiteError, backend
from vllm_metal_lite.benchmark import Engine, Metrics, Run, native

# isort: split
import mlx.nn as nn

mx = backend.mx

_ANSWER, _NEWCOMERS = 32, 4
# Token ids of texts; none is a special token.
_WORDS = np.arange(1000)


def same(ours: Run, theirs: Run) -> str:
    """How many answers of two runs have the same tokens."""
    pairs = list(zip(ours.tokens, theirs.tokens, strict=True))
    first, whole = sum(a[0] == b[0] for a, b in pairs), sum(a == b for a, b in pairs)
    return f"{first} of {len(pairs)} begin with mlx-vlm's token, {whole} are equal"


class Loads:
    """The loads.  count: the number of requests of `many`, and of the decodes in `beside`."""

    def __init__(self, pictures: Pictures, count: int) -> None:
        s = Sizes(_WORDS, 1)

        def seen() -> list[int]:
            return [*s.tokens(50), *pictures.tokens, *s.tokens(149)]

        length, few = len(seen()), [8] * _NEWCOMERS
        self.turns = WaveLoad([Wave([seen()], [8]), Wave([s.tokens(100)], [8], follows=[0])])
        self.many = WaveLoad([Wave([seen() for _ in range(count)], [_ANSWER] * count)])
        decoding = Wave([s.tokens(300) for _ in range(count)], [256] * count)

        def beside(*waves: Wave) -> WaveLoad:
            return WaveLoad([decoding, *waves], ends_with_last_wave=True)

        self.beside = {
            "pictures at once": beside(Wave([seen() for _ in few], few, after=48)),
            "texts at once": beside(Wave([s.tokens(length) for _ in few], few, after=48)),
            "texts in turn": beside(
                *(Wave([s.tokens(length)], [8], after=1 if i else 48) for i, _ in enumerate(few))
            ),
        }

    def config(self) -> EngineConfig:
        """With room for each load."""
        size, loads = EngineConfig.block_size, (self.turns, self.many, *self.beside.values())
        return EngineConfig(
            max_num_seqs=len(self.many.prompts) + _NEWCOMERS,
            max_model_len=max(load.longest for load in loads),
            num_blocks=max(sum(-(-n // size) + 1 for n in load.sizes) for load in loads),
            speculate="off",  # random weights repeat themselves
        )


def tower_seconds(compute: Callable[[], mx.array]) -> float:
    mx.eval(compute())
    times = timeit.repeat(lambda: mx.eval(compute()), number=1, repeat=5)
    return statistics.median(times)


def measured(runs: Runs, title: str, pairs: Pairs, repeats: int) -> dict[str, Metrics]:
    """Run engines on loads, and print their table.  Returns the medians."""
    print(f"\n### {runs.name}: {title}\n", flush=True)
    runs.warm_up(pairs)
    turns = runs.turns(pairs, repeats)
    found = medians(pairs, turns)
    if len(pairs) == 2:
        print(f"Answers: {same(*(of_one[-1] for of_one in turns.values()))}.\n")
    print_medians(found)
    return found


def main() -> int:
    parser = parser_of(__doc__)
    shapes = ("qwen3-vl-4b", "qwen3-vl-tiny")
    parser.add_argument("--model", choices=shapes, default=shapes[0])
    text = "of a picture, pixels"
    parser.add_argument("--side", type=at_least(64, 4096), default=1024, help=text)
    parser.add_argument("--requests", type=at_least(1, 64), default=16)
    parser.add_argument("--repeats", type=at_least(1), default=3, help="counted runs")
    parser.add_argument("--deadline", type=above_zero, default=240, help="seconds")
    parser.add_argument("--mlx-vlm", type=Path, metavar="FOLDER", help="the package mlx_vlm")
    add_trusted(parser)
    args = parser.parse_args()
    runs, repeats = Runs(deadline=args.deadline), args.repeats
    dtype = mx.float32 if backend.is_cpu() else mx.bfloat16
    model = random_model(args.model, dtype)
    pictures = Pictures(model.config, args.side)
    vlm: nn.Module | None = None
    try:
        vlm = empty_model(model.config, args.mlx_vlm)
    except MetalLiteError as e:
        say(f"without mlx-vlm: {e}")
    eyes = random_eyes(model.config, dtype, vlm, native(model))
    loads = Loads(pictures, args.requests)
    with as_asked(args):
        ours = SeeingEngine(model, loads.config(), pictures, eyes)
    engines: list[Engine] = [ours] if vlm is None else [ours, MlxVlm(vlm, pictures)]
    print_model(model)
    print(f"A picture has {len(pictures.tokens) - 1:,} rows.", flush=True)
    x = mx.random.uniform(shape=pictures.patches_shape).astype(dtype)
    tower = 1e3 * tower_seconds(lambda: eyes.tower(x, pictures.grid).rows)
    print(f"\nTower alone: {tower:.1f} ms", flush=True)

    runs.name, title = "turns", "a picture and 200 tokens, then 100 more"
    found = measured(runs, title, {e.name: (e, loads.turns) for e in engines}, repeats)["ours"]
    times = found["first_ttft_median"] / found["later_ttft_median"]
    print(f"\nOur second turn / our first: {times:.1f}")
    runs.name, title = "many", f"{args.requests} pictures at once, {_ANSWER} out"
    measured(runs, title, {e.name: (e, loads.many) for e in engines}, repeats)
    runs.name, title = "beside", f"{_NEWCOMERS} newcomers beside {args.requests} decodes"
    three = measured(runs, title, {k: (ours, v) for k, v in loads.beside.items()}, repeats)
    worst = {name: 1e3 * values["busy_gap_worst"] for name, values in three.items()}
    limits = [f"{worst[name] + tower:.1f} ({name})" for name in list(worst)[1:]]
    print(
        f"\nWorst gap with pictures: {worst['pictures at once']:.1f} ms; that with texts and the "
        f"time of the tower: {', '.join(limits)}"
    )
    return 0


if __name__ == "__main__":
    run_main(main)
