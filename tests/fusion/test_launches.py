"""How many launches a layer of a decode step takes, counted in graphs: those of three layers less
those of two."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels.launches import Stubs
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.fusion import layers
from vllm_metal_lite.fusion.launches import fuse
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.layout import find_layout
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.specs import AttentionShape

FEW = range(1, 65)
LATENT = ("deepseek_v3",)


def of_a_layer(monkeypatch, *args, **how) -> Counter:
    """args, how: the arguments of `_of_a_step`, without the number of layers."""
    stubs = Stubs(monkeypatch)
    two, three = (_of_a_step(stubs, n, *args, **how) for n in (2, 3))
    three.subtract(two)
    return Counter({launch: n for launch, n in three.items() if n})


def _of_a_step(
    stubs, layers, name, rows, skinny_rows, dtype=mx.bfloat16, kv_bits=None, expert_rows=range(0),
    **changes,
) -> Counter:  # fmt: skip
    """The launches of a decode step with joined projections.  changes: changed fields of the
    config."""
    if name == "gpt_oss":
        changes = changes | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        changes["layer_types"] = changes["layer_types"][:layers]
    model = tiny.build(config_of(name, num_hidden_layers=layers, **changes))
    model.set_dtype(dtype)
    # Frequencies of rotations are not parameters, and are also made once.
    mx.eval([v for m in model.modules() for v in m.values() if isinstance(v, mx.array)])
    layout = find_layout(model, name)
    packed = PackedModel(model, layout)
    fusion = replace(fuse(model, joins=True), skinny_rows=skinny_rows, expert_rows=expert_rows)
    specs = [replace(spec, bits=kv_bits) for spec in layout.specs]
    shapes = [AttentionShape(1, 1, 8, 8, dtype, latent=name in LATENT)]
    attention = KernelAttention(PagedStore(specs, rows, 8), "gather", shapes)
    inputs = InputBatch(rows, 1, 8, len(attention.store.num_blocks))
    added = np.array([inputs.add([0], 1) for _ in range(rows)])
    for row in added:
        inputs.append_blocks(row, [int(row)])
    batch = inputs.pack(added, np.zeros_like(added), np.ones_like(added))
    stubs.needed()  # forget the launches of the preparation
    bound = attention.begin(attention.prepare(batch, rows), attention.new_state())
    logits, _ = packed(bound, mx.arange(rows), fusion)
    return stubs.needed(logits, *bound.state)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("rows", [1, 8, profile().max_normed_rows])
def test_five_with_a_norm_or_a_sum_or_swiglu_in_each_product(monkeypatch, name, rows):
    expected = {"skinny_gemm NORM": 1, "paged_decode FUSED": 1, "skinny_gemm RESIDUAL": 2}
    expected |= {"skinny_gemm NORM GATE": 1}
    assert of_a_layer(monkeypatch, name, rows, FEW) == expected


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("rows", [profile().max_normed_rows + 1, 64])
def test_seven_where_norms_are_launches_of_their_own(monkeypatch, name, rows):
    expected = {"skinny_gemm": 3, "paged_decode FUSED": 1, "add_rms_norm": 2, "skinny_gemm GATE": 1}
    assert of_a_layer(monkeypatch, name, rows, FEW) == expected


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_latent_layer_has_two_between_its_projections(monkeypatch, name, rows):
    """The norm is of low-rank queries.  What mlx-lm splits is read in place, but for the part of
    queries that meets latents."""
    launches = of_a_layer(monkeypatch, name, rows, range(0))
    of_attention = ("latent_write", "latent_attention", "rms_norm", "Split", "Cos", "kv_write")
    assert [launches[launch] for launch in of_attention] == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("rows", [1, 64])
def test_eight_with_products_of_mlx(monkeypatch, name, rows):
    """In float32, because a CPU multiplies other types through float32.  The eighth is SwiGLU."""
    launches = of_a_layer(monkeypatch, name, rows, range(0), mx.float32)
    (swiglu,) = (launch for launch in launches if launch.startswith("CompiledSigmoid"))
    assert launches == {"Matmul": 4, "paged_decode FUSED": 1, "add_rms_norm": 2, swiglu: 1}


OF_EXPERTS = {
    "paged_decode FUSED": 1, "skinny_gemm RESIDUAL": 1, "rms_norm": 1, "expert_topk": 1,
    "expert_plan": 1, "expert_gemm": 2, "expert_sum": 1, "add_rms_norm": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "others"),
    [
        # The products of q, k and v, and of the router.
        ("qwen3_moe", {"skinny_gemm NORM": 1, "skinny_gemm": 1}),
        # This model also has an expert that all rows share, and a router that is no linear layer.
        ("glm4_moe", {"skinny_gemm": 2, "skinny_gemm NORM GATE": 1, "Matmul": 1, "Add": 1}),
    ],
)
def test_a_layer_of_experts_has_a_launch_for_its_router(monkeypatch, name, others):
    launches = of_a_layer(monkeypatch, name, 8, FEW, expert_rows=FEW)
    assert launches == OF_EXPERTS | others


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
LONG |= {"original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("gpt_oss", YARN),
        ("qwen3", YARN),
        ("phi3", LONG),
        ("phimoe", {**LONG, "long_mscale": 1.2, "short_mscale": 1.1}),
        ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}),
    ],
)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_factor_goes_with_its_rotation(monkeypatch, name, scaling, rows):
    changes = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    if name == "phi3":
        changes["partial_rotary_factor"] = 1.0
    plain, scaled = (
        of_a_layer(monkeypatch, name, rows, FEW, expert_rows=FEW, rope_scaling=how, **changes)
        for how in (None, scaling)
    )
    assert scaled == plain


def test_a_layer_of_gpt_oss_neither_multiplies_nor_copies(monkeypatch):
    launches = of_a_layer(monkeypatch, "gpt_oss", 8, FEW, expert_rows=FEW, rope_scaling=YARN)
    expected = {"skinny_gemm NORM BIAS": 1, "paged_decode FUSED": 1, "skinny_gemm BIAS RESIDUAL": 1}
    expected |= {"rms_norm": 1, "skinny_gemm BIAS": 1, "expert_topk": 1, "expert_plan": 1}
    expected |= {"expert_gemm BIAS": 2, "expert_sum": 1, "add_rms_norm": 1}
    assert launches == expected


def test_a_bias_goes_with_its_product(monkeypatch):
    expected = {"skinny_gemm NORM BIAS": 1, "paged_decode FUSED": 1, "skinny_gemm RESIDUAL": 2}
    expected |= {"skinny_gemm NORM GATE": 1}
    assert of_a_layer(monkeypatch, "qwen2", 8, FEW) == expected


def test_quantised_weights_take_no_launch_more(monkeypatch):
    plain, four_bits = (of_a_layer(monkeypatch, n, 8, FEW) for n in ("llama", "llama/q4"))
    assert plain == four_bits


def test_rows_of_large_quantised_weights_are_normalised_before(monkeypatch):
    monkeypatch.setattr(layers, "profile", lambda: replace(profile(), max_normed_weights=0))
    expected = {"rms_norm": 2, "skinny_gemm": 1, "paged_decode FUSED": 1}
    expected |= {"skinny_gemm RESIDUAL": 2, "skinny_gemm GATE": 1}
    assert of_a_layer(monkeypatch, "llama/q4", 8, FEW) == expected


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
def test_what_is_fused_of_a_layer_with_norms_behind_products_and_gelu(monkeypatch, kv_bits):
    """gemma3: norms go with sums and products, gates with their products, and weights of norms are
    not made in each call."""
    expected = {"skinny_gemm": 3, "skinny_gemm GATE": 1, "paged_decode FUSED": 1}
    expected |= {"add_rms_norm POST": 2}
    for rows in (8, 64):
        assert of_a_layer(monkeypatch, "gemma3_text", rows, FEW, kv_bits=kv_bits) == expected
