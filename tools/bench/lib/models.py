"""Models of the serving benchmarks: random weights at the sizes of real ones, made in memory.

Quantised weights are random words: on a GPU a model of 20 GiB is there within seconds, and no
array is larger than the largest parameter of the model.
"""

import argparse
import io
import json
import math
from collections.abc import Collection
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.bench.lib.shapes import SHAPES, random_config
from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.benchmark import native
from vllm_metal_lite.config import DTYPES
from vllm_metal_lite.model.drafter import attach
from vllm_metal_lite.model.files.find import DEMO_PATH
from vllm_metal_lite.model.loader import LoadedModel, from_model, load
from vllm_metal_lite.model.trained_heads import new_head

# isort: split
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import quantize_model

mx = backend.mx

# Values of `--bits`: affine in groups of 64; "mxfp4", for experts only, as in gpt-oss.
BITS = ("4", "6", "8", "mxfp4")
# Root mean square of the sixteen values of MXFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
_MXFP4_RMS = math.sqrt(68.5 / 8)
# Experts add little compared with attention.  In random models rounding sends a token to another
# expert more often than in trained ones, and the trial at load compares logits.
_OF_EXPERTS = 0.25


def _fill(path: str, w: mx.array, dtype: mx.Dtype) -> mx.array:
    """Random values for the unquantised parameter at `path`."""
    owner, _, name = path.rpartition(".")
    match name:
        case "A_log":  # Mamba's start: decays exp(-a dt) for a from 1 to 16 ...
            return mx.log(mx.random.uniform(1, 16, w.shape))
        case "dt_bias":  # ... and dt from 0.001 to 0.1, which is the softplus of its bias
            dt = mx.exp(mx.random.uniform(math.log(1e-3), math.log(0.1), w.shape))
            return (dt + mx.log(-mx.expm1(-dt))).astype(dtype)
        case "bias" | "e_score_correction_bias":
            return mx.zeros(w.shape, dtype)
    if w.ndim < 2:
        return mx.ones(w.shape, dtype)
    inputs = math.prod(w.shape[1:]) if "conv" in path else w.shape[-1]
    return mx.random.normal(w.shape, dtype, scale=_spread(owner, w, inputs))


def _spread(owner: str, w: mx.array, inputs: int) -> float:
    """The standard deviation of a matrix, or of each expert's matrix, that keeps results as large
    as inputs."""
    return inputs**-0.5 * (_OF_EXPERTS if w.ndim == 3 and owner.endswith(".down_proj") else 1)


def _fill_quantised(path: str, module: nn.Module, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Random words for a quantised module, and scales that give its values `_spread`."""
    words, shape = module.weight, module.scales.shape
    spread = _spread(path, words, shape[-1] * module.group_size)
    halves = mx.random.randint(0, 1 << 16, (*words.shape[:-1], 2 * words.shape[-1]), mx.uint16)
    found = {"weight": halves.view(mx.uint32)}
    if module.mode == "mxfp4":  # scales are powers of two: the exponent, plus 127
        exponent = 127 + round(math.log2(spread / _MXFP4_RMS))
        return {**found, "scales": mx.full(shape, exponent, mx.uint8)}
    most = (1 << module.bits) - 1
    scale = spread / math.sqrt(most * (most + 2) / 12)
    scales = scale * mx.random.uniform(0.9, 1.1, shape)
    return {**found, "scales": scales.astype(dtype), "biases": (-most / 2 * scales).astype(dtype)}


def fill(model: nn.Module, dtype: mx.Dtype, but: Collection[str] = ()) -> None:
    """Give a model random parameters, all except those at the paths in `but`."""
    made: list[tuple[str, mx.array]] = []
    for path, w in tree_flatten(model.parameters()):
        if path not in but:
            made.append((path, _fill(path, w, dtype)))
            mx.eval(made[-1][1])  # one at a time: random numbers take several times the memory
    model.update(tree_unflatten(made))


def random_weights(
    name: str, dtype: mx.Dtype = mx.float32, bits: str | int | None = None, **changes: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model of `random_config` with random weights, and its config.

    changes: other values of the config.  bits: a key of BITS; mlx-lm's conversion decides which
    layers are quantised.

    Matrices have variance 1 / inputs and norms are 1, so that context and order move the logits by
    about their own spread.  Recurrent layers remember one to a thousand tokens, and their states
    stay finite.
    """
    config = {**random_config(name), **changes}
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    if config["model_type"] == "gemma3_text":  # this ties the embedding to the head
        model.sanitize({})
    with redirect_stdout(io.StringIO()):  # mlx-lm prints
        if bits == "mxfp4":
            experts = lambda _, m: isinstance(m, SwitchLinear)  # noqa: E731
            _, config = quantize_model(model, config, 32, 4, "mxfp4", quant_predicate=experts)
        elif bits:
            _, config = quantize_model(model, config, 64, int(bits))
    fill_all(model, dtype)
    return model, config


def fill_all(model: nn.Module, dtype: mx.Dtype) -> None:
    """Give a model random weights, quantised ones too, see `random_weights`."""
    model.eval()  # mlx-lm's recurrent layers have no kernels in training
    mx.random.seed(0)
    quantised = {path: m for path, m in model.named_modules() if "scales" in m}
    of_words = {f"{path}.{name}" for path in quantised for name in ("weight", "scales", "biases")}
    made: list[tuple[str, mx.array]] = []
    for path, m in quantised.items():
        for name_, w in _fill_quantised(path, m, dtype).items():
            made.append((f"{path}.{name_}", w))
            mx.eval(w)
    fill(model, dtype, of_words)
    model.update(tree_unflatten(made))
    mx.clear_cache()


def with_random_head(model: LoadedModel, bits: str | int | None = None) -> LoadedModel:
    """The model with a trained head of random weights."""
    head = new_head(model.packed.model, model.config)
    if head is None:
        raise MetalLiteError(f"{model.name}: no trained heads are known for its family")
    if bits:
        nn.quantize(head, 64, int(bits))
    fill_all(head, model.dtype)
    return attach(model, from_model(head, None, model.config, f"the head of {model.name}"))


def random_model(
    name: str, dtype: mx.Dtype = mx.float32, bits: str | int | None = None
) -> LoadedModel:
    """`random_weights`, ready for packed steps."""
    model, config = random_weights(name, dtype, bits)
    suffix = "" if bits is None else f", {bits} bit" if str(bits).isdigit() else f", {bits}"
    return from_model(model, None, config, name=f"{name}{suffix}")


def get_model(name: str, dtype: str = "auto", bits: str | None = None) -> LoadedModel:
    """Random weights for what `random_config` knows; anything else is loaded by name."""
    is_shape = name in SHAPES or name.replace("x", "", 1).isdigit()
    if not is_shape:
        if bits:
            raise MetalLiteError(f"--bits {bits} is for random weights, and {name!r} is a model")
        return load(name, dtype)
    if dtype == "auto":
        dtype = "float32" if backend.is_cpu() else "bfloat16"
    return random_model(name, getattr(mx, dtype), bits)


def add_model(parser: argparse.ArgumentParser, default: str = "demo") -> None:
    """The options of a tool that takes a model, for `model_of`."""
    parser.add_argument("--model", default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--bits", choices=BITS, help="of random weights")


def model_of(args: argparse.Namespace) -> LoadedModel:
    """The model that was asked for, with a copy for mlx-lm; prints a heading."""
    model = get_model(args.model, args.dtype, args.bits)
    native(model)
    print_model(model)
    return model


def print_model(model: LoadedModel) -> None:
    size = f"{model.num_parameters / 1e6:,.1f} M parameters, {model.weight_bytes / 2**30:.2f} GiB"
    dtype = str(model.dtype).rsplit(".", 1)[-1]
    print(f"## {backend.describe()}\n\n{model.name}, {dtype}: {size}\n", flush=True)


def write_model(shape: str, path: Path, bits: str | None = None) -> Path:
    """A folder for servers that load by name: a key of SHAPES or HIDDENxLAYERS, with a tokenizer
    that has text for every token id; or the demo model's folder."""
    if shape == "demo":
        if bits:
            raise MetalLiteError(f"--bits {bits} is for random weights, not for the demo model")
        return DEMO_PATH
    dtype = mx.float32 if backend.is_cpu() else mx.bfloat16
    model, config = random_weights(shape, dtype, bits)
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((DEMO_PATH / "tokenizer.json").read_text())
    vocabulary: dict[str, Any] = tokenizer["model"]["vocab"]
    demo = list(vocabulary)
    for i in range(len(vocabulary), config["vocab_size"]):
        vocabulary[f"{demo[i % len(demo)]}{i}"] = i  # made by no merge, so no prompt holds it
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text((DEMO_PATH / "tokenizer_config.json").read_text())
    return path
