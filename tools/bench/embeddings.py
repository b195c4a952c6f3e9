"""Embeddings by packed prompts, beside mlx-lm's module in padded batches sorted by length.

    python -m tools.bench.embeddings                       a GPU; random weights in bfloat16
    python -m tools.bench.embeddings --model 256x4 --texts 60 --repeats 2        a CPU

The lengths of the texts are lognormal.  mlx-lm's module computes no logits, as this engine.  A size
is rows a step for this engine, and texts a batch for mlx-lm; each runs once unmeasured.  Prints
Markdown: texts a second (median), the part of the rows that is padding, the least cosine to
mlx-lm's embeddings at its last size, and the ratio.
"""

import argparse
import faulthandler
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from tools.bench.lib.mlx_lm import native
from tools.bench.lib.models import get_model
from tools.bench.lib.tables import table_head
from tools.bench.lib.trust import trusted
from vllm_metal_lite import EngineConfig, LLMEngine, PoolingParams, backend
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import body_of

mx = backend.mx

Texts = list[list[int]]
Run = Callable[[], np.ndarray]  # embeds all texts


def texts(count: int, median: int, vocab_size: int) -> Texts:
    rng = np.random.default_rng(3)
    lengths = np.clip(median * rng.lognormal(0, 0.6, count), 4, 2048).astype(int)
    return [rng.integers(10, vocab_size, length).tolist() for length in lengths]


def packed(model: LoadedModel, prompts: Texts, rows: int) -> Run:
    """Embeds all prompts with this engine, `rows` a step."""
    longest, block = max(map(len, prompts)), EngineConfig.block_size
    seats = min(len(prompts), 256)
    engine = LLMEngine(
        model,
        EngineConfig(
            max_num_batched_tokens=rows, max_num_seqs=seats, max_model_len=longest,
            num_blocks=seats * -(-longest // block), enable_prefix_caching=False,
        ),
    )  # fmt: skip

    def run() -> np.ndarray:
        found = {}
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, PoolingParams())
        while engine.has_unfinished_requests():
            found |= {o.request_id: o.pooled for o in engine.step() if o.finished}
        return np.stack([found[str(i)] for i in range(len(prompts))])

    return run


def batches(prompts: Texts, size: int) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """(numbers, padded token ids, lengths) of each batch of prompts sorted by length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        lengths = np.array([len(prompts[i]) for i in numbers])
        ids = np.zeros((len(numbers), lengths.max()), np.int32)
        for row, i in enumerate(numbers):
            ids[row, : lengths[row]] = prompts[i]
        yield numbers, ids, lengths


def padded(model: LoadedModel, prompts: Texts, size: int) -> Run:
    """Embeds all prompts with mlx-lm's module; the padding behind a text changes nothing."""
    body = body_of(native(model))
    assert body is not None

    def run() -> np.ndarray:
        found: list[tuple[list[int], mx.array]] = []
        for numbers, ids, lengths in batches(prompts, size):
            hidden = body(mx.array(ids))
            last = hidden[mx.arange(len(ids)), mx.array(lengths - 1)].astype(mx.float32)
            found.append((numbers, last / mx.linalg.norm(last, axis=-1, keepdims=True)))
            mx.async_eval(found[-1][1])
            if len(found) > 1:  # one batch ahead
                mx.eval(found[-2][1])
        order = np.argsort([i for numbers, _ in found for i in numbers])
        return np.concatenate([np.array(last) for _, last in found])[order]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--median", type=int, default=120, metavar="TOKENS")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    faulthandler.enable()
    model = get_model(args.model)
    prompts = texts(args.texts, args.median, model.vocab_size)
    tokens = sum(map(len, prompts))
    print(f"{model.name}, {len(prompts)} texts, {tokens:,} tokens, {backend.name()}\n")
    table_head(["engine", "texts a second", "padding", "least cosine"])
    with trusted():
        runs = [("ours", n, 0.0, packed(model, prompts, n)) for n in args.rows]
    for size in args.sizes:
        rows = sum(ids.size for _, ids, _ in batches(prompts, size))
        runs.append(("mlx-lm", size, 1 - tokens / rows, padded(model, prompts, size)))
    wanted = [run() for *_, run in runs][-1]
    best = {"ours": 0.0, "mlx-lm": 0.0}
    for engine, size, padding, run in runs:
        times = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            found = run()
            times.append(time.perf_counter() - start)
        rate = len(prompts) / statistics.median(times)
        best[engine] = max(best[engine], rate)
        cosine = (found * wanted).sum(axis=1).min()
        cells = (f"{engine}, {size}", f"{rate:,.1f}", f"{padding:.0%}", f"{cosine:.5f}")
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\nours / mlx-lm, each at its best: {best['ours'] / best['mlx-lm']:.2f}")


if __name__ == "__main__":
    main()
