"""Pictures on the path of kernels, which the CPU host executes."""

from unittest.mock import patch

import numpy as np
import pytest

from metal.host import installed
from tests.images.test_forward import PARAMS, oracle, requests
from tests.support.images import seeing
from tests.support.kernels.device import RIGHT, pretend_gpu
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.model.packed import NO_FUSION


@pytest.mark.parametrize("name", seeing.NAMES)
def test_kernels_see_what_a_whole_forward_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fused; steps of 32 tokens mix prompts and decodes."""
    pretend_gpu(monkeypatch, RIGHT)
    with installed(), patch.object(decide, "decide", lambda *_: NO_FUSION):
        engine = seeing.engine(name, attention="kernels", max_num_batched_tokens=32)
        assert engine.runner.attention.name == "kernels"
        found = tiny.outputs(engine, requests(name), PARAMS)
    for which, output in enumerate(found):
        tokens, answer = output.prompt_token_ids, output.outputs[0].token_ids
        expected = oracle(name, (*tokens, *answer), which)
        scores = seeing.scores(expected, tokens)
        np.testing.assert_allclose(seeing.scores_of(output), scores, atol=1e-3)
        assert answer == expected[len(tokens) - 1 : -1].argmax(-1).tolist()
