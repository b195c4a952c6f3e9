"""Runs of engines on loads: warm-ups, and counted turns."""

import math
import time

from tools.bench.lib.loads import WaveLoad
from tools.bench.lib.metrics import measure
from tools.lib.frame import say
from vllm_metal_lite import MetalLiteError
from vllm_metal_lite.benchmark import Engine, Metrics, Run, ThisEngine, drive, median_of
from vllm_metal_lite.errors import one_line

Pairs = dict[str, tuple[Engine, WaveLoad]]  # by name

_SAME = 0.1  # two runs in a row agree if their times differ by at most this part
_MOST_WARM_UPS = 6


class Runs:
    """Runs engines.

    name: of the load, for lines of progress.  deadline: seconds after which `run` raises
    MetalLiteError.
    """

    def __init__(self, name: str = "", deadline: float = math.inf) -> None:
        self.name, self._deadline, self._end = name, deadline, time.monotonic() + deadline

    def run(self, engine: Engine, load: WaveLoad, note: str) -> Run:
        if time.monotonic() > self._end:
            raise MetalLiteError(f"the rest is left out: --deadline {self._deadline:g} s is over")
        run = drive(engine, load)
        values = measure(load, run)
        say(
            f"{self.name}, {note}: {run.seconds:.2f} s, "
            f"{values['output_tokens_per_s']:,.0f} tokens/s, first after "
            f"{1e3 * values['ttft_median']:,.1f} ms, {run.cached_tokens} cached"
        )
        return run

    def warm_up(self, pairs: Pairs) -> None:
        """Run each load until two runs in a row take the same time: a variant of a step with
        prompts is compiled when it comes a second time.  With drafts, also until the engine knows
        the times of its steps: on CUDA their first ones compile for seconds, and an engine tries
        new ones in a tenth of its time.
        """
        for name, (engine, load) in pairs.items():
            pace = None
            if isinstance(engine, ThisEngine) and (drafts := engine.engine.in_flight.speculator):
                pace = drafts.pace
                pace.tries = 1.0
            before, known, count, is_settled = 0.0, -1, 0, False
            while not is_settled:
                seconds = self.run(engine, load, f"warm-up, {name}").seconds
                now, count = pace.num_known if pace else 0, count + 1
                is_same = abs(seconds - before) <= _SAME * seconds or count >= _MOST_WARM_UPS
                is_settled = is_same and now == known
                before, known = seconds, now

    def tried(self, engine: Engine, load: WaveLoad) -> Metrics | None:
        """The metrics of one run, or None if the engine fails: MLX's CUDA backend does not take all
        sizes of a batch."""
        try:
            return measure(load, self.run(engine, load, f"sweep, {engine.name}"))
        except (RuntimeError, ValueError) as e:
            say(f"{self.name}, {engine.name}: left out, {one_line(e)}")
            return None

    def turns(self, pairs: Pairs, repeats: int) -> dict[str, list[Run]]:
        """Run the engines alternately."""
        found: dict[str, list[Run]] = {name: [] for name in pairs}
        for turn in range(repeats):
            for name, (engine, load) in pairs.items():
                found[name].append(self.run(engine, load, f"turn {turn + 1}, {name}"))
        return found


def medians(pairs: Pairs, runs: dict[str, list[Run]]) -> dict[str, Metrics]:
    return {name: medians_of(load, runs[name]) for name, (_, load) in pairs.items()}


def medians_of(load: WaveLoad, runs: list[Run]) -> Metrics:
    return median_of([measure(load, run) for run in runs])
