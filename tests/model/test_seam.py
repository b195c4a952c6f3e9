"""The seam itself: handles, the hook, which rows reach the head."""

import threading

import mlx.nn as nn
import numpy as np
import pytest

from tests.support.attention.cases import begin
from tests.support.engine.batches import pack
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import WINDOW
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention, ReferenceStepAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.model.calls import unwrap_call
from vllm_metal_lite.model.layout import find_layout
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.model.seam.hooks import building, hooked
from vllm_metal_lite.model.seam.layer_cache import KVHandle, Mask, PagedLayerCache

SPEC = LayerSpec(2, 16, 16, mx.float32)


def one_step(attention: ReferenceAttention, tokens: list[int]) -> ReferenceStepAttention:
    return begin(attention, pack([(0, len(tokens))], tokens=tokens), len(tokens))


@pytest.fixture
def handle() -> KVHandle:
    attention = ReferenceAttention(PagedStore([SPEC], 4, 8))
    cache = PagedLayerCache(0, one_step(attention, [1, 2, 3]))
    k = mx.ones((3, 2, 1, 16))
    return cache.update_and_fetch(k, k)[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda h: mx.ones((3, 4, 1, 16)) @ h,
        lambda h: mx.ones((3, 4, 1, 16)) @ h.swapaxes(-1, -2),
        lambda h: mx.concatenate([h, mx.ones((3, 2, 1, 16))], axis=2),
        lambda h: mx.repeat(h, 2, axis=1) + mx.ones((3, 4, 1, 16)),
        lambda h: h + mx.ones((3, 2, 1, 16)),
        lambda h: mx.fast.scaled_dot_product_attention(mx.ones((3, 4, 1, 16)), h, h, scale=1.0),
    ],
)
def test_any_use_of_a_handle_but_the_hooked_one_fails(handle, use):
    with pytest.raises((ValueError, IndexError)):
        mx.eval(use(handle))


def test_the_hook_lets_other_attention_through_and_goes_away(handle):
    original = mx.fast.scaled_dot_product_attention
    q = mx.random.normal((1, 2, 5, 16))
    expected = original(q, q, q, scale=0.5, mask="causal")
    with building():
        assert mx.fast.scaled_dot_product_attention is not original
        got = mx.fast.scaled_dot_product_attention(q, q, q, scale=0.5, mask="causal")
        out = mx.fast.scaled_dot_product_attention(
            mx.ones((3, 4, 1, 16)), handle, handle, scale=0.5
        )
    assert mx.array_equal(got, expected)
    assert out.shape == (3, 4, 1, 16)
    assert mx.fast.scaled_dot_product_attention is original


def test_threads_install_hooks_in_turn():
    """Else the thread that ends last would put back the other thread's replacement for good."""
    original = mx.fast.rms_norm
    hooks = [(mx.fast, "rms_norm", lambda *args, **kwargs: None)]
    entered, left = threading.Event(), threading.Event()

    def load():
        with hooked(hooks):
            entered.set()
            left.wait(5)

    thread = threading.Thread(target=load)
    try:
        with building(), hooked(hooks):
            thread.start()
            assert not entered.wait(0.2)
        left.set()
        thread.join()
        assert mx.fast.rms_norm is original
    finally:
        left.set()
        mx.fast.rms_norm = original


def test_a_layer_that_is_given_no_mask_keeps_its_window():
    spec = LayerSpec(2, 16, 16, mx.float32, window=2)
    attention = ReferenceAttention(PagedStore([spec], 4, 8))
    cache = PagedLayerCache(0, one_step(attention, [1, 2, 3]))
    k = mx.random.normal((3, 2, 1, 16))
    cache.update_and_fetch(k, k)
    q = mx.random.normal((3, 4, 1, 16))
    assert cache.make_mask(1) is cache.make_mask(1, window_size=2) is None
    windowed = cache.attend(q, 1.0, cache.make_mask(1))
    assert mx.array_equal(cache.attend(q, 1.0, Mask(cache, False, 2)), windowed)
    assert not mx.allclose(cache.attend(q, 1.0, Mask(cache, False, 1))[2], windowed[2])
    assert cache.make_mask(1, window_size=1).window == 1
    # Behind the window blocks are given back: no mask looks there.
    assert mx.array_equal(cache.attend(q, 1.0, Mask(cache, False, 7)), windowed)


def test_a_mask_of_the_models_own_is_refused(handle):
    q = mx.ones((3, 4, 1, 16))
    for mask in (mx.zeros((3, 1, 1, 4)), "causal"):
        with pytest.raises(NotImplementedError, match="mask of its own"):
            handle.cache.attend(q, 1.0, mask)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "cohere2"])
def test_the_head_sees_only_the_rows_asked_for(name, monkeypatch):
    """A head over every row of a prompt would cost more than the rest of the model."""
    packed = tiny.packed(name).packed
    seen = []
    for module in (nn.Linear, nn.Embedding):
        method = "as_linear" if module is nn.Embedding else "__call__"
        original = getattr(module, method)

        def call(self, x, original=original):
            out = original(self, x)
            if out.shape[-1] == tiny.VOCAB:
                seen.append(out.size // tiny.VOCAB)
            return out

        monkeypatch.setattr(module, method, call)
    attention = ReferenceAttention(PagedStore(packed.layout.specs, 4, 8))
    logits, _ = packed(one_step(attention, list(range(20))), mx.array([19, 3]))
    assert logits.shape == (2, tiny.VOCAB)
    assert seen == [2]


def test_rows_are_picked_from_the_logits_where_a_model_has_no_separate_body():
    """The head then sees every row, and the result is the same."""
    model = tiny.build(tiny.config_of("llama"))
    packed = PackedModel(model, find_layout(model, "llama"))
    unwrap_call(model.model)  # undo the selection of rows
    attention = ReferenceAttention(PagedStore(packed.layout.specs, 4, 8))
    tokens = list(range(20))
    logits, _ = packed(one_step(attention, tokens), mx.array([19, 3]))
    expected = tiny.logits_alone(tiny.native("llama"), tokens)[[19, 3]]
    np.testing.assert_allclose(np.array(logits), expected, atol=1e-4)


def test_layers_know_their_windows_and_shapes():
    windows = [s.window for s in tiny.packed("gpt_oss").packed.layout.specs]
    assert windows == [WINDOW, None, WINDOW, None]
    wide = tiny.packed("mimo_v2_flash").packed.layout.specs[0]
    assert (wide.k_head_dim, wide.v_head_dim) == (32, 16)
    assert wide.bytes_per_token == 2 * (32 + 16) * 4
    shared = tiny.packed("gemma4_text/shared_kv")
    assert len(shared.packed.layout.specs) == 2, "layers that share K and V keep nothing"
    assert tiny.packed("gpt2").max_position == 512
