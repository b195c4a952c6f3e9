"""The checks find right kernels and miscompiled ones, and the results are remembered."""

import json
import math
import pickle
from dataclasses import replace

import pytest

from tests.support.kernels.broken_machine import miscompile
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import isolated
from vllm_metal_lite.checks.check import Check, CheckResult, MixtureShape, Speed
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.checks.popular_shapes import YARN_FACTOR
from vllm_metal_lite.checks.run_check import run
from vllm_metal_lite.checks.verdicts import verify
from vllm_metal_lite.kernels.findings import Findings
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.specs import (
    AttentionShape,
    ConvShape,
    ExpertShape,
    KernelUse,
    Quantisation,
    RecurrenceShape,
    RopeShape,
    WeightShape,
)

pytestmark = pytest.mark.usefixtures("a_gpu")

SHAPE = AttentionShape(4, 2, 32, 32, mx.float32)
BFLOAT16 = replace(SHAPE, dtype=mx.bfloat16)
LATENT = AttentionShape(4, 1, 64, 16, mx.float32, latent=True)
IN_4_BITS, IN_8_BITS = Quantisation(4, 32), Quantisation(8, 64)
USE = KernelUse((SHAPE,), 8)


@pytest.fixture
def found(monkeypatch):
    """(kernel -> the result that its checks get without a run, the checks that would run)"""
    results, ran = {}, []

    def run(check, timed):
        ran.append(check)
        return replace(results.get(check.kernel, CheckResult(check, 0.0)), check=check)

    monkeypatch.setattr(isolated, "run_here", run)
    return results, ran


# What is checked


def kernels(use: KernelUse) -> set[str]:
    return {check.kernel for check in checks_for(use)}


CONV = ConvShape(64, 4, True, True, mx.bfloat16)
STATE = RecurrenceShape(1, 4, 32, 32, mx.bfloat16, delta=False)
WEIGHTS = tuple(WeightShape(64, depth) for depth in (96, 32, 64))
WINDOW = replace(SHAPE, window=9)
IN_STORE = "kv_write kv_gather gather_rows paged_decode merge_partitions "
IN_PACKED_STORE = (
    "kv_write_quantised kv_gather_quantised gather_rows paged_decode merge_partitions "
)
NEW_ROWS = "rope_write fused_decode "
PREFIX, PROMPTS, NORM, PRODUCT = (
    "shared_prefix ",
    "varlen_prefill ",
    "add_rms_norm ",
    "skinny_gemm ",
)
# The shapes of a model, some kernels that it uses, and some that it does not use.
USED = {
    "no prefix": (replace(USE, shares_prefix=False), IN_STORE + PROMPTS, PREFIX + NEW_ROWS + NORM),
    "a window": (replace(USE, shapes=(WINDOW,)), IN_STORE, PREFIX),
    "a window in some layers": (replace(USE, shapes=(WINDOW, SHAPE)), PREFIX, NEW_ROWS),
    "wide heads": (
        replace(USE, shapes=(replace(SHAPE, k_head_dim=512, v_head_dim=512),)),
        IN_STORE,
        PROMPTS + PREFIX,
    ),
    "a quantised store": (
        replace(USE, shapes=(replace(SHAPE, kv_bits=8),), ropes=(RopeShape(32),)),
        IN_PACKED_STORE + PROMPTS + PREFIX + NEW_ROWS,
        "kv_write kv_gather",
    ),
    "a rotation": (replace(USE, ropes=(RopeShape(32),)), IN_STORE + NEW_ROWS, NORM),
    "a rotation of more than a head": (replace(USE, ropes=(RopeShape(64),)), IN_STORE, NEW_ROWS),
    "a hidden size": (replace(USE, hidden_sizes=(64,)), IN_STORE + NORM, NEW_ROWS + PRODUCT),
    "products in float32": (replace(USE, weights=WEIGHTS), IN_STORE, PRODUCT),
    "a convolution": (
        KernelUse((), 16, recurrences=(CONV,)),
        "causal_conv",
        "gated_delta " + IN_STORE,
    ),
    "a state": (
        KernelUse((), 16, (), (64,), (WeightShape(64, 64),), recurrences=(CONV, STATE)),
        "causal_conv gated_delta " + NORM + PRODUCT,
        IN_STORE + NEW_ROWS + "gated_rms_norm",
    ),
}


@pytest.mark.parametrize("name", USED)
def test_only_what_a_model_uses_is_checked(name):
    use, used, unused = USED[name]
    assert set(used.split()) <= kernels(use)
    assert kernels(use).isdisjoint(unused.split())


def test_products_are_checked_at_the_least_and_the_greatest_depth_of_each_quantisation():
    products = checks_for(replace(USE, shapes=(BFLOAT16,), weights=WEIGHTS))
    products = [(*c.shape[:2], c.shape.biased) for c in products if c.kernel == "skinny_gemm"]
    assert products == [(5, (64, 32, None), False), (64, (64, 96, None), True)]
    mixed = (*WEIGHTS, WeightShape(64, 64, IN_4_BITS), WeightShape(9, 64, IN_8_BITS))
    checks = checks_for(replace(USE, shapes=(BFLOAT16,), weights=mixed))
    assert {c.shape[:2] for c in checks if c.kernel == "skinny_gemm"} == {
        (5, (64, 32, None)),
        (64, (64, 96, None)),
        *((rows, (64, 64, IN_4_BITS)) for rows in (1, 3, 5, 64)),
        *((rows, (9, 64, IN_8_BITS)) for rows in (1, 3, 5, 64)),
    }
    assert pickle.loads(pickle.dumps(checks)) == checks


def test_every_shape_and_every_rotation_is_checked_but_not_each_with_each():
    shapes = tuple(replace(SHAPE, window=window) for window in (9, 17, None))
    ropes = tuple(RopeShape(32, base=base) for base in (1e4, 1e6))
    checks = checks_for(replace(USE, shapes=shapes, ropes=ropes))
    fused = [c for c in checks if c.kernel == "fused_decode"]
    assert {c.shape for c in fused} == set(shapes)
    assert {c.rope for c in fused} == set(ropes)
    assert len(fused) == 3
    assert len([c for c in checks if c.kernel == "rope_write"]) == 2


def test_layers_that_differ_in_their_masks_share_what_knows_no_mask():
    both = checks_for(replace(USE, shapes=(SHAPE, replace(SHAPE, window=9))))
    assert len([c for c in both if c.kernel in ("kv_write", "kv_gather", "gather_rows")]) == 3
    assert len([c for c in both if c.kernel == "paged_decode"]) == 2


UNLIKE = {
    "masks": KernelUse((replace(SHAPE, window=50, softcap=5.0, sinks=True),), 16, (RopeShape(32),)),
    "dims": KernelUse(
        (AttentionShape(6, 2, 48, 32, mx.float16),), 16, (RopeShape(24, True, scale=0.5),)
    ),
    "factor": KernelUse((BFLOAT16,), 16, (RopeShape(24, base=None, eps=1e-6, factor=YARN_FACTOR),)),
    "latents with a factor": KernelUse(
        (replace(LATENT, dtype=mx.float16),), 16, (RopeShape(16, True, factor=YARN_FACTOR),)
    ),
    "quantised": KernelUse((replace(BFLOAT16, kv_bits=4),), 8, (RopeShape(16),), (1001,)),
    "quantised with a window": KernelUse(
        (replace(SHAPE, window=50, kv_bits=8),), 16, (RopeShape(32, eps=1e-6),)
    ),
    "frequencies": KernelUse(
        (BFLOAT16,),
        32,
        (RopeShape(16, base=None, eps=1e-6),),
        (96,),
        (WeightShape(100, 1056, IN_4_BITS),),
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_kernels_are_right_at_unlike_uses(name):
    assert verify(UNLIKE[name]).failures == {}


# What is remembered


def test_kernels_that_pass_are_remembered(found, tmp_path):
    _, ran = found
    assert verify(USE) == Verdict({}, "varlen")
    assert ran == checks_for(USE)
    ran.clear()
    assert verify(USE) == Verdict({}, "varlen")
    assert ran == []
    verify(replace(USE, shapes=(SHAPE, replace(SHAPE, window=9))))
    assert {check.shape.window for check in ran} == {9}
    assert len(list(tmp_path.rglob("*.json"))) == 1


@pytest.mark.parametrize("memory", ["", "[1]", "{", "{}"])
def test_a_memory_that_cannot_be_read_is_no_memory(found, tmp_path, memory):
    _, ran = found
    verify(USE)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(memory)
    ran.clear()
    assert verify(USE) == Verdict({}, "varlen")
    assert ran == checks_for(USE)


@pytest.mark.parametrize("value", ["right", "{}", "[]", '{"error": 0}'])
def test_a_finding_that_cannot_be_read_is_no_finding(found, tmp_path, value):
    _, ran = found
    verify(USE)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), value)))
    ran.clear()
    verify(USE)
    assert ran == checks_for(USE)


def test_a_shape_is_not_taken_for_another_that_is_written_alike(found):
    shape = ExpertShape(8, 64, 64, quantisation=IN_4_BITS)
    for experts in shape, shape._replace(down=IN_4_BITS):
        found[1].clear()
        verify(KernelUse((BFLOAT16,), 8, experts=(experts,)))
        assert "expert_gemm" in {check.kernel for check in found[1]}


def test_a_failure_is_tried_again_and_a_hang_is_not(found, tmp_path):
    results, ran = found
    results["varlen_prefill"] = CheckResult(None, failure="no such function")
    results["gather_rows"] = CheckResult(None, failure="hangs: no result after 9 s", ended=True)
    first = verify(USE)
    assert set(first.failures) == {"varlen_prefill", "gather_rows"}
    ran.clear()
    again = verify(USE)
    assert [check.kernel for check in ran] == ["varlen_prefill"]
    (file,) = tmp_path.rglob("*.json")
    said = f"(found at an earlier start; to try again, delete {file})"
    assert again.failures["gather_rows"] == f"{first.failures['gather_rows']} {said}"


def test_a_hang_that_is_remembered_keeps_others_from_hanging(found):
    results, ran = found
    results["paged_decode"] = CheckResult(None, failure="hangs: no result after 9 s", ended=True)
    verify(USE)
    ran.clear()
    assert list(verify(USE).failures) == ["paged_decode"]
    assert ran == []


def test_a_folder_that_is_not_writable_costs_another_check(found, monkeypatch, tmp_path):
    _, ran = found
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for count in (1, 2):
        assert verify(USE) == Verdict({}, "varlen")
        assert len(ran) == count * len(checks_for(USE))


def test_findings_of_others_stay():
    ours, theirs = Findings(), Findings()
    theirs.add("their kernel", "right")
    ours.add("our kernel", "wrong")
    assert Findings().known == {"their kernel": "right", "our kernel": "wrong"}


def test_prompts_use_mlx_where_the_timing_failed_until_a_start_times_the_kernel(found, caplog):
    """Nobody has seen our kernel for prompts on a new Mac, and Apple tunes MLX's SDPA for each:
    only a measured gain is a reason to leave it.  With one of two layers timed, the same holds."""
    results, ran = found
    results["varlen_prefill"] = CheckResult(None, 0.0, timing_failed=True)
    assert verify(USE) == Verdict({}, "gather")
    assert f"({SHAPE}, blocks of 8) is not used for prompts: it cannot be timed" in caplog.text
    results["varlen_prefill"] = CheckResult(None, 0.0, speed=Speed(0.9e-4, 1e-4))
    ran.clear()
    assert verify(USE) == Verdict({}, "varlen")
    assert [check.kernel for check in ran] == ["varlen_prefill"]
    results["varlen_prefill"] = CheckResult(None, 0.0, timing_failed=True)
    assert verify(replace(USE, shapes=(SHAPE, replace(SHAPE, window=9)))) == Verdict({}, "gather")


def test_a_correct_kernel_whose_timing_failed_stays_where_its_fallback_takes_more_memory(found):
    """A timing fails where a model has left too little memory; the fallback copies K and V."""
    found[0]["paged_decode"] = CheckResult(None, 0.0, timing_failed=True)
    assert verify(USE) == Verdict({}, "varlen")


# What is slow


def test_a_kernel_that_is_clearly_slower_is_replaced(found, tmp_path):
    results, _ = found
    results["gather_rows"] = CheckResult(None, 0.0, speed=Speed(1.6e-3, 1e-3))
    results["paged_decode"] = CheckResult(None, 0.0, speed=Speed(1.4e-3, 1e-3))
    line = f"gather_rows ({SHAPE}): takes 1,600 us where its fallback takes 1,000 us"
    assert verify(USE).failures == {"gather_rows": line}
    (file,) = tmp_path.rglob("*.json")
    said = f"(found at an earlier start; to try again, delete {file})"
    assert verify(USE).failures == {"gather_rows": f"{line} {said}"}


def test_prompts_of_all_layers_go_the_way_that_serves_them_all(found):
    """Prompts use `gather` if that is faster for one of the layers."""
    results, _ = found
    results["varlen_prefill"] = CheckResult(None, 0.0, speed=Speed(1e-4, 1e-4))
    assert verify(USE) == Verdict({}, "varlen")
    results["varlen_prefill"] = CheckResult(None, 0.0, speed=Speed(1.1e-4, 1e-4))
    both = replace(USE, shapes=(SHAPE, replace(SHAPE, window=9)))
    assert verify(both) == Verdict({}, "gather")


def test_what_is_wrong_is_said_before_what_is_slow(found):
    results, _ = found
    results["gather_rows"] = CheckResult(None, 2.0, speed=Speed(2e-4, 1e-4))
    assert verify(USE).failures["gather_rows"].endswith("the error is 2 times the allowed one")
    results["gather_rows"] = CheckResult(None, math.inf)
    line = f"gather_rows ({SHAPE}): its results are NaN, or differ where none may"
    assert verify(USE).failures["gather_rows"] == line


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("rope_write", SHAPE),
        ("fused_decode", SHAPE),
        ("shared_prefix", SHAPE),
        ("latent_write", LATENT),
    ],
)
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("factor == 1.0f ? x", "true ? x"),
        ("float x = a[t]", "float x = rope_scaled<R, FACTOR>(a[t])"),
    ],
    ids=["ignored", "of all elements"],
)
def test_a_factor_that_a_kernel_gets_wrong_is_found(monkeypatch, name, shape, text, wrong):
    """Only that kernel is replaced, and only for models that have a factor."""
    miscompile(monkeypatch, name, (text, wrong))
    dims = 16 if shape.latent else 24
    for factor in (1.0, YARN_FACTOR):
        use = KernelUse((shape,), 16, (RopeShape(dims, factor=factor),))
        failed = list(verify(use).failures)
        assert failed == ([name] if factor != 1 else [])


@pytest.mark.parametrize(
    ("kernel", "position", "failed"),
    [("paged_decode", "stored", "fused_decode"), ("shared_prefix", "seq_len", "shared_prefix")],
)
def test_a_kernel_that_rotates_by_lengths_is_found(monkeypatch, kernel, position, failed):
    """Positions differ from lengths behind pictures."""
    miscompile(monkeypatch, kernel, ("positions[seq], lane", f"{position}, lane"))
    assert list(verify(replace(USE, ropes=(RopeShape(32, base=1e4),))).failures) == [failed]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("count", [6, 60])
def test_large_logits_that_overflow_are_noticed(count, dtype, monkeypatch):
    check = Check("expert_topk", MixtureShape(ExpertShape(count, 64, 64), dtype))
    assert run(check).passed
    miscompile(monkeypatch, "expert_topk", ("scores[s] - top)", "scores[s] - 0.5f * top)"))
    assert not run(check).passed
