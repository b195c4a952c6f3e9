"""Times attention to latents beside MLX's SDPA on contiguous latents, on this GPU.

    python -m tools.bench.latents                decodes and prompts of three models
    METAL_LITE_DEVICE=cpu python -m tools.bench.latents --tiny    each once, on the CPU host

Prints Markdown: microseconds a call, and bytes of latents a second.  Decodes are timed with the
splits of serving, with one split, and with 16 simdgroups.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np

from tools.dev.run_main import run_main
from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.measure import seconds_per_call
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.decode import decode_plan
from vllm_metal_lite.kernels.latent_attention import decode_tiles, latent_attention
from vllm_metal_lite.kernels.prefill import plan_tiles

# Query heads.
MODELS = {"DeepSeek V2 Lite": 16, "GLM 4.7 Flash": 20, "Kimi K2": 64}
RANK, ROPE, BLOCK = 512, 64, 16
DTYPE = mx.bfloat16
SCALE = (RANK + ROPE) ** -0.5

Call = Callable[[mx.array], mx.array]


class Load:
    """`batch` sequences of `context` latents, the last `rows` tokens of each computed."""

    def __init__(self, heads: int, batch: int, context: int, rows: int) -> None:
        self.heads, self.batch, self.context, self.rows = heads, batch, context, rows
        blocks = -(-context // BLOCK)
        drawn = mx.random.normal((batch * blocks * BLOCK, 1, RANK + ROPE)).astype(DTYPE)
        self.store = [mx.contiguous(part) for part in mx.split(drawn, [RANK], axis=-1)]
        table = np.random.default_rng(0).permutation(batch * blocks).reshape(batch, blocks)
        self.tables = mx.array(table.astype(np.int32))
        self.seq_lens = mx.full((max(batch, 8),), context, mx.int32)
        count = batch * rows
        self.q = mx.random.normal((count, heads, RANK)).astype(DTYPE)
        self.q_pe = mx.random.normal((count, heads, ROPE)).astype(DTYPE)
        if rows == 1:
            self.where = decode_tiles(batch, heads)
        else:
            cu = np.minimum(np.arange(max(batch + 1, 8)), batch).astype(np.int32) * rows
            self.where = mx.array(cu), mx.array(plan_tiles(cu, count, heads))
        mx.eval(self.store, self.tables, self.seq_lens, self.q, self.q_pe, self.where)

    @property
    def splits(self) -> int:
        return decode_plan(self.batch, 1, self.context).splits if self.rows == 1 else 1

    def ours(self, splits: int, simdgroups: int = 8) -> Call:
        cu, tiles = self.where
        token = new_token()
        mx.eval(token)
        return lambda q: latent_attention(
            q, self.q_pe, self.tables, cu, self.seq_lens, tiles, *self.store, token,
            block_size=BLOCK, scale=SCALE, splits=splits, simdgroups=simdgroups,
        )[0]  # fmt: skip

    def sdpa(self) -> Call:
        """One KV head, in absorbed form, with keys and values that are contiguous already."""
        joined = mx.random.normal((self.batch, 1, self.context, RANK + ROPE)).astype(DTYPE)
        latents = mx.contiguous(joined[..., :RANK])
        mx.eval(joined, latents)
        mask = None if self.rows == 1 else "causal"

        def call(q: mx.array) -> mx.array:
            q = mx.concatenate([q, self.q_pe], axis=-1)
            q = q.reshape(self.batch, self.rows, self.heads, -1).swapaxes(1, 2)
            out = mx.fast.scaled_dot_product_attention(q, joined, latents, scale=SCALE, mask=mask)
            return out.swapaxes(1, 2).reshape(-1, self.heads, RANK)

        return call


def seconds(call: Call, q: mx.array, chain: int) -> float:
    return seconds_per_call(call, q, chain)


def decodes(batches: tuple[int, ...], contexts: tuple[int, ...], chain: int) -> None:
    print("\n## Decodes\n")
    print(
        "| model | batch | context | splits | us | GB/s | 16 simdgroups us | 1 split us | SDPA us |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, heads in MODELS.items():
        for batch in batches:
            for context in contexts:
                load = Load(heads, batch, context, 1)
                ways = (
                    load.ours(load.splits),
                    load.ours(load.splits, 16),
                    load.ours(1),
                    load.sdpa(),
                )
                us = [1e6 * seconds(way, load.q, chain) for way in ways]
                rate = batch * context * (RANK + ROPE) * DTYPE.size / us[0] / 1e3
                times = " | ".join(f"{t:.1f}" for t in us[1:])
                print(
                    f"| {name} | {batch} | {context:,} | {load.splits} | {us[0]:.1f} "
                    f"| {rate:,.0f} | {times} |",
                    flush=True,
                )


def prompts(lengths: tuple[int, ...], chain: int) -> None:
    print("\n## Prompts\n")
    print("| model | rows | us | TFLOP/s | 16 simdgroups us | SDPA us |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, heads in MODELS.items():
        for rows in lengths:
            load = Load(heads, 1, rows, rows)
            us = [
                1e6 * seconds(way, load.q, chain)
                for way in (load.ours(1), load.ours(1, 16), load.sdpa())
            ]
            flops = rows * (rows + 1) * heads * (2 * RANK + ROPE)
            print(
                f"| {name} | {rows:,} | {us[0]:.1f} | {flops / us[0] / 1e6:.1f} | {us[1]:.1f} "
                f"| {us[2]:.1f} |",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small loads, also on the CPU host")
    args = parser.parse_args()
    if backend.is_cpu() and not args.tiny:
        raise MetalLiteError("kernels need a GPU, and MLX computes on the CPU here")
    host: object = nullcontext()
    if backend.is_cpu():
        from metal.host import installed

        host = installed()
    print(f"# Attention to latents: {backend.describe()}", flush=True)
    with host:
        if args.tiny:
            decodes((1, 2), (24,), 1)
            prompts((9,), 1)
        else:
            decodes((1, 8, 32), (512, 4096, 32768), 20)
            prompts((512, 4096), 4)
    return 0


if __name__ == "__main__":
    run_main(main)
