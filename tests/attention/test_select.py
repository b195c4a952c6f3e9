"""Which attention path serves a model, by what the checks found."""

import warnings
from dataclasses import replace

import pytest

from vllm_metal_lite import backend
from vllm_metal_lite.attention.select import OPTIONAL_KERNELS, Verdict, no_kernels, select
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.specs import AttentionShape

SHAPE = AttentionShape(4, 2, 32, 32, mx.float32)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "is_cpu", lambda: False)


def store() -> PagedStore:
    return PagedStore([LayerSpec(2, 32, 32, mx.float32)], 4, 8)


def failing(*kernels: str) -> Verdict:
    return Verdict({k: f"{k} is off by 2, 0.1 is allowed" for k in kernels})


# Without a look at the kernels


def test_shapes_that_kernels_may_serve():
    assert no_kernels("auto", [SHAPE]) is None
    assert no_kernels("kernels", [SHAPE]) is None


@pytest.mark.parametrize(
    ("shapes", "by_segment", "reason"),
    [
        ([replace(SHAPE, k_head_dim=36, v_head_dim=36)], None,
         "head size 36 is not a multiple of 8 up to 576"),
        ([], None, "no layer of this model attends"),
        ([SHAPE], "an indexer", "this model's attention runs a segment at a time: an indexer"),
    ],
)  # fmt: skip
def test_models_that_no_kernel_serves(shapes, by_segment, reason):
    assert no_kernels("auto", shapes, by_segment) == reason
    assert no_kernels("reference", shapes, by_segment).startswith("asked for")
    with pytest.raises(ConfigError, match="attention='kernels' is not possible") as e:
        no_kernels("kernels", shapes, by_segment)
    assert str(e.value).endswith(reason)


def test_without_a_gpu_kernels_are_used_only_if_asked_for(monkeypatch):
    monkeypatch.setattr(backend, "is_cpu", lambda: True)
    assert no_kernels("auto", [SHAPE]) == "kernels need a GPU"
    assert no_kernels("kernels", [SHAPE]) is None


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match=r"attention must be one of .*, got 'fast'"):
        no_kernels("fast", [SHAPE])


# By the verdict


@pytest.mark.parametrize("option", ["auto", "kernels"])
def test_kernels_that_are_right_are_used_without_a_warning(option):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention, reason = select(option, store(), [SHAPE], Verdict({}, "varlen"))
    assert (attention.name, attention.prefill) == ("kernels", "varlen")
    assert attention.shares == [True]
    assert attention.gathers_rows
    assert attention.rows_as_decodes == profile().rows_as_decodes
    assert reason == "right on this device; prompts by varlen_prefill"


def test_prompts_go_the_faster_way():
    attention, reason = select("auto", store(), [SHAPE], Verdict({}, "gather"))
    assert attention.prefill == "gather"
    assert "MLX's SDPA" in reason


@pytest.mark.parametrize("name", ["paged_decode", "merge_partitions", "kv_write"])
def test_a_wrong_kernel_that_is_needed_gives_way_to_the_reference(name):
    verdict = failing("gather_rows", name)
    with pytest.warns(UserWarning, match="gather_rows .* allowed; using the reference attention"):
        attention, reason = select("auto", store(), [SHAPE], verdict)
    assert attention.name == "reference"
    assert f"{name} is off by 2" in reason
    with pytest.raises(ConfigError, match=f"attention='kernels' is not possible.*{name}"):
        select("kernels", store(), [SHAPE], verdict)


@pytest.mark.parametrize("name", sorted(OPTIONAL_KERNELS))
def test_a_wrong_kernel_that_is_optional_is_done_without(name):
    with pytest.warns(UserWarning, match=f"{name} .* using MLX's own operations instead"):
        attention, reason = select("auto", store(), [SHAPE], failing(name))
    assert (attention.name, attention.prefill) == ("kernels", "gather")
    assert attention.shares == [name != "shared_prefix"]
    assert attention.gathers_rows == (name != "gather_rows")
    assert attention.rows_as_decodes == (
        0 if name == "shared_prefix" else profile().rows_as_decodes
    )
    assert "the others right" in reason
