"""`asyncrl report [RUN…]`: the page of `asyncrl view` in one file, about a run or several."""

from __future__ import annotations

from pathlib import Path

from asyncrl.commands import command_parser, find_run

HELP = """\
Write a page to send: curves, results, configuration, transcripts before and after, flow, lag, time, machine.

  asyncrl report                       of the newest run, as runs/NAME/report.html
  asyncrl report a b --out ab.html     two runs side by side

It is the file of `asyncrl view --html`, and needs no other file and no network. The exit code is 1 where the
account of a run's episodes is not exact."""


def main(argv: list[str]) -> int:
    parser = command_parser("report", HELP)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="names or directories; else the newest one")
    parser.add_argument("--out", type=Path, help="report.html in the directory of the first run by default")
    options = parser.parse_intermixed_args(argv)
    paths = [find_run(options.run_dir, name) for name in options.runs or [""]]
    from asyncrl.commands.view import export

    return export(paths, options.out or paths[0] / "report.html")
