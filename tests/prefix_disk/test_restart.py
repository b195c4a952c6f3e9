"""Prefixes that an engine finds on the disk after a restart: equal bytes, equal tokens.

The oracle is an engine that computes everything, and mlx-lm which runs each request alone.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from metal.host import compiler_available, installed
from tests.support import tiny_models as tiny
from tests.support.kernel_engine import engine_with_kernels
from tests.support.pool_accounts import check_accounts
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.prefix_disk import disk, folder
from vllm_metal_lite.sampling_params import SamplingParams

# Dense, latents, windows, recurrent layers alone and with attention, experts, shared indexers.
NAMES = (
    "llama", "qwen3", "deepseek_v3", "gemma3/w9", "gpt_oss", "llama4", "mamba2", "rwkv7", "lfm2",
    "qwen3_next", "jamba", "kimi_linear", "deepseek_v32",
)  # fmt: skip
LONG, OTHER = tiny.prompts(2, 60, 60, seed=5)
# The first is used again, as a whole and in part.
PROMPTS = [LONG, LONG, LONG[:48] + OTHER[:10]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(disk, "MIN_TOKENS", 8)
    monkeypatch.setattr(folder, "FREE_MARGIN", 0)
    monkeypatch.setattr(disk.PrefixDisk, "_is_faster", lambda *_: True)  # whatever the speed here


@pytest.fixture
def closing() -> Iterator[list[LLMEngine]]:
    engines: list[LLMEngine] = []
    yield engines
    for engine in engines:
        if engine.prefix_disk is not None:
            engine.prefix_disk.close()


def serve(engine: LLMEngine, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    """One request after another, so that later ones hit what earlier ones left."""
    done: dict[str, RequestOutput] = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY, **options)
        done |= tiny.run(engine)
    if engine.prefix_disk is not None:
        while engine.prefix_disk.wants_a_pause:
            engine.prefix_disk.between_steps()
        engine.prefix_disk.writer.flush()
    check_accounts(engine.scheduler.kv, ())
    return [done[str(i)] for i in range(len(prompts))]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}], ids=["", "8 bits"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_after_a_restart_are_those_computed(name, options, closing):
    try:
        first = tiny.engine(name, prefix_disk_gib=1, **options)
    except ValueError as e:
        pytest.skip(str(e))
    closing.append(first)
    expected = serve(first, PROMPTS)
    if not options:
        assert tokens(expected)[0] == tiny.alone(tiny.native(name), LONG, 8)
    again = tiny.engine(name, prefix_disk_gib=1, **options)
    closing.append(again)
    restored = serve(again, PROMPTS)
    assert tokens(restored) == tokens(expected)
    assert restored[0].num_cached_tokens == 56  # of 60, in blocks of 8
    metrics = again.metrics()
    assert metrics["prefix_disk_restored_tokens"] >= 56
    assert metrics["prefix_disk_errors"] == 0
