"""Puts pictures into the forward of an unmodified mlx-lm model.

Three changes, while the forward of a step with rows of pictures is built:
- the result of `embed_tokens` gets the features of pictures in their rows;
- `mx.fast.rope` rotates by three positions; each frequency takes one of them (M-RoPE);
- the first layers' results get further features (DeepStack, in Qwen3-VL).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.attention.base import DeviceBatch, StepPictures
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.calls import observing
from vllm_metal_lite.model.seam.hooks import Hook


@contextmanager
def with_features(body: nn.Module, pictures: StepPictures) -> Iterator[None]:
    """Held while the forward is built.  body: the module with `embed_tokens` and `layers`."""
    rows = pictures.rows[:, None]
    is_picture, index = rows[..., None] >= 0, mx.maximum(rows, 0)

    def embed(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        h = call(*args, **kwargs)
        return mx.where(is_picture, pictures.features[index].astype(h.dtype), h)

    def add(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        h = call(*args, **kwargs)
        features = next(deep)[index].astype(h.dtype)
        return h + mx.where(is_picture, features, mx.zeros_like(features))

    deep = iter(pictures.deep)
    with observing([body.embed_tokens], embed), observing(body.layers[: len(pictures.deep)], add):
        yield


def rotating_by_axes(step: DeviceBatch, axis_of_frequency: np.ndarray) -> list[Hook]:
    """The hook of a step whose rows have three positions.

    axis_of_frequency: (F,) int32, the axis that rotates each frequency of a head.
    """
    pictures = step.pictures
    if pictures is None or pictures.axes is None:
        return []
    axes, chosen = pictures.axes, dict[tuple[int, int, bool], list[mx.array]]()

    def by_axis(width: int, dims: int, traditional: bool) -> list[mx.array]:
        """(width,) bool for time and for row: the dimensions that each of them rotates."""
        sizes = width, dims, traditional
        if sizes not in chosen:
            axis = np.zeros(width, np.int32)  # the dimensions behind `dims` are not rotated
            axis[:dims] = (np.repeat if traditional else np.tile)(axis_of_frequency, 2)
            chosen[sizes] = [mx.array(axis == i) for i in range(2)]
        return chosen[sizes]

    def rope(original: Callable[..., mx.array], x: mx.array, dims: int, **how: Any) -> mx.array:
        if how.get("offset") is not step.positions:
            return original(x, dims, **how)
        time, row, column = (original(x, dims, **{**how, "offset": at}) for at in axes)
        by_time, by_row = by_axis(x.shape[-1], dims, how["traditional"])
        return mx.where(by_time, time, mx.where(by_row, row, column))

    return [(mx.fast, "rope", rope)]
