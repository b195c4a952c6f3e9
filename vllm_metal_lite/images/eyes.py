"""The vision part of a loaded model: prepares pictures and computes their rows."""

from collections import OrderedDict
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.families import Family, Prepared, completed, preprocess
from vllm_metal_lite.images.pictures import Picture
from vllm_metal_lite.images.towers import Tower, Weights, build
from vllm_metal_lite.runner.picture_table import Features

T = TypeVar("T")

# Bytes of prepared pictures, and of rows, that are kept for later turns.
PREPARED_BYTES = 256 << 20
FEATURE_BYTES = 256 << 20


class ByBytes(Generic[T]):
    """Values by digest; the least recently used ones leave when all have more than `limit` bytes.
    Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit, self.num_bytes = limit, 0
        self._kept: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, digest: bytes) -> T | None:
        with self._lock:
            if digest not in self._kept:
                return None
            self._kept.move_to_end(digest)
            return self._kept[digest][0]

    def put(self, digest: bytes, value: T, num_bytes: int) -> None:
        with self._lock:
            if digest in self._kept or num_bytes > self.limit:
                return
            self._kept[digest] = value, num_bytes
            self.num_bytes += num_bytes
            while self.num_bytes > self.limit:
                _, (_, freed) = self._kept.popitem(last=False)
                self.num_bytes -= freed


class Processor:
    """Prepares pictures for a model.  It needs no weights, so a server's front process has one."""

    def __init__(self, family: Family, folder: Path) -> None:
        name = family.processor
        module = import_module(f"transformers.models.{name}.image_processing_pil_{name}")
        kind = next(k for n, k in vars(module).items() if n.endswith("ImageProcessorPil"))
        self.family, self._processor = family, kind.from_pretrained(folder)
        self._kept = ByBytes[Prepared](PREPARED_BYTES)

    def __call__(self, picture: Picture) -> Prepared:
        """Raises RequestError for a picture that the family cannot take."""
        found = self._kept.get(picture.digest)
        if found is None:
            found = preprocess(self.family, self._processor, picture)
            self._kept.put(picture.digest, found, found.patches.nbytes)
        return found

    @property
    def scale_and_offset(self) -> tuple[np.ndarray, np.ndarray]:
        """A value x of 8 bits becomes x * scale - offset; both (3,) float64, by channel."""
        of = self._processor
        scale = np.full(3, of.rescale_factor if of.do_rescale else 1.0)
        if not of.do_normalize:
            return scale, np.zeros(3)
        mean, std = (np.asarray(x, np.float64) for x in (of.image_mean, of.image_std))
        return scale / std, mean / std


class Eyes:
    """Computes the rows of pictures; MLX arrays belong to the thread that uses the engine."""

    def __init__(self, processor: Processor, tower: Tower) -> None:
        self.processor, self.tower = processor, tower
        self._kept = ByBytes[Features](FEATURE_BYTES)
        self._scale, self._offset = (
            mx.array(values.astype(np.float32)) for values in processor.scale_and_offset
        )

    def __call__(self, picture: Prepared) -> Features:
        """The rows of a picture: kept ones, or those of the tower."""
        found = self._kept.get(picture.digest)
        if found is None:
            found = self.tower(self._normalised(picture.patches), picture.grid)
            rows = found.rows.astype(mx.float32) / self.processor.family.embed_scale
            found = found._replace(rows=rows.astype(found.rows.dtype))
            mx.eval(found)
            num_bytes = sum(a.nbytes for a in (found.rows, *found.deep))
            self._kept.put(picture.digest, found, num_bytes)
        return found

    def _normalised(self, patches: np.ndarray) -> mx.array:
        """Patches (P, 3 * values) of 8 bits, in the type of the tower's weights."""
        x = mx.array(patches).astype(mx.float32).reshape(len(patches), 3, -1)
        x = x * self._scale[:, None] - self._offset[:, None]
        return x.reshape(patches.shape).astype(self.tower.dtype)


def read_tower(family: Family, folder: Path, config: Mapping[str, Any]) -> Tower:
    """The tower with its weights in a model's folder, which mlx-lm leaves out.

    Raises ValueError, with the names, for weights that are missing or misshapen.
    """
    tensors: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded = mx.load(str(path))  # lazy: only the headers are read
        tensors |= {
            name: t for name, t in loaded.items() if name.startswith(family.tower.all_prefixes())
        }
    if not tensors:
        raise ValueError("its folder has no weights of the vision tower")
    return build(family.tower, completed(config), tensors)
