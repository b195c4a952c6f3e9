"""Greedy tokens of an engine with the kernels of experts are those of one without.

In float16, where MLX's operations round as the kernels do.  On the CPU host; steps are padded, as
on a GPU.
"""

import pytest

from metal.host import installed
from tests.support.kernels.device import RIGHT, fused_rows, pad_to_powers_of_two, pretend_gpu
from tests.support.kernels.expert_cases import EXPERT_KERNELS
from tests.support.kernels.launches import watch
from tests.support.models import tiny_models as tiny
from tests.support.models.rounding import gather_in_16_bits
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.experts import MAX_ROWS

# Three requests run together, then two, then one: steps have a padding row, none, one row.
PROMPTS, COUNTS, TOP_K = tiny.prompts(3, 5, 11, seed=9), (4, 6, 8), 2


@pytest.fixture(scope="module", autouse=True)
def host():
    with pytest.MonkeyPatch.context() as patch, installed():
        pretend_gpu(patch, RIGHT)
        fused_rows(patch, range(0))
        gather_in_16_bits(patch)
        pad_to_powers_of_two(patch)
        yield


def tokens_of(name: str, expert_rows: range, prompts=PROMPTS, step=24) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        fused_rows(patch, expert_rows=expert_rows)
        engine = tiny.engine(name, mx.float16, max_num_batched_tokens=step)
    tokens = tiny.answers(engine, prompts, [tiny.greedy(count) for count in COUNTS])
    assert engine.runner.path.failed_kernels == ()
    return tokens


LATENTS = {"latent_attention", "latent_write"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("qwen3_moe", {"paged_decode"}),
        ("gpt_oss", {"paged_decode"}),
        ("mixtral", {"paged_decode"}),
        ("deepseek_v2", LATENTS),
        ("deepseek_v3", LATENTS),
        ("glm4_moe_lite", LATENTS),
    ],
)
def test_tokens_are_those_of_mlx_lm_s_experts(name, others, monkeypatch):
    """Beside the other kernels of the model.  The plan knows which rows are padding."""
    launched, planned = set(), set()

    def note(kernel, arrays, _):
        launched.add(kernel)
        if kernel == "expert_plan":
            indices, num_live = arrays
            planned.add((indices.size // TOP_K, num_live.item()))

    expected = tokens_of(name, range(0))
    watch(monkeypatch, note)
    assert tokens_of(name, range(1, 65)) == expected
    assert launched >= EXPERT_KERNELS | others
    assert launched.isdisjoint(("kv_write", "rope_write") if others == LATENTS else LATENTS)
    # Rows, and those that are no padding: prompts, their rest beside decodes, three requests, two.
    assert planned == {(32, 24), (4, 4), (4, 3), (2, 2)}


@pytest.mark.thorough
def test_prompts_of_more_rows_than_few(monkeypatch):
    """A step of 150 rows has more pairs of an expert than a tile."""
    prompts, rows = tiny.prompts(3, 49, 90, seed=3), []

    def note(kernel, arrays, _):
        if kernel == "expert_plan":
            rows.append(arrays[0].size // TOP_K)

    expected = tokens_of("qwen3_moe", range(0), prompts, 150)
    watch(monkeypatch, note)
    assert tokens_of("qwen3_moe", range(1, MAX_ROWS + 1), prompts, 150) == expected
    assert max(rows) >= 150
