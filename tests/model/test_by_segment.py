"""Attention that the seam cannot carry: a segment at a time, with mlx-lm's own caches rebuilt."""

import math
import re

import numpy as np
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from tests.support.engine.batches import pack
from tests.support.engine.runner_bench import RunnerBench
from tests.support.kernels.device import pretend_gpu
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.assembly import choose_attention
from vllm_metal_lite.attention.sdpa import execute
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ConfigError, ModelLoadError
from vllm_metal_lite.kv.state_store import StateStore
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.model import trial
from vllm_metal_lite.model.seam.kv_segments import rebuild
from vllm_metal_lite.model.seam.sequences import SequenceStep

# What makes each of them need it.
NAMES = {
    "gpt_bigcode": "looks up positions by number",
    "plamo": "tiles its keys",
    "gear/softcap": "caps its scores by hand",
    "deepseek_v32": "selects keys",
    "minimax_m3_vl/sparse": "selects blocks of keys",
    "baichuan_m1": "convolves keys and values",
}


@pytest.mark.parametrize("name", NAMES)
def test_who_needs_it_and_what_follows(name, monkeypatch):
    model = tiny.packed(name)
    packed = model.packed
    assert packed.by_segment
    store = PagedStore(packed.layout.specs, 4, 8)
    pretend_gpu(monkeypatch)
    path = choose_attention(model, store, "auto")
    assert path.attention.name == "reference"
    assert path.reason.endswith(f"a segment at a time: {packed.by_segment}")
    with pytest.raises(ConfigError, match="a segment at a time"):
        choose_attention(model, store, "kernels")


@pytest.mark.parametrize("name", ["llama", "gemma3n", "llama4", "deepseek_v3", "qwen3_next"])
def test_who_does_not(name):
    assert tiny.packed(name).packed.by_segment is None
    assert "segment" not in tiny.engine(name).runner.path.reason


@pytest.mark.parametrize("name", NAMES)
def test_it_is_said_loudly_once_with_the_cost_and_the_reason(name, caplog):
    reason = tiny.load(name).packed.by_segment
    (message,) = [m for m in caplog.messages if "segment" in m]
    assert message.startswith("SLOW: ")
    assert "half the speed of mlx-lm" in message
    assert f"Reason: {reason}." in message
    assert "Answers are correct" in message
    assert "Please report it, unless docs/models.md lists this type" in message


def test_metrics_say_it_too():
    assert tiny.engine("plamo").metrics()["attention_by_segment"] == 1
    assert tiny.engine("llama").metrics()["attention_by_segment"] == 0


@pytest.mark.parametrize("option", ["auto", "reference"])
@pytest.mark.parametrize(
    ("where", "what"), [(execute, "_by_products"), (mx, "eval")], ids=["call", "evaluation"]
)
def test_why_a_model_that_could_be_packed_is_not_is_said(monkeypatch, caplog, option, where, what):
    """As on a backend that lacks an operation of packed attention: MLX raises, and so does sqrt."""
    rows, modes = trial.Draw.rows, []

    def failing(self, *args):
        modes.append(args)
        with monkeypatch.context() as patch:
            if len(modes) == 1:
                patch.setattr(where, what, math.sqrt)
            return rows(self, *args)

    monkeypatch.setattr(trial.Draw, "rows", failing)
    message = r"llama runs a segment .* TypeError: .*sqrt\(\).*Please report it"
    model = tiny.load("llama")
    [warning] = caplog.messages
    assert re.search(message, warning)
    assert model.packed.by_segment.startswith("TypeError: math.sqrt() takes")
    engine = tiny.engine(model, attention=option)
    assert engine.runner.path.reason.endswith(f"a segment at a time: {model.packed.by_segment}")


@pytest.mark.parametrize("start", [3, 9, 21])
@pytest.mark.parametrize(
    "template", [KVCache(), RotatingKVCache(max_size=9), ChunkedKVCache(chunk_size=9)]
)
def test_a_rebuilt_cache_goes_on_like_the_one_it_stands_for(template, start):
    rng = np.random.default_rng(1)
    k, v = (mx.array(rng.standard_normal((1, 2, start + 6, 4)), mx.float32) for _ in range(2))
    if start >= 9:  # the oldest token of a full window is kept, and never seen
        k[:, :, start - 9], v[:, :, start - 9] = k[:, :, start - 8], v[:, :, start - 8]
    sizes = (getattr(template, name, None) for name in ("max_size", "chunk_size"))
    native = type(template)(*[size for size in sizes if size])
    native.update_and_fetch(k[:, :, :start], v[:, :, :start])
    if isinstance(native, ChunkedKVCache):
        native.maybe_trim_front()

    store = PagedStore([LayerSpec(2, 4, 4, mx.float32)], 6, 8)
    nan = mx.full((max(start - 8, 0), 2, 4), mx.nan)
    blocks = [4, 1, 5, 0, 2]
    slots = pack([(0, start)], [blocks]).slot_mapping()
    store.write(0, k[0, :, :start].swapaxes(0, 1), v[0, :, :start].swapaxes(0, 1), mx.array(slots))
    if not isinstance(template, KVCache) and start >= 9:  # behind the window
        store.write(0, nan, nan, mx.array(slots[: start - 8]))
    batch = pack([(start, 6)], [blocks])
    attention = ReferenceAttention(store)
    steps = SequenceStep(attention.prepare(batch, 6), StateStore(), alone=True)
    rebuilt = rebuild(template, 0, store, steps, steps.batches[0], [])

    assert rebuilt.offset == native.offset == start
    for first, last in ((0, 4), (4, 5), (5, 6)):  # a chunk, then single tokens
        rows = slice(start + first, start + last)
        if hasattr(native, "make_mask"):
            how = {"return_array": True, "window_size": None}
            masks = [c.make_mask(last - first, **how) for c in (rebuilt, native)]
            assert (masks[0] is None) == (masks[1] is None)
            assert masks[0] is None or mx.array_equal(*masks)
        rebuilt.written = None
        got, expected = (
            c.update_and_fetch(k[:, :, rows], v[:, :, rows]) for c in (rebuilt, native)
        )
        for a, b in zip(got, expected, strict=True):
            # A ring may be turned: attention does not mind.
            a, b = (np.array(x)[:, :, np.lexsort(np.array(x[0, 0]).T)] for x in (a, b))
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["gpt_bigcode", "plamo", "deepseek_v32"])
def test_a_decode_step_copies_no_store(name):
    """Executed on the CPU: K and V are read before they are written, so MLX writes in place."""
    bench = RunnerBench(tiny.prompts(2, 20, 20, seed=3), num_blocks=8192, name=name)
    layer = max(k.nbytes for k in bench.runner.attention.store.keys)
    bench.step([0, 1], [0, 0], [20, 20])
    for i in range(3):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        bench.step([0, 1], [20 + i] * 2, [1, 1])
        assert mx.get_peak_memory() - before < layer // 8


def test_a_model_whose_logits_come_out_wrong_is_refused_by_name(monkeypatch):
    native = trial._native
    monkeypatch.setattr(trial, "_native", lambda m, tokens, n: native(m, tokens[::-1].copy(), n))
    with pytest.raises(ModelLoadError, match=r"llama is not supported.*away from mlx-lm's own"):
        tiny.load("llama")


def test_a_result_without_a_row_per_token_is_refused():
    batch = pack([(0, 3)], [[0]])
    attention = ReferenceAttention(PagedStore([LayerSpec(1, 4, 4, mx.float32)], 1, 8))
    steps = SequenceStep(attention.prepare(batch, 3), StateStore([], 1), alone=True)
    with pytest.raises(NotImplementedError, match="without one row per token"):
        steps.to_rows([mx.zeros((1, 5, 4))])


def test_a_model_whose_own_cache_is_unknown_is_refused_by_name():
    with pytest.raises(ModelLoadError, match=r"deepseek_v41 is not supported.*LayerCache"):
        tiny.load("deepseek_v41")
