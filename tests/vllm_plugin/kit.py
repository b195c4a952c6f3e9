"""Real vLLM engines over tiny models, and the oracles beside them."""

import gc
import importlib
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
import vllm.config.vllm
import vllm.entrypoints.cli.main
import vllm.triton_utils
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry
from vllm.triton_utils import HAS_TRITON

from tests.support.models import tiny_models as tiny
from tools.lib.servers import free_port
from vllm_metal_lite.model.files.find import DEMO_PATH
from vllm_metal_lite.vllm_plugin import logger as plugin_logger

# At the end of each engine vLLM unfreezes what imports have made, and collections walk over it.
gc.unfreeze = lambda: None
# vLLM looks at each model's class in a process of its own, which imports vLLM again.
registry._run_in_subprocess = lambda look: look()

# Our tiny model -> the name of its architecture in vLLM.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",  # capped scores, an adapter of ours
    "gemma3_text": "Gemma3ForCausalLM",  # window layers among full ones
    "mixtral": "MixtralForCausalLM",  # experts
    "gemma4_text/shared_kv": "Gemma4ForCausalLM",  # heads of two sizes, layers that share K and V
}
# Recurrent layers beside attention, and nothing but recurrent layers: no prefix is cached.
RECURRENT = {"qwen3_next": "Qwen3NextForCausalLM", "mamba2": "Mamba2ForCausalLM"}
# For several ranks.
SHARED = {
    "gpt_oss": "GptOssForCausalLM",  # windows, sinks, experts
    "deepseek_v3": "DeepseekV3ForCausalLM",  # latents
    "qwen3_5/tied": "Qwen3_5ForConditionalGeneration",  # recurrent layers
}
# Multimodal models: mlx-lm runs their text part.
TEXT_PARTS = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",  # chunks
}
FAMILIES = {
    "qwen3": "Qwen3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",  # short convolutions
    "gemma4_text/moe": "Gemma4ForCausalLM",
}
NAMES = ARCHITECTURES | RECURRENT | SHARED | TEXT_PARTS | FAMILIES

SMALL = {
    "num_gpu_blocks_override": 100,
    "max_model_len": 128,
    "block_size": 8,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@cache
def folder(name: str) -> Path:
    """A tiny model on disk; "demo" is the one that the package ships."""
    if name == "demo":
        return DEMO_PATH
    path = Path(tempfile.mkdtemp(prefix="tiny-"))
    return tiny.write_folder(path, name, architectures=[NAMES[name]])


def skip_if_vllm_cannot_read(name: str) -> None:
    """The transformers that vLLM 0.27 wants cannot read the configuration of Gemma 4."""
    if version("vllm").startswith("0.27") and name.startswith("gemma4"):
        pytest.skip("this vLLM cannot read the configuration of Gemma 4")


@cache
def native(name: str) -> Any:
    """The model as mlx-lm runs it."""
    return mlx_lm.load(str(DEMO_PATH))[0] if name == "demo" else tiny.native(name)


def alone(name: str, prompt: Sequence[int], n: int) -> list[int]:
    """n greedy tokens by mlx-lm generating this request alone."""
    return tiny.alone(native(name), prompt, n)


@contextmanager
def engine(name: str = "llama", **options: Any) -> Iterator[LLM]:
    """A small vLLM engine in this process; at its end no request may hold a block."""
    llm = LLM(str(folder(name)), **{**SMALL, "disable_log_stats": False, **options})
    try:
        yield llm
        assert not llm.llm_engine.has_unfinished_requests()
        for pool in block_pools(llm):
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # null block
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def two_hosts() -> dict[str, Any]:
    """Options of two hosts on the loopback; this process is the first."""
    return {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}


# vLLM's imports take 15 s: once, for all processes of `process`, and for their engines and ranks.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])
_FORKED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
_FORKED |= {"PYTHONPATH": ":".join(sys.path), "VLLM_LOGGING_LEVEL": "INFO"}


@contextmanager
def process(log: Path, run: Callable[..., None], *args: Any) -> Iterator[BaseProcess]:
    """A process of `run(*args)`, whose output goes to the file `log`.  It ends with the context."""
    log.touch()
    started = _FORKS.Process(target=_run, args=(log, run, args))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _FORKED.items():
            patch.setenv(name, value)  # of the process that is forked
        started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


def _run(log: Path, run: Callable[..., None], args: tuple) -> None:
    with log.open("w") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    run(*args)


def second_host(folder: Path, log: Path, **options: Any) -> AbstractContextManager[BaseProcess]:
    """vLLM without a front end, whose rank joins an engine with the same options."""
    command = ["vllm", "serve", str(folder), "--headless"]
    for name, value in (options | {"node_rank": 1}).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return process(log, _vllm, command)


def _vllm(command: list[str]) -> None:
    sys.argv = command
    vllm.entrypoints.cli.main.main()


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """The lines of our log in vLLM, from a level up; vLLM's logger passes none on to pytest."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())
    plugin_logger.addHandler(handler)
    plugin_logger.setLevel(level)
    try:
        yield lines
    finally:
        plugin_logger.removeHandler(handler)
        plugin_logger.setLevel(logging.NOTSET)


def use_dialect(monkeypatch: pytest.MonkeyPatch, dialect: str) -> None:
    """ "1": the scheduler speaks to vLLM's V2 model runner."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", dialect)
    if dialect == "1" and not HAS_TRITON:
        # Some versions fall back, some refuse; the dialect does not need what they ask for.
        # A module with kernels for Triton must be imported before Triton seems to be there.
        with suppress(ImportError):
            importlib.import_module("vllm.v1.sample.ops.topk_topp_triton")
        for module in (vllm.triton_utils, vllm.config.vllm):  # some versions have no copy
            monkeypatch.setattr(module, "HAS_TRITON", True, raising=False)


def core(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core


def block_pools(llm: LLM) -> list[Any]:
    """vLLM's pool of blocks, and that of state slots if the model caches states."""
    coordinator = core(llm).scheduler.kv_cache_manager.coordinator
    return list({id(m.block_pool): m.block_pool for m in coordinator.single_type_managers}.values())


def worker(llm: LLM) -> Any:
    return core(llm).model_executor.driver_worker.worker


def counter(llm: LLM, name: str) -> int:
    """A counter of vLLM's, since the process began."""
    return next(m.value for m in llm.get_metrics() if m.name == name)


def num_preemptions(llm: LLM) -> int:
    """Preemptions since the process began."""
    return counter(llm, "vllm:num_preemptions")


def generate(llm: LLM, prompts: Sequence[Sequence[int]], *params: Any, **kwargs: Any) -> list:
    """RequestOutputs; kwargs: SamplingParams of all, greedy unless they say otherwise."""
    params = params or SamplingParams(**{"temperature": 0, "ignore_eos": True, **kwargs})
    params = params[0] if isinstance(params, tuple) else params
    return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)


def add(llm: LLM, request_id: str, prompt: Sequence[int], priority: int = 0, **kwargs: Any) -> None:
    """kwargs: SamplingParams, greedy unless they say otherwise."""
    params = SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": 40, **kwargs})
    given = {"prompt_token_ids": list(prompt)}
    llm.llm_engine.add_request(request_id, given, params, priority=priority)


def run(llm: LLM, steps: int = 10_000) -> dict[str, Any]:
    """Step; the outputs of the requests that finished."""
    done = {}
    for _ in range(steps):
        if not llm.llm_engine.has_unfinished_requests():
            break
        done |= {out.request_id: out for out in llm.llm_engine.step() if out.finished}
    return done


def tokens(outputs: list) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


def answer(output: Any) -> tuple:
    """(Tokens, which tokens were scored at which rank), and the scores."""
    entries = [output.prompt_logprobs, *(o.logprobs for o in output.outputs)]
    scored = [(t, p) for some in entries for entry in some or () for t, p in (entry or {}).items()]
    tokens = [(list(o.token_ids), o.finish_reason) for o in output.outputs]
    ranks, scores = [(t, p.rank) for t, p in scored], [float(p.logprob) for _, p in scored]
    return (tokens, ranks), scores


def prefix_hits(outputs: list) -> int:
    """Prompt tokens that the prefix cache held."""
    return sum(o.num_cached_tokens for o in outputs)
