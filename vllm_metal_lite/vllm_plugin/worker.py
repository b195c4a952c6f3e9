"""The vLLM worker, which drives our runner."""

from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_metal_lite import backend, envs
from vllm_metal_lite.assembly import build_runner
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import ConfigError, size_text
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.adapters import rotation_limit
from vllm_metal_lite.model.loader import LoadedModel, load
from vllm_metal_lite.runner.pipeline import Pipeline
from vllm_metal_lite.runner.runner import ModelRunner, StatesLost
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.vllm_plugin import log_through_vllm, logger
from vllm_metal_lite.vllm_plugin.kv_layers import KVLayers
from vllm_metal_lite.vllm_plugin.memory import MemorySizes, check_fits, plan_memory
from vllm_metal_lite.vllm_plugin.outputs import StepOutput
from vllm_metal_lite.vllm_plugin.translate import ScheduledStep, StepTranslator

Part = TypeVar("Part", LoadedModel, Pipeline)


def _check_rotation(model: LoadedModel, max_model_len: int) -> None:
    """Refuse lengths that need "dynamic" rope_scaling, which vLLM counts into the context."""
    limit = rotation_limit(model.packed.model)
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"max_model_len ({max_model_len}) is above {limit}, beyond which this model's rotation "
            f"(rope_scaling: dynamic) depends on a request's length: give --max-model-len {limit}"
        )


def _awake(part: Part | None) -> Part:
    if part is None:
        raise RuntimeError("the worker has not started, or it sleeps")
    return part


class MetalLiteWorker(WorkerBase):
    """One device, one model.  vLLM calls the methods in roughly this order.

    ranks: the workers that share the model (rank_worker.py).
    """

    ranks: RankGroup = ALONE
    _model: LoadedModel | None = None
    _pipeline: Pipeline | None = None
    _step: ScheduledStep | None = None

    @property
    def model(self) -> LoadedModel:
        return _awake(self._model)

    @property
    def pipeline(self) -> Pipeline:
        return _awake(self._pipeline)

    @property
    def runner(self) -> ModelRunner:
        return self.pipeline.runner

    # Start

    def init_device(self) -> None:
        log_through_vllm()
        self.device = torch.device("cpu")
        if backend.is_cpu() and envs.device() != "cpu":
            raise ConfigError("MLX sees no GPU; METAL_LITE_DEVICE=cpu runs on the CPU (slowly)")
        logger.info("%s", backend.describe())

    def load_model(self) -> None:
        model = load(
            self.model_config.model, self._dtype(), self.model_config.trust_remote_code, self.ranks
        )
        kv_bits = envs.kv_bits()
        self._model = model.with_kv_bits(int(kv_bits) if kv_bits else None)
        self._layers = KVLayers(self.model, self.ranks)
        _check_rotation(self.model, self.model_config.max_model_len)
        if self._pooling is not None and (problem := self.model.no_embeddings) is not None:
            raise ConfigError(f"{model.name} gives no embeddings: {problem}")
        backend.set_memory_limits()
        reason = self._layers.no_prefix_cache(self.model, self.cache_config.mamba_cache_mode)
        if reason is not None and self.cache_config.enable_prefix_caching:
            # With "uni", vLLM creates its scheduler later in this process, from the same object.
            if self.parallel_config.distributed_executor_backend != "uni":
                raise ConfigError(f"--no-enable-prefix-caching is needed for this model: {reason}")
            self.cache_config.enable_prefix_caching = False
            logger.warning("Prefixes are not cached for this model: %s", reason)

    @property
    def _caches_states(self) -> bool:
        """Whether vLLM gives state slots to requests; otherwise a request's slot is its seat."""
        return bool(self.model.state_bytes) and self.cache_config.enable_prefix_caching

    def _dtype(self) -> str:
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        # On a CPU, "auto" is float32 too, and also dequantises weights.
        return "auto" if backend.is_cpu() and dtype == "float32" else dtype

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        slots = self._memory.num_state_slots if self._caches_states else None
        return self._layers.kv_cache_specs(self.model, self.cache_config.block_size, slots)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """The axis order of our store; vLLM would ask an attention backend."""
        return ["LBHNC"]

    def determine_available_memory(self) -> int:
        """The number of bytes for K and V."""
        return self._memory.kv_bytes

    @cached_property
    def _memory(self) -> MemorySizes:
        """Computed once, so that the number of slots stays the same when the worker sleeps.  The
        ranks take their smallest sizes.  Stages may differ in K and V; vLLM compares them."""
        sizes = plan_memory(self.model, self._layers.specs, self.vllm_config, self._caches_states)
        least = MemorySizes(*map(min, zip(*self.ranks.gather(sizes), strict=True)))
        return least._replace(kv_bytes=sizes.kv_bytes) if self.ranks.stages else least

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Make the tables of requests and the store, with the groups and blocks that vLLM chose."""
        seats, size = self.scheduler_config.max_num_seqs, self.cache_config.block_size
        self._groups, state_group = self._layers.groups(kv_cache_config, size)
        check_fits(self.model, self._groups, size, self._memory.num_state_slots)
        all_sample = ALONE if self.ranks.stages else self.ranks
        self._sampler = Sampler(seats, self.model.vocab_size, all_sample)
        inputs = InputBatch(seats, self.model_config.max_model_len, size, len(self._groups))
        self.translator = StepTranslator(
            inputs, self._sampler, self.model_config.seed, state_group, self._pooling
        )
        self._make_runner()

    def _make_runner(self) -> None:
        states = self.model.packed.state_store(self._memory.num_state_slots)
        groups, size, shared = self._groups, self.cache_config.block_size, len(self._groups) > 1
        store = PagedStore(self.model.kv_specs, groups, size, shared=shared, states=states)
        runner = build_runner(self.model, store, self._sampler, envs.attention())
        self._pipeline = Pipeline(runner, self.translator.inputs)
        logger.info("Attention: %s (%s)", runner.attention.name, runner.path.reason)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Run one token, so that the first request does not pay one-time costs."""
        inputs = InputBatch(1, 1, self.cache_config.block_size, len(self._groups))
        row = np.array([inputs.add([0], 1)])
        # Block 0 is vLLM's null block, which nothing reads.
        inputs.append_blocks(0, *[[0]] * len(self._groups))
        batch = inputs.pack(row, np.array([0]), np.array([1]))
        while True:
            try:
                self.runner.execute(batch)
                break
            except StatesLost:  # nothing is lost yet; again without the kernel that failed
                continue
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",) if self._pooling is None else ("embed",)

    @property
    def _pooling(self) -> str | None:
        """How embeddings are made, "last" or "mean"; None if the engine generates."""
        config = self.model_config.pooler_config
        return None if config is None else str(config.seq_pooling_type).lower()

    # A step

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Record the step; it runs in `sample_tokens`, once the grammar's mask is known.

        Steps of embeddings sample nothing, so they run at once.
        With async scheduling the previous step may be in flight; vLLM has the output of all
        earlier ones.
        """
        self.pipeline.advance()
        self._step = self.translator.begin(scheduler_output)
        if self._step is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        return None if self._pooling is None else self.sample_tokens(None)

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        step, self._step = self._step, None
        if step is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        masks = self.translator.masks(step, grammar_output)
        self.pipeline.begin(step)
        try:
            result = self.pipeline.launch(step.batch, step.num_prompt_logprobs, masks)
        except Exception:
            self.pipeline.steps.pop()  # vLLM calls once more before it reads the error
            raise
        output = StepOutput(step, result)
        if self.scheduler_config.async_scheduling or self.ranks.stages:
            return output  # a stage that is done may start the next step
        result.wait()
        return output.get_output()

    # Sleep: frees K and V; level 2 also frees the weights.

    def sleep(self, level: int = 1) -> None:
        self.synchronize_device()  # a step in flight holds K and V
        before = mx.get_active_memory()
        self._pipeline = None
        if level >= 2:
            self._model = None
        mx.clear_cache()
        logger.info("Sleeping: %s freed", size_text(before - mx.get_active_memory()))

    def wake_up(self, tags: list[str] | None = None) -> None:
        if self._model is None:  # also if only K and V wake, since they need the weights
            self.load_model()
        if self._pipeline is None and (not tags or "kv_cache" in tags):
            self._make_runner()

    # Other methods that vLLM may call

    def get_model(self) -> Any:
        return self.model.packed.model

    def get_model_inspection(self) -> str:
        return str(self.get_model())

    def synchronize_device(self) -> None:
        if self._pipeline is not None:
            self._pipeline.runner.synchronize()
        mx.synchronize()

    def reset_encoder_cache(self) -> None:
        """There is no encoder."""

    def shutdown(self) -> None:
        self._pipeline = self._model = None
