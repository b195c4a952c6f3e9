"""What keeping K and V in 8 or 4 bits costs: the error of attention and of the demo model's logits.

    python -m tools.prove.kv_error

Prints Markdown.  mlx-lm's quantised cache (`QuantizedKVCache`) is measured beside it.  What it
costs in answers: `python -m tools.demo_model.recall --engine both --kv-bits 4`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from vllm_metal_lite.backend import mx  # first: it prepares MLX

import numpy as np  # isort: skip
from tools.demo_model.data import recall_prompts  # isort: skip
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache  # isort: skip
from tokenizers import Tokenizer  # isort: skip

from vllm_metal_lite import backend
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.model.files import DEMO_PATH
from vllm_metal_lite.model.loader import LoadedModel, load

BITS = (None, 8, 4)
LENGTHS = (256, 1024, 3072)
HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 16


def one_sequence(length: int, rows: int) -> ForwardBatch:
    """The last `rows` of a sequence of `length` tokens, its blocks in random order."""
    inputs = InputBatch(1, length, BLOCK)
    row = np.array([inputs.add([0] * length, length)])
    blocks = -(-length // BLOCK)
    inputs.append_blocks(0, np.random.default_rng(0).permutation(blocks).tolist())
    return inputs.pack(row, np.array([length - rows]), np.array([rows]))


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def attention_errors(length: int, dtype: mx.Dtype, num_queries: int = 16) -> dict[str, float]:
    """The error of attention, relative to its size: `num_queries` queries at one position.

    Keys have channels that differ in size and in mean, as real ones do; all inputs are exact in
    `dtype`, and what counts is the distance to attention in float64.  What mlx-lm's cache keeps is
    expanded for MLX's SDPA: its quantised products in 16 bits are off by more than that on a CPU.
    """
    rng = np.random.default_rng(length)

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    channels = mx.exp(0.5 * draw(1, KV_HEADS, DIM))
    k = (channels * (draw(length, KV_HEADS, DIM) + 2 * draw(1, KV_HEADS, DIM))).astype(dtype)
    v = draw(length, KV_HEADS, DIM).astype(dtype)
    q = draw(num_queries, HEADS, DIM).astype(dtype)
    scale = DIM**-0.5

    wide_q, wide_k, wide_v = (np.array(a.astype(mx.float32), np.float64) for a in (q, k, v))
    wide_k, wide_v = (np.repeat(a, HEADS // KV_HEADS, axis=1) for a in (wide_k, wide_v))
    scores = np.einsum("qhd,khd->hqk", wide_q, wide_k) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    exact = np.einsum("hqk,khd->qhd", weights, wide_v)

    def error(out: mx.array) -> float:
        return root_mean_square(np.array(out.astype(mx.float32)) - exact) / root_mean_square(exact)

    batch, whole = one_sequence(length, 1), one_sequence(length, length)
    slots = mx.array(whole.slot_mapping)
    errors = {}
    for bits in BITS:
        spec = LayerSpec(KV_HEADS, DIM, DIM, dtype, bits=bits)
        store = PagedStore([spec], length // BLOCK, BLOCK)
        store.write(0, k, v, slots)
        attention = ReferenceAttention(store)
        step = attention.begin(attention.prepare(batch, 1), attention.new_state())
        out = [step.attend(0, q[i : i + 1], scale=scale) for i in range(num_queries)]
        errors[f"ours, {bits or 8 * dtype.size}"] = error(mx.concatenate(out))
    for bits in BITS[1:]:
        cache = QuantizedKVCache(64, bits)
        kept = cache.update_and_fetch(*(a.swapaxes(0, 1)[None] for a in (k, v)))
        rows = [mx.dequantize(*a, group_size=64, bits=bits) for a in kept]
        queries = q.swapaxes(0, 1)[None]
        out = mx.fast.scaled_dot_product_attention(queries, *rows, scale=scale)
        errors[f"mlx-lm, {bits}"] = error(out[0].swapaxes(0, 1))
    return errors


def packed_logits(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    """Logits (len(tokens), V) of one prompt, by the reference attention."""
    batch = one_sequence(len(tokens), len(tokens))
    batch.token_ids[:] = tokens
    store = PagedStore(model.kv_specs, -(-len(tokens) // BLOCK), BLOCK)
    attention = ReferenceAttention(store)
    step = attention.prepare(batch, batch.num_tokens)
    bound = attention.begin(step, attention.new_state())
    return np.array(model.packed(bound, None).astype(mx.float32))


def native_logits(model: LoadedModel, tokens: list[int], bits: int) -> np.ndarray:
    """The same by mlx-lm with its quantised cache."""
    native = model.packed.model
    group = model.kv_specs[0].k_row.group_size
    caches = [QuantizedKVCache(group, bits) for _ in make_prompt_cache(native)]
    return np.array(native(mx.array([tokens]), cache=caches)[0].astype(mx.float32))


def logit_errors(length: int, count: int) -> dict[str, tuple[float, float]]:
    """By way: the error of the logits relative to their spread, and the rows of the same argmax."""
    model = load("demo")
    tokenizer = Tokenizer.from_file(str(DEMO_PATH / "tokenizer.json"))
    ways: dict[str, Callable[[list[int]], np.ndarray]] = {}
    for bits in BITS[1:]:
        quantised = model.with_kv_bits(bits)
        ways[f"ours, {bits}"] = lambda t, m=quantised: packed_logits(m, t)
        ways[f"mlx-lm, {bits}"] = lambda t, b=bits: native_logits(model, t, b)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for test in recall_prompts(tokenizer, length, count):
        exact = packed_logits(model, test.prompt_ids)
        for way, logits_of in ways.items():
            logits = logits_of(test.prompt_ids)
            same = logits.argmax(axis=-1) == exact.argmax(axis=-1)
            found[way].append((root_mean_square(logits - exact) / exact.std(), same.mean()))
    return {way: tuple(np.mean(rows, axis=0)) for way, rows in found.items()}


def table(head: str, rows: dict[str, list[str]]) -> None:
    print(f"| {head} | " + " | ".join(f"{n:,}" for n in LENGTHS) + " |")
    print("| --- |" + " --- |" * len(LENGTHS))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-prompts", type=int, default=4, help="of each length, for logits")
    args = parser.parse_args()
    print(f"# K and V in fewer bits: {backend.describe()}")
    for dtype in (mx.bfloat16, mx.float32):
        print(f"\n## Attention, {dtype}: error relative to its size, by tokens of context\n")
        errors = [attention_errors(n, dtype) for n in LENGTHS]
        table("bits", {way: [f"{e[way]:.2g}" for e in errors] for way in errors[0]})
    print(
        "\n## Logits of the demo model: error relative to their spread, rows of the same argmax\n"
    )
    results = [logit_errors(n, args.num_prompts) for n in LENGTHS]
    table("bits", {
        way: [f"{r[way][0]:.2g}, {100 * r[way][1]:.1f} %" for r in results] for way in results[0]
    })  # fmt: skip


if __name__ == "__main__":
    main()
