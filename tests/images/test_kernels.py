"""Pictures on the path of kernels, which the CPU host executes."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from metal.host import installed
from tests.images.test_forward import PARAMS, oracle, requests
from tests.support.images import seeing
from tests.support.kernels.device import change_device, pretend_gpu
from tests.support.kernels.launches import watch
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.fusion.launches import FusedLaunches, fuse
from vllm_metal_lite.kernels.registry import Prefill, Verdict
from vllm_metal_lite.model.packed import NO_FUSION, PackedModel


def fusion_of(model: PackedModel, fused: bool) -> Any:
    return fuse(model.model, joins=True) if fused else NO_FUSION


@pytest.mark.parametrize(
    ("fused", "prefill"), [(False, "gather"), (True, "gather"), (False, "varlen")]
)
@pytest.mark.parametrize("name", seeing.NAMES)
def test_kernels_see_what_a_whole_forward_sees(
    name: str, fused: bool, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 32 tokens mix prompts and decodes.  Fused decodes rotate by themselves, but not
    behind a picture that turns them by other positions than their own."""
    pretend_gpu(monkeypatch, Verdict({}, prefill))
    change_device(monkeypatch, small_scores=0, rows_as_decodes=0)
    building, fused_pictures = FusedLaunches.building, list[bool]()

    def noted(fusion: FusedLaunches, step: Any) -> Any:
        fused_pictures.append(step is not None and step.pictures is not None)
        return building(fusion, step)

    monkeypatch.setattr(FusedLaunches, "building", noted)
    layers = set()  # (window, whether rows of a picture see each other)

    def note(kernel: str, _: Any, template: Any) -> None:
        if kernel == "varlen_prefill":
            layers.add((template["WINDOW"] > 0, template["SPANS"]))

    watch(monkeypatch, note)
    seeing.model_of.cache_clear()  # fusion changes models
    with installed(), patch.object(decide, "decide", lambda model, *_: fusion_of(model, fused)):
        engine = seeing.engine(name, attention="kernels", max_num_batched_tokens=32)
        assert engine.runner.attention.name == "kernels"
        assert (engine.runner.path.fusion is not NO_FUSION) is fused
        found = tiny.outputs(engine, requests(name), PARAMS)
    seeing.model_of.cache_clear()
    assert any(fused_pictures) is fused
    if prefill == "varlen" and name in seeing.SEES:
        both = {True} if seeing.SEES[name] == "sliding" else {True, False}
        assert {window for window, sees in layers if sees} == both
    else:
        assert not any(sees for _, sees in layers)
    for which, output in enumerate(found):
        tokens, answer = output.prompt_token_ids, output.outputs[0].token_ids
        expected = oracle(name, (*tokens, *answer), which)
        scores = seeing.scores(expected, tokens)
        np.testing.assert_allclose(seeing.scores_of(output), scores, atol=1e-3)
        assert answer == expected[len(tokens) - 1 : -1].argmax(-1).tolist()
