"""tools/chaos.py with runs that are forked (`forked`), given that tools/ is in PYTHONPATH."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from chaos import main
from faults.launcher import dial_through
from faults.target import Target

from tests.fakes.forked import asyncrl

ROOT = Path(__file__).resolve().parents[2]


def launch(self: Target, *more: str) -> None:
    _, _, dial, *arguments = self.command(*more)
    ports = dict(pair.split("=") for pair in dial.split(","))
    self.launcher = asyncrl(arguments, self.out, ROOT, self.environment, first=partial(dial_through, ports))


if __name__ == "__main__":
    Target.launch = launch  # type: ignore[method-assign]
    sys.exit(main())
