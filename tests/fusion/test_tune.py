"""Products and mixtures use the faster of the kernels and MLX, which is measured once.  Timed steps
leave nothing behind."""

import re
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from metal.host import installed
from tests.support.engine import rank_threads
from tests.support.kernels.device import pretend_gpu
from tests.support.kernels.launches import Stubs, watch
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import CONFIGS
from tests.support.models.rounding import of_16_bits
from vllm_metal_lite import backend
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import isolated
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.fusion import decide, tune
from vllm_metal_lite.fusion.launches import FusedLaunches, fuse
from vllm_metal_lite.kernels.experts import MAX_ROWS as EXPERT_ROWS
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.scheduler.kv_groups import KVGroup

ALL_ROWS = range(1, 65)
ALL_EXPERTS = FusedLaunches(expert_rows=range(1, EXPERT_ROWS + 1))


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, tmp_path):
    """A machine that seems to have a GPU, and remembers nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(mx, "gather_mm", of_16_bits(mx.gather_mm))


def model(name="qwen3", dtype=mx.bfloat16, failed=(), block_size=8):
    """A packed model, and attention by kernels except those that failed."""
    packed = tiny.packed(name, dtype).packed
    specs, groups = packed.layout.specs, {}
    for layer, spec in enumerate(specs):
        groups.setdefault(spec.window, []).append(layer)
    blocks = [KVGroup(tuple(layers), num_blocks=4) for layers in groups.values()]
    store = PagedStore(specs, blocks, block_size, states=packed.state_store(1))
    return packed, KernelAttention(store, "gather", (), failed_kernels=failed)


def decided(monkeypatch, packed, attention) -> tuple[range, str]:
    """The rows whose products go through the kernel, and the note, for a model that passes its
    trial."""
    monkeypatch.setattr(decide._Trials, "problem", lambda *_: None)
    fusion = decide.decide(packed, attention, ALONE)
    return fusion.skinny_rows, fusion.note


def timed(monkeypatch, *faster) -> list[int]:
    """Make steps of these row counts faster by the kernel; returns the list of timed row counts."""
    sizes = []

    def seconds(steps, num_rows):
        sizes.append(num_rows)
        return (1.0, 1.1) if num_rows in faster else (1.0, 1.0)

    monkeypatch.setattr(tune._Steps, "seconds", seconds)
    return sizes


@pytest.mark.parametrize(
    ("faster", "rows", "count"),
    [
        ((1, 8, 16, 32, 64), range(1, 65), "1 to 64 rows"),
        ((2, 8, 16, 32, 64), range(2, 65), "2 to 64 rows"),
        ((4, 8, 16, 64), range(4, 17), "4 to 16 rows"),
        ((8, 16), range(8, 17), "8 to 16 rows"),
        ((2, 4), range(2, 3), "2 rows"),
        ((1, 8), range(1, 9), "1 to 8 rows"),
        ((1,), range(1, 2), "one row"),
        ((), range(0), None),
    ],
)
def test_as_many_rows_as_steps_are_faster_with(monkeypatch, faster, rows, count):
    timed(monkeypatch, *faster)
    said = f"; products of {count} by skinny_gemm" if count else ""
    for _ in ("measured", "remembered"):
        assert decided(monkeypatch, *model()) == (rows, said)


def test_a_model_s_weights_are_measured_once(monkeypatch):
    """A model with more weights, or with others, is measured again."""
    sizes = timed(monkeypatch, 8)
    decided(monkeypatch, *model())
    assert sizes == [1, 2, 4, 32, 16, 8]
    decided(monkeypatch, *model())
    assert len(sizes) == 6
    for count, (name, dtype) in enumerate([("llama", mx.bfloat16), ("qwen3", mx.float16)], 2):
        decided(monkeypatch, *model(name, dtype))
        assert len(sizes) == 6 * count


def test_weights_count_by_how_many_there_are(monkeypatch):
    sizes = timed(monkeypatch)
    packed, attention = model()
    decided(monkeypatch, packed, attention)
    once = list(sizes)
    weights = tune.product_weights(packed.model)
    monkeypatch.setattr(tune, "product_weights", lambda _: weights[::-1])
    decided(monkeypatch, *model())
    assert sizes == once
    monkeypatch.setattr(tune, "product_weights", lambda _: [*weights, weights[0]])
    decided(monkeypatch, *model())
    assert sizes == once * 2


@pytest.mark.parametrize(
    ("name", "dtype", "wrong"),
    [
        ("qwen3", mx.bfloat16, ("skinny_gemm",)),
        ("qwen3", None, ()),  # float32
        ("llama/q3", mx.bfloat16, ()),
        ("recurrent_gemma", mx.bfloat16, ()),  # its steps run uncompiled
    ],
)
def test_nothing_is_timed_where_the_kernel_cannot_help(monkeypatch, name, dtype, wrong):
    monkeypatch.setitem(CONFIGS, "llama/q3", {"quantization": {"bits": 3, "group_size": 32}})
    sizes = timed(monkeypatch, 1, 8)
    assert decided(monkeypatch, *model(name, dtype, wrong)) == (range(0), "")
    assert sizes == []


@pytest.mark.parametrize("name", ["llama/q4", "llama/mxfp4", "llama/mixed", "mamba2"])
def test_products_are_timed(monkeypatch, name):
    sizes = timed(monkeypatch, 1, 8)
    rows, _ = decided(monkeypatch, *model(name))
    assert (rows, sizes) == (range(1, 9), [1, 32, 16, 8])


def test_nothing_is_timed_on_a_cpu(monkeypatch):
    sizes = timed(monkeypatch, 1, 8)
    packed, attention = model()
    monkeypatch.setattr(backend, "is_cpu", lambda: True)
    assert decided(monkeypatch, packed, attention) == (range(0), "")
    assert sizes == []


def test_products_that_cannot_be_timed_are_mlx_s(monkeypatch, caplog, tmp_path):
    """One row could be timed, but more rows fail.  The next start tries again.  Launches are
    stubs."""

    def no_room_for_32(kernel, arrays, _):
        if kernel == "skinny_gemm" and len(arrays[0]) == 32:
            raise RuntimeError("[metal]\n no room")

    Stubs(monkeypatch)
    watch(monkeypatch, no_room_for_32)
    for _ in range(2):
        caplog.clear()
        assert decided(monkeypatch, *model()) == (range(0), "")
        assert re.search(r"skinny_gemm .* not used: .*\[metal\] no room$", caplog.messages[-1])
        assert not list(tmp_path.rglob("*.json"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "hunyuan_v1_dense", "gemma3_text/w9", "lfm2"])
def test_timing_leaves_the_store_as_it_is(monkeypatch, name):
    """The models write by attention and by kv_write, have two KV groups, or have states."""
    monkeypatch.setattr(tune, "_SIZES", (8,))
    monkeypatch.setattr(tune, "_MAX_SECONDS", 0.0)
    rows = Counter()

    def count(kernel, arrays, _):
        rows[len(arrays[0])] += kernel == "skinny_gemm"

    watch(monkeypatch, count)
    packed, attention = model(name)
    store, rng = attention.store, np.random.default_rng(0)
    for arrays in (store.keys, store.values):
        arrays[:] = [mx.array(rng.standard_normal(a.shape)).astype(a.dtype) for a in arrays]
    held = [*store.arrays, *store.states.arrays]
    before = [np.array(a.astype(mx.float32)) for a in held]
    assert all(np.isfinite(a).all() for a in before)
    fusion = replace(fuse(packed.model, joins=True), skinny_rows=ALL_ROWS)
    with installed():
        tune.faster_rows(packed, attention, fusion, ALONE)
    kept = [*store.arrays, *store.states.arrays]
    assert all(a is b for a, b in zip(kept, held, strict=True))
    for array, expected in zip(held, before, strict=True):
        np.testing.assert_array_equal(np.array(array.astype(mx.float32)), expected)
    assert set(+rows) <= {1, 2, 4, 8}
    assert rows[1] == rows[8] > 0


def test_a_trial_that_passed_is_remembered_for_models_of_its_form(monkeypatch, tmp_path):
    tried = []
    qwen, llama, blocks = model("qwen3"), model("llama"), model("qwen3", block_size=16)
    monkeypatch.setattr(decide.Trial, "problem", lambda trial, *_: tried.append(trial))
    fusion = FusedLaunches()
    less = fusion.without(["add_rms_norm"])
    for count, (tiny_model, of_fusion) in enumerate(
        [(qwen, fusion), (llama, fusion), (blocks, fusion), (qwen, less)], 1
    ):
        for _ in range(2):
            assert decide._Trials(*tiny_model, ALONE).problem(of_fusion) is None
            assert len(tried) == count


def test_a_trial_that_failed_is_repeated(monkeypatch):
    packed, attention = model()
    monkeypatch.setattr(decide.Trial, "problem", lambda *_: "wrong logits")
    for _ in range(2):
        assert decide._Trials(packed, attention, ALONE).problem(FusedLaunches())


def test_ctrl_c_ends_a_trial_at_once(monkeypatch):
    trials = decide._Trials(*model(), ALONE)
    monkeypatch.setattr(decide.Trial, "problem", tried := Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trials.problem(FusedLaunches())
    assert tried.call_count == 1


@pytest.mark.parametrize("suits", [True, False])
def test_an_engine_times_a_model_that_passed_its_trial(monkeypatch, caplog, suits):
    order = []
    sizes = timed(monkeypatch, 2, 8, 16)

    def problem(trials, fusion):
        order.append((fusion.skinny_rows, list(sizes)))
        return "wrong logits" if fusion.skinny_rows and not suits else None

    monkeypatch.setattr(decide._Trials, "problem", problem)
    monkeypatch.setattr(isolated, "results", lambda *_, **__: [])
    with installed():
        engine = tiny.engine("qwen3", mx.bfloat16, attention="kernels")
    assert order == [(range(0), []), (ALL_ROWS, [])]
    assert bool(caplog.records) is not suits
    assert engine.runner.path.fusion.skinny_rows == (range(2, 17) if suits else range(0))
    said = engine.runner.path.reason.rpartition(";")[2]
    assert said == (
        " products of 2 to 16 rows by skinny_gemm" if suits else " prompts by MLX's SDPA"
    )


def test_a_rank_follows_what_rank_0_knows(monkeypatch):
    """A rank without a finding does not measure alone, because the others would not take part."""

    class Follower(RankGroup):
        def from_leader(self, value):
            return "1 9"

    sizes = timed(monkeypatch, 1, 8)
    packed, attention = model()
    fusion = FusedLaunches(skinny_rows=ALL_ROWS)
    assert tune.faster_rows(packed, attention, fusion, Follower()) == range(1, 9)
    assert not sizes


def test_a_step_that_fails_on_one_rank_fails_on_all(monkeypatch, caplog):
    """If a rank stopped alone, the others would wait for its time."""
    stages = [model() for _ in range(2)]

    def back_to_back(steps, *_):
        def run(count):
            if steps.ranks.rank == 0:
                raise RuntimeError("[metal]\n no room")

        return run

    monkeypatch.setattr(tune._Steps, "_back_to_back", back_to_back)
    fusion = FusedLaunches(skinny_rows=ALL_ROWS)
    rows = rank_threads.run(lambda ranks: tune.faster_rows(*stages[ranks.rank], fusion, ranks))
    assert rows == [range(0)] * 2
    assert [m.rpartition(": ")[2] for m in caplog.messages] == ["[metal] no room"] * 2


@pytest.mark.parametrize("names", [("qwen3", "qwen3_moe"), ("qwen3_moe", "qwen3")])
def test_a_stage_without_experts_waits_for_the_others(monkeypatch, names):
    """Each stage takes part in trials and timings of weights that only another stage has."""
    stages, layers = [model(name) for name in names], Counter()

    def problem(trials, fusion):
        trials.ranks.gather("rows")

    def seconds(steps, num_rows):
        return steps.ranks.from_leader((1.0, 1.1))

    def mixture_seconds(layer, *_):
        layers[id(layer)] += 1
        return 1.0, 1.1

    monkeypatch.setattr(decide._Trials, "problem", problem)
    monkeypatch.setattr(decide, "fuse", lambda *_, **__: FusedLaunches())
    monkeypatch.setattr(tune._Steps, "seconds", seconds)
    monkeypatch.setattr(tune, "_mixture_seconds", mixture_seconds)
    fusions = rank_threads.run(lambda ranks: decide.decide(*stages[ranks.rank], ranks))
    assert fusions[0] == fusions[1]
    assert fusions[0].expert_rows == range(1, EXPERT_ROWS + 1)
    assert len(layers) == 1


# Prompts


@pytest.mark.parametrize(
    ("few", "prompts", "rows"),
    [
        (range(2, 65), True, range(2, EXPERT_ROWS + 1)),
        (range(2, 65), False, range(2, 65)),
        (range(1, 33), True, range(1, 33)),  # fewer rows are already slower
        (range(0), True, range(0)),
    ],
)
def test_prompts_come_behind_few_rows(monkeypatch, few, prompts, rows):
    monkeypatch.setattr(tune._Steps, "winning_rows", lambda *_: few)
    monkeypatch.setattr(tune, "_faster_prompts", lambda *_: prompts)
    assert tune.faster_expert_rows(*model("qwen3_moe"), ALL_EXPERTS, ALONE) == rows


@pytest.mark.parametrize(("seconds", "faster"), [((1.0, 1.1), True), ((1.0, 1.0), False)])
def test_the_faster_way_is_remembered(monkeypatch, seconds, faster):
    """All mixtures of the model have the same shape."""
    packed, _ = model("qwen3_moe")
    calls = []
    monkeypatch.setattr(tune, "_mixture_seconds", lambda *how: calls.append(how) or seconds)
    assert [tune._faster_prompts(packed) for _ in range(2)] == [faster, faster]
    assert len(calls) == 1


@pytest.mark.parametrize(("enough", "calls"), [(1e9, tune._ROUNDS), (0, 1)])
def test_mixtures_are_timed_by_kernels_and_by_mlx(monkeypatch, enough, calls):
    launched = []
    Stubs(monkeypatch)
    watch(monkeypatch, lambda kernel, *_: launched.append(kernel))
    monkeypatch.setattr(tune, "_PROMPT_SECONDS", enough)
    packed, _ = model("qwen3_moe")
    fuse(packed.model, joins=False)
    tune._faster_prompts(packed)
    # One call compiles, and one decides how many are timed.
    assert launched.count("expert_plan") == 2 + calls
    assert launched.count("expert_gemm") == 2 * launched.count("expert_plan")


def test_mixtures_that_cannot_be_timed_are_mlx_s(monkeypatch, caplog):
    """The next start tries again."""
    monkeypatch.setattr(Kernel, "__call__", Mock(side_effect=RuntimeError("[metal]\n no room")))
    packed, _ = model("qwen3_moe")
    fuse(packed.model, joins=False)
    for _ in range(2):
        caplog.clear()
        assert not tune._faster_prompts(packed)
        assert "cannot be timed: [metal] no room" in caplog.text


def test_a_start_says_that_prompts_are_served():
    assert ALL_EXPERTS.note == "; experts of all rows by expert_gemm"
    but_one = FusedLaunches(expert_rows=range(2, EXPERT_ROWS + 1))
    assert but_one.note == "; experts of 2 rows and more by expert_gemm"
