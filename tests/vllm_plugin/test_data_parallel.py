"""Two data-parallel engines under real vLLM: both are asked, and each answers as one engine."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

from tests.support import tiny_models as tiny

pytest.importorskip("vllm", reason="vLLM is not installed: tools/dev/vllm_env.sh")

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.reader import get_metrics_snapshot

from tests.vllm_plugin import kit
from vllm_metal_lite import backend
from vllm_metal_lite.vllm_plugin.worker import MetalLiteWorker

pytestmark = pytest.mark.xdist_group("data_parallel")

MODEL = "mixtral"  # experts: vLLM keeps ranks that share experts in step
NUM_TOKENS = 16
PROMPTS = tiny.prompts(20, 1, 60, seed=1)
SIZES = {
    "num_gpu_blocks_override": 100,
    "block_size": 8,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


def arguments(**options):
    return AsyncEngineArgs(str(kit.folder(MODEL)), data_parallel_size=2, **SIZES, **options)


async def ask(llm, request_id, prompt, **kwargs):
    kwargs = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **kwargs}
    params = SamplingParams(**kwargs, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in llm.generate({"prompt_token_ids": list(prompt)}, params, request_id):
        return list(output.outputs[0].token_ids)


def generated():
    """Tokens by engine, since the process began."""
    found = (m for m in get_metrics_snapshot() if m.name == "vllm:generation_tokens")
    return {m.labels["engine"]: m.value for m in found if m.labels["model_name"] == MODEL}


async def until_it_fails(llm, name):
    for i in range(100_000):
        try:
            await ask(llm, f"{name}-{i}", [5])
        except EngineDeadError:
            return True


async def serve_then_lose_an_engine(llm):
    answers = await asyncio.gather(*(ask(llm, str(i), p) for i, p in enumerate(PROMPTS)))
    assert answers == [kit.alone(MODEL, p, NUM_TOKENS) for p in PROMPTS]
    tokens = generated()
    assert set(tokens) == {"0", "1"}
    assert min(tokens.values()) > 0
    assert sum(tokens.values()) == NUM_TOKENS * len(PROMPTS)

    clients = [asyncio.create_task(until_it_fails(llm, name)) for name in "abcd"]
    while generated() == tokens:
        await asyncio.sleep(0.05)
    os.kill(llm.engine_core.resources.engine_manager.processes[1].pid, signal.SIGKILL)
    assert await asyncio.wait_for(asyncio.gather(*clients), 600) == [True] * len(clients)


def test_both_engines_answer_as_one_and_the_end_of_one_is_an_error():
    async def main():
        llm = AsyncLLM.from_engine_args(arguments(served_model_name=MODEL))
        try:
            await serve_then_lose_an_engine(llm)
        finally:
            llm.shutdown()

    asyncio.run(main())


def test_engines_are_not_kept_in_step_and_run_the_model_in_their_process():
    config = arguments().create_engine_config()
    assert not config.model_config.is_moe
    assert config.parallel_config.distributed_executor_backend == "uni"
    alone = AsyncEngineArgs(str(kit.folder(MODEL)), **SIZES).create_engine_config()
    assert alone.model_config.is_moe


@pytest.mark.parametrize(("engine", "rank", "device"), [(0, 0, "4"), (0, 1, "5"), (1, 1, "7")])
def test_each_worker_gets_a_gpu_or_a_part_of_the_memory(monkeypatch, engine, rank, device):
    config = arguments(tensor_parallel_size=2).create_engine_config()
    config.parallel_config.data_parallel_rank_local = engine
    config.parallel_config.reconfigure_for_independent_dp_rank()  # as vLLM does in each engine
    worker = SimpleNamespace(
        vllm_config=config, parallel_config=config.parallel_config, local_rank=rank
    )
    monkeypatch.setattr(backend, "_sharers", 1)
    memory = backend.memory_limit()
    MetalLiteWorker._take_device(worker)
    assert backend.memory_limit() == memory // 4

    monkeypatch.setattr(backend, "_sharers", 1)
    monkeypatch.setattr(backend, "name", lambda: "cuda")
    monkeypatch.setenv("METAL_LITE_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    MetalLiteWorker._take_device(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == device
    assert backend._sharers == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"data_parallel_size_local": 1}, "2 data-parallel ranks with 1 on this host"),
        ({"data_parallel_rank": 1}, "--data-parallel-rank"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "--data-parallel-size 2 with --nnodes 2"),
    ],
)
def test_what_needs_several_hosts_is_refused_by_name(options, named):
    with pytest.raises(Exception, match="vllm-metal-lite does not support") as e:
        arguments(**options).create_engine_config()
    assert named in str(e.value)
