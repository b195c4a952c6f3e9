"""Every architecture of mlx-lm conforms, or is on a short list that says why not.

Measured over all that pass: at most 2e-5 of the logits' scale in float32; the tolerance leaves room
for other BLAS libraries.  The control, a decode over another request's context, is off by 0.5 to 1.
"""

from pathlib import Path

import mlx_lm.models
import pytest

from tests.support.models import bench, conformance
from tests.support.models import configs as arch_configs
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import CANNOT_RUN, CONFIGS, HELPERS, REFUSED
from tools.dev import models_table

PAGE = models_table.PATH.read_text(encoding="utf-8")
LISTED = models_table.listed(PAGE)
MODULES = {p.stem for p in Path(mlx_lm.models.__path__[0]).glob("*.py")} - {"__init__"}


def module_of(name: str) -> str:
    return name.split("/")[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_an_architecture_conforms(name):
    result = conformance.check(name)
    module = module_of(name)
    if result.status == "cannot run":
        assert module in CANNOT_RUN, result.reason
        return
    if module in REFUSED:
        assert result.status == "refused"
        assert module in result.reason
        assert "not supported" in result.reason
        assert "\n" not in result.reason
        return
    assert result.status == "passed", (result.reason, result.errors)
    assert result.early > 0.05, "the weights do not show what early tokens do"
    assert result.order > 0.3, "the weights do not show what the order of tokens does"
    assert result.control > 0.1, "a wrong context goes unnoticed"
    assert result.drift < conformance.TOLERANCE, "mlx-lm itself is not sure"
    assert name in LISTED[models_table.head(result)], "see below"


# One for each kind of state; no mixtures of experts: MLX's CPU has them in float32 only.
@pytest.mark.parametrize("name", [
    "llama", "gemma2", "gemma3_text", "gemma3n", "minicpm3", "youtu_llm", "mamba", "rwkv7",
    "qwen3_5", "lfm2", "recurrent_gemma", "gear/softcap",
])  # fmt: skip
def test_bfloat16_is_no_farther_from_float32_than_mlx_lms_own(name):
    """Measured: the same bit for bit, but for latents, which come 5 % nearer."""
    ours, theirs = conformance.bfloat16_errors(name)
    assert 0 < ours < 1.1 * theirs < 0.05


def test_every_file_of_mlx_lm_is_accounted_for():
    """A new release with a new architecture fails here: give it a configuration."""
    configured = {module_of(name) for name in CONFIGS}
    assert configured | HELPERS == MODULES
    assert not configured & HELPERS
    assert set(CANNOT_RUN) | REFUSED <= configured


@pytest.mark.long
@pytest.mark.parametrize("name", ["phi3small", "plamo3"])
def test_what_is_refused_for_mlx_lms_own_fault_shows_it(name):
    assert conformance.check(name).drift > 100 * conformance.TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_the_engine_preempts_and_hits_while_it_serves(name):
    tokens, metrics = conformance.serve(tiny.packed(name))
    assert [len(t) for t in tokens] == [conformance.GENERATED] * 4
    assert metrics["preemptions"] > 0
    assert metrics["prefix_cache_hit_tokens"] > 0


@pytest.mark.parametrize("window", [arch_configs.WINDOW, arch_configs.NARROW])
def test_windows_end_inside_the_sequences_and_not_on_a_block(window):
    assert window + bench.BLOCK_SIZE < max(bench.PROMPT_LENGTHS)
    assert window % bench.BLOCK_SIZE


def test_the_page_names_every_configuration():
    works = {name for name in CONFIGS if module_of(name) not in {*CANNOT_RUN, *REFUSED}}
    assert set().union(*LISTED.values()) == works


def test_the_page_of_models_is_current(request):
    """Or else run tools/dev/models_table.py."""
    if not request.config.getoption("all_cases"):
        pytest.skip("runs every configuration: tools/test --all")
    assert models_table.render([conformance.check(name) for name in CONFIGS]) == PAGE
