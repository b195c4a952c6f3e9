"""The tiny model that reads a digit and its colour, and such pictures in the form of each API."""

import base64
import random
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from tools.demo_model.train_reader import draw

READER = Path(__file__).parent / "reader"
DIGIT, COLOUR = "Which digit is this?", "Which colour is it?"


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(digit: int, colour: str = "blue", seed: int = 1) -> bytes:
    """A file that shows a digit."""
    return file_of(Image.fromarray(draw(digit, colour, random.Random(seed))))


def base64_of(image: Image.Image) -> str:
    return base64.b64encode(file_of(image)).decode()


def url(digit: int, colour: str = "red") -> str:
    file = png(digit, colour, seed=digit)
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


SEVEN, THREE = url(7), url(3, "blue")


def chat_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def response_part(url: str) -> dict:
    return {"type": "input_image", "image_url": url, "detail": "high"}


def block(url: str) -> dict:
    kind, data = url.removeprefix("data:").split(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def text(words: str, kind: str = "text") -> dict:
    return {"type": kind, "text": words}


def said(words: str) -> dict:
    return {"role": "assistant", "content": words}
