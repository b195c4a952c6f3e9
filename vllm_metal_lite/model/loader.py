"""Loads a model by name and prepares the model for packed steps."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import activations
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import ConfigError, Option, show
from vllm_metal_lite.kernels.weight_formats import shape_of
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.model.adapters import adapt
from vllm_metal_lite.model.context import context_length
from vllm_metal_lite.model.files.checkpoint import read_model, refuse_wrong, sampling_defaults
from vllm_metal_lite.model.files.find import find
from vllm_metal_lite.model.files.folder import loading
from vllm_metal_lite.model.files.pooling_config import PoolingConfig, pooling_config
from vllm_metal_lite.model.layer_weights import mixtures, product_weights
from vllm_metal_lite.model.layout import find_layout
from vllm_metal_lite.model.packed import PackedModel, body_of
from vllm_metal_lite.model.seam.hooks import namespaces
from vllm_metal_lite.model.shards import shard
from vllm_metal_lite.model.stages import check_kinds, keep_stage
from vllm_metal_lite.model.trial import fit, foresee
from vllm_metal_lite.model.usage import Usage
from vllm_metal_lite.specs import AttentionShape, GatedNormShape, KernelUse, RecurrenceShape

logger = logging.getLogger(__name__)


@dataclass
class LoadedModel:
    """A model, its tokenizer and the facts that the engine needs.

    usage: the shapes that the kernels must serve.
    max_position: the longest context in tokens.  context_guess: the source of this number if it is
    a guess, otherwise None.
    sampling_defaults: SamplingParams fields for requests that do not set them.
    kv_bits: bits per stored K or V value; None: not quantised.
    ranks: the ranks that share the model; this is one shard.  ALONE for a whole model.
    pooling: how the model makes embeddings and scores.  no_answers: why the model gives no text.
    config: config.json as mlx-lm completes it, with the code that comes with the model.
    folder: the model's files; None for a model that was made in memory.
    drafter: the model that drafts this model's tokens, see model/drafter.py.
    """

    name: str
    model_type: str
    packed: PackedModel
    usage: Usage
    tokenizer: TokenizerWrapper | None
    max_position: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    weight_bytes: int
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    context_guess: str | None = None
    ranks: RankGroup = ALONE
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    kv_bits: int | None = None
    no_answers: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    drafter: "LoadedModel | None" = None

    @property
    def kv_specs(self) -> list[LayerSpec]:
        """The layers of the store: the model's, then the drafter's."""
        specs = [*self.packed.layout.specs, *(self.drafter.kv_specs if self.drafter else ())]
        return [replace(spec, bits=self.kv_bits) for spec in specs]

    @property
    def attention_shapes(self) -> list[AttentionShape]:
        shapes = [*self.usage.shapes, *(self.drafter.attention_shapes if self.drafter else ())]
        return list(dict.fromkeys(replace(shape, kv_bits=self.kv_bits) for shape in shapes))

    @property
    def vocab_size(self) -> int:
        return self.packed.layout.vocab_size

    @property
    def dtype(self) -> mx.Dtype:
        return self.packed.layout.dtype

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(s.bytes_per_token for s in self.kv_specs)

    def with_kv_bits(self, kv_bits: int | None) -> "LoadedModel":
        """The same model with K and V stored in 8 or 4 bits per value; None: not quantised.

        Raises ConfigError, with the reason, if a layer's rows cannot be quantised.
        """
        if kv_bits is not None and (problem := _not_quantisable(self.kv_specs)):
            raise ConfigError(
                Option("kv_bits"), f"={kv_bits} is not possible for {self.name}: {problem}"
            )
        return replace(self, kv_bits=kv_bits)

    @property
    def no_embeddings(self) -> str | None:
        """Why the model gives no embeddings, or None if it does."""
        if body_of(self.packed.model) is None or self.ranks.stages:
            return "its hidden states cannot be read"
        return self.pooling.problem

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state per request, independent of the length."""
        return sum(state.nbytes for state in self.packed.layout.states)

    def kernel_use(self, block_size: int) -> KernelUse:
        """The shapes that the kernels must serve, over a store with blocks of block_size tokens."""
        model, usage = self.packed.model, self.usage
        # mlx-lm uses this function for the gated norm after the gated delta rule.
        gated = namespaces(model, activations.precise_swiglu)
        norms = [
            GatedNormShape(shape.v_dim, shape.v_heads, shape.dtype)
            for shape in usage.recurrences
            if gated and isinstance(shape, RecurrenceShape) and shape.delta
        ]
        return KernelUse(
            shapes=tuple(self.attention_shapes),
            block_size=block_size,
            ropes=usage.ropes,
            hidden_sizes=tuple(usage.hidden_sizes),
            weights=tuple(dict.fromkeys(map(shape_of, product_weights(model)))),
            recurrences=(*usage.recurrences, *norms),
            experts=tuple(dict.fromkeys(experts.shape for _, experts in mixtures(model))),
            spans=self.packed.spans,
        )


def load(
    name: str, dtype: str = "auto", trust_remote_code: bool = False, ranks: RankGroup = ALONE
) -> LoadedModel:
    """Load a model by name; every failure is a ModelLoadError of one line.

    trust_remote_code: whether Python code from the model's folder may run, if the tokenizer or the
    architecture needs it.  dtype: "auto" means the type of the weights on a GPU.  On a CPU it means
    float32, with quantised weights expanded, because MLX's CPU backend is fast only in float32.
    ranks: the ranks that share the model.  This one loads its shard or stage; all must load at
    once.
    """
    folder, name = find(name), str(name)
    logger.info("reading the model's files", extra={"transient": True})
    model, tokenizer, config, no_answers = read_model(folder, name, dtype, trust_remote_code)
    with loading(name, "this model"):
        if ranks.size > 1:
            divide = keep_stage if ranks.stages else shard
            divide(model, str(config.get("model_type")), ranks)
        choose = partial(fit, files=_identity(folder, dtype) if ranks.size == 1 else "")
        loaded = from_model(model, tokenizer, config, name=name, ranks=ranks, choose=choose)
        return replace(
            loaded,
            sampling_defaults=sampling_defaults(folder),
            no_answers=no_answers,
            folder=folder,
            pooling=pooling_config(folder, name, tokenizer.get_vocab()),
            config={**config, "code": [file.read_bytes() for file in sorted(folder.glob("*.py"))]},
        )


def preview(
    folder: Path, name: str, dtype: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """The model of a folder, without its weights; raises as `load` does.

    Only the headers of the weight files are read: names, shapes and dtypes.  The weights are zeros
    that take no memory.  `foresee` chooses the mode.
    """
    model, tokenizer, config, _ = read_model(folder, name, dtype, trust_remote_code)
    with loading(name, "this model"):
        model.update(
            tree_map(lambda w: mx.broadcast_to(mx.zeros((), w.dtype), w.shape), model.parameters())
        )
        return from_model(model, tokenizer, config, name=name, choose=foresee)


def from_model(
    model: nn.Module,
    tokenizer: TokenizerWrapper | None,
    config: dict[str, Any],
    name: str,
    choose: Callable[..., tuple[PackedModel, Usage]] = fit,
    ranks: RankGroup = ALONE,
) -> LoadedModel:
    """Wrap an mlx-lm model that is in memory; raises ModelLoadError if packed steps cannot run it.

    choose: `fit` or `foresee`.  ranks: the ranks that share the model, which is this rank's shard.
    """
    model_type = str(config.get("model_type"))
    refuse_wrong(name, model_type)
    num_parameters = get_total_parameters(model)  # adapters may add copies
    adapt(model)
    layout = find_layout(model, model_type)
    if ranks.stages:
        check_kinds(layout, model_type, ranks)
    max_position, context_guess = context_length(model, config)
    packed, usage = choose(model, layout, model_type, ranks)
    ends = _end_token_ids(name, tokenizer, layout.vocab_size) if tokenizer is not None else ()
    return LoadedModel(
        name=name,
        model_type=model_type,
        packed=packed,
        usage=usage,
        tokenizer=tokenizer,
        max_position=max_position,
        eos_token_ids=ends,
        num_parameters=num_parameters,
        weight_bytes=sum(w.nbytes for w in backend.leaves(model.parameters())),
        context_guess=context_guess,
        ranks=ranks,
        config=config,
    )


def _identity(folder: Path, dtype: str) -> str:
    """A key of these files and of how they are read.  It changes when a file changes."""
    files = [f for f in sorted(folder.iterdir()) if f.suffix in (".json", ".py", ".safetensors")]
    stats = [(file.name, stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]
    parts = folder.resolve(), dtype, version("mlx-lm"), stats
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _not_quantisable(specs: list[LayerSpec]) -> str | None:
    """Why a layer's rows cannot be quantised, or None if all layers can."""
    for layer, spec in enumerate(specs):
        if not mx.issubdtype(spec.dtype, mx.floating):
            return f"layer {layer} keeps {spec.dtype}"
        for dim in (spec.k_head_dim, spec.v_head_dim):
            if dim % 8:
                return f"layer {layer} keeps heads of {dim} values, which is not a multiple of 8"
    return None


def _end_token_ids(name: str, tokenizer: TokenizerWrapper, vocab_size: int) -> tuple[int, ...]:
    """The token ids that end an answer; ids outside the vocabulary are ignored, as in mlx-lm."""
    ids = tokenizer.eos_token_ids
    known = tuple(sorted(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size))
    if unknown := [i for i in ids if i not in known]:
        logger.warning(
            f"{name}: eos_token_id {', '.join(map(show, unknown))} is outside the vocabulary of "
            f"{vocab_size}: ignored"
        )
    return known
