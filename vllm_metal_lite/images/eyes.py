"""The vision part of a loaded model: prepares pictures and computes their rows."""

import logging
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import transformers
from mlx.utils import tree_flatten

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.pictures import PlacedPictures
from vllm_metal_lite.errors import RequestError, one_line
from vllm_metal_lite.images.families import find_family, preprocess
from vllm_metal_lite.images.family import Family, Prepared
from vllm_metal_lite.images.peak import peak_bytes
from vllm_metal_lite.images.pictures import DIGEST_BYTES, MAX_PIXELS, Picture, read
from vllm_metal_lite.images.positions import axis_of_frequency
from vllm_metal_lite.images.prompts import expand, place
from vllm_metal_lite.images.towers import Tower, Weights, build
from vllm_metal_lite.model.files.folder import read_json
from vllm_metal_lite.model.files.inner_model import completed
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import Mode
from vllm_metal_lite.runner.pictures import Features, NoEyes

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Bytes of prepared pictures, and of rows, that are kept for later turns.
PREPARED_BYTES = 256 << 20
NAME_BYTES = 1 << 20
FEATURE_BYTES = 256 << 20
# Bytes of prepared pictures that a server's engine keeps, so that a turn need not send them again.
SENT_BYTES = 128 << 20
# Sizes that give more tiles, or more rows of Gemma 4, than a square: 4 x 3, 10 x 7 and 5 x 2.
_LARGEST = (2308, 1731), (2390, 1673), (3160, 1264)


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
        kind: Any = getattr(transformers, family.processor, None)  # imports Pillow
        if kind is None:
            from vllm_metal_lite.images import processors

            kind = getattr(processors, family.processor)
        self.family, self._processor = family, kind.from_pretrained(folder)
        self._kept = ByBytes[Prepared](PREPARED_BYTES)
        self._digests = ByBytes[bytes](NAME_BYTES)  # digests of pictures, by a hash of the file

    @classmethod
    def of_folder(cls, folder: Path) -> "Processor":
        """The processor of a model that takes pictures."""
        family = find_family(read_json(folder / "config.json"))
        assert family is not None, f"{folder} has no vision tower"
        return cls(family, folder)

    def __call__(self, picture: Picture) -> Prepared:
        """Raises RequestError for a picture that the family cannot take."""
        found = self._kept.get(picture.digest)
        if found is None:
            found = preprocess(self.family, self._processor, picture)
            self._kept.put(picture.digest, found, found.patches.nbytes)
        return found

    def of(self, item: Any) -> Prepared:
        """Prepare a picture in any form that `read` takes.  Later turns of a conversation bring its
        data: URL or its file again; it is not decoded again.  Raises RequestError."""
        if not isinstance(item, (str, bytes)):
            return self(read(item))
        data = item.encode(errors="surrogatepass") if isinstance(item, str) else item
        name = blake2b(data, digest_size=DIGEST_BYTES).digest()
        digest = self._digests.get(name)
        found = None if digest is None else self._kept.get(digest)
        if found is None:
            found = self(read(item))
            self._digests.put(name, found.digest, 2 * DIGEST_BYTES)
        return found

    @property
    def settings(self) -> str:
        return str(self._processor.to_json_string())

    @property
    def most_patches(self) -> int:
        """How many patches the largest allowed picture has, all its tiles included."""
        side = math.isqrt(MAX_PIXELS)
        if self.family.rotates_by_grid:  # such a picture keeps its size, so preparing it is slow
            return int(self._processor.get_number_of_image_patches(side, side, {}))
        sizes = [(side, side), *_LARGEST]
        black = (Picture(np.zeros((*size, 3), np.uint8), b"") for size in sizes)
        return max(len(preprocess(self.family, self._processor, p).patches) for p in black)

    @property
    def scale_and_offset(self) -> tuple[np.ndarray, np.ndarray]:
        """A value x of 8 bits becomes x * scale - offset; both (3,) float64, by channel."""
        of = self._processor
        scale = np.full(3, of.rescale_factor if of.do_rescale else 1.0)
        if not of.do_normalize:
            return scale, np.zeros(3)
        mean, std = (np.full(3, x, np.float64) for x in (of.image_mean, of.image_std))
        return scale / std, mean / std


class Eyes(NoEyes):
    """Computes the rows of pictures; MLX arrays belong to the thread that uses the engine."""

    def __init__(self, processor: Processor, tower: Tower, max_pictures: int) -> None:
        """max_pictures: the most pictures of a prompt."""
        self.processor, self.tower, self.family = processor, tower, processor.family
        self.max_pictures = max_pictures
        self._kept = ByBytes[Features](FEATURE_BYTES)
        self._scale, self._offset = (
            mx.array(values.astype(np.float32)) for values in processor.scale_and_offset
        )
        weights: Any = tree_flatten(tower.parameters())
        self.settings, self.weights = processor.settings, weights
        self.num_bytes = sum(value.nbytes for _, value in weights) + FEATURE_BYTES + SENT_BYTES

    def prepare(self, items: Any) -> list[Prepared]:
        if len(items) > self.max_pictures:
            raise RequestError(too_many(self.max_pictures, len(items)))
        return [x if isinstance(x, Prepared) else self.processor.of(x) for x in items]

    def expand(self, text: str, pictures: Sequence[Prepared]) -> str:
        return expand(text, self.family, pictures)

    def place(self, token_ids: Sequence[int], pictures: Sequence[Prepared]) -> PlacedPictures:
        return place(token_ids, self.family, pictures)

    def __call__(self, picture: Prepared) -> Features:
        """The features of a picture.  If they are not kept, the device begins to compute them while
        the host builds the step."""
        found = self._kept.get(picture.digest)
        if found is None:
            views = picture.views(self._normalised(picture.patches))
            found = joined([self.tower(patches, grid) for patches, grid in views])
            rows = found.rows.astype(mx.float32) / self.family.embed_scale
            found = found._replace(rows=rows.astype(found.rows.dtype))
            mx.async_eval(found)
            num_bytes = sum(a.nbytes for a in (found.rows, *found.deep))
            self._kept.put(picture.digest, found, num_bytes)
        return found

    def _normalised(self, patches: np.ndarray) -> mx.array:
        """Patches (P, 3 * values) of 8 bits, in the type of the tower's weights."""
        last = self.family.channels_last
        scale, offset = (a if last else a[:, None] for a in (self._scale, self._offset))
        shape = (len(patches), -1, 3) if last else (len(patches), 3, -1)
        x = mx.array(patches).astype(mx.float32).reshape(shape)
        x = x * scale - offset
        return x.reshape(patches.shape).astype(self.tower.dtype)


def too_many(most: int, count: int) -> str:
    return f"a prompt takes at most {most} pictures (limit_mm_per_prompt), got {count}"


def attach(model: LoadedModel, max_pictures: int) -> NoEyes:
    """The eyes of a model, or the reason why it takes no pictures, which is logged once if the
    model has a tower.

    max_pictures: the most pictures of a prompt; 0: the tower is not loaded.
    """
    name, folder = model.name, model.folder
    try:
        family = find_family(model.config)
        if family is None:
            return NoEyes(f"{name} takes text only")
        if not max_pictures:
            return NoEyes(f"{name} takes no pictures here: limit_mm_per_prompt is 0")
        if folder is None or model.ranks.size > 1 or model.packed.mode is not Mode.PACKED:
            raise ValueError("it is divided, loaded without its files, or not packed")
        tower = read_tower(family, folder, model.config)
        tower.set_dtype(model.dtype)
        processor = Processor(family, folder)
        eyes = Eyes(processor, tower, max_pictures)
        eyes.peak_bytes = peak_bytes(tower, processor.most_patches)
        if family.rotates_by_grid:
            sections = rotary_sections(model.config)
            model.packed.axis_of_frequency = axis_of_frequency(sections, family.rotates_in_turns)
    except Exception as e:  # files of others fail in any way
        reason = f"{name} takes no pictures here: {one_line(e)}"
        logger.warning(reason)
        return NoEyes(reason)
    model.packed.spans = family.sees_whole_picture
    return eyes


def joined(parts: Sequence[Features]) -> Features:
    """The features of a picture, from those of its views."""
    if len(parts) == 1:
        return parts[0]
    return Features(mx.concatenate([part.rows for part in parts]))


def rotary_sections(config: Mapping[str, Any]) -> list[int]:
    """How many frequencies time, row and column have."""
    text = config.get("text_config", config)
    for name in ("rope_parameters", "rope_scaling"):
        if sections := (text.get(name) or {}).get("mrope_section"):
            return list(sections)
    raise ValueError("its configuration has no mrope_section")


def read_tower(family: Family, folder: Path, config: Mapping[str, Any]) -> Tower:
    """The tower with its weights in a model's folder, which mlx-lm leaves out.

    Raises ValueError, with the names, for weights that are missing or misshapen.
    """
    tensors: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded: Any = mx.load(str(path))  # lazy: only the headers are read
        tensors |= {
            name: t for name, t in loaded.items() if name.startswith(family.tower.all_prefixes())
        }
    if not tensors:
        raise ValueError("its folder has no weights of the vision tower")
    return build(family.tower, completed(config), tensors)
