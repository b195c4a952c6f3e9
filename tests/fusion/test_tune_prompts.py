"""Whether experts of prompts run by the kernels: the faster way, measured once.

Launches are stubs.
"""

import pytest

from tests.support.models import tiny_models as tiny
from tests.support.models.rounding import of_16_bits
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE
from vllm_metal_lite.fusion import tune, tune_prompts
from vllm_metal_lite.fusion.launches import FusedLaunches, fuse
from vllm_metal_lite.kernels.experts import MAX_ROWS
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kv.store import PagedStore

ALL = FusedLaunches(expert_rows=range(1, MAX_ROWS + 1))


@pytest.fixture(autouse=True)
def remembers_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mx, "gather_mm", of_16_bits(mx.gather_mm))


def model(name="qwen3_moe"):
    packed = tiny.packed(name, mx.bfloat16).packed
    fuse(packed.model, joins=False)
    store = PagedStore(packed.layout.specs, 4, 8, states=packed.state_store(1))
    return packed, KernelAttention(store, "gather", ())


def timed(monkeypatch, by_kernels: float, by_mlx: float) -> list[int]:
    """A list that grows by the experts of each mixture that is timed."""
    found = []

    def seconds(layer, shape, dtype):
        found.append(shape.experts)
        return by_kernels, by_mlx

    monkeypatch.setattr(tune_prompts, "_mixture_seconds", seconds)
    return found


@pytest.mark.parametrize(("few", "prompts", "rows"), [
    (range(2, 65), True, range(2, MAX_ROWS + 1)),
    (range(2, 65), False, range(2, 65)),
    (range(1, 33), True, range(1, 33)),  # more rows are slower already
    (range(0), True, range(0)),
])  # fmt: skip
def test_prompts_come_behind_few_rows(monkeypatch, few, prompts, rows):
    monkeypatch.setattr(tune._Steps, "faster_rows", lambda *_: few)
    monkeypatch.setattr(tune, "faster_prompts", lambda *_: prompts)
    assert tune.faster_expert_rows(*model(), ALL, ALONE) == rows


@pytest.mark.parametrize(("seconds", "faster"), [((1.0, 1.1), True), ((1.0, 1.0), False)])
def test_the_faster_way_is_remembered(monkeypatch, seconds, faster):
    """The model's mixtures all have the same shapes."""
    packed, _ = model()
    calls = timed(monkeypatch, *seconds)
    assert [tune_prompts.faster_prompts(packed) for _ in range(2)] == [faster, faster]
    assert len(calls) == 1


@pytest.mark.parametrize(("enough", "calls"), [(1e9, tune_prompts._ROUNDS), (0, 1)])
def test_mixtures_are_timed_by_kernels_and_by_mlx(monkeypatch, enough, calls):
    launched = []

    def stub(self, arrays, template, grid, threadgroup, outputs):
        launched.append(self.name)
        return [mx.zeros(*output) for output in outputs]

    monkeypatch.setattr(Kernel, "__call__", stub)
    monkeypatch.setattr(tune_prompts, "_ENOUGH", enough)
    packed, _ = model()
    tune_prompts.faster_prompts(packed)
    assert launched.count("expert_plan") == 2 + calls  # one compiles, one tells how many to time
    assert launched.count("expert_gemm") == 2 * launched.count("expert_plan")


def test_prompts_that_cannot_be_timed_are_mlx_s(monkeypatch, caplog):
    """Tried again at the next start."""

    def fails(*_):
        raise RuntimeError("[metal]\n no room")

    monkeypatch.setattr(Kernel, "__call__", fails)
    packed, _ = model()
    for _ in range(2):
        caplog.clear()
        assert not tune_prompts.faster_prompts(packed)
        assert "cannot be timed: [metal] no room" in caplog.text


def test_a_start_says_that_prompts_are_served():
    assert ALL.note == "; experts of all rows by expert_gemm"
    but_one = FusedLaunches(expert_rows=range(2, MAX_ROWS + 1))
    assert but_one.note == "; experts of 2 rows and more by expert_gemm"
