"""Task folders in Harbor's format, and images that are directories and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.isolation.images import Image, find_image

INSTRUCTION = "Write 42 into answer.txt."
SOLVE = "echo 42 > answer.txt\n"
TEST = """\
if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def bare_image(
    images: Path, name: str, *directories: str, over: str = "", digest: str = "", directory: str = "/"
) -> Image:
    """Make an image of these directories, for what only looks at it; `over`: the name of one below it."""
    digest = digest or f"sha256-{name:0>64}"
    root = images / digest / "root"
    for inner in ("", *directories):
        (root / inner).mkdir(parents=True, exist_ok=True)
    image = Image(digest, over=(find_image(over).digest,) if over else (), directory=directory)
    (images / digest / "image.json").write_bytes(msgspec.json.encode(image))
    (images / "names").mkdir(exist_ok=True)
    (images / "names" / name).unlink(missing_ok=True)
    (images / "names" / name).symlink_to(f"../{digest}")

    return find_image(name)


def task_folder(
    path: Path,
    toml: str = '[environment]\ndocker_image = "bare"\nworkdir = "/app"\n',
    *,
    instruction: str = INSTRUCTION,
    test: str = TEST,
    solve: str = SOLVE,
    config: Any = None,
) -> Path:
    """Make a task folder; `config`: what tests/config.json holds."""
    for name, text in {
        "task.toml": toml,
        "instruction.md": instruction,
        "tests/test.sh": test,
        "solution/solve.sh": solve,
        "tests/config.json": "" if config is None else json.dumps(config),
    }.items():
        if text:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
    return path
