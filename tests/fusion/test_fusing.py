"""Joined projections and fused launches give the results of the model's own operations."""

import contextlib
import io
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from metal.host import installed
from tests.support.kernels.launches import Stubs, watch
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import CANNOT_RUN, CONFIGS, VOCAB, config_of
from tests.support.models.fused import Fused
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.pending_heads import Heads, same_rope
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.distributed import ALONE
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.fusion.joined_projections import (
    JoinedPart,
    JoinedProjection,
    join_projections,
    joined_projections,
)
from vllm_metal_lite.fusion.launches import FusedLaunches
from vllm_metal_lite.fusion.norms import Sum
from vllm_metal_lite.fusion.traced import Traced, as_view, origin_of, rows_of
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model import trial
from vllm_metal_lite.model.adapters import adapt
from vllm_metal_lite.model.packed import NO_FUSION, PackedModel

TOKENS = mx.array([[3, 14, 15, 9, 26, 5, 35]])


def logits(model: nn.Module) -> np.ndarray:
    return np.array(model(TOKENS).astype(mx.float32))


# Joined projections


# Models whose projections are joined already, or whose layers are used more than once.
NOTHING_TO_JOIN = {
    "gpt2", "gpt_bigcode", "gpt_neox", "nanbeige", "openelm", "phi3", "phi3small", "phixtral",
    "iquestloopcoder", "plamo2", "plamo3", "mamba", "mamba2", "rwkv7",
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in CONFIGS if n.partition("/")[0] not in CANNOT_RUN])
def test_a_joined_model_computes_the_same(name):
    """All architectures are tried, because a GPU joins the projections of all."""
    model = tiny.build(config_of(name))
    adapt(model)
    before = logits(model), sum(w.nbytes for _, w in tree_flatten(model.parameters()))
    join_projections(model)
    products = joined_projections(model)
    assert bool(products) is (name.partition("/")[0] not in NOTHING_TO_JOIN)
    np.testing.assert_allclose(logits(model), before[0], rtol=1e-4, atol=1e-4)
    assert sum(w.nbytes for _, w in tree_flatten(model.parameters())) == before[1]
    for product in products:
        assert product._x is product._y is None  # no array of the forward is kept


def test_what_is_joined():
    """q, k and v are joined, and gate and up; o and down have inputs of their own."""
    model = tiny.build(config_of("qwen3"))
    join_projections(model)
    parts = {path for path, m in model.named_modules() if isinstance(m, JoinedPart)}
    layer = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"}
    layer |= {"mlp.up_proj"}
    assert parts == {f"model.layers.{i}.{name}" for i in range(3) for name in layer}


def test_projections_of_unlike_weights_stay_apart():
    """Only v is quantised, so v stays alone: q is joined with k, and gate with up."""
    model = tiny.build(config_of("llama"))
    nn.quantize(model, 32, 4, class_predicate=lambda path, m: "self_attn.v_proj" in path)
    join_projections(model)
    sizes = {(p.linear.weight.shape[0], len(p.ends) - 1) for p in joined_projections(model)}
    assert sizes == {(96, 2), (192, 2)}  # q with k, and gate with up


# Traces


@pytest.fixture
def building():
    with FusedLaunches().building(step=None):
        yield


def test_a_trace_is_an_array_of_the_right_value(building):
    y = mx.arange(24, dtype=mx.float32).reshape(2, 1, 12)
    q = Traced(y[..., 4:12], Columns(y, 4)).reshape(2, 1, 2, 4)
    assert origin_of(q) == Heads(Columns(y, 4), 2, 4)
    turned = q.transpose(0, 2, 1, 3)
    assert origin_of(turned) is origin_of(q)
    np.testing.assert_array_equal(turned.squeeze(2), np.arange(24).reshape(2, 3, 4)[:, 1:])
    assert origin_of(q.transpose(0, 1, 3, 2)) is None
    assert origin_of(q * 2) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.__setitem__((..., slice(2)), 0.0),
        lambda x: x.__imul__(2.0),
        lambda x: x.__iadd__(mx.ones(x.shape)),
    ],
)
def test_what_is_changed_in_place_is_forgotten(building, change):
    y = mx.ones((2, 1, 8))
    q = Traced(y[..., :8], Columns(y, 0)).reshape(2, 1, 2, 4)
    assert origin_of(q) is not None
    change(q)
    assert origin_of(q) is None
    assert not mx.array_equal(q.reshape(2, 1, 8), y)


def test_rows_are_found_again():
    rows = mx.arange(16, dtype=mx.float32).reshape(2, 8)
    x = as_view(rows, (2, 1))
    assert x.shape == (2, 1, 8)
    assert rows_of(x) is rows_of(rows) is rows
    np.testing.assert_array_equal(rows_of(x * 2), 2 * rows)
    x[0] = 0.0
    np.testing.assert_array_equal(rows_of(x), [[0.0] * 8, rows[1].tolist()])


def test_a_sum_that_a_kernel_computed_is_used(monkeypatch):
    """The array also changes by operations that have no rule."""
    x, y = mx.ones((2, 1, 8)), mx.full((2, 1, 8), 2.0)
    mx.eval(x, y)
    stubs = Stubs(monkeypatch)
    with FusedLaunches().building(step=None):
        total = x + Traced(y, None)
        assert isinstance(origin_of(total), Sum)
        mx.fast.rms_norm(total, None, 1e-5)
        assert stubs.needed(mx.abs(total)) == {"add_rms_norm": 1, "Abs": 1}
        assert origin_of(total + 1.0) is None
        assert origin_of(Traced(y, None) + mx.ones((8,))) is None


def test_a_trace_costs_nothing():
    """Otherwise MLX would copy the array from which a traced array is made."""
    for shape in (2, 1, 8), (1, 1, 8), (1, 8), (3, 8):
        dot = io.StringIO()
        mx.export_to_dot(dot, Traced(mx.ones(shape).square(), None))
        assert "Square" in dot.getvalue()
        assert "AsType" not in dot.getvalue()


def test_norms_and_rotations_come_once_and_in_order():
    heads = Heads(Columns(mx.ones((2, 8)), 0), 2, 4)
    norm, rope = RMSNorm(mx.ones(4), 1e-5), Rope(4, False, 1e4, 1.0, None)
    assert heads.normed(RMSNorm(mx.ones(8), 1e-5)) is None
    both = heads.normed(norm).rotated(rope)
    assert (both.norm, both.rope) == (norm, rope)
    assert both.rotated(rope) is both.normed(norm) is heads.rotated(rope).normed(norm) is None


@pytest.mark.parametrize("split", [None, 8, -8])
@pytest.mark.parametrize(
    ("scale", "dims", "factor"),
    [
        (lambda x: x.at[..., :4].multiply(1.5), 4, 1.5),
        (lambda x: x.at[..., 0:4:1].multiply(1.5), 4, 1.5),
        (lambda x: x.at[..., :9].multiply(1.5), 8, 1.5),
        (lambda x: 1.5 * x, 8, 1.5),
        # The factor is for a part of the rotated elements, or for more than these.
        (lambda x: x.at[..., :4].multiply(1.5), 8, None),
        (lambda x: 1.5 * x, 4, None),
        (lambda x: x.at[..., 4:].multiply(1.5), 4, None),
        (lambda x: x.at[..., :4].add(1.5), 4, None),
        (lambda x: x.at[..., :4].multiply(mx.array(1.5)), 4, None),
        (lambda x: x.at[:, :, :, :4].multiply(1.5), 4, None),
        (lambda x: 1.5 * (1.5 * x), 8, None),
    ],
)
def test_a_factor_before_a_rotation_is_part_of_it(scale, dims, factor, split):
    """A gate is fused in each spelling; any other operation is computed unchanged."""
    rows, at = mx.random.normal((3, 32)), mx.zeros(3, mx.int32)
    with FusedLaunches(unused=frozenset({"add_rms_norm"})).building(
        SimpleNamespace(positions=at, pictures=None)
    ):
        heads = Traced(rows[:, None], Columns(rows, 0))
        heads = heads.reshape(3, 1, *((2, 16) if split else (4, 8))).transpose(0, 2, 1, 3)
        x = mx.split(heads, [split], axis=-1)[1] if split else heads
        value = scale(x)
        turned = mx.fast.rope(value, dims, traditional=False, base=1e4, scale=1.0, offset=at)
    np.testing.assert_array_equal(value, scale(mx.array(x)))
    known = origin_of(turned)
    if factor is None:
        assert isinstance(known, Heads)
        assert known.columns.array is not rows
        assert known.rope.factor == 1
    else:
        assert known.columns.array is rows
        assert known.columns.start == (8 if split else 0)
        assert known.rope == Rope(dims, False, 1e4, 1.0, None, factor)


def test_rotations_are_compared_by_what_they_do():
    heads, freqs = Heads(Columns(mx.ones((2, 8)), 0), 2, 4), mx.ones(2)
    turned = [
        heads.rotated(Rope(4, False, None, 1.0, freqs)),
        heads.rotated(Rope(4, False, None, 1.0, mx.ones(2))),
        heads.rotated(Rope(4, False, 1e4, 1.0, None)),
        heads.rotated(Rope(4, False, 1e4, 1.0, None, 1.5)),
        heads,
    ]
    for i, a in enumerate(turned):
        assert [same_rope(a.rope, b.rope) for b in turned] == [i == j for j in range(5)]


# Whole models on the CPU host.  For each: how many launches of (rope_write, kv_write,
# add_rms_norm) one layer makes.  In steps of decodes, attention does the work of rope_write.
# kv_write serves layers without rope_write.  The other counts are 0 if the architecture lacks what
# the kernel fuses: a rotation after the norms of heads, or plain residual sums.
LAUNCHES = {
    "qwen3": (1, 0, 2),
    "llama": (1, 0, 2),
    "llama/yarn": (1, 0, 2),
    "llama/q4": (1, 0, 2),
    "mixtral": (1, 0, 2),
    "gemma3": (1, 0, 2),
    "cohere": (1, 0, 0),
    "hunyuan_v1_dense": (0, 1, 2),  # its norms follow the rotation
    "gpt2": (0, 1, 0),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_fused_model_computes_the_same(monkeypatch, name):
    launches = Counter()

    def count(kernel, _, template):
        launches["fused" if template.get("FUSED") else kernel] += 1

    watch(monkeypatch, count)
    model = Fused(tiny.load(name))
    with installed():
        assert max(row.error for row in model.rows()) < 1e-4
    layers = len(model.layout.specs)
    times = layers * len(trial.STEPS)
    decodes = sum(max(scheduled) == 1 for _, scheduled in trial.STEPS)
    rotations = LAUNCHES[name][0] * layers
    assert launches["fused"] == rotations * decodes
    counts = [launches["rope_write"] + launches["fused"], launches["kv_write"]]
    counts.append(launches["add_rms_norm"])
    assert counts == [n * times for n in LAUNCHES[name]]


@pytest.mark.long
@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_whose_fused_logits_differ_does_without(monkeypatch, caplog, tmp_path, wrong):
    """The rotation has wrong arguments, as if a rule read them wrongly; the kernels are right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if wrong:
        rotated = Heads.rotated
        monkeypatch.setattr(
            Heads, "rotated", lambda self, rope: rotated(self, rope._replace(base=50.0))
        )
    prompts = tiny.prompts(3)
    with installed():
        engine = tiny.engine("qwen3", attention="kernels")
        assert (engine.runner.path.fusion is NO_FUSION) is wrong
        assert tiny.answers(engine, prompts, 5) == tiny.all_alone("qwen3", prompts, 5)
    assert ("fused launches do not suit this model" in caplog.text) is wrong


def test_a_fault_in_the_trial_is_no_verdict_about_the_model(monkeypatch, caplog, tmp_path):
    """The model starts without fused launches, and the log has the fault with its traceback."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny.packed("qwen3")

    def broken(*_):
        return [][1]

    monkeypatch.setattr(trial.Trial, "problem", broken)
    store = PagedStore(model.packed.layout.specs, 8, 8)
    with installed():
        fusion = decide.decide(model.packed, KernelAttention(store, "gather", ()), ALONE)
    assert fusion is NO_FUSION
    assert "a fault of vllm-metal-lite, not of this model" in caplog.text
    assert "IndexError" in caplog.text
    assert "do not suit" not in caplog.text
    caplog.clear()


@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.long)])
def test_products_of_few_rows_go_through_the_kernel(monkeypatch, name):
    """Every one of every forward of these rows, and the sums behind two of them; the tokens stay
    the same.  The head of "qwen3" is its embedding, and that of "llama" sees other rows.

    Launches run at once here, also those of products that then are computed with their sum.
    """
    launches, forwards, forward = Counter(), Counter(), PackedModel.__call__
    layers = len(tiny.packed(name, mx.bfloat16).packed.layout.specs)

    def count(kernel, arrays, template):
        if kernel == "skinny_gemm" and len(arrays[1]) != VOCAB:
            launches[len(arrays[0]), template["RESIDUAL"]] += 1

    def noting(self, attention, *args):
        forwards[len(attention.step.token_ids)] += 1
        return forward(self, attention, *args)

    watch(monkeypatch, count)
    monkeypatch.setattr(PackedModel, "__call__", noting)
    monkeypatch.setattr(verdicts, "verify", lambda *_: Verdict({}))
    tokens = []
    for few in (range(0), range(1, 5), range(2, 65)):
        with installed():
            engine = tiny.engine(name, mx.bfloat16, attention="kernels", max_num_batched_tokens=70)
            assert isinstance(engine.runner.path.fusion, FusedLaunches)
            fusion = replace(engine.runner.path.fusion, skinny_rows=few)
            engine.runner._use(replace(engine.runner.path, fusion=fusion))
            launches.clear(), forwards.clear()
            params = [tiny.greedy(4 + i) for i in range(5)]
            tokens.append(tiny.answers(engine, tiny.prompts(5, 3, 20, seed=3), params))
        assert {1, 2, 4, 5} <= set(forwards)
        expected = Counter()
        for rows, n in forwards.items():
            if rows in few:
                expected[rows, False] = 7 * layers * n
            if rows in few and rows <= profile().max_normed_rows:
                expected[rows, True] = 2 * layers * n
        assert launches == expected
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.long
@pytest.mark.parametrize("wrong", [(), (1, 2, 7), (1,), (2,)])
def test_products_that_do_not_suit_a_model_are_done_without(monkeypatch, caplog, wrong):
    """Products of these rows are wrong.  Other fused launches stay: the model is tried both
    ways."""
    launch, launches = Kernel.__call__, Counter()

    def launching(self, arrays, *args):
        launches[self.name] += 1
        out = launch(self, arrays, *args)
        is_wrong = self.name == "skinny_gemm" and len(arrays[0]) in wrong
        return [y * 3 for y in out] if is_wrong else out

    monkeypatch.setattr(Kernel, "__call__", launching)
    packed = tiny.packed("qwen3", mx.bfloat16).packed
    store = PagedStore(packed.layout.specs, 1, 8)
    attention = KernelAttention(store, "gather", ())
    monkeypatch.setattr(decide, "faster_rows", lambda *_: range(1, 65))
    with installed():
        fusion = decide.decide(packed, attention, ALONE)
    assert isinstance(fusion, FusedLaunches)
    assert fusion.skinny_rows == (range(0) if wrong else range(1, 65))
    assert ["products by skinny_gemm" in m for m in caplog.messages] == [True] * bool(wrong)
    layers = len(packed.layout.specs)
    # Tried with MLX's products; with the kernel these few rows have their norms and sums in it.
    assert launches["add_rms_norm"] == 2 * layers * len(trial.STEPS)


# One model, several engines


def test_nothing_of_a_forward_is_kept_in_joined_projections(monkeypatch):
    """This also holds if a forward ends between two parts of a joined product."""
    model = Fused(tiny.load("llama"))
    assert model.fusion.joined
    part, countdown = JoinedProjection.part, [0]

    def breaking_off(self, index, x):
        countdown[0] -= 1
        return part(self, index, x) if countdown[0] else 1 / 0

    monkeypatch.setattr(JoinedProjection, "part", breaking_off)
    for calls in (2, 5, 1 << 30):
        countdown[0] = calls
        with installed(), contextlib.suppress(ZeroDivisionError):
            model.rows()
        assert all(p._x is p._y is None for p in model.fusion.joined)
    assert countdown[0] > 1


def test_engines_with_and_without_fused_launches_share_a_model(monkeypatch):
    """As on a GPU, where projections are joined, in turns, and each starts while others run."""
    monkeypatch.setattr(decide, "backend", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(verdicts, "verify", lambda *_: Verdict({}))
    loaded, prompts = tiny.load("qwen3"), tiny.prompts(3)
    options = EngineConfig(block_size=8, num_blocks=32, max_num_seqs=4, max_model_len=64)
    engines = []
    with installed():
        for attention in ("reference", "kernels", "reference", "kernels"):
            engines.append(LLMEngine(loaded, replace(options, attention=attention)))
            tiny.submit(engines[-1], prompts, 6)
            for engine in engines:
                engine.step()
        done = [tiny.run(engine) for engine in engines]
    reference, fused = engines[0].runner.path.fusion, engines[1].runner.path.fusion
    assert reference is engines[2].runner.path.fusion is NO_FUSION
    assert len(fused.joined) == len(engines[3].runner.path.fusion.joined) == 2 * 3
    for outputs in done:
        assert tiny.tokens_of(outputs[i] for i in "012") == tiny.all_alone("qwen3", prompts, 6)
