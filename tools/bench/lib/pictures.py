"""Random pictures, a model that sees them, and the engine of the benchmark of pictures."""

from typing import Any
from unittest.mock import patch

import numpy as np

from tools.bench.lib.loads import WaveLoad
from tools.bench.lib.models import fill
from vllm_metal_lite import EngineConfig, LLMEngine, backend
from vllm_metal_lite.benchmark import Load, ThisEngine
from vllm_metal_lite.images.eyes import Eyes, rotary_sections
from vllm_metal_lite.images.families import find_family
from vllm_metal_lite.images.family import Family, Prepared
from vllm_metal_lite.images.pictures import DIGEST_BYTES
from vllm_metal_lite.images.positions import axis_of_frequency
from vllm_metal_lite.images.towers import Tower, build
from vllm_metal_lite.model.files.inner_model import completed
from vllm_metal_lite.model.loader import LoadedModel

# isort: split
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

mx = backend.mx


class Pictures:
    """Random pictures of side x side pixels, of one model."""

    def __init__(self, config: dict[str, Any], side: int) -> None:
        family = find_family(config)
        assert family is not None, "the model takes no pictures"
        vision = config["vision_config"]
        self.family: Family = family
        patch, merge = vision["patch_size"], vision["spatial_merge_size"]
        n = side // (patch * merge)
        self.merged, self.grid = (n, n), (n * merge, n * merge)
        self.patches_shape = (n * merge) ** 2, 3 * patch**2
        self._names = np.random.default_rng(2)
        # mlx-vlm finds a picture by the token before it.
        self.tokens = [config["vision_start_token_id"], *[family.image_token_id] * n**2]

    def draw(self, load: Load) -> list[Prepared | None]:
        """The pictures of a run, one for each prompt with rows of a picture.  A second turn has the
        picture of the first.  All runs have the same pixels, so that answers can be compared, but
        new names, so that no engine knows the pictures."""
        follows = load.follows if isinstance(load, WaveLoad) else [None] * len(load.prompts)
        rng, found = np.random.default_rng(1), list[Prepared | None]()
        for prompt, before in zip(load.prompts, follows, strict=True):
            if self.family.image_token_id in prompt:
                patches = rng.integers(0, 256, self.patches_shape, dtype=np.uint8)
                name = self._names.bytes(DIGEST_BYTES)
                found.append(Prepared(patches, self.grid, self.merged, name))
            else:
                found.append(None if before is None else found[before])
        return found


class _Processor:
    """Replaces transformers' processor: its values are from -1 to 1."""

    settings, scale_and_offset = "", (np.full(3, 1 / 127.5), np.ones(3))

    def __init__(self, family: Family) -> None:
        self.family = family


def random_eyes(
    config: dict[str, Any], dtype: mx.Dtype, vlm: nn.Module | None, language: nn.Module
) -> Eyes:
    """Eyes with random weights.  vlm: mlx-vlm's model; it gets the same weights and those of the
    language model."""
    family = find_family(config)
    assert family is not None, "the model takes no pictures"
    if vlm is None:
        tower: Tower = family.tower(completed(config))
        fill(tower, dtype)
    else:
        known: Any = tree_flatten(language.parameters())
        vlm.update(tree_unflatten(known))
        fill(vlm, dtype, {path for path, _ in known})
        weights = dict(tree_flatten(vlm.parameters()))
        of_tower = {k: w for k, w in weights.items() if k.startswith(family.tower.all_prefixes())}
        tower = build(family.tower, completed(config), of_tower)
    tower.set_dtype(dtype)
    processor: Any = _Processor(family)
    return Eyes(processor, tower, max_pictures=100)


class SeeingEngine(ThisEngine):
    """This engine, whose requests have new pictures in each run."""

    def __init__(
        self, model: LoadedModel, config: EngineConfig, pictures: Pictures, eyes: Eyes
    ) -> None:
        model.packed.axis_of_frequency = axis_of_frequency(rotary_sections(model.config))
        with patch("vllm_metal_lite.images.eyes.attach", lambda *_: eyes):
            super().__init__(LLMEngine(model, config))
        self.pictures = pictures

    def begin(self, load: Load) -> None:
        super().begin(load)
        self._found = self.pictures.draw(load)

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        made: Any = [
            prompt
            if picture is None
            else {"prompt_token_ids": prompt, "multi_modal_data": {"image": [picture]}}
            for prompt, picture in zip(prompts, self._found[first:], strict=False)
        ]
        super().add(first, made, max_tokens)
