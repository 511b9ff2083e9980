"""Commands, one module each. This module has helpers for all: parsers of arguments, and finding runs by
name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """A parser that explains foreign flags: flags of Hydra, and keys written with dashes."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raise ConfigError for foreign flags."""
        flag_names = [flag.partition("=")[0] for flag in args or ()]
        flag_names = flag_names[: flag_names.index("--")] if "--" in flag_names else flag_names
        known_flags = tuple(self._option_string_actions)
        foreign_flags = [
            flag
            for flag in flag_names
            if flag.startswith("--") and not any(name.startswith(flag) for name in known_flags)
        ]

        takes_keys = any(action.dest in ("overrides", "what") for action in self._actions)
        if foreign_flags and takes_keys:
            from asyncrl.config.composition import refused_flags

            raise refused_flags(foreign_flags)
        return super().parse_known_args(args, namespace)


def command_parser(
    name: str, description: str, run_dir_help: str = "directory that contains the run directories"
) -> argparse.ArgumentParser:
    """Make the parser of `asyncrl NAME`, whose --help shows `description` unchanged. `run_dir_help`: help for
    --run-dir; '' leaves the flag out."""
    parser = CommandParser(
        prog=f"asyncrl {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if run_dir_help:
        parser.add_argument("--run-dir", type=Path, default=Path("runs"), help=run_dir_help)
    return parser


def find_run(directory: Path, name: str, option: str = "--run-dir") -> Path:
    """Return the directory of a run by its name or path; of the newest run if `name` is empty. Raises
    ConfigError if there is none. `option`: how `directory` is given, for the error."""
    if name and os.path.isfile(os.path.join(name, "config.yaml")):
        return Path(name)
    runs = {path.name: path for path in reversed(list_run_directories(directory, option))}
    path = runs.get(name) if name else next(reversed(runs.values()), None)
    if path is None:
        raise ConfigError(
            f"{directory}: no run is named {name!r}; existing runs: {', '.join(runs) or 'none'}"
        )
    return path


def list_run_directories(directory: Path, option: str = "--run-dir") -> list[Path]:
    """Return the directories of runs, newest first. Raises ConfigError if `directory` does not exist."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory; set {option} to the directory that contains the run directories"
        )
    paths = [path.parent for path in directory.glob("*/config.yaml")]
    return sorted(paths, key=lambda path: (path / "config.yaml").stat().st_mtime, reverse=True)
