"""`asyncrl runs list | show`: the runs in a directory, and the summary of one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.observe.files import read_summary


def main(argv: list[str]) -> int:
    """Parse the arguments and run the action."""
    parser = argparse.ArgumentParser(prog="asyncrl runs", description="List runs, or show one's summary.")
    parser.add_argument("action", choices=("list", "show"))
    parser.add_argument("name", nargs="?", default="", help="run to show; the newest one by default")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="parent of run directories")
    options = parser.parse_intermixed_args(argv)
    if options.action == "list":
        return list_runs(options.run_dir)
    return show(options.run_dir, options.name)


def list_runs(directory: Path) -> int:
    """One line per run, newest first."""
    for path in _runs(directory):
        try:
            found = read_summary(path)
        except ConfigError:
            found = {"outcome": "unreadable"}
        success = found.get("success_after")
        shown = "" if success is None else f"  success {success:.1%}"
        print(
            f"{path.name:<32} {found.get('outcome', 'no summary'):<10} step {found.get('steps', '–')}{shown}"
        )
    return 0


def show(directory: Path, name: str) -> int:
    """The summary of a run, by its name or path; of the newest one without."""
    path = find_run(directory, name)
    found = read_summary(path)
    if not found:
        raise ConfigError(f"{path}: has no summary.json: it is running, or was killed")
    if "flow" not in found:
        raise ConfigError(f"{path / 'summary.json'}: is not the summary of a run")
    from asyncrl.observe.console import print_summary

    print_summary(found, path)
    return 0


def find_run(directory: Path, name: str) -> Path:
    """The directory of a run by its name or path; of the newest one without. ConfigError if there is none."""
    if name and os.path.isfile(os.path.join(name, "config.yaml")):
        return Path(name)
    runs = {path.name: path for path in reversed(_runs(directory))}
    path = runs.get(name) if name else next(reversed(runs.values()), None)
    if path is None:
        raise ConfigError(f"{directory}: no run {name!r}; there are: {', '.join(runs) or 'none'}")
    return path


def _runs(directory: Path) -> list[Path]:
    """Directories of runs, newest first. ConfigError where there is nothing to look at."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; give the parent of run directories as --run-dir")
    paths = [path.parent for path in directory.glob("*/config.yaml")]
    return sorted(paths, key=lambda path: (path / "config.yaml").stat().st_mtime, reverse=True)
