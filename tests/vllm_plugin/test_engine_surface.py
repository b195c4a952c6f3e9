"""What vLLM's engine offers beside generation: aborts, resets, priorities, sleep, refusals."""

import os
import sys
from importlib.metadata import version
from operator import attrgetter

import pytest
from vllm import LLM
from vllm.config import PoolerConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.model_executor.models import registry

from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from tests.support.run_python import run_python
from tests.vllm_plugin import kit
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.packed import Fusion
from vllm_metal_lite.vllm_plugin.platform import too_long_steps
from vllm_metal_lite.vllm_plugin.refusals import _OPTIONS
from vllm_metal_lite.vllm_plugin.register_models import register_text_parts
from vllm_metal_lite.vllm_plugin.worker import _check_rotation

PROMPTS = tiny.prompts(8, 3, 40, seed=9)


class NoFusion(Fusion):
    note = "; nothing fused"


def test_aborted_requests_give_everything_back_and_leave_the_others_alone():
    with kit.engine() as llm:
        for i, prompt in enumerate(PROMPTS):
            kit.add(llm, str(i), prompt)
        kit.run(llm, steps=9)
        llm.llm_engine.abort_request([str(i) for i in range(0, 8, 2)])
        done = kit.run(llm)
        assert sorted(done) == ["1", "3", "5", "7"]
        for name, output in done.items():
            assert kit.tokens([output]) == [kit.alone("llama", PROMPTS[int(name)], 40)]
        # A step of others tells the worker what has ended.
        kit.generate(llm, PROMPTS[:1], max_tokens=3)
        assert len(kit.worker(llm).translator._requests) <= 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_prefix_cache_can_be_reset_under_running_requests(is_async):
    with kit.engine(async_scheduling=is_async) as llm:
        for i, prompt in enumerate(PROMPTS):
            kit.add(llm, str(i), prompt)
        before = kit.num_preemptions(llm)
        done = kit.run(llm, steps=12)
        assert kit.core(llm).scheduler.reset_prefix_cache(reset_running_requests=True)
        done |= kit.run(llm)
        assert kit.num_preemptions(llm) - before == 8
        answers = kit.tokens([done[str(i)] for i in range(8)])
        assert answers == [kit.alone("llama", p, 40) for p in PROMPTS]
        assert llm.reset_prefix_cache()


def test_priorities_decide_who_goes_first():
    with kit.engine(max_num_seqs=1, scheduling_policy="priority") as llm:
        for i, priority in enumerate([3, 1, 2, 0]):
            kit.add(llm, str(i), PROMPTS[i], max_tokens=4, priority=priority)
        assert list(kit.run(llm)) == ["3", "1", "2", "0"]


@pytest.mark.parametrize(
    ("level", "tags"), [(1, [None]), (2, [None]), (2, ["kv_cache", "weights"])]
)
def test_sleep_gives_memory_back_and_waking_up_changes_no_token(level, tags):
    with kit.engine(enable_sleep_mode=True, num_gpu_blocks_override=2000) as llm:
        expected = [kit.alone("llama", p, 20) for p in PROMPTS]
        assert kit.tokens(kit.generate(llm, PROMPTS, max_tokens=20)) == expected
        store = kit.worker(llm).runner.attention.store.nbytes
        before = mx.get_active_memory()
        llm.sleep(level=level)
        assert before - mx.get_active_memory() >= store
        for tag in tags:
            llm.wake_up(tag and [tag])
        assert mx.get_active_memory() >= before - 2**16
        assert kit.tokens(kit.generate(llm, PROMPTS, max_tokens=20)) == expected


def test_what_is_fused_is_decided_for_each_store(monkeypatch):
    """At the start, and when a worker that slept gets a new one."""
    seen = []
    monkeypatch.setattr(decide, "decide", lambda *args: (seen.append(args[:2]), NoFusion())[1])
    with kit.logged() as said, kit.engine(enable_sleep_mode=True) as llm:
        for count in (1, 2):
            mine = kit.worker(llm)
            assert len(seen) == count
            assert seen[-1] == (mine.model.packed, mine.runner.attention)
            assert said[-1].startswith("Attention: reference (")
            assert said[-1].endswith("; nothing fused)")
            llm.sleep()
            llm.wake_up()


def test_a_long_answer_ends_at_the_context_length():
    with kit.engine(max_model_len=64) as llm:
        out = kit.generate(llm, PROMPTS[:2], max_tokens=500)
        assert [len(p) + len(t) for p, t in zip(PROMPTS, kit.tokens(out), strict=False)] == [64, 64]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            "--pipeline-parallel-size 2: not with --tensor-parallel-size 2",
        ),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"block_size": 64}, "--block-size 64: take one of"),
        ({"prefix_match_unit": 4}, "--prefix-match-unit 4"),
        ({"hf_overrides": {"rope_theta": 5.0}}, "--hf-overrides"),
        ({"hf_config_path": str(kit.DEMO_PATH)}, "--hf-config-path"),
        ({"download_dir": "/x"}, "--download-dir /x"),
        ({"code_revision": "x"}, "--code-revision x"),
        ({"logprobs_mode": "processed_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"offload_group_size": 2}, "--offload-group-size 2"),
        ({"runner": "pooling", "tensor_parallel_size": 2}, "--runner pooling: pooling runs on one"),
        ({"runner": "pooling", "convert": "classify"}, "--convert classify"),
        (
            {
                "runner": "pooling",
                "pooler_config": PoolerConfig(seq_pooling_type="CLS"),
                "max_num_batched_tokens": 128,
            },
            "--runner pooling: its pooling type is CLS",
        ),
        ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"model_impl": "transformers"}, "--model-impl transformers"),
        ({"attention_backend": "TRITON_ATTN"}, "--attention-backend"),
        ({"mamba_block_size": 24}, "--mamba-block-size 24: states have blocks of 8 tokens"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "--weight-transfer-config"),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 3,
                }
            },
            "--speculative-config",
        ),
    ],
)
def test_what_is_not_supported_is_refused_at_start_by_name(options, named):
    with pytest.raises(Exception, match="metal-lite does not support") as e, kit.engine(**options):
        pass
    assert named in str(e.value)


@pytest.mark.skipif(not version("vllm").startswith("0.33"), reason="older ones lack some options")
def test_every_option_that_is_refused_is_one_of_vllm():
    """`get` reads an option that has moved as unset."""
    config = EngineArgs(str(kit.folder("llama"))).create_engine_config()
    for path, *_ in _OPTIONS:
        if path != "model_config.enable_return_routed_experts":  # of older versions
            attrgetter(path)(config)


def test_data_parallel_is_refused():
    """vLLM's `LLM` refuses it by itself; a server would not."""
    args = AsyncEngineArgs(str(kit.folder("demo")), data_parallel_size=2)
    with pytest.raises(Exception, match="--data-parallel-size 2: start a server for each rank"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "a model for pooling"),
        (
            {
                "architectures": ["LlamaForCausalLM"],
                "quantization_config": {
                    "quant_method": "awq",
                    "bits": 4,
                    "group_size": 32,
                    "zero_point": True,
                },
            },
            "weights quantised by .*awq: use those of mlx-community",
        ),
    ],
)
def test_a_folder_is_refused_without_an_option(tmp_path, changes, refused):
    folder = tiny.write_folder(tmp_path, "llama", **changes)
    with pytest.raises(Exception, match=f"does not support {refused}"):
        LLM(str(folder), **kit.SMALL, dtype="bfloat16")  # vLLM refuses float32 by itself


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 2**50},
            "--kv-cache-memory-bytes",
        ),
        ({"num_gpu_blocks_override": 2**28}, "--num-gpu-blocks-override"),
        (
            {"num_gpu_blocks_override": None, "gpu_memory_utilization": 1e-9},
            "does not fit: .* lower --max-num-batched-tokens",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_sum(options, said):
    with pytest.raises(Exception, match=said), kit.engine(**options):
        pass


@pytest.mark.parametrize("own", [object(), registry._LazyRegisteredModel("users.models", "Own")])
def test_a_model_that_a_user_has_registered_stays(monkeypatch, own):
    models, name = registry.ModelRegistry.models, next(iter(registry._MULTIMODAL_MODELS))
    monkeypatch.setitem(models, name, own)
    register_text_parts()
    assert models[name] is own


def test_conversations_that_alternate_on_one_seat_find_their_prefixes():
    prompts = tiny.prompts(2, 104, 104)
    options = {"max_num_seqs": 1, "num_gpu_blocks_override": None}
    with kit.engine(**options) as llm:
        kit.generate(llm, prompts, max_tokens=9)
        assert kit.prefix_hits(kit.generate(llm, prompts, max_tokens=9)) == 2 * 96
    with kit.engine(**options, enable_prefix_caching=False) as llm:  # no more can be used
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 128 // 8 + 1


def test_many_seats_do_not_fill_the_memory_of_a_cpu():
    """vLLM's default are 256: K and V are for three full contexts of 32."""
    options = {"max_num_seqs": 256, "max_num_batched_tokens": 256}
    with kit.engine(num_gpu_blocks_override=None, **options) as llm:
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 32 * 3 * 128 // 8 + 1


def test_macos_may_kill_long_steps(monkeypatch):
    config = EngineArgs(str(kit.folder("llama")), **kit.SMALL).create_engine_config()
    config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens = 32768, 8192
    assert too_long_steps(config) is None  # on a CPU
    monkeypatch.setenv("METAL_LITE_DEVICE", "gpu")
    for chunked in (True, False):  # a prompt is one chunk with MEAN pooling
        config.scheduler_config.enable_chunked_prefill = chunked
        assert "lower --max-num-batched-tokens to 2048" in too_long_steps(config)
    config.model_config.max_model_len = 8192
    assert too_long_steps(config) is None


@pytest.mark.parametrize(
    ("environment", "is_active"),
    [
        ({"METAL_LITE_DEVICE": "cpu"}, True),
        ({"METAL_LITE_DEVICE": "cpu", "VLLM_PLUGINS": ""}, False),
        ({}, sys.platform == "darwin"),
    ],
)
def test_active_only_when_asked(environment, is_active):
    """A process of its own, which cleans up as vLLM does; the front end never loads MLX."""
    script = "import sys; from vllm.platforms import current_platform as p\n"
    if is_active:
        script += "import torch; torch.accelerator.empty_cache()\n"
    script += "print(type(p).__name__, 'mlx.core' in sys.modules)"
    env = {k: v for k, v in os.environ.items() if k != "METAL_LITE_DEVICE"} | environment
    out = run_python("-c", script, env=env)
    name, has_mlx = out.stdout.split()
    assert (name == "MetalLitePlatform") == is_active
    assert has_mlx == "False"


def test_a_rotation_that_depends_on_the_length_ends_the_context():
    """vLLM would allow the trained context times the factor of the scaling."""
    scaling = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}
    config = {**config_of("internlm2"), **scaling}
    model = loader.from_model(tiny.build(config), None, config, "internlm2")
    _check_rotation(model, 64)
    _check_rotation(tiny.packed("llama"), 1 << 20)
    with pytest.raises(ConfigError, match=r"max_model_len \(128\) .* give --max-model-len 64"):
        _check_rotation(model, 128)
