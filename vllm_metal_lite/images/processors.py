"""Image processors on Pillow for models whose processor in transformers needs torch."""

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

from vllm_metal_lite.model.files.folder import read_json


class Lfm2VlSettings(ImagesKwargs, total=False):
    """The settings of preprocessor_config.json that ImagesKwargs lacks."""

    do_image_splitting: bool
    use_thumbnail: bool
    downsample_factor: int
    encoder_patch_size: int
    tile_size: int
    min_tiles: int
    max_tiles: int
    min_image_tokens: int
    max_image_tokens: int
    max_pixels_tolerance: float


class Lfm2VlImageProcessorPil(PilBackend):
    """Works as transformers' Lfm2VlImageProcessor: a picture of many pixels becomes tiles of one
    size, and a view of the whole."""

    valid_kwargs = Lfm2VlSettings
    resample = PILImageResampling.BILINEAR
    image_mean: ClassVar = [0.5, 0.5, 0.5]
    image_std: ClassVar = [0.5, 0.5, 0.5]
    size: ClassVar = {"height": 512, "width": 512}
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    do_image_splitting = use_thumbnail = True
    downsample_factor, encoder_patch_size, tile_size = 2, 16, 512
    min_tiles, max_tiles = 2, 10
    min_image_tokens, max_image_tokens = 64, 256
    max_pixels_tolerance = 2.0

    @classmethod
    def from_pretrained(cls, folder: Any, **options: Any) -> Any:  # type: ignore[override]
        """Older folders have the settings of tiles in processor_config.json."""
        found = read_json(Path(folder) / "processor_config.json")
        known = {n: value for n, value in found.items() if n in Lfm2VlSettings.__annotations__}
        return super().from_pretrained(folder, **{**known, **options})

    def _preprocess(  # type: ignore[override]
        self, images: list[np.ndarray], **options: Any
    ) -> BatchFeature:
        """pixel_values: (3, height, width) of each tile, then of the whole picture.  tiles:
        (height, width) in tiles.  has_whole: whether pixel_values has the whole picture."""
        [image] = images
        height, width = image.shape[1:]
        side = self.encoder_patch_size * self.downsample_factor
        least, most = (n * side**2 for n in (self.min_image_tokens, self.max_image_tokens))
        area = math.prod(max(self.encoder_patch_size, nearest(n, side)) for n in (height, width))
        is_large = self.do_image_splitting and area > most * self.max_pixels_tolerance
        tiles, views = self._tiles(height, width) if is_large else (0, 0), []
        if is_large:
            n = self.tile_size
            parts = self._resized(image, tiles[0] * n, tiles[1] * n)
            parts = parts.reshape(3, tiles[0], n, tiles[1], n).transpose(1, 3, 0, 2, 4)
            views = list(parts.reshape(-1, 3, n, n))
        has_whole = self.use_thumbnail or not views
        if has_whole:
            views.append(self._resized(image, *fitting(height, width, side, least, most)))
        return BatchFeature({"pixel_values": views, "tiles": tiles, "has_whole": has_whole})

    def _resized(self, image: np.ndarray, height: int, width: int) -> np.ndarray:
        return self.resize(image, SizeDict(height=height, width=width), resample=self.resample)

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in tiles, with the proportions nearest to the picture's.  If several are
        as near, the most tiles with less than twice the picture's pixels."""
        counts = range(1, self.max_tiles + 1)
        shapes = [(y, x) for x in counts for y in counts]
        shapes = [s for s in shapes if self.min_tiles <= math.prod(s) <= self.max_tiles]
        best, nearest_yet = (1, 1), math.inf
        for shape in sorted(shapes, key=math.prod):
            distance = abs(width / height - shape[1] / shape[0])
            fills = height * width > math.prod(shape) * self.tile_size**2 / 2
            if distance < nearest_yet or (distance == nearest_yet and fills):
                best, nearest_yet = shape, distance
        return best


def nearest(value: float, side: int) -> int:
    """The multiple of `side` nearest to a value."""
    return round(value / side) * side


def fitting(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) as multiples of `side`, with about the proportions of a picture, and between
    `least` and `most` pixels."""
    found = [max(side, nearest(n, side)) for n in (height, width)]
    if math.prod(found) > most:
        shrink = math.sqrt(height * width / most)
        found = [max(side, math.floor(n / shrink / side) * side) for n in (height, width)]
    elif math.prod(found) < least:
        grow = math.sqrt(least / (height * width))
        found = [math.ceil(n * grow / side) * side for n in (height, width)]
    return found[0], found[1]
