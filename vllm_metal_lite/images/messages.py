"""Pictures that users give: objects, files' bytes, and parts of messages."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_metal_lite.errors import RequestError, show
from vllm_metal_lite.images.pictures import Picture, decode, of_pillow, picture_of
from vllm_metal_lite.runner.pictures import PICTURE_PARTS


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


def split(messages: Any) -> tuple[Any, list[Any]]:
    """(Messages with {"type": "image"} for each picture, the pictures as `read` takes them).

    Messages without parts stay as they are.  Raises RequestError for a part without its picture.
    """
    if not isinstance(messages, (list, tuple)):
        return messages, []
    found: list[Any] = []
    return [_without_pictures(message, found) for message in messages], found


def _without_pictures(message: Any, found: list[Any]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in PICTURE_PARTS:
            parts.append(part)
            continue
        item = part.get(kind)
        item = item.get("url") if isinstance(item, Mapping) else item
        if item is None:
            raise RequestError(f"a part of type {kind} has no picture: {show(part)}")
        found.append(item)
        parts.append({"type": "image"})
    return {**message, "content": parts}
