"""Reads stored images as the input of a model's vision tower, with the model's own processor of transformers.

file ──► PIL.Image RGB ──► processor, without scaling ──► pixel_values [patches, channels], grid [1, 3]
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, one_line
from asyncrl.vision.files import KEPT_FORMATS, ImageError


@dataclass(frozen=True)
class Pixels:
    """The patches of images, one after another. `pixel_values` [patches, values of a patch], float32;
    `grids` [images, 3]: frames, rows and columns of patches."""

    pixel_values: Tensor
    grids: Tensor

    @classmethod
    def concatenate(cls, parts: Sequence[Pixels]) -> Pixels:
        return cls(
            torch.cat([part.pixel_values for part in parts]), torch.cat([part.grids for part in parts])
        )

    def to(self, device: torch.device) -> Pixels:
        return Pixels(self.pixel_values.to(device), self.grids.to(device))


class PixelReader:
    """Reads stored images for the model in a directory. ConfigError if its processor cannot be loaded."""

    def __init__(self, model_directory: str) -> None:
        self._processor = _load_processor(model_directory)
        self._factor = self._processor.patch_size * self._processor.merge_size  # side of a merged patch

    def read(self, file: bytes) -> Pixels:
        """Return the patches of a stored image. ImageError if the file cannot be decoded, or was scaled for
        other patches."""
        image = decode_stored(file)
        if image.height % self._factor or image.width % self._factor:
            raise ImageError(
                f"a stored image has {image.width} x {image.height} pixels, but the model reads patches of "
                f"{self._factor} x {self._factor}; prepare the image with this model's processor"
            )
        features = self._processor(images=[image], do_resize=False, return_tensors="pt")
        return Pixels(features["pixel_values"], features["image_grid_thw"])


def decode_stored(file: bytes) -> Any:
    """Return a stored image as an RGB PIL.Image. ImageError if the file cannot be decoded."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(file), formats=KEPT_FORMATS) as image:
            return image.convert("RGB")
    except MemoryError:  # the file may be sound
        raise
    except Exception as error:  # decoders of Pillow raise errors of many types for damaged files
        raise ImageError(f"a stored image cannot be decoded ({one_line(error)})") from error


def image_size(file: bytes) -> tuple[int, int]:
    """Return height and width of a stored image, from the head of its file. ImageError without one."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(file), formats=KEPT_FORMATS) as image:
            return image.height, image.width
    except MemoryError:
        raise
    except Exception as error:  # as above; a head may also announce more pixels than Pillow opens
        raise ImageError(f"a stored image cannot be decoded ({one_line(error)})") from error


@lru_cache(maxsize=4)
def _load_processor(model_directory: str) -> Any:
    import transformers

    try:
        return transformers.AutoImageProcessor.from_pretrained(
            model_directory, backend="pil", local_files_only=True
        )
    except Exception as error:  # transformers raises errors of many types for files that it cannot read
        raise ConfigError(f"{model_directory}: no usable image processor ({one_line(error)})") from error
