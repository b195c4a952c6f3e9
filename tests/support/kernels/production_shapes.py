"""The shapes of real models, and what each kernel launches there, for what only needs the texts."""

from collections.abc import Callable
from functools import partial

from metal.host.texts import KernelText, recorded
from tests.support.kernels import zero_launches as zero
from tests.support.kernels.zero_launches import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.popular_shapes import YARN_FACTOR
from vllm_metal_lite.kernels.expert_topk import Routing
from vllm_metal_lite.specs import Quantisation

# Groups of 1, 2, 4, 7 and 8; every head size that is common.
QWEN3 = Heads("group 2 of 128", 16, 8, 128)
LLAMA = Heads("group 4 of 64", 32, 8, 64)
QWEN2_7B = Heads("group 7 of 128", 28, 4, 128)
PHI = Heads("group 1 of 80", 32, 32, 80)
GEMMA3 = Heads("group 2 of 256, window", 8, 4, 256, window=1024)
GEMMA2 = Heads("group 2 of 256, softcap", 8, 4, 256, softcap=50.0)
GPT_OSS = Heads("group 8 of 64, factor", 64, 8, 64, factor=YARN_FACTOR)
ALL_HEADS = (
    QWEN3, LLAMA, QWEN2_7B, PHI, GEMMA3, GEMMA2, GPT_OSS,
    Heads("group 1 of 128", 16, 16, 128), Heads("group 4 of 128", 32, 8, 128),
    Heads("group 7 of 64", 14, 2, 64), Heads("group 8 of 128", 64, 8, 128),
)  # fmt: skip
# Heads of k, of v; their sizes; the form of gates ("vector": a gate per column).
RECURRENCES = {
    "Qwen3-Next": (16, 32, 128, 128, "delta"),
    "Kimi Linear": (32, 32, 128, 128, "vector"),
    "heads of 96 and 192": (30, 30, 96, 192, "delta"),
    "heads of 256": (8, 16, 256, 256, "delta"),
    "Mamba 2": (1, 80, 128, 64, "ssm"),
    "Nemotron-H": (8, 128, 128, 64, "ssm"),
    "Falcon-H1": (1, 24, 256, 128, "ssm"),
}
# Channels, kernel size, bias, SiLU.
CONV = {
    "Qwen3-Next": (8192, 4, False, True),
    "Mamba 2": (5376, 4, True, True),
    "LFM2": (2048, 3, False, False),
}
# Size and number of groups; whether the gate comes first.
NORMS = {"Qwen3-Next": (128, 32, False), "Nemotron-H": (1024, 8, True), "Mamba 2": (5120, 1, True)}


def _recurrent_cases() -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {}
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        name = str(dtype).removeprefix("mlx.core.")
        for model, shape in CONV.items():
            cases[f"causal_conv {model} {name}"] = partial(zero.conv, *shape, dtype)
        for model, shape in NORMS.items():
            cases[f"gated_rms_norm {model} {name}"] = partial(zero.norm, *shape, dtype)
        for form, rows in (("rows", 1), ("tiles", 512)):
            for model, (*shape, gates) in RECURRENCES.items():
                key = f"gated_delta {model} {name} {form}"
                cases[key] = partial(zero.recurrence, *shape, gates, dtype, rows)
                if gates != "vector":
                    fused = f"fused {gates}"
                    cases[f"{key} fused"] = partial(zero.recurrence, *shape, fused, dtype, rows)
    return cases


def _cases() -> dict[str, Callable[[], None]]:
    half, bf16, f32 = mx.float16, mx.bfloat16, mx.float32
    cases: dict[str, Callable[[], None]] = {}

    def add(launch: Callable[..., None], name: str, *args: object, **how: object) -> None:
        words = [str(w).removeprefix("mlx.core.") for w in args if not isinstance(w, Heads)]
        words += [k if v is True else f"{k} {v}" for k, v in how.items()]
        cases[" ".join([name, *words])] = partial(launch, *args, **how)

    for of in ALL_HEADS:
        add(zero.decode, f"paged_decode {of.name}", of, bf16)
        add(zero.prefill, f"varlen_prefill {of.name}", of, bf16)
    for of in (QWEN3, LLAMA, PHI):
        for dtype in (half, f32):
            add(zero.decode, f"paged_decode {of.name}", of, dtype)
    for of in (QWEN3, QWEN2_7B, GEMMA3, GPT_OSS):
        add(zero.decode, f"paged_decode {of.name}", of, bf16, fused=True)
        for bits in (8, 4):
            add(zero.decode, f"paged_decode {of.name}", of, bf16, bits=bits)
            add(zero.decode, f"paged_decode {of.name}", of, bf16, bits=bits, fused=True)
            add(zero.prefill, f"varlen_prefill {of.name}", of, bf16, bits=bits)
            add(zero.prefix, f"shared_prefix {of.name}", of, bf16, bits=bits, fused=True)
            add(zero.rope, f"rope_write {of.name}", of, bf16, bits=bits)
    for of in (QWEN3, LLAMA, PHI, GEMMA2, GPT_OSS):
        add(zero.decode, f"paged_decode {of.name}", of, bf16, fused=True, prefix=True, splits=4)
        add(zero.prefix, f"shared_prefix {of.name}", of, bf16, fused=True)
        add(zero.prefix, f"shared_prefix {of.name}", of, bf16)
    add(zero.decode, f"paged_decode {QWEN3.name}", QWEN3, f32, fused=True, simdgroups=4)
    add(zero.decode, f"paged_decode {QWEN3.name}", QWEN3, half, bits=4)
    add(zero.decode, f"paged_decode {QWEN3.name}", QWEN3, f32, bits=8)
    for dtype in (half, f32):
        add(zero.prefill, f"varlen_prefill {QWEN3.name}", QWEN3, dtype)
        add(zero.prefix, f"shared_prefix {QWEN3.name}", QWEN3, dtype, fused=True)
    add(zero.prefill, f"varlen_prefill {GEMMA3.name}", GEMMA3, f32)
    for dtype in (bf16, f32):
        add(zero.write, f"kv_write {QWEN3.name}", QWEN3, dtype)
        add(zero.gather, f"kv_gather {QWEN3.name}", QWEN3, dtype)
        add(zero.rows_of, f"gather_rows {QWEN3.name}", QWEN3, dtype)
        add(zero.rope, f"rope_write {QWEN3.name}", QWEN3, dtype)
        add(zero.add_norm, "add_rms_norm", 1024, dtype)
        add(zero.merge, f"merge_partitions {QWEN3.name}", QWEN3, dtype)
        for bits in (8, 4):
            add(zero.write, f"kv_write_quantised {QWEN3.name}", QWEN3, dtype, bits=bits)
            add(zero.gather, f"kv_gather_quantised {QWEN3.name}", QWEN3, dtype, bits=bits)
    for of in (LLAMA, PHI, GEMMA3, GPT_OSS):
        add(zero.rope, f"rope_write {of.name}", of, bf16, rows=512)
    add(zero.write, f"kv_write_quantised {PHI.name}", PHI, half, bits=4)
    for dtype in (bf16, half, f32):
        add(zero.latents, "latent_attention GLM 4.7 Flash", 20, 512, 64, dtype)
        add(zero.latent_rows, "latent_write GLM 4.7 Flash", 20, 512, 64, dtype)
    add(zero.latents, "latent_attention Kimi K2", 64, 512, 64, bf16, splits=4)
    add(zero.latents, "latent_attention MiniCPM 3", 40, 256, 32, bf16)
    add(zero.latent_rows, "latent_write MiniCPM 3", 40, 256, 32, bf16)
    for bits in (8, 4):
        add(zero.latent_rows, "latent_write GLM 4.7 Flash", 20, 512, 64, bf16, bits=bits)
        add(zero.latents, "latent_attention GLM 4.7 Flash", 20, 512, 64, bf16, bits=bits)
    for dim in (2560, 5120, 4099):
        add(zero.add_norm, "add_rms_norm", dim, bf16)
        add(zero.add_norm, "add_rms_norm", dim, bf16, post=True)
    for rows in (1, 8, 20, 64):
        add(zero.product, "skinny_gemm", rows, 1024, 4096, bf16)
    add(zero.product, "skinny_gemm", 1, 2560, 20480, bf16, "norm swiglu")
    add(zero.product, "skinny_gemm", 16, 1024, 4096, half, "norm")
    add(zero.product, "skinny_gemm", 64, 2048, 16384, half, "swiglu")
    add(zero.product, "skinny_gemm", 64, 3072, 1024, bf16, "residual")
    for bits in (4, 6, 8):
        for rows in (1, 8, 64):
            how = Quantisation(bits, 64)
            add(
                zero.product,
                "skinny_gemm",
                rows,
                2560,
                19456,
                bf16,
                "norm swiglu",
                quantisation=how,
            )
        add(zero.product, "skinny_gemm", 8, 1024, 1024, half, "residual", quantisation=how)
    for mode, bits, size in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)):
        how = Quantisation(bits, size, mode)
        add(zero.product, "skinny_gemm", 8, 2880, 5120, bf16, "norm bias", quantisation=how)
    how = Quantisation(4, 32)
    add(zero.product, "skinny_gemm", 16, 2560, 20480, bf16, "geglu", quantisation=how)
    for rows in (1, 16, 64):
        add(zero.experts, "expert_gemm Qwen3-30B-A3B", rows, 8, 128, 2048, 768, bf16)
        how = Quantisation(4, 64)
        add(
            zero.experts,
            "expert_gemm Qwen3-30B-A3B",
            rows,
            8,
            128,
            2048,
            768,
            bf16,
            quantisation=how,
        )
        how = Quantisation(4, 32, "mxfp4")
        rest = {"quantisation": how, "oai": True}
        add(zero.experts, "expert_gemm gpt-oss-20b", rows, 4, 32, 2880, 2880, bf16, **rest)
    for bits in (6, 8):
        how = Quantisation(bits, 64)
        add(
            zero.experts, "expert_gemm GLM-4.7-Flash", 64, 4, 64, 2048, 1536, half, quantisation=how
        )
    options = {"quantisation": Quantisation(4, 64), "gated": False}
    add(zero.experts, "expert_gemm Nemotron-3-Nano", 16, 6, 128, 2688, 1856, bf16, **options)
    renormalized = Routing("softmax", True, "renormalized")
    add(zero.router, "expert_topk Qwen3-30B-A3B", 16, 8, 128, renormalized, bf16)
    add(zero.router, "expert_topk Qwen3.5-35B-A3B", 16, 8, 256, renormalized, bf16)
    sigmoid = Routing("sigmoid", False, "renormalized", 1e-20, 1.8)
    add(zero.router, "expert_topk GLM-4.7-Flash", 16, 4, 64, sigmoid, half)
    add(zero.router, "expert_topk gpt-oss-20b", 1, 4, 32, Routing("logits", True, "softmax"), bf16)
    return cases


CASES = _cases() | _recurrent_cases()


def texts_of(case: Callable[[], object]) -> list[KernelText]:
    """The texts that a case launches."""
    with recorded() as recording:
        case()
        return recording.texts()


def all_texts() -> list[KernelText]:
    """The distinct texts of all cases."""
    return list(dict.fromkeys(text for case in CASES.values() for text in texts_of(case)))
