"""The mode that is known without weights is the one that loading chooses."""

import pytest

from tests.support.arch_configs import CANNOT_RUN, CONFIGS, config_of
from tests.support.tiny_models import build
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model.fit import foresee
from vllm_metal_lite.model.loader import from_model


def mode(name, **how):
    """How the model runs, and whether it caches prefixes; "refused" if it does not run."""
    config = config_of(name)
    try:
        packed = from_model(build(config), None, config, name, **how).packed
    except ModelLoadError:
        return "refused"
    return (
        packed.by_segment is not None,
        packed.in_sequences is not None,
        packed.no_prefix_cache is None,
    )


@pytest.mark.parametrize(
    "name", [n for n in CONFIGS if "/w9" not in n and n.split("/")[0] not in CANNOT_RUN]
)
def test_the_form_is_known_without_weights(name):
    assert mode(name, fit=foresee) == mode(name)
