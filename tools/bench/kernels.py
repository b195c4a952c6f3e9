"""Check every kernel of metal/ on this GPU, then measure it beside MLX's own attention.

    python -m tools.bench.kernels               everything
    python -m tools.bench.kernels --only check  only right or wrong

Prints Markdown.  Exit code 1 if a kernel is wrong.
"""

import argparse
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import numpy as np

from tools.bench.products import products  # noqa: F401 (a section)
from tools.dev.run_main import run_main
from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.attention.base import Step
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.checks import fusedcheck, measure, selfcheck
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.plan import checks_for
from vllm_metal_lite.checks.run import run
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.new_rows import Columns, HeadNorm, NewRows, Rope
from vllm_metal_lite.kernels.prefill import plan_tiles, varlen_prefill
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.shared_prefix import prefix_splits
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.specs import AttentionShape

QWEN3 = AttentionShape(16, 8, 128, 128, mx.bfloat16)
QWEN3_5 = AttentionShape(16, 4, 256, 256, mx.bfloat16)
# Rows, and keys that they share and that each has alone: eight agents (bench/agents.py).
AGENTS = (8, 20_000, 7_000)
SECTIONS = (
    "check", "huge", "sanitize", "decode", "plans", "shapes", "shared", "prefill", "fused",
    "products",
)  # fmt: skip
WORKERS = 14


def check() -> bool:
    """Every kernel at every shape of the full lists."""
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:  # compilation takes the time
        results = list(pool.map(_check, range(len(_checks()))))
    failed = [line for _, _, line in results if line is not None]
    print(f"\n## Right or wrong\n\n{len(results)} checks, {len(failed)} failed.")
    for kernel in dict.fromkeys(kernel for kernel, _, _ in results):
        errors = [error for name, error, _ in results if name == kernel]
        print(f"- {kernel}: {len(errors)} checks, worst error {max(errors):.2g} of what is allowed")
    for line in failed:
        print(f"- FAILED {line}")
    return not failed


def huge() -> bool:
    """The last blocks of a store of more than 2^31 elements: offsets beyond 32 bits."""
    slots, dim, bs = (1 << 24) + 64, 128, 16
    if backend.memory_limit() < 40 << 30:
        print("\n## Offsets beyond 32 bits\n\nNot run: not enough memory.")
        return True
    tail = mx.random.normal((2, 64, 1, dim)).astype(mx.bfloat16)
    table, lens = mx.arange(4, dtype=mx.int32)[None], mx.array([50], mx.int32)
    q = mx.random.normal((1, 2, dim)).astype(mx.bfloat16)
    rows = mx.arange(slots - 64, slots, dtype=mx.int32)
    tiles = mx.array(plan_tiles(np.array([0, 1]), 1, 2))
    cu = mx.array([0, 1], mx.int32)
    how = {"block_size": bs, "scale": 0.1}
    large = [mx.zeros((slots, 1, dim), mx.bfloat16) for _ in range(2)]
    mx.eval(large, tail)
    token = kv_write(tail[0], tail[1], rows, *large, new_token())
    results = []
    for store, shift, after in ((large, slots // bs - 4, token), (list(tail), 0, new_token())):
        decoded, after = paged_decode(
            q, table + shift, lens, *store, after, plan=DecodePlan(1, 8), **how
        )
        prompt, after = varlen_prefill(q, table + shift, cu, lens, tiles, *store, after, **how)
        gathered = kv_gather(mx.arange(64) + shift * bs, *store, after)[:2]
        results.append([np.array(a.astype(mx.float32)) for a in (decoded, prompt, *gathered)])
    same = all((a == b).all() for a, b in zip(*results, strict=True))
    print(
        f"\n## Offsets beyond 32 bits\n\n{'Right' if same else 'WRONG'}: {slots:,} slots of {dim}."
    )
    return same


def _checks() -> list[Check]:
    uses = selfcheck.full_list() + fusedcheck.full_list()
    return list(dict.fromkeys(check for use in uses for check in checks_for(use)))


def _check(index: int) -> tuple[str, float, str | None]:
    """Kernel, error as a part of what is allowed, and a line if it failed.  By number: MLX's dtypes
    cannot be pickled."""
    result = run(_checks()[index])
    error = result.error / (result.tolerance or 1)
    return result.kernel, error, None if result.passed else str(result)


def sanitize() -> bool:
    """This script's checks again under NVIDIA's memory and race checkers."""
    tool = shutil.which("compute-sanitizer")
    print("\n## compute-sanitizer\n")
    if tool is None:
        print("Not found, so not run.")
        return True
    passed = True
    for mode in ("memcheck", "racecheck"):
        command = [tool, "--tool", mode, "--error-exitcode", "9"]
        command += ["--kernel-name", "kernel_substring=metal_lite"]
        command += [sys.executable, "-m", "tools.bench.kernels", "--only", "few"]
        run = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in run.stdout.splitlines() if "SUMMARY" in line or "checks" in line]
        print(f"- {mode}: exit code {run.returncode}; " + "; ".join(lines[-2:]), flush=True)
        passed &= run.returncode == 0
    return passed


def few() -> bool:
    """A few shapes in this process, for a sanitizer."""
    results = [run(check) for check in _checks()[::12]]
    failed = [r for r in results if not r.passed]
    print(f"{len(results)} checks, {len(failed)} failed", *failed)
    return not failed


def decode() -> None:
    """One query a sequence: ours on the paged store, SDPA on contiguous K and V."""
    copy, matmul = measure.copy_bandwidth(), measure.matmul_rate()
    print(f"\n## Decode, {QWEN3}\n")
    print(f"Copy {copy / 1e9:,.0f} GB/s, bfloat16 matmul {matmul / 1e12:,.0f} TFLOP/s.\n")
    print("| batch | context | splits x simdgroups | us compiled | eager | GB/s | of copy "
          "| SDPA us compiled | eager | best SDPA / ours |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for batch in (1, 8, 64):
        for context in (512, 4096, 32768):
            load = measure.Workload(QWEN3, batch, context)
            ours, eager = load.decode(), load.decode(compiled=False)
            theirs = [load.sdpa(compiled=c).seconds for c in (True, False)]
            plan = load.plan
            print(
                f"| {batch} | {context:,} | {plan.splits} x {plan.simdgroups} "
                f"| {1e6 * ours.seconds:.1f} | {1e6 * eager.seconds:.1f} "
                f"| {ours.bandwidth / 1e9:,.0f} | {ours.bandwidth / copy:.0%} "
                f"| {1e6 * theirs[0]:.1f} | {1e6 * theirs[1]:.1f} "
                f"| {min(theirs) / ours.seconds:.2f} |",
                flush=True,
            )


def plans() -> None:
    """What cutting the context into more parts does, and larger threadgroups."""
    print("\n## Plans: us of a decode call\n")
    choices = [(s, g) for s in (1, 2, 4, 8, 16, 32) for g in (4, 8, 16)]
    print("| batch | context | " + " | ".join(f"{s}x{g}" for s, g in choices) + " |")
    print("| --- | --- | " + "--- | " * len(choices))
    for batch, context in ((1, 512), (1, 4096), (1, 32768), (8, 512), (8, 4096), (64, 512)):
        load = measure.Workload(QWEN3, batch, context)
        times = [f"{1e6 * load.decode(DecodePlan(*c)).seconds:.1f}" for c in choices]
        print(f"| {batch} | {context:,} | " + " | ".join(times) + " |", flush=True)


def shapes() -> None:
    """Other heads, types and blocks, at batch 64 and context 4,096."""
    print("\n## Decode at batch 64, context 4,096\n")
    print("| shape | block | us | GB/s | SDPA us | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for shape in (
        AttentionShape(32, 8, 128, 128, mx.bfloat16),
        AttentionShape(64, 8, 128, 128, mx.bfloat16),
        AttentionShape(32, 32, 128, 128, mx.bfloat16),
        AttentionShape(14, 2, 64, 64, mx.bfloat16),
        AttentionShape(32, 8, 64, 64, mx.bfloat16),
        AttentionShape(32, 8, 80, 80, mx.bfloat16),
        AttentionShape(8, 4, 256, 256, mx.bfloat16),
        AttentionShape(16, 8, 128, 128, mx.float16),
        AttentionShape(16, 8, 128, 128, mx.float32),
        *(AttentionShape(h, 8, 128, 128, mx.bfloat16, kv_bits=b) for h in (16, 32) for b in (8, 4)),
    ):
        for block_size in (8, 32) if shape.dtype == mx.float16 else (16,):
            load = measure.Workload(shape, 64, 4096, block_size)
            ours, theirs = load.decode(), load.sdpa(compiled=False)
            print(
                f"| {shape} | {block_size} | {1e6 * ours.seconds:.0f} "
                f"| {ours.bandwidth / 1e9:,.0f} | {1e6 * theirs.seconds:.0f} "
                f"| {theirs.seconds / ours.seconds:.2f} |",
                flush=True,
            )


def shared() -> bool:
    """Decodes behind keys that they share: read once, and by each."""
    layers, size = 8, 16
    print(f"\n## A shared prefix, {layers} layers in turn\n")
    print(
        "| shape | rows | keys: shared | own | splits | us a layer shared | apart | apart / shared "
        "| difference |"
    )
    print("|" + " --- |" * 9)
    passed = True
    for shape in (QWEN3, replace(QWEN3, num_heads=32), QWEN3_5):
        for rows, prefix, own in ((8, 4600, 100), (24, 4600, 100), (64, 4600, 100), AGENTS):
            batch = _behind_a_prefix(rows, prefix, own, size)
            spec = LayerSpec(shape.num_kv_heads, shape.k_head_dim, shape.v_head_dim, shape.dtype)
            num_blocks = int(batch.block_tables.max()) + 1
            store = PagedStore([spec] * layers, num_blocks, size)
            for arrays in (store.keys, store.values):
                arrays[:] = [mx.random.normal(a.shape).astype(a.dtype) for a in arrays]
            q = mx.random.normal((rows, shape.num_heads, shape.k_head_dim)).astype(shape.dtype)
            mx.eval(q, store.keys, store.values)
            outputs, times = [], []
            for shares in (True, False):
                attention = KernelAttention(
                    store,
                    "gather",
                    {shape.num_heads // shape.num_kv_heads},
                    without=() if shares else ["shared_prefix"],
                )
                step = attention.prepare(batch, rows)
                state, scale = attention.new_state(), shape.k_head_dim**-0.5
                call = partial(_all_layers, attention, step, state, scale)
                outputs.append(call(q).astype(mx.float32))
                times.append(1e6 * measure.seconds_per_call(call, q, chain=12) / layers)
                if shares:
                    splits = prefix_splits(
                        rows, shape.num_heads, spec.num_kv_heads, step.plan.prefix_len
                    )
            difference = (mx.abs(outputs[0] - outputs[1]).max() / mx.abs(outputs[1]).max()).item()
            passed &= difference <= 0.02  # of the largest: weights and results are rounded
            print(
                f"| {shape} | {rows} | {prefix:,} | {own:,} | {splits} | {times[0]:.1f} "
                f"| {times[1]:.1f} | {times[1] / times[0]:.2f} | {difference:.2g} |",
                flush=True,
            )
    return passed


def _behind_a_prefix(rows: int, prefix: int, own: int, size: int) -> ForwardBatch:
    inputs = InputBatch(rows, prefix + own, size)
    index = np.array([inputs.add([0] * (prefix + own), 1) for _ in range(rows)])
    common, rest = prefix // size, -(-(prefix + own) // size) - prefix // size
    blocks = np.random.default_rng(0).permutation(common + rows * rest)
    for row, its in zip(index, blocks[common:].reshape(rows, rest), strict=True):
        inputs.append_blocks(row, [*blocks[:common], *its])
    return inputs.pack(index, np.full(rows, prefix + own - 1), np.ones(rows, int))


def _all_layers(
    attention: KernelAttention, step: Step, state: list[mx.array], scale: float, q: mx.array
) -> mx.array:
    bound = attention.begin(step, state)
    for layer in range(len(attention.store.specs)):
        q = bound.attend(layer, q, scale=scale)
    return q


def prefill() -> None:
    """Prompts, and chunks behind a context: the two ways beside SDPA on contiguous K and V."""
    matmul = measure.matmul_rate()
    print(f"\n## Prompts, {QWEN3}\n\nbfloat16 matmul {matmul / 1e12:,.0f} TFLOP/s.\n")
    print("| sequences x rows at context | varlen us | TFLOP/s | gather us | TFLOP/s | SDPA us |")
    print("| --- | --- | --- | --- | --- | --- |")
    for batch, rows, context in (
        (32, 64, 64), (16, 128, 128), (4, 512, 512), (1, 2048, 2048), (1, 8192, 8192),
        (4, 512, 4096), (1, 2048, 32768), (1, 64, 4096),
    ):  # fmt: skip
        load = measure.Workload(QWEN3, batch, context)
        varlen, gather = (load.prefill(how, rows) for how in ("varlen", "gather"))
        print(
            f"| {batch} x {rows:,} at {context:,} | {1e6 * varlen.seconds:.0f} "
            f"| {varlen.rate / 1e12:.1f} | {1e6 * gather.seconds:.0f} | {gather.rate / 1e12:.1f} "
            f"| {1e6 * load.sdpa(rows, compiled=False).seconds:.0f} |",
            flush=True,
        )


def fused() -> bool:
    """rope_write and add_rms_norm beside the calls of MLX that they stand for; decodes at context
    700 in one launch beside rope_write and paged_decode."""
    print(f"\n## Fused kernels, {QWEN3}, hidden size 2,048\n")
    print("| kernel | rows | us compiled | eager | apart: us compiled | eager | difference |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    passed = True
    for rows in (1, 8, 64, 512, 8192):
        cases = [_rope_write(rows), _add_rms_norm(rows)]
        if rows <= 64:
            cases.append(_fused_decode(rows))
        for name, state, ours, theirs in cases:
            got, wanted = ours(state)[0], theirs(state)[0]
            difference = mx.abs(got.astype(mx.float32) - wanted.astype(mx.float32)).max().item()
            passed &= difference <= 0.04  # of numbers up to 5: two roundings to bfloat16
            chain = 100 if rows <= 64 else 5
            times = [
                f"{1e6 * measure.seconds_per_call(call, state, chain, compiled):.1f}"
                for call in (ours, theirs)
                for compiled in (True, False)
            ]
            print(f"| {name} | {rows:,} | {' | '.join(times)} | {difference:.2g} |", flush=True)
    return passed


def _rope_write(rows: int) -> tuple:
    """One layer, as Qwen3 has it: k and v joined; q goes from each call to the next."""
    s = QWEN3
    width = s.num_kv_heads * s.k_head_dim
    kv = mx.random.normal((rows, 2 * width)).astype(s.dtype)
    store = [mx.zeros((rows, s.num_kv_heads, s.k_head_dim), s.dtype) for _ in range(2)]
    positions = mx.arange(1000, 1000 + rows, dtype=mx.int32)
    slots = mx.arange(rows, dtype=mx.int32)
    norm = HeadNorm(mx.random.uniform(0.8, 1.2, (s.k_head_dim,)).astype(s.dtype), 1e-6)
    turn = Rope(s.k_head_dim, False, 1e6, 1.0, None)
    q = mx.random.normal((rows, s.num_heads, s.k_head_dim)).astype(s.dtype)
    state = [q, new_token()]
    mx.eval(kv, store, positions, slots, norm.weight, state)

    def ours(state: list[mx.array]) -> list[mx.array]:
        return list(rope_write(
            NewRows(
                Columns(state[0].reshape(rows, -1), 0), Columns(kv, 0), Columns(kv, width),
                s.num_heads, turn, norm, norm,
            ),
            positions=positions, slot_mapping=slots, keys=store[0], values=store[1],
            token=state[1],
        ))  # fmt: skip

    def rotated(x: mx.array) -> mx.array:
        x = mx.fast.rms_norm(x, *norm)[:, :, None]
        return mx.fast.rope(
            x, turn.dims, traditional=False, base=turn.base, scale=turn.scale, offset=positions
        )[:, :, 0]

    def theirs(state: list[mx.array]) -> list[mx.array]:
        k, v = (a.reshape(rows, s.num_kv_heads, -1) for a in mx.split(kv, 2, axis=1))
        return [rotated(state[0]), kv_write(rotated(k), v, slots, *store, state[1])]

    return "rope_write", state, ours, theirs


def _fused_decode(rows: int) -> tuple:
    """One layer, q, k and v joined; attention's output takes the place of q in the next call."""
    s = QWEN3
    load = measure.Workload(s, rows, 700)
    norm = HeadNorm(mx.random.uniform(0.8, 1.2, (s.k_head_dim,)).astype(s.dtype), 1e-6)
    turn = Rope(s.k_head_dim, False, 1e6, 1.0, None)
    positions, store = load.seq_lens - 1, (load.keys, load.values)
    blocks = mx.take_along_axis(load.block_tables, positions[:, None] // load.block_size, 1)[:, 0]
    slots = blocks * load.block_size + positions % load.block_size
    width = s.num_kv_heads * s.k_head_dim
    kv = mx.random.normal((rows, 2 * width)).astype(s.dtype)
    state = [mx.random.normal((rows, s.num_heads, s.k_head_dim)).astype(s.dtype), new_token()]
    mx.eval(norm.weight, positions, slots, kv, state)

    def new_rows(q: mx.array) -> NewRows:
        columns = Columns(q.reshape(rows, -1), 0), Columns(kv, 0), Columns(kv, width)
        return NewRows(*columns, s.num_heads, turn, norm, norm)

    def attend(q: mx.array | NewRows, token: mx.array) -> list[mx.array]:
        return list(paged_decode(
            q, load.block_tables, load.seq_lens, *store, token,
            block_size=load.block_size, scale=load.scale, plan=load.plan,
        ))  # fmt: skip

    def ours(state: list[mx.array]) -> list[mx.array]:
        return attend(new_rows(state[0]), state[1])

    def apart(state: list[mx.array]) -> list[mx.array]:
        q, token = rope_write(
            new_rows(state[0]), positions=positions, slot_mapping=slots,
            keys=store[0], values=store[1], token=state[1],
        )  # fmt: skip
        return attend(q, token)

    return "fused_decode", state, ours, apart


def _add_rms_norm(rows: int) -> tuple:
    state = [mx.random.normal((rows, 2048)).astype(mx.bfloat16) for _ in range(2)]
    weight = mx.random.uniform(0.8, 1.2, (2048,)).astype(mx.bfloat16)
    mx.eval(state, weight)

    def ours(state: list[mx.array]) -> list[mx.array]:
        return list(add_rms_norm(*state, weight, 1e-6))[::-1]

    def theirs(state: list[mx.array]) -> list[mx.array]:
        added = state[0] + state[1]
        return [mx.fast.rms_norm(added, weight, 1e-6), added]

    return "add_rms_norm", state, ours, theirs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=(*SECTIONS, "few"), default=SECTIONS)
    args = parser.parse_args()
    if backend.is_cpu():
        raise MetalLiteError("kernels need a GPU, and MLX computes on the CPU here")
    print(f"# Kernels: {backend.describe()}", flush=True)
    passed = True
    for section in args.only:
        passed &= globals()[section]() is not False
    return 0 if passed else 1


if __name__ == "__main__":
    run_main(main)
