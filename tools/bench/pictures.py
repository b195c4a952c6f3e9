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
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np

from tools.bench.lib.loads import Sizes, Wave, WaveLoad
from tools.bench.lib.metrics import measure, newcomers
from tools.bench.lib.mlx_vlm import MlxVlm, empty_model
from tools.bench.lib.models import random_model
from tools.bench.lib.pictures import Pictures, SeeingEngine, random_eyes
from tools.bench.lib.tables import COLUMNS, NEWCOMER, Column, print_medians, ratios
from tools.lib.frame import above_zero, at_least, parser_of, run_main, say
from tools.lib.trust import trusted
from vllm_metal_lite import EngineConfig, LLMEngine, MetalLiteError, backend
from vllm_metal_lite.benchmark import Engine, Metrics, Run, drive, median_of, native
from vllm_metal_lite.images.eyes import rotary_sections
from vllm_metal_lite.images.positions import axis_of_frequency

# isort: split
import mlx.nn as nn

mx = backend.mx

_SAME = 0.1  # two runs in a row agree if their times differ by at most this part
_MOST_WARM_UPS = 6
_ANSWER, _NEWCOMERS = 32, 4
# Token ids of texts; none is a special token.
_WORDS = np.arange(1000)


class Deadline(Exception):
    """The time is up."""


class Bench:
    """Runs engines on a load, alternately.  seconds: of all runs together."""

    def __init__(self, seconds: float, repeats: int) -> None:
        self._ends, self._repeats = timeit.default_timer() + seconds, repeats

    def run(self, engine: Engine, load: WaveLoad, name: str) -> Run:
        if timeit.default_timer() > self._ends:
            raise Deadline
        run = drive(engine, load)
        firsts = [f"{1e3 * (t[0] - at):.1f}" for t, at in zip(run.times, run.arrived, strict=True)]
        say(
            f"{name}, {engine.name}: {run.seconds:.3f} s, {run.cached_tokens} cached, "
            f"first tokens after ms {' '.join(firsts)}"
        )
        return run

    def medians(
        self, engines: dict[str, tuple[Engine, WaveLoad]], of: Callable[[Run, WaveLoad], Metrics]
    ) -> dict[str, Metrics]:
        for name, (engine, load) in engines.items():
            before = 0.0
            for _ in range(_MOST_WARM_UPS):
                seconds = self.run(engine, load, f"{name}, warm-up").seconds
                if abs(seconds - before) <= _SAME * seconds:
                    break
                before = seconds
        found: dict[str, list[Metrics]] = {name: [] for name in engines}
        for turn in range(self._repeats):
            answers = []
            for name, (engine, load) in engines.items():
                run = self.run(engine, load, f"{name}, turn {turn + 1}")
                found[name].append(of(run, load))
                answers.append(run.tokens)
        if len(answers) == 2:
            print(f"Answers: {same(*answers)}.\n")
        return {name: median_of(values) for name, values in found.items()}


def same(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """How many answers of two runs have the same tokens."""
    pairs = list(zip(ours, theirs, strict=True))
    first, whole = sum(a[0] == b[0] for a, b in pairs), sum(a == b for a, b in pairs)
    return f"{first} of {len(pairs)} begin with mlx-vlm's token, {whole} are equal"


def of_turns(run: Run, load: WaveLoad) -> Metrics:
    """The time to the first token of each of the two turns."""
    first, later = (times[0] - at for times, at in zip(run.times, run.arrived, strict=True))
    cached = float(run.cached_tokens)
    return {"ttft_median": first, "later_ttft_median": later, "cached_tokens": cached}


def of_many(run: Run, load: WaveLoad) -> Metrics:
    return {"seconds": run.seconds, **measure(load, run)}


def of_beside(run: Run, load: WaveLoad) -> Metrics:
    return newcomers(run, _NEWCOMERS)


class Loads:
    """The loads.  count: the number of requests of `many`, and of the decodes in `beside`."""

    def __init__(self, pictures: Pictures, count: int) -> None:
        s = Sizes(_WORDS, 1)

        def seen() -> list[int]:
            return [*s.tokens(50), *pictures.tokens, *s.tokens(149)]

        length = len(seen())
        second = Wave([s.tokens(100)], [8], follows=[0])
        self.turns = WaveLoad([Wave([seen()], [8]), second])
        self.many = WaveLoad([Wave([seen() for _ in range(count)], [_ANSWER] * count)])
        decoding = Wave([s.tokens(300) for _ in range(count)], [256] * count)
        few = range(_NEWCOMERS)

        def beside(waves: list[Wave]) -> WaveLoad:
            waves[0] = Wave(waves[0].prompts, waves[0].max_tokens, after=48)
            return WaveLoad([decoding, *waves], ends_with_last_wave=True)

        def text() -> list[int]:
            return s.tokens(length)

        self.beside = {
            "pictures at once": beside([Wave([seen() for _ in few], [8] * _NEWCOMERS)]),
            "texts at once": beside([Wave([text() for _ in few], [8] * _NEWCOMERS)]),
            "texts in turn": beside([Wave([text()], [8], after=1) for _ in few]),
        }

    @property
    def num_blocks(self) -> int:
        size = EngineConfig.block_size
        loads = (self.turns, self.many, *self.beside.values())
        return max(sum(-(-n // size) + 1 for n in load.sizes) for load in loads)

    @property
    def longest(self) -> int:
        return max(load.longest for load in (self.turns, self.many, *self.beside.values()))


def tower_seconds(compute: Callable[[], mx.array]) -> float:
    mx.eval(compute())
    times = timeit.repeat(lambda: mx.eval(compute()), number=1, repeat=5)
    return statistics.median(times)


def run_all(
    bench: Bench, engine: SeeingEngine, theirs: MlxVlm | None, loads: Loads, tower: float
) -> None:
    def pair(load: WaveLoad) -> dict[str, tuple[Engine, WaveLoad]]:
        found: dict[str, tuple[Engine, WaveLoad]] = {"ours": (engine, load)}
        return found if theirs is None else {**found, theirs.name: (theirs, load)}

    print("\n### turns: a picture and 200 tokens, then 100 more\n")
    medians = bench.medians(pair(loads.turns), of_turns)
    print_medians(medians, ratios(medians))
    ours = medians["ours"]
    print(f"\nOur second turn / our first: {ours['ttft_median'] / ours['later_ttft_median']:.1f}")

    print(f"\n### many: {len(loads.many.prompts)} pictures at once, {_ANSWER} out\n")
    medians = bench.medians(pair(loads.many), of_many)
    print_medians(medians, ratios(medians), (Column("seconds", "s", ".2f"), *COLUMNS))

    print(f"\n### beside: {_NEWCOMERS} newcomers beside {len(loads.many.prompts)} decodes\n")
    three: dict[str, tuple[Engine, WaveLoad]] = {
        name: (engine, load) for name, load in loads.beside.items()
    }
    medians = bench.medians(three, of_beside)
    print_medians(medians, {}, NEWCOMER)
    worst = {name: 1e3 * values["busy_gap_worst"] for name, values in medians.items()}
    limits = [f"{worst[name] + 1e3 * tower:.1f} ({name})" for name in list(worst)[1:]]
    print(
        f"\nWorst gap with pictures: {worst['pictures at once']:.1f} ms; that with texts and the "
        f"time of the tower: {', '.join(limits)}"
    )


def main() -> int:
    parser = parser_of(__doc__)
    shapes = ("qwen3-vl-4b", "qwen3-vl-tiny")
    parser.add_argument("--model", choices=shapes, default=shapes[0])
    parser.add_argument(
        "--side", type=at_least(64, 4096), default=1024, help="of a picture, pixels"
    )
    parser.add_argument("--requests", type=at_least(1, 64), default=16)
    parser.add_argument("--repeats", type=at_least(1), default=3, help="counted runs")
    parser.add_argument("--deadline", type=above_zero, default=240, help="seconds")
    parser.add_argument("--mlx-vlm", type=Path, metavar="FOLDER", help="the package mlx_vlm")
    parser.add_argument(
        "--trusted", action="store_true", help="every kernel for all rows; no checks or timings"
    )
    args = parser.parse_args()
    bench = Bench(args.deadline, args.repeats)
    dtype = mx.float32 if backend.is_cpu() else mx.bfloat16
    model = random_model(args.model, dtype)
    pictures = Pictures(model.config, args.side)
    vlm: nn.Module | None = None
    try:
        vlm = empty_model(model.config, args.mlx_vlm)
    except MetalLiteError as e:
        say(f"without mlx-vlm: {e}")
    eyes = random_eyes(model.config, dtype, vlm, native(model))
    sections = rotary_sections(model.config)
    model.packed.axis_of_frequency = axis_of_frequency(sections)
    loads = Loads(pictures, args.requests)
    config = EngineConfig(
        max_num_seqs=args.requests + _NEWCOMERS,
        max_model_len=loads.longest,
        num_blocks=loads.num_blocks,
        speculate="off",  # random weights repeat themselves
    )
    with (
        patch("vllm_metal_lite.images.eyes.attach", lambda *_: eyes),
        trusted() if args.trusted else nullcontext(),
    ):
        ours = SeeingEngine(LLMEngine(model, config), pictures)
    theirs = None if vlm is None else MlxVlm(vlm, pictures)
    rows = len(pictures.tokens) - 1
    print(f"## {backend.describe()}\n\n{model.name}: a picture has {rows:,} rows.", flush=True)
    x = mx.random.uniform(shape=pictures.patches_shape).astype(dtype)
    tower = tower_seconds(lambda: eyes.tower(x, pictures.grid).rows)
    print(f"\nTower alone: {1e3 * tower:.1f} ms", flush=True)
    try:
        run_all(bench, ours, theirs, loads, tower)
    except Deadline:
        print(f"\nThe rest is left out: --deadline {args.deadline:g} s is over.")
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
