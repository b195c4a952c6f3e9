"""Decoding: every kind of picture file gives 8-bit RGB, or an error of one line."""

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from tests.support.images.drawn import file_of
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.images.pictures import MAX_PIXELS, decode, picture_of

RGB = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
IMAGE = Image.fromarray(RGB)


def test_lossless_files_give_their_pixels_and_one_digest() -> None:
    found = [decode(file_of(IMAGE, kind)) for kind in ("PNG", "BMP", "TIFF")]
    found.append(decode(file_of(IMAGE, "WEBP", lossless=True)))
    for picture in found:
        np.testing.assert_array_equal(picture.rgb, RGB)
    assert {picture.digest for picture in found} == {picture_of(RGB).digest}


def test_the_digest_names_pixels_and_size() -> None:
    other = RGB.copy()
    other[3, 4, 1] ^= 1
    names = {picture_of(a).digest for a in (RGB, other, RGB.reshape(40, 24, 3), RGB[:-1])}
    assert len(names) == 4


@pytest.mark.parametrize(
    ("convert", "value"),
    [
        (lambda: Image.fromarray(np.full((4, 6), 0x8080, np.uint16)), 0x80),
        (lambda: Image.fromarray(np.full((4, 6), 200, np.uint8)), 200),
        (lambda: Image.new("1", (6, 4), 1), 255),
        (lambda: Image.new("LA", (6, 4), (10, 0)), 255),  # transparent: white
        (lambda: Image.new("RGBA", (6, 4), (10, 10, 10, 255)), 10),
        (lambda: Image.new("RGBA", (6, 4), (10, 10, 10, 0)), 255),
        (lambda: Image.new("P", (6, 4), 0), 0),
    ],
    ids=["16 bits", "gray", "1 bit", "clear gray", "opaque", "clear", "palette"],
)
def test_other_modes_become_rgb(convert: Callable[[], Image.Image], value: int) -> None:
    rgb = decode(file_of(convert())).rgb
    assert rgb.shape == (4, 6, 3)
    assert rgb.dtype == np.uint8
    assert np.unique(rgb).tolist() == [value]


def test_cmyk_is_converted() -> None:
    rgb = decode(file_of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)).rgb
    red, green, blue = rgb.reshape(-1, 3).mean(axis=0)
    assert red > 200
    assert max(green, blue) < 60


def test_the_first_frame_of_a_film_is_read() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    rgb = decode(file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])).rgb
    assert np.unique(rgb.reshape(-1, 3), axis=0).tolist() == [[255, 0, 0]]


def test_a_photo_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright: turned by 90 degrees
    image = Image.new("RGB", (40, 24), "white")
    image.paste("black", (0, 0, 40, 8))  # the top
    rgb = decode(file_of(image, "JPEG", exif=exif, quality=100)).rgb
    assert rgb.shape == (40, 24, 3)
    assert rgb[:, -6:].max() < 40  # now on the right


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be decoded"),
        (b"hello", "cannot be decoded"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded"),
        (file_of(IMAGE)[:200], "cannot be decoded"),
        (file_of(IMAGE, "JPEG")[:200], "cannot be decoded"),
        (file_of(Image.fromarray(np.ones((3, 3), np.float32)), "TIFF"), "floating-point"),
        (file_of(Image.new("1", (8_000, 5_000))), f"8000 x 5000 pixels; .* 1 to {MAX_PIXELS:,}"),
        (file_of(Image.new("1", (20_000, 20_000))), f"more than {MAX_PIXELS:,} pixels"),
    ],
    ids=["empty", "text", "svg", "cut PNG", "cut JPEG", "floats", "large", "bomb"],
)
def test_what_is_no_picture_is_refused_in_one_line(data: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        decode(data)
    assert "\n" not in str(error.value)
