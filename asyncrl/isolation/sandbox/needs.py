"""Finds the paths that a sandbox must show so that a program runs inside."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from asyncrl.isolation.sandbox.jail import SYSTEM_DIRECTORIES


def find_needed_paths(program: str) -> list[str]:
    """Find the paths to show (`Jail(show=…)`) for a command or a file: the file, links on the way, the file's
    npm package or Python environment, and the same for its interpreter. Paths of the system, which every
    sandbox shows, are left out, and so is an entire home. Libraries elsewhere are not found."""
    needed_paths: dict[Path, None] = {}
    _add_needed(Path(os.path.abspath(shutil.which(program) or program)), needed_paths)

    home = Path.home().resolve()
    return [
        str(path)
        for path in needed_paths
        if path not in (home, *home.parents) and not any(map(path.is_relative_to, SYSTEM_DIRECTORIES))
    ]


def _add_needed(path: Path, needed_paths: dict[Path, None]) -> None:
    if path in needed_paths or not path.is_file():
        return
    needed_paths[path] = None

    prefix = path.parent.parent
    if (prefix / "pyvenv.cfg").exists():
        needed_paths[prefix] = None
        _add_needed(prefix / "bin/python", needed_paths)

    if path.is_symlink():
        _add_needed(Path(os.path.abspath(path.parent / path.readlink())), needed_paths)
        return

    if package := _npm_package_paths(path):
        needed_paths |= dict.fromkeys(package)
    elif path.name.startswith("python") and any(prefix.glob("lib/python3*")):
        needed_paths[prefix] = None

    _add_needed(path.resolve(), needed_paths)  # another path where a directory above is a link
    for interpreter in _script_interpreter(path):
        _add_needed(Path(interpreter), needed_paths)


def _npm_package_paths(file: Path) -> list[Path]:
    """Find the package of a file: below the outermost `node_modules` (the entire directory if packages of a
    project lie side by side); elsewhere the paths that the nearest package.json publishes, if the file is
    among these paths."""
    parts = file.parts
    if "node_modules" in parts:
        package_index = parts.index("node_modules") + 1
        modules = Path(*parts[:package_index])
        if (modules / ".package-lock.json").exists():
            return [modules]
        return [
            modules.joinpath(
                *parts[package_index : package_index + (2 if parts[package_index].startswith("@") else 1)]
            )
        ]

    package_file = next(filter(Path.exists, (parent / "package.json" for parent in file.parents)), None)
    published = list[Path]()
    with suppress(OSError, ValueError, AttributeError, TypeError):  # the package.json is not written for npm
        if package_file and not (package := json.loads(package_file.read_bytes())).get("private"):
            names = (name.strip("./") for name in package.get("files", ()) if ".." not in name)
            matching_paths = (path for name in filter(None, names) for path in package_file.parent.glob(name))
            published = [
                path for path in matching_paths if path != package_file.parent and path.name[:1] != "."
            ]

    return [package_file, *published] if package_file and any(map(file.is_relative_to, published)) else []


def _script_interpreter(file: Path) -> list[str]:
    """Find the interpreter that the first line of a script names."""
    first_line = ""
    with suppress(OSError), file.open("rb") as script:  # a program may be executable and not readable
        first_line = os.fsdecode(script.readline(1000))

    words = first_line[2:].split() if first_line.startswith("#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        words[:1] = [shutil.which(word) or word for word in words[:1]]
    return words[:1]
