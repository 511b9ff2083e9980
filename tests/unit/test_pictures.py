"""The pictures of the documentation are small, load nothing, and the drawn ones are up to date."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.fakes.scripts import script

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
MAX_BYTES = 250_000  # of a picture
MAX_TOTAL_BYTES = 1_500_000


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in PICTURES.iterdir()}
    assert max(sizes.values()) <= MAX_BYTES and sum(sizes.values()) <= MAX_TOTAL_BYTES, sizes


def test_each_picture_of_the_page_has_dark_and_light_colors() -> None:
    dark_names = {path.stem for path in PICTURES.glob("viewer_*.png") if not path.stem.endswith("_light")}
    light_names = {path.stem.removesuffix("_light") for path in PICTURES.glob("viewer_*_light.png")}
    assert dark_names == light_names and len(dark_names) == 5


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_drawings_load_nothing(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text())
    assert not [element for element in root.iter() if "href" in "".join(element.attrib)]
    assert "url(http" not in path.read_text() and "@import" not in path.read_text()


@pytest.mark.parametrize("name", ["dark", "light"])
def test_the_drawn_architecture_is_up_to_date(name: str) -> None:
    architecture_picture = script("architecture_picture")
    drawing = architecture_picture.drawing(architecture_picture.THEMES[name])
    assert drawing == (PICTURES / f"architecture_{name}.svg").read_text()
