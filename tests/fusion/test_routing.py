"""A router is one launch, with the same experts and weights, however a model writes it."""

from collections import Counter

import numpy as np
import pytest
from mlx_lm.models import deepseek_v3, glm4_moe, gpt_oss, kimi_linear

from metal.host import installed
from tests.support.kernels.launches import Stubs
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.launches import FusedLaunches, fuse
from vllm_metal_lite.fusion.traced import as_view
from vllm_metal_lite.kernels.launch import Kernel

ROWS, EXPERTS, K = 5, 16, 3
LOGITS = mx.array(
    np.random.default_rng(0).permuted(np.tile(np.arange(EXPERTS), (ROWS, 1)), axis=1) / 4.0,
    mx.float32,
)
BIAS = mx.array(np.random.default_rng(1).permutation(EXPERTS) / 50.0, mx.float32)
ROUTERS = (deepseek_v3, "group_expert_select"), (kimi_linear, "_group_expert_select")
ROUTES = FusedLaunches(routers=ROUTERS)


def qwen3_moe(x):
    x = mx.softmax(x, axis=-1, precise=True)
    inds = mx.stop_gradient(mx.argpartition(x, kth=-K, axis=-1)[..., -K:])
    weights = mx.take_along_axis(x, inds, axis=-1)
    weights /= mx.sum(weights, axis=-1, keepdims=True)
    return inds, weights


def olmoe(x):
    x = mx.softmax(x, axis=2, precise=True)
    inds = mx.stop_gradient(mx.argpartition(-x, kth=K - 1, axis=-1)[..., :K])
    weights = mx.take_along_axis(x, inds, axis=-1)
    return inds, weights / weights.sum(axis=-1, keepdims=True)


def mixtral(x):
    inds = mx.stop_gradient(mx.argpartition(-x, kth=K - 1, axis=-1)[..., :K])
    return inds, mx.softmax(mx.take_along_axis(x, inds, axis=-1), axis=-1, precise=True)


def lfm2_moe(x):
    x = mx.sigmoid(x)
    inds = mx.argpartition(x.astype(mx.float32) + BIAS, kth=-K, axis=-1)[..., -K:]
    weights = mx.take_along_axis(x, inds, axis=-1)
    return inds, weights / (mx.sum(weights, axis=-1, keepdims=True) + 1e-6) * 1.5


def klear(x):
    scores = mx.sigmoid(x.astype(mx.float32))
    inds = mx.argpartition(-(scores + BIAS.reshape(1, 1, -1)), kth=K - 1, axis=-1)[..., :K]
    return inds, mx.take_along_axis(scores, inds, axis=-1)


def deepseek(x, groups=1):
    return deepseek_v3.group_expert_select(x, BIAS, K, groups, 2 // (3 - groups), 2.5, True)


def kimi(x, scoring="sigmoid"):
    return kimi_linear._group_expert_select(x, BIAS, K, 1, 1, 2.5, True, scoring)


FUSED = {
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "mixtral": mixtral,
    "gpt_oss": lambda x: gpt_oss.mlx_topk(x, K)[::-1],
    "lfm2_moe": lfm2_moe,
    "klear": klear,
    "deepseek_v3": deepseek,
    "kimi_linear": kimi,
    "kimi_linear of softmax": lambda x: kimi(x, "softmax"),
}


# Ways to continue that no rule knows.  All must stay right.


def gathered_twice(x):
    inds, weights = qwen3_moe(x)
    return inds, mx.take_along_axis(mx.softmax(x, axis=-1, precise=True), inds, axis=-1) + weights


def renormalized_twice(x):
    inds, weights = olmoe(x)
    weights = weights * 2.0 * 3.0
    return inds, weights / weights.sum(axis=-1, keepdims=True) * weights


def divided_by_other_sums(x):
    inds, weights = klear(x)
    return inds, weights / (weights * 2).sum(axis=-1, keepdims=True) / x.sum(-1, keepdims=True)


def weighed_by_the_bias(x):
    biased = mx.sigmoid(x) + BIAS
    inds = mx.argpartition(biased, kth=-K, axis=-1)[..., -K:]
    return inds, mx.take_along_axis(biased, inds, axis=-1)


def scaled_by_expert(x):
    inds, weights = mixtral(x)
    return inds, weights * BIAS[inds]


def the_lowest(x):
    x = mx.softmax(x, axis=-1, precise=True)
    inds = mx.argpartition(x, kth=K - 1, axis=-1)[..., :K]
    return inds, mx.take_along_axis(x, inds, axis=-1)


UNKNOWN = {
    f.__name__: f
    for f in (
        gathered_twice,
        renormalized_twice,
        divided_by_other_sums,
        weighed_by_the_bias,
        scaled_by_expert,
        the_lowest,
    )
}
UNKNOWN["groups"] = lambda x: deepseek(x, groups=2)


def by_expert(inds, weights) -> np.ndarray:
    """The weights of a choice as (rows, experts): the order of the choice differs on a CPU."""
    dense = np.zeros((ROWS, EXPERTS))
    flat = np.array(inds).reshape(ROWS, K)
    np.put_along_axis(dense, flat, np.array(weights.astype(mx.float32)).reshape(ROWS, K), -1)
    return dense


def evaluated(monkeypatch, route, dtype=mx.float32) -> tuple[np.ndarray, Counter]:
    """The weights of a fused router, and the launches that compute its indices and weights."""
    launched: Counter = Counter()
    launch = Kernel._launcher

    def counting(self):
        launched[self.name] += 1
        return launch(self)

    monkeypatch.setattr(Kernel, "_launcher", counting)
    with installed(), ROUTES.building(step=None):
        inds, weights = route(as_view(LOGITS.astype(dtype), (ROWS, 1)))
        return by_expert(inds, weights), launched


def expected(route, dtype=mx.float32) -> np.ndarray:
    return by_expert(*route(LOGITS.astype(dtype)[:, None]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*FUSED, *UNKNOWN])
def test_a_router_chooses_and_weighs_the_same(monkeypatch, name, dtype):
    route = {**FUSED, **UNKNOWN}[name]
    got, _ = evaluated(monkeypatch, route, dtype)
    rounding = 1e-6 if dtype == mx.float32 else 0.02
    np.testing.assert_allclose(got, expected(route, dtype), rtol=rounding, atol=rounding / 100)


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("name", FUSED)
def test_a_known_router_is_one_launch(monkeypatch, name, rows):
    """Of its indices and weights; the graph has nothing else that computes."""
    stubs = Stubs(monkeypatch)
    with ROUTES.building(step=None):
        inds, weights = FUSED[name](as_view(LOGITS[:rows], (rows, 1)))
        assert stubs.needed(inds, weights) == {"expert_topk": 1}


def test_compiled_functions_of_mlx_lm_stay_as_they_are(monkeypatch):
    """A forward without kernels launches none, even after one with kernels."""
    for route in (deepseek, kimi, UNKNOWN["groups"]):
        before = expected(route)
        _, launched = evaluated(monkeypatch, route)
        launched.clear()
        np.testing.assert_array_equal(expected(route), before)
        assert not launched


def test_a_model_without_experts_has_no_router():
    assert fuse(tiny.build(config_of("llama")), joins=True).unused == {"expert_topk"}
    model = tiny.build(config_of("glm4_moe"))
    model.set_dtype(mx.bfloat16)
    fusion = fuse(model, joins=True)
    assert not fusion.unused
    assert (glm4_moe, "group_expert_select") in fusion.routers
    assert fusion.without(["expert_topk"]).unused == {"expert_topk"}
    assert fusion.without(["expert_gemm"]).unused == {"expert_gemm"}
