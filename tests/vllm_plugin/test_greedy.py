"""Under vLLM, every greedy token is what mlx-lm says alone, whatever the scheduler does."""

import json
import os
import sys

import pytest

from tests.support.models import tiny_models as tiny
from tests.support.run_python import run_python
from tests.vllm_plugin import kit

NUM_TOKENS = 40
PLAIN = tiny.prompts(8, 1, 60, seed=1)
PREFIX = tiny.prompts(1, 48, 48, seed=2)[0]
SHARED = [PREFIX + p for p in tiny.prompts(8, 1, 30, seed=3)]
CHUNKS = {"max_num_batched_tokens": 8}
# 8 requests of up to 13 blocks.
TINY_POOL = {"num_gpu_blocks_override": 24}


def check(llm, name, prompts, min_hits=0, min_preemptions=0):
    """Generate; every token is right, and the scheduler did what the test is about."""
    expected = [kit.alone(name, p, NUM_TOKENS) for p in prompts]
    before = kit.num_preemptions(llm)
    outputs = kit.generate(llm, prompts, max_tokens=NUM_TOKENS)
    assert kit.tokens(outputs) == expected
    assert kit.prefix_hits(outputs) >= min_hits
    assert kit.num_preemptions(llm) - before >= min_preemptions


def check_every_way(name, tiny_pool, hits, hits_in_tiny_pool):
    """Whole, in chunks, with shared prefixes, and preempted.  hits: cached prefixes, at least."""
    with kit.engine(name) as llm:
        check(llm, name, PLAIN)
    with kit.engine(name, **CHUNKS) as llm:
        check(llm, name, PLAIN)
    with kit.engine(name) as llm:
        check(llm, name, SHARED[:4])
        check(llm, name, SHARED, min_hits=hits * len(PREFIX))
    with kit.engine(name, **tiny_pool, enable_prefix_caching=False) as llm:
        check(llm, name, PLAIN, min_preemptions=3)
    with kit.engine(name, **tiny_pool, **CHUNKS) as llm:
        check(llm, name, SHARED)
        check(llm, name, SHARED, min_hits=hits_in_tiny_pool * len(PREFIX), min_preemptions=3)


@pytest.mark.parametrize("name", ["demo", *kit.ARCHITECTURES])
def test_every_way_of_scheduling(name):
    kit.skip_if_vllm_cannot_read(name)
    check_every_way(name, TINY_POOL, hits=8, hits_in_tiny_pool=4)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("qwen3_5", "gemma3") else pytest.mark.thorough)
        for name in kit.TEXT_PARTS
    ],
)
def test_the_text_part_of_a_multimodal_model(name):
    """Under its own name, without torchvision; a hybrid one caches prefixes."""
    kit.skip_if_vllm_cannot_read(name)
    with kit.engine(name, **CHUNKS) as llm:
        model_config = llm.llm_engine.vllm_config.model_config
        assert model_config.architectures == [kit.TEXT_PARTS[name]]
        assert model_config.is_hybrid == name.startswith("qwen3_5")
        check(llm, name, SHARED[:4])
        check(llm, name, SHARED[:4], min_hits=2 * len(PREFIX))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_store_of_fewer_bits(monkeypatch, bits):
    """The tokens are those of the embedded engine, and vLLM counts the bytes as they are."""
    embedded = tiny.engine("llama", kv_bits=bits, max_model_len=128)
    expected = tiny.answers(embedded, SHARED, tiny.greedy(NUM_TOKENS, ignore_eos=True))
    size = 40 * 8 * embedded.model.kv_bytes_per_token
    memory = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": size}
    monkeypatch.setenv("METAL_LITE_KV_BITS", str(bits))
    with kit.engine(**CHUNKS, **memory) as llm:
        outputs = kit.generate(llm, SHARED, max_tokens=NUM_TOKENS)
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 40
    assert kit.tokens(outputs) == expected


@pytest.mark.parametrize(
    ("name", "value"), [("METAL_LITE_KV_BITS", "5"), ("METAL_LITE_ATTENTION", "fast")]
)
def test_a_bad_variable_is_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(Exception, match=f"{name} must be one of .*, got '{value}'"), kit.engine():
        pass


@pytest.mark.parametrize("dialect", ["0", "1"], ids=["V1", "V2"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_both_dialects_of_the_scheduler_with_and_without_async_scheduling(
    monkeypatch, dialect, is_async
):
    kit.use_dialect(monkeypatch, dialect)
    with kit.engine(**TINY_POOL, **CHUNKS, async_scheduling=is_async) as llm:
        assert kit.core(llm).scheduler.use_v2_model_runner == (dialect == "1")
        check(llm, "llama", SHARED)
        check(llm, "llama", SHARED + PLAIN, min_hits=4 * len(PREFIX), min_preemptions=3)


@pytest.mark.parametrize(
    ("executor", "name"),
    [
        ("uni", "llama"),
        pytest.param("mp", "llama", marks=pytest.mark.thorough),
        ("mp", "qwen3_next"),
    ],
)
def test_the_engine_in_a_process_of_its_own(executor, name):
    """`LLM` as users call it: the engine (and with "mp" also the worker) is another process."""
    script = f"""
import json
from tests.vllm_plugin import kit
def main():
    llm = kit.LLM({str(kit.folder(name))!r}, max_model_len=128, num_gpu_blocks_override=40,
                  distributed_executor_backend={executor!r})
    print(json.dumps(kit.tokens(kit.generate(llm, {PLAIN!r}, max_tokens={NUM_TOKENS}))))
if __name__ == "__main__":
    main()
"""
    path = kit.folder(name) / f"{executor}.py"
    path.write_text(script)
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": ":".join(sys.path)}
    out = run_python(path, env=env)
    assert out.returncode == 0, out.stderr[-3000:]
    expected = [kit.alone(name, p, NUM_TOKENS) for p in PLAIN]
    (line,) = (line for line in out.stdout.splitlines() if line.startswith("[["))  # among logs
    assert json.loads(line) == expected
