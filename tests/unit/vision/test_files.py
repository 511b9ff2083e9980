"""Prepared images: whatever comes in, engine and trainer read the same upright RGB picture."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.vision.files import ImageError, image_digest, prepare_decoded, prepare_image
from asyncrl.vision.pixels import decode_stored, image_size
from tests.fakes.image_data import animated_file, encode_image, noise
from tests.fakes.layouts import qwen_layout

LAYOUT = qwen_layout(placeholder=9, patch_size=8, min_side=32, max_side=128)


def decoded(file: bytes) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(file)))


def test_a_file_that_needs_no_change_stays_as_it_came() -> None:
    image = PIL.Image.fromarray(noise(48, 64))
    for kind in ("PNG", "JPEG"):
        file = encode_image(image, kind)
        prepared = prepare_image(file, LAYOUT)
        assert prepared.file is file
        assert not prepared.changes
        assert prepared.ref.digest == image_digest(file)
        assert (prepared.ref.height, prepared.ref.width) == (48, 64)


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP", "TIFF"])
def test_other_formats_become_png(kind: str) -> None:
    image = PIL.Image.fromarray(noise(48, 64)).quantize(16).convert("RGB")
    file = encode_image(image, kind, lossless=True)
    prepared = prepare_image(file, LAYOUT)
    assert prepared.file.startswith(b"\x89PNG")
    assert np.array_equal(decoded(prepared.file), np.asarray(PIL.Image.open(io.BytesIO(file)).convert("RGB")))


def test_a_photo_with_a_preview_is_read() -> None:
    image = PIL.Image.fromarray(noise(48, 64))
    file = encode_image(image, "MPO", save_all=True, append_images=[image.resize((32, 24))])
    prepared = prepare_image(file, LAYOUT)
    assert np.array_equal(decoded(prepared.file), decoded(file))


def test_a_lack_of_memory_is_not_taken_for_a_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    image = PIL.Image.fromarray(noise(300, 200))
    file = encode_image(image)

    def lack_memory(*arguments: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(PIL.Image.Image, "resize", lack_memory)
    with pytest.raises(MemoryError):
        prepare_decoded(image, LAYOUT)
    monkeypatch.setattr(PIL.Image, "open", lack_memory)
    for read in (lambda: prepare_image(file, LAYOUT), lambda: decode_stored(file), lambda: image_size(file)):
        with pytest.raises(MemoryError):
            read()


def test_images_are_scaled_once() -> None:
    prepared = prepare_image(encode_image(PIL.Image.fromarray(noise(300, 200))), LAYOUT)
    assert prepared.changes == ("scaled",)
    assert (prepared.ref.height, prepared.ref.width) == decoded(prepared.file).shape[:2]
    assert prepare_image(prepared.file, LAYOUT) == prepared._replace(changes=())


def test_photos_are_turned_upright() -> None:
    image = PIL.Image.fromarray(noise(48, 64))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    prepared = prepare_image(encode_image(image, "PNG", exif=exif), LAYOUT)
    assert prepared.changes == ("rotated",)
    assert np.array_equal(decoded(prepared.file), np.rot90(np.asarray(image), -1))


def test_colours_become_rgb() -> None:
    grey = PIL.Image.fromarray(noise(48, 64, 1))
    prepared = prepare_image(encode_image(grey), LAYOUT)
    assert prepared.changes == ("converted to RGB",)
    assert np.array_equal(decoded(prepared.file), np.repeat(np.asarray(grey)[..., None], 3, 2))

    palette = PIL.Image.fromarray(noise(48, 64)).quantize(16)
    assert np.array_equal(
        decoded(prepare_image(encode_image(palette), LAYOUT).file), np.asarray(palette.convert("RGB"))
    )
    printed = PIL.Image.fromarray(noise(48, 64)).convert("CMYK")
    assert decoded(prepare_image(encode_image(printed, "JPEG"), LAYOUT).file).shape == (48, 64, 3)


def test_transparent_pixels_are_white() -> None:
    pixels = noise(48, 64, 4)
    pixels[:24, :, 3] = 0
    pixels[24:, :, 3] = 255
    prepared = prepare_image(encode_image(PIL.Image.fromarray(pixels, "RGBA")), LAYOUT)
    assert prepared.changes == ("put on white",)
    assert (decoded(prepared.file)[:24] == 255).all()
    assert np.array_equal(decoded(prepared.file)[24:], pixels[24:, :, :3])


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_half_transparent_pixels_are_mixed_with_white(mode: str) -> None:
    pixels = noise(48, 64, 4)
    image = PIL.Image.fromarray(pixels, "RGBA").convert(mode)
    opacity = pixels[..., 3:] / 255
    colours = np.asarray(image.convert("RGBA"))[..., :3]
    mixed = decoded(prepare_image(encode_image(image), LAYOUT).file)
    assert np.abs(mixed - (colours * opacity + 255 * (1 - opacity))).max() <= 0.6


def test_a_decoded_image_gives_the_same_file() -> None:
    image = PIL.Image.fromarray(noise(100, 70))
    prepared = prepare_decoded(image, LAYOUT)
    assert prepared == prepare_decoded(image, LAYOUT)
    assert prepared.ref == prepare_image(encode_image(image), LAYOUT).ref


def bomb(width: int, height: int) -> bytes:
    """A PNG that says that it has so many pixels, and has none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")


DEEP = PIL.Image.fromarray(np.zeros((48, 64), dtype=np.uint16))
PLAIN = encode_image(PIL.Image.fromarray(noise(48, 64)))


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (b"", "not an image file"),
        (encode_image(PIL.Image.fromarray(noise(48, 64)), "EPS"), "not an image file of a supported format"),
        (encode_image(PIL.Image.fromarray(noise(48, 64)), "ICNS"), "not an image file of a supported format"),
        (b"GIF89a, in name alone", "not an image file|damaged"),
        (PLAIN[: len(PLAIN) // 2], "damaged"),
        (bomb(20_000, 20), "20000 x 20 pixels, but a side may have at most 16384"),
        (bomb(16_000, 16_000), "too many pixels"),
        (bomb(8_000, 5_000), "8000 x 5000 pixels, more than the allowed 32,000,000; scale it down"),
        (animated_file(), "3 frames"),
        (encode_image(DEEP), "16 bits|8 bits per channel"),
        (encode_image(PIL.Image.fromarray(noise(1, 300))), "300 times the shorter side"),
        (b"\x89PNG" + bytes(40 << 20), "more than the allowed 33,554,432"),
    ],
    ids=[
        "empty",
        "eps",
        "icns",
        "no gif",
        "cut",
        "long",
        "large",
        "many pixels",
        "animated",
        "16 bits",
        "narrow",
        "heavy",
    ],
)
def test_bad_images_are_refused(file: bytes, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        prepare_image(file, LAYOUT)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(PLAIN) - 1), st.integers(0, 255))
def test_a_changed_byte_is_an_image_or_an_image_error(offset: int, value: int) -> None:
    file = PLAIN[:offset] + bytes([value]) + PLAIN[offset + 1 :]
    try:
        prepared = prepare_image(file, LAYOUT)
    except ImageError:
        return
    assert decoded(prepared.file).shape[2] == 3
