"""The benchmarks of engines measure what they say: the clock, the engines, the comparison."""

import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.support.models import tiny_models as tiny
from tools import repro_block_exhaustion
from tools.bench import engine as bench_engine
from tools.bench import host, speculation
from tools.bench.lib.agreement import agree
from tools.bench.lib.engines import FittedEngine
from tools.bench.lib.loads import Sizes, Wave, WaveLoad, agents, newcomer, users
from tools.bench.lib.metrics import measure, reusable_tokens
from tools.bench.lib.mlx_lm import MlxLmServer, Settings
from tools.bench.lib.models import random_model
from tools.bench.lib.roofline import step_bytes
from tools.bench.lib.runs import Runs
from tools.demo_model import recall
from tools.lib.trust import trusted
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.benchmark import MlxLmSingle, Run, drive, median_of
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.distributed import ALONE
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kv.store import PagedStore

HYBRIDS = ("qwen3.5-tiny", "nemotron-h-tiny", "lfm2-tiny")


@pytest.fixture(scope="module")
def model():
    return random_model("128x2")


@pytest.fixture(scope="module")
def shared() -> WaveLoad:
    return agents(Sizes(8192, 0.02))


@pytest.fixture(scope="module")
def expected(model, shared) -> Run:
    return drive(FittedEngine(model, shared), shared)


def test_waves_come_when_the_one_before_has_half_its_answer(shared, expected):
    size = len(shared.waves[0].prompts)
    for i in range(size, len(shared.prompts)):
        before = range(i // size * size - size, i // size * size)
        had = [sum(t <= expected.arrived[i] for t in expected.times[j]) for j in before]
        assert min(had) == shared.waves[1].after


@pytest.mark.parametrize("prefix", ["none", "once", "server"])
def test_mlx_lm_with_and_without_caches_of_the_prefix(model, shared, expected, prefix):
    run = drive(MlxLmServer(model, Settings(2, 8, prefix=prefix)), shared)
    assert agree(model, expected, run).within_ties
    late = len(shared.prompts) - len(shared.waves[0].prompts)
    least = {"none": 0, "once": late, "server": late}[prefix] * shared.prefix_length
    assert least <= run.cached_tokens <= (least and len(shared.prompts) * shared.prefix_length)


def test_runs_are_alike_because_the_prefix_is_forgotten_between_them(model, shared, expected):
    ours = FittedEngine(model, shared)
    runs = [drive(ours, shared) for _ in range(2)]
    assert [r.cached_tokens for r in runs] == [expected.cached_tokens] * 2
    assert runs[0].tokens == runs[1].tokens == expected.tokens


def test_one_request_alone(model):
    load = WaveLoad([Wave([list(range(9))], [6])])
    runs = [drive(e, load) for e in (FittedEngine(model, load), MlxLmSingle(model))]
    assert agree(model, *runs).within_ties
    assert [len(r.tokens[0]) for r in runs] == [6, 6]


def test_a_wrong_token_is_not_a_tie(model, shared, expected):
    tokens = [[*t[:3], (t[3] + 1) % 8192, *t[4:]] for t in expected.tokens]
    agreement = agree(model, expected, replace(expected, tokens=tokens))
    assert agreement.equal == 0
    assert not agreement.within_ties


def test_paces_of_a_run():
    """Two requests, a token every 10 ms from 0.1 s on; the second is 5 ms late once."""
    times = [[0.1 + 0.01 * i for i in range(20)] for _ in range(2)]
    times[1][12:] = [t + 0.005 for t in times[1][12:]]
    run = Run([0.0, 0.05], times, [[0] * 20] * 2, seconds=0.4, peak_bytes=1 << 30)
    values = measure(WaveLoad([Wave([[1]] * 2, [20] * 2)]), run)
    assert values["output_tokens_per_s"] == pytest.approx(100)
    assert values["ttft_median"] == pytest.approx(0.075)
    assert values["gap_median"] == pytest.approx(0.01)
    assert values["gap_worst"] == pytest.approx(0.015)
    # From 0.17 to 0.29: 12 tokens of the first, 11 of the second.
    assert values["steady_tokens_per_s"] == pytest.approx(23 / 0.12)
    assert values["peak_gib"] == 1


def test_medians_are_of_the_metrics_that_all_turns_have():
    """A turn whose requests never decode together has no steady pace."""
    turns = [{"ttft": 1.0, "steady": 2.0}, {"ttft": 3.0}]
    assert median_of(turns) == {"ttft": 2.0}


def test_gaps_around_a_newcomer():
    """One request decodes every 10 ms; while the newcomer is computed (0.2 to 0.26), every 30."""
    times = [0.01 * i for i in range(1, 21)] + [0.23, 0.26, 0.27]
    run = Run([0.0, 0.2], [times, [0.26, 0.27]], [[0] * 23, [0] * 2], seconds=0.27)
    load = newcomer(Sizes(100, 0.01))
    values = measure(load, run)
    assert values["newcomer_ttft"] == pytest.approx(0.06)
    assert values["newcomer_tokens_per_s"] == pytest.approx(2 / 0.07)
    assert values["idle_gap_median"] == pytest.approx(0.01)
    assert values["busy_gap_median"] == pytest.approx(0.03)
    assert values["busy_gap_worst"] == pytest.approx(0.03)
    assert values["others_tokens_per_s"] == pytest.approx(2 / 0.06)


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request):
    return random_model(request.param)


@pytest.fixture(scope="module")
def conversations() -> WaveLoad:
    return users(Sizes(512, 0.02), count=3, turns=2)


@pytest.mark.long
def test_states_of_random_weights_stay_finite_and_remember(hybrid):
    model = hybrid.packed.model
    tokens = mx.random.randint(0, 512, (1, 400))
    other = mx.concatenate([(tokens[:, :1] + 1) % 512, tokens[:, 1:]], axis=1)
    first, second = (model(t)[0] for t in (tokens, other))
    assert mx.isfinite(first).all()
    assert mx.abs(first - second)[30].max() / first.std() > 0.01


def test_a_turn_follows_its_own_answer(model, conversations):
    run = drive(FittedEngine(model, conversations), conversations)
    for i, before in enumerate(conversations.follows):
        if before is not None:
            said = run.prompts[before] + run.tokens[before]
            assert run.prompts[i][: len(said)] == said
            assert run.arrived[i] >= run.times[before][-1]
    sizes = [len(p) + len(t) for p, t in zip(run.prompts, run.tokens, strict=True)]
    assert sizes == conversations.sizes


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["once", "server"])
def test_mlx_lm_keeps_caches_with_states(hybrid, conversations, prefix):
    ours = drive(FittedEngine(hybrid, conversations), conversations)
    run = drive(MlxLmServer(hybrid, Settings(3, 8, prefix=prefix)), conversations)
    assert agree(hybrid, ours, run).within_ties
    shared = conversations.prefix_length * (len(conversations.prompts) - 1)
    assert (
        run.cached_tokens == {"once": shared, "server": reusable_tokens(conversations, run)}[prefix]
    )


def test_bytes_of_a_decode_step():
    model = random_model("nemotron-h-tiny")
    embedding = 2048 * 64 * 4
    state = 8 * 16 * 16 * 4 + 3 * (8 * 16 + 2 * 2 * 16) * 4  # of each of three layers
    keys_and_values = 2 * 2 * 16 * 4
    assert step_bytes(model, 3, 10) == (
        model.weight_bytes - embedding + 3 * (10 * keys_and_values + 2 * 3 * state)
    )


def test_bytes_of_experts_that_are_used():
    """16 experts, 4 a token, in two layers: three matrices of 64 x 64 each."""
    model = random_model("qwen3-moe-tiny")
    experts = 2 * 3 * 64 * 64 * 4
    unused = step_bytes(model, 1, 10) + 12 * experts - model.weight_bytes
    keys_and_values = 10 * model.kv_bytes_per_token
    assert unused == pytest.approx(keys_and_values - 2048 * 64 * 4)
    assert step_bytes(model, 100, 0) == pytest.approx(model.weight_bytes - 2048 * 64 * 4)


@pytest.mark.thorough
def test_the_tables_of_loads_of_a_hybrid_model(run_tool, capsys):
    arguments = "--model nemotron-h-tiny --load decodes single --scale 0.03 --quick"
    assert run_tool(bench_engine, arguments) == 0
    tables = []
    for text in capsys.readouterr().out.split("### ")[1:]:
        columns, _, ours, _, ratio = (
            line.split(" | ") for line in text.splitlines() if line.startswith("| ")
        )
        assert dict(zip(columns, ratio, strict=True))["output tokens/s"].startswith("**")
        tables.append(dict(zip(columns, ours, strict=True)))
    decodes, _ = tables
    assert decodes["of roofline"].endswith("%")


def test_an_engine_that_fails_is_left_out(model, capsys):
    load = WaveLoad([Wave([[1]], [2])])
    runs, engine = Runs("single"), MlxLmSingle(model)
    assert runs.tried(engine, load)["output_tokens_per_s"] > 0
    engine.step = Mock(side_effect=RuntimeError("cuGraphAddKernelNode: invalid argument"))
    assert runs.tried(engine, load) is None
    assert capsys.readouterr().err.endswith("left out, cuGraphAddKernelNode: invalid argument\n")


def test_warm_ups_end_when_two_runs_agree_or_after_six(monkeypatch):
    for seconds, expected in [([3, 1, 1, 1], 3), ([1, 1, 1], 2), ([9, 7, 5, 4, 3, 2, 1], 6)]:
        load, left = WaveLoad([Wave([[1]], [2])]), [Mock(seconds=s) for s in seconds]
        runs = Runs()
        monkeypatch.setattr(runs, "run", lambda *_, left=left: left.pop(0))
        runs.warm_up({"any": (Mock(), load)})
        assert len(seconds) - len(left) == expected


def test_a_trusted_engine_uses_every_kernel_for_all_rows(monkeypatch):
    model = tiny.packed("qwen3", mx.bfloat16)
    store = PagedStore(model.packed.layout.specs, 4, 8)
    monkeypatch.setattr(decide.Trial, "problem", lambda *_: pytest.fail("a trial"))
    with trusted("varlen"):
        verdict = verdicts.verify(None)
        fusion = decide.decide(model.packed, KernelAttention(store, verdict.prefill, ()), ALONE)
    assert not verdict.failures
    assert fusion.skinny_rows == range(1, 65)


@pytest.mark.parametrize(
    ("tool", "arguments", "error"),
    [
        (bench_engine, "--load short_even --scale 0", "--scale: must be above 0, got 0"),
        (bench_engine, "--load short_even --repeats -1", "--repeats: must be at least 1, got -1"),
        (speculation, "--runs 0", "--runs: must be at least 1, got 0"),
        (speculation, "--runs 1e3", "--runs: must be an integer, got '1e3'"),
        (speculation, "--runs 10000000", "--runs: must be at most 1000000, got 10000000"),
        (bench_engine, "--load short_even --scale nan", "--scale: must be above 0, got nan"),
        (
            bench_engine,
            "--load short_even --scale inf",
            "--scale: must be at most 1000000, got inf",
        ),
        (recall, "--require nan", "--require: must be from 0 to 1, got nan"),
        (recall, "--lengths 0", "--lengths: must be at least 1, got 0"),
        (repro_block_exhaustion, "--num-requests 1", "--num-requests: must be at least 2, got 1"),
        (
            repro_block_exhaustion,
            "--num-requests 99999999999",
            "--num-requests: must be at most 16384, got 99999999999",
        ),
        (repro_block_exhaustion, "--num-requests " + "9" * 5000, "must be an integer, got '999"),
        (repro_block_exhaustion, "--oversubscribe 1", "--oversubscribe must be above 1, got 1"),
        (repro_block_exhaustion, "--oversubscribe nan", "--oversubscribe: must be above 0"),
        (
            repro_block_exhaustion,
            "--tensor-parallel-size 2",
            "--tensor-parallel-size 2 needs --engine vllm",
        ),
    ],
)
def test_a_number_that_cannot_work_is_named_before_the_run(
    run_tool, capsys, tool, arguments, error
):
    with pytest.raises(SystemExit, match="2"):
        run_tool(tool, arguments)
    assert error in capsys.readouterr().err


def test_drafts_of_an_edited_text_are_accepted(run_tool, capsys):
    run_tool(speculation, "--model 128x2 --length 120 --only edit --requests 1 --runs 1")
    assert int(re.search(r"(\d+) of \d+ \|$", capsys.readouterr().out.rstrip())[1]) > 0


def test_steps_without_a_model_take_time_of_the_host(run_tool, capsys):
    assert run_tool(host, "--requests 2 --steps 3") == 0
    found = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(found) == 3
    assert all(float(cpu) > 0 for _, cpu in found)


def test_a_model_without_known_heads_leaves_their_rows_out(run_tool, capsys):
    assert run_tool(speculation, "--model 128x2 --length 100 --only heads") == 0
    assert "no trained heads are known" in capsys.readouterr().err
