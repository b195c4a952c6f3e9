"""Counts launches, barriers and command buffers of whole steps on a replay of MLX's Metal encoder.

    METAL_LITE_DEVICE=cpu python -m tools.count.commits
    METAL_LITE_DEVICE=cpu python -m tools.count.commits --bits 4 --store-gib 0.5

Nothing is computed and nothing is allocated: a 28-layer model of Qwen3-0.6B's shape is recorded in
seconds.  MLX's own primitives are approximated (tests/support/metal_replay.py).  "held": results
that exist at once if the host is 10 command buffers ahead.
"""

import argparse

import mlx.nn as nn
from mlx_lm.models import qwen3

from tests.support.metal_encoder import Limits
from tests.support.metal_replay import Replay
from tests.support.recorded_steps import kernel_engine, record
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.model.layout import inspect
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.model.usage import Usage
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.specs import AttentionShape

QWEN3_06B = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6,
    "tie_word_embeddings": True,
}  # fmt: skip
BLOCK = 16


def model_of(bits: int | None) -> LoadedModel:
    """A model whose weights are never computed."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(QWEN3_06B))
    model.set_dtype(mx.bfloat16)
    if bits:
        nn.quantize(model, 64, bits)
    layout = inspect(model, "qwen3")
    shapes = [AttentionShape(16, s.num_kv_heads, s.k_head_dim, s.v_head_dim, s.dtype)
              for s in layout.specs]  # fmt: skip
    return LoadedModel(
        "Qwen3-0.6B's shape", "qwen3", PackedModel(model, layout), None, 151936, 40960, (), 0, 0,
        mx.bfloat16, {}, shapes, list(layout.specs), [], Usage(),
    )  # fmt: skip


def drive(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for i in range(8):
        engine.add_request(str(i), [i] * 200, params)
    for _ in range(4):
        engine.step()
    engine.add_request("late", [9] * 1800, params)
    while engine.has_unfinished_requests():
        engine.step()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, help="of the weights; default: bfloat16")
    parser.add_argument("--store-gib", type=float, default=4)
    parser.add_argument("--mb", type=int, nargs="*", default=[40, 1024, 1 << 20])
    parser.add_argument("--ops", type=int, default=40)
    args = parser.parse_args(argv)
    evaluate, mx.eval = mx.eval, lambda *arrays: None  # nothing of the model is computed
    try:
        model = model_of(args.bits)
        num_blocks = int(args.store_gib * 2**30) // (BLOCK * model.kv_bytes_per_token)
        config = EngineConfig(block_size=BLOCK, num_blocks=num_blocks, max_num_seqs=16)
        engine = kernel_engine(model, lambda m: LLMEngine(m, config))
    finally:
        mx.eval = evaluate
    graph = record(engine, drive, weights=True)
    for mb in args.mb:
        print(f"\nMLX_MAX_MB_PER_BUFFER={mb} MLX_MAX_OPS_PER_BUFFER={args.ops}")
        print(f"{'step':14} {'launches':>8} {'barriers':>8} {'commits':>8} {'held MiB':>9}")
        seen = set()
        for step in Replay(graph, Limits(args.ops, mb)).run().steps:
            if step.label not in seen:
                seen.add(step.label)
                print(f"{step.label:14} {step.launches:8} {step.barriers:8} {step.commits:8} "
                      f"{step.held / 2**20:9.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
