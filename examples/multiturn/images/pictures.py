"""Pictures of four corners, each with a colour and a pattern, and the tool that looks closely at a corner.

The model sees a picture at half its size: the colours are clear, but every pattern blurs into plain colour.
So the model has to zoom into the corner that the question asks about.
"""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
import PIL.Image

from asyncrl.types import Sample

CORNERS = ("top left", "top right", "bottom left", "bottom right")
COLOURS = {"red": (200, 60, 60), "green": (60, 180, 60), "blue": (60, 80, 220), "yellow": (200, 190, 40)}
# The bright pixels of each cell of 2 x 2 pixels. All patterns are equally bright.
PATTERNS = {
    "A": ((1, 1), (0, 0)),
    "B": ((0, 0), (1, 1)),
    "C": ((1, 0), (1, 0)),
    "D": ((0, 1), (0, 1)),
    "E": ((1, 0), (0, 1)),
    "F": ((0, 1), (1, 0)),
}
CORNER_PIXELS = 32  # the side of a corner
CONTRAST = 55  # of bright and dark pixels to the colour


class Picture:
    """A picture that is drawn from a seed, with a question about it. `corner`: that of the question."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.colours = rng.sample(list(COLOURS), len(CORNERS))
        self.patterns = rng.choices(list(PATTERNS), k=len(CORNERS))
        self.corner = self.colours.index("red")
        self.image = PIL.Image.new("RGB", (2 * CORNER_PIXELS, 2 * CORNER_PIXELS))
        for corner, (colour, pattern) in enumerate(zip(self.colours, self.patterns, strict=True)):
            self.image.paste(_draw_corner(colour, pattern), _position(corner))

    @property
    def question(self) -> str:
        return "Which pattern is in the red corner?"

    @property
    def answer(self) -> str:
        return self.patterns[self.corner]

    def zoomed(self, corner: int) -> PIL.Image.Image:
        """Return a corner in full size."""
        left, top = _position(corner)
        return self.image.crop((left, top, left + CORNER_PIXELS, top + CORNER_PIXELS))


def _position(corner: int) -> tuple[int, int]:
    row, column = divmod(corner, 2)
    return column * CORNER_PIXELS, row * CORNER_PIXELS


def _draw_corner(colour: str, pattern: str) -> PIL.Image.Image:
    is_bright = np.tile(PATTERNS[pattern], (CORNER_PIXELS // 2, CORNER_PIXELS // 2))
    brightness = np.where(is_bright, CONTRAST, -CONTRAST)[..., None]
    pixels = np.array(COLOURS[colour]) + brightness
    return PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


class Magnifier:
    """The tool of the task: an episode has one object."""

    def reset(self, sample: Sample) -> None:
        self._picture = Picture(sample.extra_info["seed"])

    def zoom(
        self, corner: Literal["top left", "top right", "bottom left", "bottom right"]
    ) -> PIL.Image.Image:
        """Look closely at a corner of the picture."""
        return self._picture.zoomed(CORNERS.index(corner))
