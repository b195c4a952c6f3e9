"""Embeddings by packed prompts, beside mlx-lm's module in padded batches sorted by length.

    python -m tools.bench.embeddings                                     a GPU, random bfloat16
    python -m tools.bench.embeddings --model 256x2 --texts 40 --rows 256 512 --sizes 1 2 4    a CPU

Lengths are lognormal, median 120 tokens.  Neither side computes logits.  MLX CUDA needs
MLX_CUDA_SDPA_CACHE_SIZE=16384, or it plans the attention of each shape again in every run.  A size
is rows a step here, and texts a batch for mlx-lm.  Prints Markdown: texts a second (median, after
one run), the part of the rows that is padding, the least cosine to mlx-lm's last size, and the
ratio.
"""

import gc
import statistics
import timeit
from collections.abc import Callable, Iterator

import numpy as np

from tools.bench.lib.models import add_model, model_of
from tools.lib.frame import at_least, parser_of, print_table, run_main
from tools.lib.trust import trusted
from vllm_metal_lite import EngineConfig, LLMEngine, PoolingParams
from vllm_metal_lite.backend import mx
from vllm_metal_lite.benchmark import MLX_CACHE_LIMIT, native
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import body_of

Texts = list[list[int]]
Run = Callable[[], np.ndarray]  # embeds all texts


def texts(count: int, vocab_size: int) -> Texts:
    rng = np.random.default_rng(3)
    lengths = np.clip(120 * rng.lognormal(0, 0.6, count), 4, 2048).astype(int)
    return [rng.integers(10, vocab_size, length).tolist() for length in lengths]


def packed(model: LoadedModel, prompts: Texts, rows: int) -> Run:
    """Embeds all prompts with this engine, `rows` a step."""
    longest, seats = max(map(len, prompts)), min(len(prompts), 1024)
    config = EngineConfig(
        max_num_batched_tokens=rows,
        max_num_seqs=seats,
        max_model_len=longest,
        num_blocks=(3 * rows + longest) // EngineConfig.block_size + seats,
        enable_prefix_caching=False,
    )
    engine = LLMEngine(model, config)
    cache_limit = mx.set_cache_limit(MLX_CACHE_LIMIT)  # that of the engine

    params = PoolingParams()

    def run() -> np.ndarray:
        mx.set_cache_limit(cache_limit)
        found = {}
        for i, prompt in enumerate(prompts):  # in the order of `LLM.embed`
            engine.add_request(str(i), prompt, params, priority=len(prompt))
        while engine.has_unfinished_requests():
            found |= {o.request_id: o.pooled for o in engine.step() if o.finished}
        return np.stack([found[str(i)] for i in range(len(prompts))])

    return run


def batches(prompts: Texts, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(padded token ids, lengths) of each batch of prompts sorted by length."""
    prompts = sorted(prompts, key=len)
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        ids = np.zeros((len(batch), len(batch[-1])), np.int32)
        for row, prompt in zip(ids, batch, strict=True):
            row[: len(prompt)] = prompt
        yield ids, np.array(list(map(len, batch)))


def padded(model: LoadedModel, prompts: Texts, size: int) -> Run:
    """Embeds all prompts with mlx-lm's module; the padding after a text changes nothing."""
    body = body_of(native(model))
    assert body is not None

    def run() -> np.ndarray:
        mx.set_cache_limit(MLX_CACHE_LIMIT)
        found: list[mx.array] = []
        for ids, lengths in batches(prompts, size):
            hidden = body(mx.array(ids))
            last = hidden[mx.arange(len(ids)), mx.array(lengths - 1)].astype(mx.float32)
            found.append(last / mx.linalg.norm(last, axis=-1, keepdims=True))
            mx.async_eval(found[-1])
            mx.eval(found[-2:-1])  # one batch ahead
        # `sorted` keeps the order of equals, as a stable sort.
        place = np.argsort(np.argsort(list(map(len, prompts)), kind="stable"))
        return np.array(mx.concatenate(found))[place]

    return run


def main() -> int:
    parser = parser_of(__doc__)
    add_model(parser, "qwen3-0.6b")
    parser.add_argument("--texts", type=at_least(1), default=2000)
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[4096, 8192])
    parser.add_argument("--sizes", type=at_least(1), nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--repeats", type=at_least(1), default=3)
    args = parser.parse_args()
    model = model_of(args)
    prompts = texts(args.texts, model.vocab_size)
    tokens = sum(map(len, prompts))
    print(f"{len(prompts)} texts, {tokens:,} tokens\n")
    with trusted():
        runs = [("ours", n, 0.0, packed(model, prompts, n)) for n in args.rows]
    for size in args.sizes:
        rows = sum(ids.size for ids, _ in batches(prompts, size))
        runs.append(("mlx-lm", size, 1 - tokens / rows, padded(model, prompts, size)))
    found = [run() for *_, run in runs]
    gc.collect()
    gc.freeze()  # as the server does
    best = {"ours": 0.0, "mlx-lm": 0.0}

    def timed() -> Iterator[tuple[str, ...]]:
        for (engine, size, padding, run), values in zip(runs, found, strict=True):
            times = timeit.repeat(run, number=1, repeat=args.repeats)
            rate = len(prompts) / statistics.median(times)
            best[engine] = max(best[engine], rate)
            cosine = (values * found[-1]).sum(axis=1).min()
            yield f"{engine}, {size}", f"{rate:,.1f}", f"{padding:.0%}", f"{cosine:.5f}"

    print_table(("engine", "texts a second", "padding", "least cosine"), timed())
    print(f"\nours / mlx-lm, each at its best: {best['ours'] / best['mlx-lm']:.2f}")
    return 0


if __name__ == "__main__":
    run_main(main)
