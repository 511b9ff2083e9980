"""Names to objects: unknown ones tell the nearest, foreign ones are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.registry import Registry


@pytest.fixture
def registry() -> Registry[object]:
    registry: Registry[object] = Registry("gadget")
    for name in ("hammer", "hamster", "saw"):
        registry.register(name)(name.upper())
    return registry


def test_registered_names_are_found_and_listed(registry: Registry[object]) -> None:
    assert registry.get("saw") == registry.load("saw") == "SAW"
    assert list(registry) == ["hammer", "hamster", "saw"] and "saw" in registry


def test_an_unknown_name_tells_the_nearest(registry: Registry[object]) -> None:
    with pytest.raises(ConfigError, match="unknown gadget 'hamer'; did you mean hammer, hamster"):
        registry.get("hamer")
    with pytest.raises(ConfigError, match="known: hammer, hamster, saw"):
        registry.get("xyz")
    with pytest.raises(ConfigError, match="known: none"):
        Registry("widget").get("a")


def test_a_name_is_taken_once(registry: Registry[object]) -> None:
    with pytest.raises(ConfigError, match="already registered"):
        registry.register("saw")(object())


def test_modules_and_files_are_loaded(registry: Registry[object], tmp_path: Path) -> None:
    assert registry.load("pathlib:Path") is Path
    (tmp_path / "mine.py").write_text("thing = object()")
    spec = f"{tmp_path / 'mine.py'}:thing"
    assert registry.load(spec) is registry.load(spec)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("thing = 1", "has no 'thign'; did you mean thing"),
        ("import nothing_of_that_name", "cannot import .*ModuleNotFoundError"),
        ("raise RuntimeError('own reason')", "own reason"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    registry: Registry[object], tmp_path: Path, source: str, complaint: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=complaint):
        registry.load(f"{tmp_path / 'mine.py'}:thign")


def test_a_missing_file_is_named(registry: Registry[object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        registry.load(f"{tmp_path / 'none.py'}:thing")
