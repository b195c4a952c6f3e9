"""Ranks whose steps launch kernels, are fused, compiled and one ahead answer as one rank.

Each test runs two processes joined by a ring, over the CPU host.
"""

from pathlib import Path

import pytest

from metal.host import installed
from tests.model.test_shards import MODELS, seeded, shard
from tests.support.attention.array_attention import compile_on_cpu
from tests.support.engine import rank_processes
from tests.support.kernels.device import change_device, pad_to_powers_of_two, pretend_gpu
from tests.support.kernels.expert_cases import EXPERT_KERNELS
from tests.support.kernels.launches import watch
from tests.support.models import tiny_models as tiny
from tests.support.models.rounding import gather_in_16_bits
from tests.support.run_python import run_python
from tests.support.server.command import eventually
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.distributed import ALONE
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kernels.registry import Verdict

HERE = "tests.runner.test_ranks"
PREFIX = tiny.prompts(1, 16, 16, seed=3)[0]
PROMPTS = [PREFIX + prompt for prompt in tiny.prompts(4, 14, 24, seed=5)]
# Blocks for two of four requests; chunks beside decodes.
TIGHT = {
    "block_size": 8,
    "num_blocks": 12,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
}


def tokens_of(engine: LLMEngine) -> list[list[int]]:
    return tiny.answers(engine, PROMPTS, seeded(len(PROMPTS), 20, logprobs=1))


def use_kernels(patch: pytest.MonkeyPatch, rank: int) -> set[str]:
    """Kernels as on a GPU, fused; their names, as they are launched.

    Rank 1's checks find a kernel wrong, and its timings are not those of rank 0.
    """
    launched = set()
    verdict = Verdict({"add_rms_norm": "wrong"} if rank else {}, "varlen")
    few_rows = lambda packed, attention, fusion, ranks: range(1, ranks.from_leader(9 - 8 * rank))  # noqa: E731
    watch(patch, lambda kernel, *_: launched.add(kernel))
    pretend_gpu(patch, verdict)
    patch.setattr(decide, "faster_rows", few_rows)
    patch.setattr(decide, "faster_expert_rows", few_rows)
    gather_in_16_bits(patch)
    pad_to_powers_of_two(patch)
    change_device(patch, rows_as_decodes=0)
    return launched


def through_kernels(ranks, names):
    """By model.  The load runs twice: the second finds prefixes in the cache."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, installed():
        launched = use_kernels(patch, ranks.rank)
        for name in names:
            engine = LLMEngine(
                shard(ranks, name, name == HALF, **MODELS[name]), EngineConfig(**TIGHT)
            )
            launched.clear()
            tokens = [tokens_of(engine) for _ in range(2)]
            metrics = engine.metrics()
            found[name] = {
                "tokens": tokens,
                "launched": sorted(launched),
                "failed": engine.runner.path.failed_kernels,
                "ahead": engine.in_flight.pipeline.num_ahead,
                "preemptions": metrics["preemptions"],
                "hits": metrics["prefix_cache_hit_tokens"],
            }
    return found


# Of each model, kernels that must have run beside others.
ATTENTION = {"paged_decode", "rope_write", "varlen_prefill"}
LATENTS = {"latent_attention", "latent_write"}
STATES = {"causal_conv", "gated_delta", "gated_rms_norm"}
KERNELS = {"deepseek_v3": LATENTS, "qwen3_5": ATTENTION | STATES}
# In float16, for which these kernels are; sums of shards round otherwise than one rank's.
HALF = "qwen3_moe"


def one_rank(name):
    engine = LLMEngine(shard(ALONE, name, **MODELS[name]), EngineConfig(**TIGHT))
    return [tokens_of(engine) for _ in range(2)]


@pytest.mark.long
def test_ranks_with_kernels_answer_as_one_rank_without():
    """Chunked, mixed, preempted, with shared prefixes, one step ahead.  A kernel that is wrong on
    one rank is used by none.  Products and experts of few rows follow rank 0's timing."""
    results = rank_processes.run(f"{HERE}:through_kernels", 2, [*KERNELS, HALF])
    for name, kernels in KERNELS.items():
        expected, (first, second) = one_rank(name), (result[name] for result in results)
        assert first == second, name
        assert first["tokens"] == expected, name
        assert kernels <= {*first["launched"]}, name
        assert first["failed"] == ["add_rms_norm"]
        assert "add_rms_norm" not in first["launched"]
        assert first["ahead"] > 20
        assert first["hits"] > len(PREFIX)
        assert first["preemptions"] > 0
    first, second = (result[HALF] for result in results)
    assert first == second
    assert {*first["launched"]} >= EXPERT_KERNELS | {"skinny_gemm"}


def compiled(ranks, names):
    """Steps through ArrayAttention, which MLX can compile on a CPU."""
    found = {}
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            pad_to_powers_of_two(patch)
            model = shard(ranks, name, **MODELS[name])
            engine = compile_on_cpu(LLMEngine(model, EngineConfig(**TIGHT)), "varlen")
            tokens = tokens_of(engine)
            reason, metrics = engine.runner.compiled.reason, engine.metrics()
            found[name] = tokens, reason, metrics["steps"], metrics["compiled_steps"]
    return found


@pytest.mark.thorough
def test_compiled_steps_sum_over_the_ranks():
    names = ["llama/q4"]
    for result in rank_processes.run(f"{HERE}:compiled", 2, names):
        for name, (tokens, reason, steps, compiled_steps) in result.items():
            assert tokens == one_rank(name)[0], name
            assert reason is None
            assert steps > compiled_steps > steps // 2


def ahead(ranks, file):
    """Rank 1 waits until rank 0 has submitted the sums of two steps."""
    file = Path(file)
    if ranks.rank == 1:
        eventually(file.exists)
    tokens = ranks.from_rank_0(mx.arange(4) + 10 * ranks.rank)
    mx.async_eval(tokens)
    following = ranks.from_rank_0(tokens + 1)
    mx.async_eval(following)
    if ranks.rank == 0:
        file.touch()
    return [tokens.tolist(), following.tolist()]


@pytest.mark.long
def test_a_step_is_submitted_before_the_ranks_agree_on_the_previous_tokens(tmp_path):
    """Small: MLX's CPU backend lets few tasks wait."""
    results = rank_processes.run(f"{HERE}:ahead", 2, str(tmp_path / "submitted"))
    assert results == [[[0, 1, 2, 3], [1, 2, 3, 4]]] * 2


def test_imports_run_nothing_on_a_device():
    """A rank chooses its device afterwards; MLX's first stream comes with its first operation."""
    code = "import vllm_metal_lite.engine.llm, mlx.core as mx; print(mx.new_stream(mx.cpu))"
    done = run_python("-c", code, check=True)
    assert done.stdout.strip() == "Stream(Device(cpu, 0), 0)"
