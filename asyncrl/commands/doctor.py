"""`asyncrl doctor [OVERRIDES]`: checks this machine, and the keys of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import indent

from asyncrl.commands import command_parser
from asyncrl.config.composition import compose
from asyncrl.errors import MissingKeyError
from asyncrl.observe.wrapping import fit_terminal
from asyncrl.registry import search_working_directory
from asyncrl.values import printable

HELP = """\
Check the machine and, with model.path and data.train, also the model and data of a run. Each line
reports "ok", a "warning", or an "error" that says what to do. Nothing is written or started, except that
a hub model is downloaded and a sandbox is started briefly. OVERRIDES work as in asyncrl train.

  asyncrl doctor                                       the machine
  asyncrl doctor experiment=calculator                 the machine and the demo
  asyncrl doctor model.path=DIR data.train=FILE        the machine, your model and data

The exit code is 0 if there are no errors, and 2 otherwise.
"""
TEXT_COLUMN = 24  # column at which the texts begin
NO_MODEL = ["model.path=none", "data.train=none"]  # Overrides for checks that need neither model nor data.


def main(argv: list[str]) -> int:
    parser = command_parser("doctor", HELP, run_dir_help="")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="key=value or group=choice")
    parser.add_argument("--config-dir", type=Path, help="directory with your own configuration groups")
    options = parser.parse_intermixed_args(argv)

    from asyncrl.launch.checks import ALL_CHECKS, MACHINE_CHECKS, collect_notes
    from asyncrl.launch.inputs import Inputs

    checks = ALL_CHECKS
    try:
        config = compose(options.overrides, options.config_dir)
    except MissingKeyError as error:
        if error.key != "model.path":
            raise
        checks = MACHINE_CHECKS
        config = compose([*NO_MODEL, *options.overrides], options.config_dir)

    search_working_directory()

    levels = list[str]()
    for level, text, subject in collect_notes(checks, Inputs(config)):  # each as soon as its check has run
        first_line, _, more_lines = printable(text).partition("\n")
        print(fit_terminal(f"{level:<8} {subject:<14} {first_line}", sys.stdout, TEXT_COLUMN), flush=True)
        if more_lines:
            indented_lines = indent(more_lines, " " * TEXT_COLUMN, lambda line: True)
            print(fit_terminal(indented_lines, sys.stdout, hanging_indent=0))
        levels.append(level)

    counts = {level: levels.count(level) for level in ("ok", "warning", "error", "skipped")}
    plurals = {
        level: "s" if count != 1 and level in ("warning", "error") else "" for level, count in counts.items()
    }
    print("\n" + ", ".join(f"{count} {level}{plurals[level]}" for level, count in counts.items()))

    if checks is MACHINE_CHECKS:
        print("only the machine was checked; set model.path and data.train to check your model and data")
    return 2 if "error" in levels else 0
