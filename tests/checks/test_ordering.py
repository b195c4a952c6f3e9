"""The ordering stress sees launches that run out of order, and no others."""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from metal.host import HostKernel, installed
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import isolated, ordering
from vllm_metal_lite.checks.ordering import BUFFERS, build, problem, stress
from vllm_metal_lite.kernels.store import LayerStore

TINY = {"launches": 24, "sequences": 2, "context": 32}
TINY |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
KERNELS = "kv_write", "kv_gather", "paged_decode"


def test_launches_in_order_are_right():
    with installed():
        reads = build(**TINY)
        assert problem(reads) is None
    assert {"kv_write", *(kernel for kernel, *_ in reads)} == set(KERNELS)


class Launches:
    """Replaces kernels by a device that orders launches by what they declare, as a GPU may.

    Launches are noted and answered with arrays that hold nothing yet.  `run` then executes them on
    the CPU host in any order in which a launch comes after those whose outputs it takes, and after
    no other: a write through an input, which MLX cannot see, orders nothing.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[HostKernel, dict[str, Any]]] = []
        self.outputs: list[list[mx.array]] = []  # kept, so that no other array gets this id
        self.made_by: dict[int, int] = {}

    def launcher(self, *args: Any, **kwargs: Any) -> Callable[..., list[mx.array]]:
        kernel = HostKernel(*args, **kwargs)

        def launch(**call: Any) -> list[mx.array]:
            shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            outputs = [mx.zeros(shape, dtype) for shape, dtype in shapes]
            mx.eval(outputs)
            self.made_by |= {id(a): len(self.launches) for a in outputs}
            self.launches.append((kernel, call))
            self.outputs.append(outputs)
            return outputs

        return launch

    def _needs(self, i: int) -> set[int]:
        """The launches whose outputs are inputs of launch i."""
        return {self.made_by.get(id(a), -1) for a in self.launches[i][1]["inputs"]}

    def run(self, pick: Callable[[list[int]], int]) -> dict[int, mx.array]:
        """Execute everything; `pick` chooses among the launches that may be next.

        Returns the results by the id of the array that was handed out for each.
        """
        results: dict[int, mx.array] = {}
        waiting = set(range(len(self.launches)))
        while waiting:
            ready = [i for i in sorted(waiting) if not self._needs(i) & waiting]
            i = pick(ready)
            kernel, call = self.launches[i]
            inputs = [results.get(id(a), a) for a in call["inputs"]]
            done = kernel(**call | {"inputs": inputs})
            results |= {id(a): r for a, r in zip(self.outputs[i], done, strict=True)}
            waiting.remove(i)
        return results


def first_problem(pick):
    launches = Launches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", launches.launcher)
        reads = build(**TINY)
    results = launches.run(pick)
    return problem([(*read, results[id(values)]) for *read, values in reads])


def test_tickets_order_the_launches_in_every_order_that_a_device_may_take():
    rng = np.random.default_rng(0)
    assert first_problem(max) is None
    assert first_problem(lambda ready: int(rng.choice(ready))) is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_dropped_ticket_is_noticed(monkeypatch, kernel):
    """The launch returns the ticket that it took, so no later launch waits for it."""
    launch = getattr(ordering, kernel)

    def forgetful(*args, **kwargs):
        result = launch(*args, **kwargs)
        (ticket,) = (arg.ticket for arg in args if isinstance(arg, LayerStore))
        return (*result[:-1], ticket) if isinstance(result, tuple) else ticket

    monkeypatch.setattr(ordering, kernel, forgetful)
    assert " must see " in first_problem(max)


def told() -> tuple[int, str]:
    return 1, os.environ["MLX_MAX_OPS_PER_BUFFER"]


@pytest.fixture
def process(monkeypatch):
    """The child process works, but its launches are not kernels."""
    words = [sys.executable, "-P", "-m", "vllm_metal_lite.checks.run_check"]
    monkeypatch.setattr(isolated, "command", lambda: words)


def test_each_process_gets_its_variables(process, monkeypatch):
    monkeypatch.setattr(ordering, "run", told)
    found = {o.buffers: o.problem for o in stress()}
    assert found == dict(zip(BUFFERS, ("1", "10000"), strict=True))


@pytest.mark.long
def test_a_process_that_gives_no_result_is_a_problem(process, monkeypatch):
    monkeypatch.setattr(ordering, "run", os.abort)
    assert next(stress()).problem == "ends the process: SIGABRT"


def test_a_python_that_cannot_be_started_is_a_problem(monkeypatch):
    monkeypatch.setattr(isolated, "command", lambda: ["/nowhere/python"])
    assert "No such file" in next(stress()).problem


def test_the_whole_graph_is_evaluated(monkeypatch):
    monkeypatch.setattr(ordering, "build", list)
    assert ordering.run() == (0, None)
