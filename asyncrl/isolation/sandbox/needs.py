"""Finds what a sandbox must show so that a program runs inside."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from asyncrl.isolation.sandbox.jail import SYSTEM


def needed_by(program: str) -> list[str]:
    """Find the paths to show (`Jail(show=…)`) for a command or a file: the file, links that lead to it, its
    npm package or its Python environment, and the same for its interpreter. Paths of the system are left
    out, as every sandbox shows them, and so is a whole home. Libraries elsewhere are not found."""
    found: dict[Path, None] = {}
    _find(Path(os.path.abspath(shutil.which(program) or program)), found)
    home = Path.home().resolve()
    left_out = (home, *home.parents)
    system = [path for path in found if any(path.is_relative_to(top) for top in SYSTEM)]
    return [str(path) for path in found if path not in (*system, *left_out)]


def _find(path: Path, found: dict[Path, None]) -> None:
    if path in found or not path.is_file():
        return
    found[path] = None
    prefix = path.parent.parent
    if (prefix / "pyvenv.cfg").exists():
        found[prefix] = None
        _find(prefix / "bin/python", found)
    if path.is_symlink():
        _find(Path(os.path.abspath(path.parent / path.readlink())), found)
        return
    if package := _npm_package(path):
        found |= dict.fromkeys(package)
    elif path.name.startswith("python") and any(prefix.glob("lib/python3*")):
        found[prefix] = None
    _find(path.resolve(), found)  # another path where a directory above is a link
    for interpreter in _interpreter(path):
        _find(Path(interpreter), found)


def _npm_package(file: Path) -> list[Path]:
    """Find the package of a file: below the outermost `node_modules` (all of it, where packages of a project
    lie side by side); elsewhere what the nearest package.json lets npm publish, if the file is part of it."""
    parts = file.parts
    if "node_modules" in parts:
        at = parts.index("node_modules") + 1
        modules = Path(*parts[:at])
        if (modules / ".package-lock.json").exists():
            return [modules]
        return [modules.joinpath(*parts[at : at + (2 if parts[at].startswith("@") else 1)])]
    described = next(filter(Path.exists, (above / "package.json" for above in file.parents)), None)
    published = list[Path]()
    with suppress(OSError, ValueError, AttributeError, TypeError):  # not written for npm
        if described and not (package := json.loads(described.read_bytes())).get("private"):
            names = (name.strip("./") for name in package.get("files", ()) if ".." not in name)
            found = (path for name in filter(None, names) for path in described.parent.glob(name))
            published = [path for path in found if path != described.parent and path.name[:1] != "."]
    return [described, *published] if described and any(map(file.is_relative_to, published)) else []


def _interpreter(file: Path) -> list[str]:
    """Find the interpreter of a script, which its first line names."""
    line = ""
    with suppress(OSError), file.open("rb") as opened:  # it may be run, and not be read
        line = os.fsdecode(opened.readline(1000))
    words = line[2:].split() if line.startswith("#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        words[:1] = [shutil.which(word) or word for word in words[:1]]
    return words[:1]
