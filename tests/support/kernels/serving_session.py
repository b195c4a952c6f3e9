"""The texts that a serving session makes Metal compile: prompts, mixed steps and decodes of three
models, built as on a Mac and not run.

Each model has the sizes of a real one, but one layer of each kind.  The test of texts and
tools.prove.metal_texts use this module.
"""

import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from metal.host.texts import KernelText, recorded
from tests.support.engine.batches import pack
from tests.support.models.configs import config_of
from vllm_metal_lite import backend
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.fusion.launches import FusedLaunches, fuse
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.layout import find_layout
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.runner.runner import padded_rows
from vllm_metal_lite.scheduler.kv_groups import kv_groups
from vllm_metal_lite.specs import AttentionShape

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COMMON = {"num_hidden_layers": 2, "vocab_size": 4096, "max_position_embeddings": 1 << 17}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": config_of(
        "qwen3", **_COMMON, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, rope_theta=1e6,
    ),
    "Gemma3-4B": config_of(
        "gemma3_text", **_COMMON, hidden_size=2560, intermediate_size=10240, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, sliding_window=1024, sliding_window_pattern=2,
        query_pre_attn_scalar=256, rope_theta=1e6, rope_local_base_freq=1e4,
    ),
    "Llama-3.2-1B": config_of(
        "llama", **_COMMON, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, rope_theta=5e5, rope_scaling=_LLAMA3_ROPE,
    ),
}  # fmt: skip
# Name -> the path of prompts, and the largest number of rows that use skinny_gemm.
PATHS = {"gather": ("gather", 0), "varlen": ("varlen", 0), "gather, skinny_gemm": ("gather", 64)}
BLOCK_SIZE, MAX_LEN = 16, 32_768


class Request(NamedTuple):
    """computed: tokens in the store.  new: tokens of this step.  shared: leading tokens that all
    requests of the step have in common."""

    computed: int
    new: int = 1
    shared: int = 0


def steps() -> Iterator[list[Request]]:
    """The steps of a server, several times."""
    for prompt in (3, 5, 20, 100, 300, 2048):
        yield [Request(0, prompt)]
    yield [Request(0, 7), Request(0, 40)]
    yield [Request(0, 200), Request(0, 230), Request(512, 512)]
    yield [Request(2048, 512)]
    yield [Request(30_000, 512)]
    for decodes in (1, 3, 20):
        for prompt in (4, 30, 300, 512):
            yield [Request(700)] * decodes + [Request(0, prompt)]
        yield [Request(700)] * decodes + [Request(2048, 512)]
        yield [Request(700)] * decodes + [Request(0, 200), Request(0, 190)]
    for decodes in (1, 2, 3, 8, 20, 64):
        for context in (10, 60, 300, 1500, 4000, 20_000):
            yield [Request(context)] * decodes
    for decodes in (3, 8, 20, 64):
        for shared in (512, 1024, 4096, 16_384):
            for own in (30, 3000):
                yield [Request(shared + own, 1, shared)] * decodes
    yield [Request(4096 + 100, 1, 4096)] * 8 + [Request(4096, 300, 4096)]


def _batch(requests: list[Request], groups: int) -> ForwardBatch:
    tables, block = [], 1 + MAX_LEN // BLOCK_SIZE
    for computed, new, shared in requests:
        count, common = -(-(computed + new) // BLOCK_SIZE), shared // BLOCK_SIZE
        own = range(block, block + count - common)
        tables.append([*range(common), *own])
        block = own.stop
    return pack([r[:2] for r in requests], *[tables] * groups, block_size=BLOCK_SIZE)


def count(texts: Sequence[KernelText]) -> Counter[str]:
    """The number of texts of each kernel."""
    return Counter(text.kernel.removeprefix("metal_lite_") for text in texts)


class Session:
    """One model, its attention with `prefill`, and `skinny_gemm` for up to `skinny_rows` rows."""

    def __init__(self, name: str, prefill: str, skinny_rows: int = 0) -> None:
        config = MODELS[name]
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        model = module.Model(module.ModelArgs.from_dict(config))
        model.set_dtype(mx.bfloat16)
        layout = find_layout(model, name)
        self.packed = PackedModel(model, layout)
        fused: FusedLaunches = fuse(model, joins=True)
        self.fusion = replace(fused, skinny_rows=range(1, skinny_rows + 1))
        groups = [replace(group, num_blocks=1) for group in kv_groups(layout.specs)]
        store = PagedStore(layout.specs, groups, BLOCK_SIZE)
        spec, heads = layout.specs[0], config["num_attention_heads"]
        dims = spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim
        shapes = [AttentionShape(heads, *dims, spec.dtype)]
        self.attention = KernelAttention(store, prefill, shapes)

    def texts(self) -> list[KernelText]:
        """The distinct texts of all steps, in the order in which they are first needed."""
        found: dict[KernelText, None] = {}
        state = self.attention.new_state()
        with pytest.MonkeyPatch.context() as patch, recorded() as recording:
            patch.setattr(backend, "name", lambda: "metal")
            patch.setattr(mx, "async_eval", lambda *arrays: None)  # a large step would run
            for requests in steps():
                batch = _batch(requests, len(self.attention.store.num_blocks))
                step = self.attention.prepare(batch, padded_rows(batch.num_tokens))
                bound = self.attention.begin(step, state)
                logits, _ = self.packed(bound, step.logits_indices, self.fusion)
                found |= dict.fromkeys(recording.texts(logits, *bound.state))
                # The next step needs the shape of the state, not its history.
                state = [mx.zeros(a.shape, a.dtype) for a in bound.state]
        return list(found)
