"""Two stages under real vLLM: what one rank answers, and an engine that ends when a stage does."""

import os
import re
import signal

import pytest

from tests.support.models import tiny_models as tiny
from tests.vllm_plugin import kit
from tests.vllm_plugin.test_tensor_parallel import (
    LONG,
    NUM_TOKENS,
    PROMPTS,
    SERVED,
    TIGHT,
    check_as_one,
    load,
    pid_of_rank_1,
    serving,
    wait_for,
)
from vllm_metal_lite.vllm_plugin.kv_layers import KVLayers

pytestmark = pytest.mark.xdist_group("tensor_parallel")  # each engine has three processes


def batches_in_flight(llm):
    """Filled later: at each step's start, the batches before it whose tokens vLLM does not have."""
    core, found = kit.core(llm), []
    execute = core.model_executor.execute_model

    def counting(*args, **kwargs):
        found.append(len(core.batch_queue))
        return execute(*args, **kwargs)

    core.model_executor.execute_model = counting
    return found


def test_two_stages_answer_as_one():
    """Chunked, mixed, preempted, with shared prefixes, aborted; two batches in flight."""
    found = []
    for size in (2, 1):
        with kit.engine("llama", **TIGHT, pipeline_parallel_size=size) as llm:
            in_flight = batches_in_flight(llm) if size == 2 else [1]
            found.append(load(llm))
            assert max(in_flight) == 1
    check_as_one(*found)


def test_stages_with_recurrent_states():
    name = "qwen3_5/tied"
    kit.skip_if_vllm_cannot_read(name)
    options = {**TIGHT, "enable_prefix_caching": True, "pipeline_parallel_size": 2}
    with kit.engine(name, **options) as llm:
        for _ in range(2):
            outputs = kit.generate(llm, PROMPTS, max_tokens=NUM_TOKENS)
            assert kit.tokens(outputs) == [kit.alone(name, p, NUM_TOKENS) for p in PROMPTS]


class OfStages(KVLayers):
    """Layers that know the windows of each stage."""

    def __init__(self, windows):
        self._windows = windows


def test_stages_with_unlike_windows_tell_none():
    """Otherwise vLLM would make a group of one stage's window layers beside all other layers."""
    assert not OfStages([[None], [None]]).has_several_groups
    assert OfStages([[None], [17]]).has_several_groups
    assert not OfStages([[None, 17], [17]]).may_share_arrays(None, 16)


def test_a_stage_of_another_host_that_dies_ends_the_engine(tmp_path):
    """vLLM alone would wait 300 s for its answer."""
    log, log_2 = tmp_path / "log", tmp_path / "log_2"
    model = tiny.write_folder(tmp_path / "model", "llama", **LONG)
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    options = SERVED | sizes | kit.two_hosts()
    with kit.second_host(model, log_2, **options), serving(tmp_path, model, options) as process:
        wait_for(log, "SERVING", process, 600)
        pid = pid_of_rank_1(log_2)
        os.kill(pid, signal.SIGKILL)
        wait_for(log, "ERROR EngineDeadError", process, 200)
    assert re.search(rf"The engine ends: rank 1 of 2 \(pid {pid} on .* silent", log.read_text())
