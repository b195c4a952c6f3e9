"""Rows of one picture that see each other (Gemma), on each path, against the definition."""

from dataclasses import replace

import numpy as np
import pytest

from metal.host import installed
from tests.support.attention.cases import PREFILLS, TOLERANCE, Case, KernelCase, check
from tests.support.kernels.device import checks_find
from tests.support.kernels.launches import watch
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.paged.step import VarlenPrompts
from vllm_metal_lite.attention.sdpa.calls import SdpaPlan
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.registry import Verdict

# Decodes, a text, a prompt with two pictures, a chunk that begins with its picture, another text
# behind a context: (tokens before, rows).
SEGMENTS = [(17, 1), (30, 1), (0, 13), (0, 45), (21, 30), (8, 25)]
SPANS = [(3, 2, 20), (3, 24, 44), (4, 21, 48)]


@pytest.fixture(autouse=True)
def host(monkeypatch):
    checks_find(monkeypatch, Verdict({}, "varlen"))
    with installed():
        yield


def reference(*args, prefill, **kwargs):
    return Case(*args, **kwargs)


CASES = [(reference, "gather"), *((KernelCase, prefill) for prefill in PREFILLS)]


@pytest.mark.parametrize(("case", "prefill"), CASES, ids=["reference", *PREFILLS])
@pytest.mark.parametrize("how", [{}, {"window": 11}, {"window": 60}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_pictures_beside_text_and_decodes(case, prefill, how, bits):
    check(case(SEGMENTS, prefill=prefill, spans=SPANS, sinks=True, bits=bits), padding=3, **how)


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_in_16_bits_with_gemmas_heads(dtype, prefill):
    how = {"heads": 2, "kv_heads": 1, "dim": 256, "dtype": dtype}
    check(KernelCase([(0, 40)], prefill=prefill, spans=[(0, 3, 37)], **how), window=16)


def test_causal_rows_would_differ():
    """The control: without spans, rows of pictures differ, and no other row does."""
    for how in ({}, {"window": 11}):
        seeing, causal = Case(SEGMENTS, spans=SPANS), Case(SEGMENTS)
        away = np.abs(seeing.run(**how) - causal.run(**how)).max(axis=(1, 2))
        sees = seeing.batch.pictures.spans[:, 1] > seeing.batch.positions + 1
        assert (away[sees] > 100 * TOLERANCE[mx.float32]).all()
        in_span = np.ptp(seeing.batch.pictures.spans, axis=1) > 1
        assert not away[~in_span].any()


@pytest.mark.parametrize("prefill", PREFILLS)
def test_a_small_step_attends_to_no_row_of_a_picture_as_to_a_decode(prefill):
    """A shared prefix is not used either: both paths read only what comes before a row."""
    launched = []

    class SmallSteps(KernelCase):
        rows_as_decodes = 64

    for segments, spans in (([(9, 1), (16, 12)], [(1, 16, 28)]), ([(16, 12)], [(0, 18, 24)])):
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, lambda name, *_: launched.append(name))
            check(SmallSteps(segments, prefill=prefill, spans=spans))
            assert "shared_prefix" not in launched
            assert ("paged_decode" in launched) == (segments[0][1] == 1)
            text = SmallSteps(segments, prefill=prefill)
            assert text.batch.pictures is None
            launched.clear()
            check(text)
            assert launched[0] in ("paged_decode", "shared_prefix")  # the control
            launched.clear()


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("only_windowed", [False, True])
def test_only_layers_that_see_pictures_get_their_spans(only_windowed, window, monkeypatch):
    flags = []
    watch(monkeypatch, lambda name, _, template: flags.append(template.get("SPANS")))
    check(
        KernelCase(SEGMENTS[2:], prefill="varlen", spans=[(1, 2, 20)], only_windowed=only_windowed),
        window=window,
    )
    assert flags == [window is not None or not only_windowed]


def test_steps_of_text_get_no_spans(monkeypatch):
    flags = []
    watch(monkeypatch, lambda name, _, template: flags.append(template.get("SPANS")))
    check(KernelCase(SEGMENTS[2:], prefill="varlen"))
    assert flags == [False]


@pytest.mark.parametrize("failed", [(), ("varlen_prefill",)], ids=str)
def test_without_the_kernel_pictures_take_masks(failed):
    case = KernelCase(SEGMENTS, prefill="varlen" if not failed else "gather", spans=SPANS)
    attention = KernelAttention(case.store, case.prefill, case.shapes, failed_kernels=failed)
    plan = attention.prepare(case.batch, case.batch.num_tokens).plan
    assert isinstance(plan.prompts, SdpaPlan if failed else VarlenPrompts)


def test_a_span_outside_its_segment_is_refused():
    """On a device, such a span would read keys that are not there."""
    batch = Case(SEGMENTS, spans=SPANS).batch
    blocks = int(batch.block_tables.max()) + 1
    batch.validate(blocks)
    for row, span in ((-1, (31, 34)), (0, (18, 19)), (20, (-1, 9))):
        spans = batch.pictures.spans.copy()
        spans[row] = span
        wrong = replace(batch, pictures=replace(batch.pictures, spans=spans))
        with pytest.raises(
            ValueError, match=rf"row {row % len(spans)} sees .*{span[0]} to {span[1]}"
        ):
            wrong.validate(blocks)
