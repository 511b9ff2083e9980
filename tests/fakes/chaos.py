"""tools/chaos.py with runs that are forked (`forked`), given that tools/ is in PYTHONPATH."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from chaos import main
from faults.launcher import dial_through
from faults.target import Target

from tests.fakes.forked import Forked, asyncrl

ROOT = Path(__file__).resolve().parents[2]


def start(self: Target, command: list[str], out: Path) -> Forked:
    _, _, dial, *arguments = command
    ports = dict(pair.split("=") for pair in dial.split(","))
    return asyncrl(arguments, out, ROOT, self.environment, first=partial(dial_through, ports))


if __name__ == "__main__":
    Target.start = start  # type: ignore[method-assign]
    sys.exit(main())
