"""A model's layers divided among ranks: each rank is a stage of a pipeline.

Like mlx-lm's PipelineMixin, for any model with a list of layers: a layer of another stage returns
its input.  The first own layer receives from the previous stage, the last one sends to the next.
Hidden states never go back, so only the last stage has logits, and a stage that has sent may begin
the next step.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import RankGroup
from vllm_metal_lite.errors import ModelLoadError, one_line
from vllm_metal_lite.model.calls import calls_of, wrap_call
from vllm_metal_lite.model.layout import Layout
from vllm_metal_lite.model.packed import body_of
from vllm_metal_lite.model.seam.kv_segments import NATIVE_TYPES


def keep_stage(model: nn.Module, model_type: str, ranks: RankGroup) -> None:
    """Keep this rank's layers, in place; raises ModelLoadError.

    Every stage keeps the embedding and the head.  The weights may be unevaluated: then the other
    layers never stay in memory.
    """
    refusal = f"{model_type} cannot be divided into {ranks.size} stages"
    body = body_of(model)
    if body is None:
        raise ModelLoadError(f"{refusal}: it has no list of layers")
    layers = body.layers
    if len(layers) < ranks.size:
        raise ModelLoadError(f"{refusal}: it has {len(layers)} layers")
    try:
        _check_chain(model, layers)
        for stage in range(ranks.size):  # on all ranks, so that all refuse the model
            body.layers = _of_stage(layers, stage, ranks.size)
            calls_of(model, ())
    except Exception as e:
        raise ModelLoadError(f"{refusal}: {one_line(e)}") from e
    body.layers = _of_stage(layers, ranks.rank, ranks.size)
    own = [layer for layer in body.layers if not isinstance(layer, Absent)]
    if ranks.rank > 0:
        wrap_call(own[0], lambda call, x, *args, **how: call(ranks.receive(like=x), *args, **how))
    if ranks.rank < ranks.size - 1:
        wrap_call(own[-1], lambda call, *args, **how: ranks.send(call(*args, **how)))


def check_kinds(layout: Layout, model_type: str, ranks: RankGroup) -> None:
    """Raise ModelLoadError on every rank if a stage lacks a kind of layer that another one has."""
    kinds = ranks.gather([bool(layout.specs), bool(layout.states)])
    for kind, has in zip(("K and V", "recurrent states"), zip(*kinds, strict=True), strict=True):
        if any(has) and not all(has):
            raise ModelLoadError(
                f"{model_type} cannot be divided into {ranks.size} stages: no layer of stage "
                f"{has.index(False)} keeps {kind}"
            )


class Absent(nn.Module):
    """The placeholder of a layer of another stage.

    It has no weights, but keeps the layer's plain attributes, because models ask layers for their
    kind.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        vars(self).update(vars(layer))

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        for value in (*args, *kwargs.values()):
            _advance(value, x.shape[1])
        return x


def _advance(cache: Any, num_tokens: int) -> None:
    """Count tokens in mlx-lm's own caches: models take masks and positions from the first one."""
    if isinstance(cache, CacheList):
        for member in cache.caches:
            _advance(member, num_tokens)
    elif isinstance(cache, NATIVE_TYPES):
        vars(cache)["offset"] += num_tokens


def _of_stage(layers: list[nn.Module], stage: int, num_stages: int) -> list[nn.Module]:
    """The layers, with placeholders for those of other stages.  The last stage, which also computes
    the head, never gets an extra layer."""
    return [
        layer if i * num_stages // len(layers) == stage else Absent(layer)
        for i, layer in enumerate(layers)
    ]


def _check_chain(model: nn.Module, layers: list[nn.Module]) -> None:
    """Raise ModelLoadError unless each layer takes the result of the one before.  Builds a forward
    of one token, and evaluates nothing."""
    calls = calls_of(model, layers)
    if [id(layer) for layer, *_ in calls] != list(map(id, layers)):
        raise ModelLoadError("its layers do not run once each, in order")
    for i, (_, x, y) in enumerate(calls):
        if i and x is not calls[i - 1][2]:
            raise ModelLoadError(f"layer {i} gets something other than what layer {i - 1} returns")
        if not isinstance(y, mx.array) or (y.shape, y.dtype) != (x.shape, x.dtype):
            raise ModelLoadError(f"layer {i} does not return hidden states like its own")
