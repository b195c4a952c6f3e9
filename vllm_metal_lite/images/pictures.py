"""Decodes the pictures that users give (objects, data: URLs, files) to RGB."""

import base64
import binascii
import hashlib
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from vllm_metal_lite.errors import RequestError, one_line, show

# The most pixels of a picture; its size is known before it is decoded.
MAX_PIXELS = 32_000_000
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Picture:
    """rgb: (height, width, 3) uint8.  digest: names the pixels and the size, so the same picture
    in another file or format has the same name."""

    rgb: np.ndarray
    digest: bytes


def picture_of(rgb: np.ndarray) -> Picture:
    """A picture of decoded pixels."""
    shape = np.array(rgb.shape, np.int64).tobytes()
    digest = hashlib.blake2b(shape, digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(rgb).data)
    return Picture(rgb, digest.digest())


def read(item: Any) -> Picture:
    """A picture: a Pillow image, an array (height, width, 3) of uint8, the bytes of a file, or a
    data: URL.  Raises RequestError."""
    if isinstance(item, str):
        item = bytes_of(item)
    if isinstance(item, (bytes, bytearray)):
        return decode(bytes(item))
    if hasattr(item, "convert"):  # a Pillow image
        return of_pillow(item)
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.shape[2:] == (3,):
        return picture_of(item)
    raise RequestError(
        "a picture must be a Pillow image, an array (height, width, 3) of uint8, the bytes of a "
        f"file or a data: URL, got {show(item)}"
    )


def bytes_of(url: str) -> bytes:
    """The bytes of a data: URL in base64.  Raises RequestError."""
    head, comma, data = url.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64") and comma):
        raise RequestError(
            f"the URL of a picture must be data:image/...;base64,..., got {show(url[:80])}"
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as e:
        raise RequestError(f"the data of a picture's URL is no base64: {e}") from None


def decode(data: bytes) -> Picture:
    """The first frame of a picture file, turned as its EXIF data say, over white.

    Raises RequestError for a file that is damaged or no picture, and for one of more than
    MAX_PIXELS, which is not decoded.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise RequestError(
            "pictures need Pillow: install vllm-metal-lite with the extra 'images'"
        ) from None
    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            return of_pillow(image)
    except RequestError:
        raise
    except Image.DecompressionBombError:
        raise RequestError(f"the picture has more than {MAX_PIXELS:,} pixels") from None
    except Exception as e:  # Pillow's decoders raise any error
        raise RequestError(
            f"the picture of {len(data)} bytes cannot be decoded; it must be a whole file in one "
            f"of {', '.join(_FORMATS)}: {one_line(e)}"
        ) from e


def of_pillow(image: Any) -> Picture:
    """The picture of a Pillow image.  Raises RequestError for too many pixels."""
    from PIL import ImageOps

    _check_size(*image.size)
    return picture_of(_rgb(ImageOps.exif_transpose(image)))


def _check_size(width: int, height: int) -> None:
    if not 0 < width * height <= MAX_PIXELS:
        raise RequestError(
            f"the picture has {width} x {height} pixels; it must have 1 to {MAX_PIXELS:,}"
        )


def _rgb(image: Any) -> np.ndarray:
    """The pixels of a Pillow image, in 8 bits."""
    from PIL import Image

    if image.mode.startswith("I"):  # gray values of 16 bits
        gray = (np.asarray(image, np.int64).clip(0, 65535) // 257).astype(np.uint8)
        image = Image.fromarray(gray)
    elif image.mode == "F":
        raise ValueError("its values are floating-point numbers")
    if image.mode in ("LA", "PA", "La", "RGBa", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        over = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(over, image)
    return np.asarray(image.convert("RGB"))
