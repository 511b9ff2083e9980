"""Images: found by name and digest, imported whole or not at all, listed and removed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from asyncrl.isolation.images import find_image
from tests.fakes.images import small_image


def test_programs_of_a_small_image_run_in_it(images: Path) -> None:
    image = small_image(images, "small-python", python=True, packages=("pytest",))
    assert find_image(image.digest) == find_image("small-python") == image
    command = ["unshare", "--user", "--map-root-user", "chroot", image.root, "python3", "-m", "pytest"]
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if "unshare failed" not in shown.stderr:
        assert shown.stdout.startswith("pytest"), shown.stderr
