"""`asyncrl runs list | show | transcripts | restore`: lists the runs in a directory; shows the summary or
episodes of a run; restores a damaged run.db."""

from __future__ import annotations

from pathlib import Path

from asyncrl.commands import command_parser, find_run, list_run_directories
from asyncrl.commands.status import describe_ending
from asyncrl.errors import ConfigError
from asyncrl.observe.evidence import WINDOW_STEPS
from asyncrl.observe.files import read_lines, read_some_rows, read_status, read_summary
from asyncrl.observe.summary import newest_number, summarize
from asyncrl.values import printable


def main(argv: list[str]) -> int:
    parser = command_parser(
        "runs", "List runs, show a run's summary or transcripts, or restore a run's run.db."
    )
    parser.add_argument("action", choices=("list", "show", "transcripts", "restore"))
    parser.add_argument("name", nargs="?", default="", help="name of the run (default: the newest)")
    parser.add_argument(
        "--of", choices=("validation", "training"), default="validation", help="kind of transcripts"
    )
    parser.add_argument("--all", action="store_true", help="also show diagnostics")
    parser.add_argument("--step", type=int, help="show transcripts from this step (default: the last)")
    options = parser.parse_intermixed_args(argv)

    if options.action == "list":
        return list_runs(options.run_dir)
    if options.action == "transcripts":
        return print_transcripts(find_run(options.run_dir, options.name), options.of, options.step)
    if options.action == "restore":
        return restore_database(options.run_dir, options.name)
    return show_summary(options.run_dir, options.name, options.all)


def restore_database(directory: Path, name: str) -> int:
    """Make run.db anew from the newest good copy."""
    from asyncrl.launch.run_directory import lock_directory
    from asyncrl.store import copies

    if not name:
        raise ConfigError("runs restore: name the run to restore")
    with lock_directory(run_dir := find_run(directory, name), "run_dir"):
        print(*copies.restore_newest(run_dir), "resume=auto continues from this copy", sep="\n")
    return 0


def list_runs(directory: Path) -> int:
    """Print a line per run, the newest first: its ending or `running`, its steps, and its newest held-out
    number."""
    for path in list_run_directories(directory):
        try:
            summary = read_summary(path)
            status = read_status(path)
            ending_text = summary.get("outcome") or describe_ending(path).partition(":")[0]
        except ConfigError:
            summary = {}
            status = {}
            ending_text = "unreadable"

        if not summary and ending_text != "unreadable":  # Under way, or killed: summarize the metrics so far
            summary = summarize(
                read_some_rows(path, edge=WINDOW_STEPS, max_rows=WINDOW_STEPS), account={}, conserved=True
            )

        total = status.get("total_steps")
        total_text = f" of {total}" if total and ending_text != "completed" else ""
        steps = "evaluation" if total == 0 else f"step {summary.get('steps', '–')}{total_text}"
        line = f"{path.name:<32} {ending_text or 'running':<10} {steps}  {newest_number(summary)}"
        print(printable(line.rstrip()))
    return 0


def show_summary(directory: Path, name: str, everything: bool = False) -> int:
    """Print the summary of a run, by its name or path; of the newest run if `name` is empty."""
    path = find_run(directory, name)
    summary = read_summary(path)
    if not summary:
        raise ConfigError(f"{path}: no summary.json; the run is still running, or was killed")
    if "flow" not in summary:
        raise ConfigError(f"{path / 'summary.json'}: the file is not a run's summary")
    from asyncrl.observe.table import print_summary

    print_summary(summary, path, everything=everything)
    return 0 if summary["conserved"] else 1


def print_transcripts(run_dir: Path, kind: str, step: int | None) -> int:
    """Print the episodes of a step that were kept as text."""
    paths = (run_dir / "transcripts" / kind).glob("step-*.jsonl")
    steps = {int(path.stem.partition("-")[2]): path for path in paths}

    if not steps:
        raise ConfigError(f"{run_dir}: no {kind} transcripts")

    chosen_step = max(steps) if step is None else step
    if chosen_step not in steps:
        steps_text = ", ".join(map(str, sorted(steps)))
        raise ConfigError(
            f"{run_dir}: no {kind} transcripts from step {chosen_step}; steps with transcripts: {steps_text}"
        )

    for entry in read_lines(steps[chosen_step]):
        text = entry.pop("text", "")
        header = ", ".join(f"{key} {value}" for key, value in entry.items())
        print(printable(f"== {kind}, step {chosen_step}: {header}\n{text}"), end="\n\n")
    return 0
