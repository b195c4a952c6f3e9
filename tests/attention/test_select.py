"""Which attention path serves a model, by what the checks found."""

import re
from dataclasses import replace

import pytest

from tests.support.attention.cases import make_batch
from tests.support.kernels.device import pretend_gpu
from vllm_metal_lite import backend
from vllm_metal_lite.attention.select import no_kernels, select
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.kernels.registry import REGISTRY, Verdict
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.specs import AttentionShape

SHAPE = AttentionShape(4, 2, 32, 32, mx.float32)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    pretend_gpu(monkeypatch)


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
        (
            [replace(SHAPE, k_head_dim=36, v_head_dim=36)],
            None,
            "head size 36 is not a multiple of 8 up to 576",
        ),
        ([], None, "no layer of this model has a kernel"),
        ([SHAPE], "an indexer", "this model's attention runs a segment at a time: an indexer"),
    ],
)
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


# By the verdict


@pytest.mark.parametrize("option", ["auto", "kernels"])
def test_kernels_that_are_right_are_used_without_a_warning(caplog, option):
    attention, reason = select(option, store(), [SHAPE], Verdict({}, "varlen"))
    assert not caplog.records
    assert (attention.name, attention.prefill) == ("kernels", "varlen")
    assert attention.shares == [True]
    assert not attention.failed_kernels
    assert attention.prepare(make_batch([(0, 3)]), 3).plan.prompts is None
    assert reason == "correct on this device; prompts by varlen_prefill"


def test_layers_with_latents_share_no_prefix():
    """`latent_attention` reads all keys of each row, whatever the sizes."""
    layer, shape = LayerSpec(1, 64, 32, mx.float32), AttentionShape(4, 1, 64, 32, mx.float32)
    latents = replace(shape, latent=True)
    attention, _ = select("auto", PagedStore([layer], 4, 8), [latents], Verdict({}))
    assert attention.shares == [False]


def test_prompts_go_the_faster_way():
    attention, reason = select("auto", store(), [SHAPE], Verdict({}, "gather"))
    assert attention.prefill == "gather"
    assert "MLX's SDPA" in reason


@pytest.mark.parametrize("name", ["kv_write", "kv_write_quantised"])
def test_a_kernel_that_no_other_can_replace_is_replaced_by_the_reference(caplog, name):
    shape = replace(SHAPE, kv_bits=8)
    verdict = failing("gather_rows", name)
    attention, reason = select("auto", store(), [shape], verdict)
    assert re.fullmatch(f"a kernel .*: {name} .* allowed; the reference .*", *caplog.messages)
    assert attention.name == "reference"
    assert f"{name} is off by 2" in reason
    with pytest.raises(ConfigError, match=f"attention='kernels' is not possible.*{name}"):
        select("kernels", store(), [shape], verdict)


def test_a_quantised_store_has_both_ways_of_prompts(caplog):
    shape, failed = replace(SHAPE, kv_bits=8), failing("kv_gather_quantised")
    attention, _ = select("auto", store(), [shape], failed)
    assert (attention.name, attention.prefill) == ("kernels", "varlen")
    assert re.search("kv_gather_quantised .* prompts use varlen_prefill", *caplog.messages)


@pytest.mark.parametrize("name", ["causal_conv", "gated_delta"])
def test_recurrent_layers_without_a_kernel_take_attention_along(caplog, name):
    attention, reason = select("auto", store(), [SHAPE], failing("gather_rows", name))
    assert re.fullmatch(f"a kernel .*: {name} .*; attention and recurrent .*", *caplog.messages)
    assert (attention.name, reason.startswith(f"a kernel fails: {name}")) == ("reference", True)


@pytest.mark.parametrize("option", ["auto", "kernels"])
@pytest.mark.parametrize("name", [row.name for row in REGISTRY.values() if not row.essential])
def test_any_other_kernel_is_replaced_alone(caplog, name, option):
    attention, reason = select(option, store(), [SHAPE], failing(name))
    assert re.fullmatch(
        f"a kernel .*: {name} is off .* allowed; .* Please report.*", *caplog.messages
    )
    assert (attention.name, attention.failed_kernels) == ("kernels", {name})
    assert attention.prefill == ("varlen" if name.startswith("kv_gather") else "gather")
    shares = name not in ("shared_prefix", "paged_decode", "varlen_prefill")
    assert attention.shares == [shares]
    alone = name in ("paged_decode", "latent_attention")
    assert (attention.prepare(make_batch([(0, 3)]), 3).plan.prompts is not None) == alone
    assert f"without {name}, the others correct" in reason


def test_without_both_ways_of_prompts_the_reference_is_used(caplog):
    verdict = failing("kv_gather", "varlen_prefill")
    assert select("auto", store(), [SHAPE], verdict)[0].name == "reference"
    wide = replace(SHAPE, k_head_dim=512, v_head_dim=512)  # too wide for varlen_prefill
    assert select("auto", store(), [wide], failing("kv_gather"))[0].name == "reference"


def test_what_the_user_knows_is_not_said_again(caplog):
    select("auto", store(), [SHAPE], failing("gather_rows", "rope_write"), known=["gather_rows"])
    assert re.search("rope_write is off", *caplog.messages)


def test_of_several_devices_a_kernel_must_be_right_and_fast_on_each():
    one = Verdict({"rope_write": "x"}, "varlen")
    other = Verdict({"rope_write": "y", "kv_write": "z"})
    assert Verdict.of_all([one, other]) == Verdict({"rope_write": "x", "kv_write": "z"}, "gather")
    assert Verdict.of_all([one, one]) == one
