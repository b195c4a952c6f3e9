"""The mode that is known without weights is the one that loading chooses."""

import pytest

from tests.support.models.configs import CANNOT_RUN, CONFIGS, config_of
from tests.support.models.tiny_models import build, load
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model.adapters import adapt
from vllm_metal_lite.model.layout import find_layout
from vllm_metal_lite.model.trial import Trial, fit, foresee


def mode(name, **how):
    """How the model runs; "refused" if it does not run."""
    try:
        return load(name, how=how).packed.mode
    except ModelLoadError:
        return "refused"


@pytest.mark.parametrize(
    "name", [n for n in CONFIGS if "/w9" not in n and n.split("/")[0] not in CANNOT_RUN]
)
def test_the_form_is_known_without_weights(name):
    assert mode(name, choose=foresee) == mode(name)


def test_adapters_compute_nothing_without_weights():
    model = build(config_of("deepseek_v2"))
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    adapt(model)
    assert mx.get_active_memory() == before


def test_a_mode_that_fails_leaves_the_model_as_it_was(monkeypatch):
    model = build(config_of("mamba2"))
    layout, before = find_layout(model, "mamba2"), list(map(type, model.modules()))
    monkeypatch.setattr(Trial, "problem", lambda *_: "no mode fits")
    with pytest.raises(ModelLoadError, match="no mode fits"):
        fit(model, layout, "mamba2")
    assert list(map(type, model.modules())) == before
