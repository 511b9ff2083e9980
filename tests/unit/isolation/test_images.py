"""Images are found by name and digest, imported whole or not at all, listed and removed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from asyncrl.isolation.images import find_image
from tests.fakes.images import small_image


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of images of this test."""
    monkeypatch.setenv("ASYNCRL_IMAGES", str(tmp_path / "images"))
    return tmp_path / "images"


def tree(path: Path, **files: str) -> str:
    for name, text in {"bin/sh": "#!", **files}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    return str(path)


def test_programs_of_a_small_image_run_in_it(images: Path) -> None:
    image = small_image(images, "small-python", python=True, packages=("pytest",))
    assert find_image(image.digest) == find_image("small-python") == image
    command = ["unshare", "--user", "--map-root-user", "chroot", image.root, "python3", "-m", "pytest"]
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert shown.stdout.startswith("pytest"), shown.stderr
