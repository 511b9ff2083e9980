"""Prepares images: from a file of one of the usual formats to the file that engines and trainer read.

    bytes ──decode──► upright RGB ──scale──► final size ──► PNG ──digest──► StoredImage
              │                                 │
              └► ImageError                     └► the file as it came, if nothing had to be changed

An image is scaled once, here. Its digest names the stored file wherever the image goes.
"""

from __future__ import annotations

import base64
import hashlib
import io
from typing import Any, NamedTuple

from asyncrl.errors import AsyncrlError, one_line
from asyncrl.types import ImageRef
from asyncrl.vision.image_ids import DIGEST_DIGITS
from asyncrl.vision.layout import ImageLayout

MAX_FILE_BYTES = 32 << 20  # of an image as it comes
MAX_STORED_BYTES = 16 << 20  # of a prepared image, so that a message holds several
MAX_SIDE = 16_384  # pixels of a side, as it comes
MAX_PIXELS = 32_000_000  # as it comes; converted and scaled, such an image takes up to 500 MB for a moment
PNG_START = b"\x89PNG\r\n\x1a\n"
JPEG_START = b"\xff\xd8\xff"
BIT_DEPTH_OFFSET = 24  # of the byte in a PNG file that says how many bits a channel has
# Files come from agents and tools. Pillow's decoders of other formats are less tested, and that of EPS starts
# Ghostscript.
READ_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
KEPT_FORMATS = ("JPEG", "PNG")  # files of these formats are kept if nothing has to be changed
UPRIGHT = 1  # EXIF orientation of an image that need not be turned
EXIF_ORIENTATION = 0x0112
ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")
DEEP_MODES = ("I", "F")  # modes of more than 8 bits per channel begin with these


class ImageError(AsyncrlError):
    """An image cannot be read, or is not of a kind that models read. The text says what to do."""


class StoredImage(NamedTuple):
    """A prepared image. `file`: the bytes of a PNG or JPEG file. `changes`: how the image as it came was
    changed, such as "scaled" or "rotated"."""

    ref: ImageRef
    file: bytes
    changes: tuple[str, ...] = ()


def image_digest(file: bytes) -> str:
    """Return the digest that names a stored file: the first DIGEST_DIGITS hexadecimal digits of BLAKE2b."""
    return hashlib.blake2b(file, digest_size=16).hexdigest()[:DIGEST_DIGITS]


def is_image_file(file: bytes) -> bool:
    """Return True if the bytes begin as a PNG or JPEG file does."""
    return file.startswith((PNG_START, JPEG_START))


def data_url(file: bytes) -> str:
    """Return a stored file, PNG or JPEG, as a data: URL."""
    media_type = "image/png" if file.startswith(PNG_START) else "image/jpeg"
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def prepare_image(file: bytes, layout: ImageLayout) -> StoredImage:
    """Prepare an image file for a model. ImageError says what is wrong with the file; a lack of memory is a
    MemoryError."""
    if len(file) > MAX_FILE_BYTES:
        raise ImageError(
            f"the image file has {len(file):,} bytes, more than the allowed {MAX_FILE_BYTES:,}; scale it down"
        )

    if file.startswith(PNG_START) and file[BIT_DEPTH_OFFSET : BIT_DEPTH_OFFSET + 1] == b"\x10":
        raise ImageError("the image has 16 bits per channel; convert it to 8 bits")

    import PIL.Image  # takes a moment, and most runs have no images

    try:
        with PIL.Image.open(io.BytesIO(file), formats=READ_FORMATS) as image:
            _check_kind(image)
            image.load()
            kept_format = image.format if image.format in KEPT_FORMATS else None
            return _prepare_decoded(image, layout, file if kept_format else None)
    except (ImageError, MemoryError):  # for lack of memory the file may be sound
        raise
    except PIL.Image.DecompressionBombError:
        raise ImageError("the image has too many pixels; scale it down") from None
    except PIL.UnidentifiedImageError:
        raise ImageError(
            f"the bytes are not an image file of a supported format ({', '.join(READ_FORMATS)}); write a PNG "
            "or JPEG file"
        ) from None
    except Exception as error:  # decoders of Pillow raise errors of many types for damaged files
        raise ImageError(f"the image file is damaged ({one_line(error)}); write the file again") from error


def prepare_decoded(image: Any, layout: ImageLayout) -> StoredImage:
    """Prepare a PIL.Image for a model. ImageError says what is wrong with the image."""
    try:
        _check_kind(image)
        return _prepare_decoded(image, layout, file=None)
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"the image is damaged ({one_line(error)}); load the image again") from error


def _check_kind(image: Any) -> None:
    """Raise ImageError for an image that is too large, moves, or has more than 8 bits per channel."""
    if max(image.size) > MAX_SIDE:
        raise ImageError(
            f"the image has {image.width} x {image.height} pixels, but a side may have at most {MAX_SIDE}; "
            "scale it down"
        )
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(
            f"the image has {image.width} x {image.height} pixels, more than the allowed {MAX_PIXELS:,}; "
            "scale it down"
        )
    if min(image.size) < 1:
        raise ImageError("the image has no pixels; write another image")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # MPO: a photo with a preview beside it
        raise ImageError(
            f"the image has {image.n_frames} frames, but only still images are allowed; choose one frame"
        )
    if image.mode.startswith(DEEP_MODES):
        raise ImageError(f"the image has more than 8 bits per channel (mode {image.mode}); convert it to RGB")


def _prepare_decoded(image: Any, layout: ImageLayout, file: bytes | None) -> StoredImage:
    """Turn, convert and scale a decoded image. `file`: the file to keep if nothing is changed."""
    import PIL.Image
    import PIL.ImageOps

    changes: list[str] = []
    if image.getexif().get(EXIF_ORIENTATION, UPRIGHT) != UPRIGHT:
        image = PIL.ImageOps.exif_transpose(image)
        changes.append("rotated")

    if image.mode in ALPHA_MODES or "transparency" in image.info:
        # By `paste`: `alpha_composite` has the same result, but holds Python's lock, 0.3 s for MAX_PIXELS.
        transparent = image.convert("RGBA")
        image = PIL.Image.new("RGB", image.size, "white")
        image.paste(transparent, mask=transparent)
        changes.append("put on white")
    elif image.mode != "RGB":
        image = image.convert("RGB")
        changes.append("converted to RGB")

    try:
        height, width = layout.final_size(image.height, image.width)
    except ValueError as error:
        raise ImageError(f"the image has {image.width} x {image.height} pixels: {error}; crop it") from None
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), PIL.Image.Resampling.BICUBIC)
        changes.append("scaled")

    if file is None or changes:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", icc_profile=None)
        file = buffer.getvalue()

    if len(file) > MAX_STORED_BYTES:
        raise ImageError(
            f"the image of {width} x {height} pixels takes {len(file):,} bytes as PNG, more than the allowed "
            f"{MAX_STORED_BYTES:,}; set model.max_image_tokens lower"
        )

    return StoredImage(ImageRef(image_digest(file), height, width), file, tuple(changes))
