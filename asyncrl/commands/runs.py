"""`asyncrl runs list | show | transcripts`: the runs in a directory, the summary and the episodes of one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.observe.files import read_lines, read_summary


def main(argv: list[str]) -> int:
    """Parse the arguments and run the action."""
    parser = argparse.ArgumentParser(prog="asyncrl runs", description="List runs, or show one.")
    parser.add_argument("action", choices=("list", "show", "transcripts"))
    parser.add_argument("name", nargs="?", default="", help="run to show; the newest one by default")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="parent of run directories")
    parser.add_argument(
        "--of", choices=("validation", "training"), default="validation", help="which transcripts"
    )
    parser.add_argument("--step", type=int, help="transcripts of this step; the last one by default")
    options = parser.parse_intermixed_args(argv)
    if options.action == "list":
        return list_runs(options.run_dir)
    if options.action == "transcripts":
        return transcripts(find_run(options.run_dir, options.name), options.of, options.step)
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
    from asyncrl.observe.table import print_summary

    print_summary(found, path)
    return 0


def transcripts(run_dir: Path, kind: str, step: int | None) -> int:
    """Print the episodes of a step that were kept as text."""
    paths = (run_dir / "transcripts" / kind).glob("step-*.jsonl")
    steps = {int(path.stem.partition("-")[2]): path for path in paths}
    if not steps:
        raise ConfigError(f"{run_dir}: has no {kind} transcripts")
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        have = ", ".join(map(str, sorted(steps)))
        raise ConfigError(f"{run_dir}: no {kind} transcripts of step {chosen}; those that have some: {have}")
    for entry in read_lines(steps[chosen]):
        text = entry.pop("text", "")
        print(f"== {kind}, step {chosen}: " + ", ".join(f"{key} {value}" for key, value in entry.items()))
        print(text, end="\n\n")
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
