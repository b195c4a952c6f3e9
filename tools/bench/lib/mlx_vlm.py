"""mlx-vlm as an engine of the benchmark of pictures: one request after another.

The packages of mlx-vlm import many others.  Stubs replace them, so only its models are imported.
"""

import importlib.util
import sys
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tools.bench.lib.pictures import Pictures
from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.benchmark import MLX_CACHE_LIMIT, Load, MlxLmSingle, Tokens
from vllm_metal_lite.images.family import Prepared

# isort: split
import mlx.nn as nn
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import make_prompt_cache

mx = backend.mx


def empty_model(config: dict[str, Any], folder: Path | None = None) -> nn.Module:
    """mlx-vlm's model, without weights.  folder: the package's, if Python does not find it.

    Raises MetalLiteError, with the reason, if mlx-vlm cannot be imported.
    """
    if folder is None:
        spec = importlib.util.find_spec("mlx_vlm")
        if spec is None or spec.origin is None:
            raise MetalLiteError("mlx_vlm is not installed, and no folder was given")
        folder = Path(spec.origin).parent
    if not (folder / "models").is_dir():
        raise MetalLiteError(f"{folder} is not the package mlx_vlm: it has no folder models")
    for name, path in (("mlx_vlm", folder), ("mlx_vlm.models", folder / "models")):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(path)]
    kind = config["model_type"]
    try:
        module = import_module(f"mlx_vlm.models.{kind}.{kind}")
        settings = import_module(f"mlx_vlm.models.{kind}.config").ModelConfig.from_dict(config)
    except ImportError as e:
        raise MetalLiteError(f"mlx_vlm cannot be imported: {e}") from e
    model: nn.Module = module.Model(settings)
    return model


class MlxVlm(MlxLmSingle):
    """mlx-vlm at its fastest: it computes a whole prompt in one pass, and the logits of one row."""

    name, kind = "mlx-vlm, one by one", "mlx-vlm"

    def __init__(self, model: nn.Module, pictures: Pictures) -> None:
        self.model, self.pictures = model, pictures

    def begin(self, load: Load) -> None:
        mx.set_cache_limit(MLX_CACHE_LIMIT)
        found = self.pictures.draw(load)
        self._pixels = [None if p is None else self._pixels_of(p) for p in found]
        self._queue: deque[tuple[int, list[int], int]] = deque()
        self._steps = self._requests()

    def _pixels_of(self, picture: Prepared) -> mx.array:
        """(P, values), as its processor gives them: in two equal frames, normalised."""
        patches = picture.patches.astype(np.float32).reshape(len(picture.patches), 3, 1, -1)
        frames = np.repeat(patches / 127.5 - 1, 2, axis=2).reshape(len(patches), -1)
        pixels = mx.array(frames)
        mx.eval(pixels)
        return pixels

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        self._queue.extend(zip(count(first), prompts, max_tokens, strict=False))

    def _requests(self) -> Any:
        while True:
            i, prompt, max_tokens = self._queue.popleft()
            with wired_limit(self.model):
                for token in self._answer(prompt, self._pixels[i], max_tokens):
                    yield [(i, token)]

    def step(self) -> Tokens:
        tokens: Tokens = next(self._steps)
        return tokens

    def _answer(self, prompt: list[int], pixels: mx.array | None, limit: int) -> Iterator[int]:
        model: Any = self.model
        cache, ids = make_prompt_cache(model.language_model), mx.array(prompt)[None]
        grid = None if pixels is None else mx.array([[1, *self.pictures.grid]])
        embedded = model.get_input_embeddings(ids, pixels, image_grid_thw=grid).to_dict()
        how = {key: value for key, value in embedded.items() if value is not None}
        out = model.language_model(inputs=ids, cache=cache, logits_to_keep=1, **how)
        y = out.logits[:, -1].argmax(-1)
        mx.async_eval(y)
        for left in range(limit, 0, -1):  # the next token is computed while this one is read
            following = y
            if left > 1:
                following = model.language_model(y[:, None], cache=cache).logits[:, -1].argmax(-1)
                mx.async_eval(following)
            yield int(y.item())
            y = following
