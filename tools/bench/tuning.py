"""Chooses constants of devices.py by timing; `tune.py` has the constants.

Most constants select between forms of a launch.  Loads around the threshold are timed in each form
that some candidate would select; a candidate costs what its forms cost, each relative to the best
form of its load, summed over the loads.  The present value stays unless another one is clearly
cheaper, so that noise changes nothing.  Constants are measured one after another, each with the
values that were found before it.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import DeviceProfile, profile, using
from vllm_metal_lite.errors import one_line

# The constants that this tool measures, with the least and the largest value of each.
TUNABLE: dict[str, tuple[float, float]] = {
    "decode_fill": (8, 4096),
    "min_split_context": (64, 1 << 20),
    "min_split_keys": (32, 1 << 14),
    "few_keys": (0, 1 << 20),
    "prefix_fill": (8, 4096),
    "min_prefix_split_keys": (32, 1 << 14),
    "rope_many_rows": (1, 1 << 30),
    "gemm_fill": (1, 4096),
    "max_lane_rows": (0, 4),
    "max_normed_rows": (0, 64),
    "max_normed_weights": (0, 1 << 30),
    "argmax_fill": (1, 4096),
    "argmax_long": (1 << 10, 1 << 30),
    "min_saved_tokens": (256, 1 << 22),
    "prefix_row_cost": (0, 1),
    "rows_as_decodes": (0, 512),
    "sdpa_call_cost": (1, 1 << 28),
    "key_cost": (1, 1 << 14),
}

# What another value must save, as a share of the cost of the present one.
_CLEARLY = 0.03
# Candidates this near to the cheapest one are as good.
_ALIKE = 0.01
# A time is the median of _ROUNDS chains of about _SECONDS, of at most _LONGEST calls.
_ROUNDS, _SECONDS, _LONGEST = 5, 0.01, 50


class Way(NamedTuple):
    """One form of a load: x = call(x), again and again.  compiled: by mx.compile, as decode steps
    are."""

    form: Hashable
    call: Callable[[Any], Any]
    x: Any
    compiled: bool = True


Timer = Callable[[Sequence[Way]], Sequence[float]]


class Load(NamedTuple):
    """form: the form that the profile in use selects.  way: makes a form ready to be timed."""

    form: Callable[[], Hashable]
    way: Callable[[Any], Way]


@dataclass(frozen=True)
class Choice:
    """A constant to be chosen among candidates.  method: one sentence for people."""

    name: str
    method: str
    candidates: Sequence[int]
    loads: Callable[[], Iterable[Load]]

    def measure(self, timer: Timer) -> float:
        now = profile()
        present = getattr(now, self.name)
        values = sorted({*self.candidates, present})
        costs = dict.fromkeys(values, 0.0)
        for load in self.loads():
            forms = {value: _form(load, replace(now, **{self.name: value})) for value in values}
            ways = [load.way(form) for form in dict.fromkeys(forms.values())]
            if len(ways) == 1:
                continue
            times = dict(zip((way.form for way in ways), timer(ways), strict=True))
            for value in values:
                costs[value] += times[forms[value]] / min(times.values())
        least = min(costs.values())
        if least >= (1 - _CLEARLY) * costs[present]:
            return present
        good = [value for value in values if costs[value] <= (1 + _ALIKE) * least]
        nearest = values.index(present)
        return min(good, key=lambda value: abs(values.index(value) - nearest))


@dataclass(frozen=True)
class Formula:
    """A constant that follows from times directly."""

    name: str
    method: str
    compute: Callable[[Timer], float]

    def measure(self, timer: Timer) -> float:
        low, high = TUNABLE[self.name]
        value = min(max(self.compute(timer), low), high)
        return value if self.name == "prefix_row_cost" else round(value)


Constant = Choice | Formula


@dataclass(frozen=True)
class Measured:
    """before: the value of the default profile.  failure: one line; the value is then `before`."""

    name: str
    before: float
    value: float
    method: str
    failure: str | None = None


def tune(
    constants: Sequence[Constant],
    start: DeviceProfile,
    progress: Callable[[str], object] = lambda name: None,
    timer: Timer | None = None,
) -> list[Measured]:
    """Measure constants in order, beginning with the values of `start`.

    progress: gets the name of each constant before it is measured.
    """
    found: list[Measured] = []
    for constant in constants:
        progress(constant.name)
        values: dict[str, Any] = {measured.name: measured.value for measured in found}
        value = before = getattr(start, constant.name)
        failure = None
        try:
            with using(replace(start, **values)):
                value = constant.measure(timer or seconds_in_turns)
        except Exception as e:  # from a compiler or a driver
            failure = one_line(e)
        found.append(Measured(constant.name, before, value, constant.method, failure))
        mx.clear_cache()
    return found


def _form(load: Load, candidate: DeviceProfile) -> Hashable:
    with using(candidate):
        return load.form()


def seconds_in_turns(ways: Sequence[Way]) -> list[float]:
    """Seconds per call of each way: medians, measured in turns because clocks drift."""
    chains = [_Chain(way) for way in ways]
    rounds = [[chain.seconds() for chain in chains] for _ in range(_ROUNDS)]
    return np.median(rounds, axis=0).tolist()


class _Chain:
    """Calls, each of which takes the result of the one before, so that the device stays busy."""

    def __init__(self, way: Way) -> None:
        self._x = way.x
        mx.eval(way.call(way.x))  # compiles the kernels
        start = time.perf_counter()
        mx.eval(way.call(way.x))
        once = time.perf_counter() - start
        self._length = max(2, min(_LONGEST, int(_SECONDS / once)))

        def run(x: Any) -> Any:
            for _ in range(self._length):
                x = way.call(x)
            return x

        self._run = mx.compile(run) if way.compiled else run
        for _ in range(2):  # these trace, and capture
            self.seconds()

    def seconds(self) -> float:
        start = time.perf_counter()
        mx.eval(self._run(self._x))
        return (time.perf_counter() - start) / self._length
