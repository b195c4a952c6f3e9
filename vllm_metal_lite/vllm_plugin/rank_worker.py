"""A worker that runs one rank's shard of a model (`--tensor-parallel-size`), or one stage
(`--pipeline-parallel-size`).

All ranks get the same calls from vLLM and run the same steps; vLLM reads only the leader's answers.
A rank that fails leaves the others waiting inside of a step, so its process ends: vLLM notices,
ends the other workers and gives requests an error.
"""

import atexit
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from importlib.metadata import version
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_metal_lite import __version__, backend, envs
from vllm_metal_lite.distributed import RankGroup
from vllm_metal_lite.errors import ConfigError, one_line
from vllm_metal_lite.model.files.find import find
from vllm_metal_lite.model.files.folder import weight_files
from vllm_metal_lite.vllm_plugin import logger
from vllm_metal_lite.vllm_plugin.heartbeat import Heartbeat
from vllm_metal_lite.vllm_plugin.join_ranks import join_workers
from vllm_metal_lite.vllm_plugin.worker import MetalLiteWorker


def _fatal(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that its errors end this process, for which other ranks would wait."""

    @wraps(method)
    def call(self: "RankWorker", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as e:
            self._failed(e)
            raise

    return call


def check_alike(ranks: RankGroup, facts: dict[str, Any]) -> None:
    """Raise ConfigError on every rank if a fact of any differs from that of rank 0."""
    first, *others = ranks.gather(facts)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other.get(name) != value:
                raise ConfigError(
                    f"rank {rank} has {name} {other.get(name)!r}, rank 0 has {value!r}: "
                    "all ranks of a model must be alike"
                )


class RankWorker(MetalLiteWorker):
    """One rank of several, each a process with its own shard or stage, and its own K and V."""

    _heartbeat: Heartbeat | None = None

    determine_available_memory = _fatal(MetalLiteWorker.determine_available_memory)
    get_kv_cache_spec = _fatal(MetalLiteWorker.get_kv_cache_spec)
    initialize_from_config = _fatal(MetalLiteWorker.initialize_from_config)
    compile_or_warm_up_model = _fatal(MetalLiteWorker.compile_or_warm_up_model)
    execute_model = _fatal(MetalLiteWorker.execute_model)
    sleep = _fatal(MetalLiteWorker.sleep)
    wake_up = _fatal(MetalLiteWorker.wake_up)

    def init_device(self) -> None:
        self._take_device()
        super().init_device()
        stages = self.parallel_config.pipeline_parallel_size > 1
        if stages and backend.name() == "cuda":
            raise ConfigError(
                "--pipeline-parallel-size is not possible on NVIDIA: MLX cannot send between GPUs; "
                "take --tensor-parallel-size"
            )
        group, self._heartbeat = join_workers(
            self.rank, self.parallel_config, self.distributed_init_method, self._end
        )
        self.ranks = RankGroup(group, stages)
        self._waiter = ThreadPoolExecutor(1, "StepWaiter")

    def _take_device(self) -> None:
        """Give this process one NVIDIA device; on other backends, its share of the device's memory.

        NCCL takes the device with the rank's number, so the process must see one only; and another
        default device would not do, because MLX gives new threads a stream of the first one.  Call
        before MLX's first operation, which looks for devices.
        """
        if envs.device() == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = visible.split(",") if visible else None
            if devices is not None and self.local_rank >= len(devices):
                raise ConfigError(
                    f"rank {self.rank} has no device: CUDA_VISIBLE_DEVICES names {len(devices)}"
                )
            device = devices[self.local_rank] if devices else str(self.local_rank)
            os.environ["CUDA_VISIBLE_DEVICES"] = device
        if backend.name() != "cuda":
            backend.share_device(self.parallel_config.local_world_size)

    def load_model(self) -> None:
        check_alike(self.ranks, self._facts())
        super().load_model()

    def _facts(self) -> dict[str, Any]:
        """What must be the same on all ranks, by the name that an error gives it."""
        path = find(self.model_config.model)
        return {
            **{name: version(name) for name in ("mlx", "mlx-lm", "vllm")},
            "vllm-metal-lite": __version__,
            "device": backend.describe(),
            "METAL_LITE_ATTENTION": envs.attention(),
            "METAL_LITE_KV_BITS": envs.kv_bits(),
            "config.json": hashlib.sha256((path / "config.json").read_bytes()).hexdigest()[:16],
            "weights": [(f.name, f.stat().st_size) for f in weight_files(path)],
            "--dtype": self._dtype(),
            "--max-num-seqs": self.scheduler_config.max_num_seqs,
            "--max-num-batched-tokens": self.scheduler_config.max_num_batched_tokens,
            "--max-model-len": self.model_config.max_model_len,
            "--pipeline-parallel-size": self.parallel_config.pipeline_parallel_size,
            "--block-size": self.cache_config.block_size,
            "--kv-cache-memory-bytes": self.cache_config.kv_cache_memory_bytes,
            "--enable-prefix-caching": self.cache_config.enable_prefix_caching,
        }

    @property
    def _is_leader(self) -> bool:
        return self.ranks.rank == self.ranks.leader

    @_fatal
    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        output = super().sample_tokens(grammar_output)
        if not self._is_leader and self.pipeline.steps:  # vLLM waits for the leader's step only
            self._waiter.submit(self._wait, self.pipeline.steps[-1].result.wait)
        return output

    @_fatal
    def _wait(self, wait: Callable[[], None]) -> None:
        wait()

    def _failed(self, error: Exception) -> None:
        """The leader's errors reach vLLM as the answer to its call; vLLM reads no others."""
        if not self._is_leader and self._heartbeat is not None:
            why = f"{type(error).__name__}: {one_line(error)}"
            self._end(f"rank {self.rank} of {self.ranks.size} fails: {why}")

    def _end(self, line: str) -> None:
        logger.error("The engine ends: %s", line)
        os._exit(1)

    def shutdown(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.leave()
        super().shutdown()
        # MLX's ring joins its threads when the process ends, but tells them without holding their
        # lock (~SocketThread in ring.cpp): a thread about to sleep misses it, and the join hangs.
        atexit.register(os._exit, 0)
