"""The serving benchmark measures what it says: its clock, its engines, its comparison of tokens."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bench_kernels
import serving_engines as engines
from serving_loads import Load, Sizes, Wave, agents, newcomer
from serving_metrics import agree, measure
from serving_models import random_model

from vllm_metal_lite import MetalLiteError, backend


@pytest.fixture(scope="module")
def model():
    return random_model("128x2")


@pytest.fixture(scope="module")
def shared() -> Load:
    (load,) = agents(Sizes(8192, 0.02))
    return load


@pytest.fixture(scope="module")
def expected(model, shared) -> engines.Run:
    return engines.drive(engines.Ours(model, shared), shared)


def test_waves_come_when_the_one_before_has_half_its_answer(shared, expected):
    size = len(shared.waves[0].prompts)
    for i in range(size, len(shared.prompts)):
        before = range(i // size * size - size, i // size * size)
        had = [sum(t <= expected.arrived[i] for t in expected.times[j]) for j in before]
        assert min(had) == shared.waves[1].after


@pytest.mark.parametrize("prefix", ["none", "once", "server"])
def test_mlx_lm_with_and_without_caches_of_the_prefix(model, shared, expected, prefix):
    settings = engines.Settings(2, 8, prefix=prefix)
    run = engines.drive(engines.MlxLm(model, settings), shared)
    agreement = agree(model, expected, run)
    assert agreement.within_ties
    late = len(shared.prompts) - len(shared.waves[0].prompts)
    least = {"none": 0, "once": late, "server": late}[prefix] * shared.prefix_length
    assert least <= run.cached_tokens <= (least and len(shared.prompts) * shared.prefix_length)


def test_runs_are_alike_because_the_prefix_is_forgotten_between_them(model, shared, expected):
    ours = engines.Ours(model, shared)
    runs = [engines.drive(ours, shared) for _ in range(2)]
    assert [r.cached_tokens for r in runs] == [expected.cached_tokens] * 2
    assert runs[0].tokens == runs[1].tokens == expected.tokens


def test_one_request_alone(model):
    load = Load("one", [Wave([list(range(9))], [6])])
    runs = [engines.drive(e, load) for e in (engines.Ours(model, load), engines.MlxLmSingle(model))]
    assert agree(model, *runs).within_ties
    assert [len(r.tokens[0]) for r in runs] == [6, 6]


def test_a_wrong_token_is_not_a_tie(model, shared, expected):
    tokens = [[*t[:3], (t[3] + 1) % 8192, *t[4:]] for t in expected.tokens]
    wrong = replace(expected, tokens=tokens)
    agreement = agree(model, expected, wrong)
    assert agreement.equal == 0
    assert not agreement.within_ties


def test_paces_of_a_run():
    """Two requests, a token every 10 ms from 0.1 s on; the second is 5 ms late once."""
    times = [[0.1 + 0.01 * i for i in range(20)] for _ in range(2)]
    times[1][12:] = [t + 0.005 for t in times[1][12:]]
    run = engines.Run([0.0, 0.05], times, [[0] * 20] * 2, seconds=0.4, peak_bytes=1 << 30)
    values = measure(Load("", [Wave([[1]] * 2, [20] * 2)]), run)
    assert values["output_tokens_per_s"] == pytest.approx(100)
    assert values["ttft_median"] == pytest.approx(0.075)
    assert values["gap_median"] == pytest.approx(0.01)
    assert values["gap_worst"] == pytest.approx(0.015)
    # From 0.17 to 0.29: 12 tokens of the first, 11 of the second.
    assert values["steady_tokens_per_s"] == pytest.approx(23 / 0.12)
    assert values["peak_gib"] == 1


def test_gaps_around_a_newcomer():
    """One request decodes every 10 ms; while the newcomer is computed (0.2 to 0.26), every 30."""
    times = [0.01 * i for i in range(1, 21)] + [0.23, 0.26, 0.27]
    run = engines.Run([0.0, 0.2], [times, [0.26, 0.27]], [[0] * 23, [0] * 2], seconds=0.27)
    (load,) = newcomer(Sizes(100, 0.01))
    values = measure(load, run)
    assert values["newcomer_ttft"] == pytest.approx(0.06)
    assert values["newcomer_tokens_per_s"] == pytest.approx(2 / 0.07)
    assert values["idle_gap_median"] == pytest.approx(0.01)
    assert values["busy_gap_median"] == pytest.approx(0.03)
    assert values["busy_gap_worst"] == pytest.approx(0.03)
    assert values["others_tokens_per_s"] == pytest.approx(2 / 0.06)


@pytest.mark.skipif(not backend.is_cpu(), reason="there is a GPU")
def test_kernels_are_not_timed_without_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--only", "decode"])
    with pytest.raises(MetalLiteError, match="kernels need a GPU"):
        bench_kernels.main()
