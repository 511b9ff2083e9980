"""`asyncrl trace [RUN]`: what each process of a run did when, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from asyncrl.commands.arguments import command_parser, find_run


def main(argv: list[str]) -> int:
    """Parse the arguments and write the file."""
    parser = command_parser("trace", __doc__)
    parser.add_argument("run", nargs="?", default="", help="name of a run, or its directory; else the newest")
    parser.add_argument("--out", type=Path, help="the file; RUN.trace.json.gz by default")
    options = parser.parse_intermixed_args(argv)
    run_dir = find_run(options.run_dir, options.run)
    from asyncrl.viewer.trace import write_trace

    path = options.out or Path(f"{run_dir.resolve().name}.trace.json.gz")
    count = write_trace(run_dir, path)
    print(f"{path}: {count:,} events; open it at ui.perfetto.dev, or with chrome://tracing")
    return 0
