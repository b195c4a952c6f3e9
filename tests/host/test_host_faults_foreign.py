"""Faults seeded into kernels that are not ours: each barrier removed in turn, and a few others.

Some barriers order nothing (nobody wrote before, or a later one does their work): they are named
here, and removing them must not be reported: the checker is exact in both directions.
"""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from metal.host import HostOptions, KernelFault
from tests.support.host.foreign_attention import sdpa_vector, steel_attention, two_pass_second
from tests.support.host.foreign_runs import random, softmax, sort
from tests.support.kernels.seeded_faults import BARRIER, Fault, read_faults


def second_pass():
    partials = [random(shape, "float")[0] for shape in ((2, 1, 32, 64), (2, 1, 32), (2, 1, 32))]
    return two_pass_second("float", partials[0], mx.abs(partials[1]) + 1, partials[2])


# The call, which barriers of the text its kernel has, and which of them order nothing.
CASES = {
    "softmax": (lambda: softmax("float", 2, 300)[0], range(5), ()),
    "softmax_looped": (lambda: softmax("float", 2, 300, looped=True)[0], range(5, 7), ()),
    "sdpa_vector": (lambda: sdpa_vector("float", "none", 1, 1, 1, 40, 64)[0], range(3), ()),
    "second_pass": (second_pass, range(4, 6), ()),
    "sort": (lambda: sort(1, 250)[0], range(5), ()),
    "steel_attention": (
        lambda: steel_attention("float", False, 1, 1, 33, 70, 64)[0],
        (0, 1, 2, 5, 6),
        (0,),
    ),
}


@pytest.mark.parametrize(
    ("case", "number"),
    [(case, number) for case, (_, there, _) in CASES.items() for number in there],
)
def test_barrier_removed(case, number):
    make, _, idle = CASES[case]
    dispatch = make()
    source = Fault(case, BARRIER, number, ";", ()).seeded(dispatch.source)
    for schedule in ("forward", 5):
        options = HostOptions(checked=True, schedule=schedule)
        dispatch.run(options)
        if number in idle:
            replace(dispatch, source=source).run(options)
            continue
        with pytest.raises(KernelFault) as raised:
            replace(dispatch, source=source).run(options)
        assert raised.value.kind in ("race", "uninitialised"), raised.value


FAULTS = read_faults(Path(__file__))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(name):
    fault = FAULTS[name]
    dispatch = CASES[fault.kernel][0]()
    assert fault.text in dispatch.source, f"no {fault.text!r}: the fault is not seeded"
    mutant = replace(dispatch, source=dispatch.source.replace(fault.text, fault.put_there))
    with pytest.raises(KernelFault) as raised:
        mutant.run(HostOptions(checked=True))
    assert raised.value.kind in fault.kinds, raised.value
