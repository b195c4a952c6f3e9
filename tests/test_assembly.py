"""The assembly chooses a model's attention and fusion, as the optional rooms say."""

import re
import sys
from dataclasses import replace

import pytest

from tests.support.kernels.device import checks_find, fused_rows
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import backend
from vllm_metal_lite.assembly import build_runner, choose_attention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.distributed import RankGroup
from vllm_metal_lite.fusion.launches import FusedLaunches
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.packed import NO_FUSION
from vllm_metal_lite.sampling.sampler import Sampler

SKINNY = range(1, 9)


@pytest.fixture
def fast_skinny_gemm(monkeypatch):
    """Timing means nothing here."""
    fused_rows(monkeypatch, SKINNY)


def assemble(name="qwen3", dtype=None, option="kernels"):
    model = tiny.packed(name, dtype)
    store = PagedStore(model.packed.layout.specs, 8, 8)
    return build_runner(model, store, Sampler(4, model.vocab_size), option)


def with_wrong(monkeypatch, *kernels):
    failures = {k: f"{k} is off by 2, 0.1 is allowed" for k in kernels}
    checks_find(monkeypatch, Verdict(failures))


def test_without_a_gpu_the_reference_is_used_unchecked_and_without_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(verdicts, "verify", lambda *_: pytest.fail("checked"))
    built = assemble(option="auto")
    assert not caplog.messages
    assert built.attention.name == "reference"
    assert built.path.fusion is NO_FUSION
    assert built.path.reason == ("kernels need a GPU" if backend.is_cpu() else "")


def test_a_stage_attends_as_the_others_can(a_gpu, monkeypatch):
    """The stage must not wait for checks that the others do not make."""
    with_wrong(monkeypatch)
    model, ranks = tiny.packed("qwen3"), RankGroup()
    ranks.gather = lambda own: [own, "heads of 20"]
    store = PagedStore(model.packed.layout.specs, 8, 8)
    path = choose_attention(replace(model, ranks=ranks), store, "auto")
    assert (path.attention.name, path.reason) == ("reference", "heads of 20")


@pytest.mark.parametrize(
    "name", ["rope_write", "add_rms_norm", "fused_decode", "gather_rows", "paged_decode"]
)
def test_without_one_kernel_the_others_are_fused(
    a_gpu, fast_skinny_gemm, monkeypatch, caplog, name
):
    with_wrong(monkeypatch, name)
    built = assemble(dtype=mx.bfloat16, option="auto")
    assert re.search(f"a kernel does not suit this device: {name} .*", caplog.text)
    assert built.attention.name == "kernels"
    assert built.attention.failed_kernels == {name}
    assert ("add_rms_norm" in built.path.fusion.unused) == (name == "add_rms_norm")
    assert "skinny_gemm" in built.path.reason


def test_a_wrong_skinny_gemm_is_all_that_is_done_without(
    a_gpu, fast_skinny_gemm, monkeypatch, caplog
):
    with_wrong(monkeypatch, "skinny_gemm")
    built = assemble(dtype=mx.bfloat16, option="auto")
    assert re.search("skinny_gemm .*; MLX's product is used", caplog.text)
    assert built.attention.name == "kernels"
    assert isinstance(built.path.fusion, FusedLaunches)
    assert built.path.fusion.skinny_rows == range(0)
    assert "products of" not in built.path.reason


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_products_may_go_through_skinny_gemm_in_16_bits(
    a_gpu, fast_skinny_gemm, monkeypatch, dtype
):
    with_wrong(monkeypatch)
    built = assemble(dtype=dtype)
    wanted = range(0) if dtype == mx.float32 else SKINNY
    assert built.path.fusion.skinny_rows == wanted
    assert ("products of 1 to 8 rows" in built.path.reason) == bool(wanted)


def test_a_room_that_lacks_one_of_its_modules_is_a_fault(monkeypatch):
    model = tiny.packed("qwen3")
    store = PagedStore(model.packed.layout.specs, 8, 8)
    monkeypatch.delitem(sys.modules, "vllm_metal_lite.checks.verdicts")
    for name in ("for_model", "isolated", "run_check"):
        monkeypatch.delitem(sys.modules, f"vllm_metal_lite.checks.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "vllm_metal_lite.checks.for_model", None)
    with pytest.raises(ModuleNotFoundError, match="for_model"):
        choose_attention(model, store, "kernels")
