"""The child's main program: the guard forks the warden, waits for it, and leaves nothing behind.

python -I -S -c START <root of this package> memory=512 … show=/usr … path=/…/site-packages fallback=/tmp/…
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from asyncrl.isolation.sandbox import confine, files, processes
from asyncrl.isolation.sandbox.confine import ConfinementPlan, SandboxLimits
from asyncrl.isolation.sandbox.warden import Warden

START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from asyncrl.isolation.sandbox.jail import main; main()"
)


def main() -> None:
    given = [argument.partition("=")[::2] for argument in sys.argv[1:]]
    words = dict(given)
    plan = ConfinementPlan(
        SandboxLimits(**{name: int(words[name]) for name in SandboxLimits._fields}),
        [value for name, value in given if name == "show"],
        words["fallback"],
        os.getpid(),
    )
    notes: list[str] = []
    spaces = confine.split_off(notes)
    pid = os.fork()
    if pid == 0:
        work(plan, spaces, notes, [value for name, value in given if name == "path"])
    wait(pid, plan)


def work(plan: ConfinementPlan, spaces: set[str], notes: list[str], path: list[str]) -> None:
    """The warden's life. It ends when the owner does, and the kernel then ends all of its namespace."""
    try:
        ground = confine.settle(plan, spaces, notes)
        os.environ.update(HOME=ground.home, TMPDIR=ground.home)
        sys.path[:] = [ground.home, *sys.path[1:], *path]
        sys.argv[:] = [""]
        Warden(plan.limits, ground).serve()
    finally:
        os._exit(0)


def wait(warden: int, plan: ConfinementPlan) -> None:
    """Until the warden has ended, by itself or because the owner wants it (SIGTERM) or is dead."""

    def end(number: int, frame: FrameType | None) -> None:
        processes.kill(warden, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGTERM)
    os.close(0)  # the owner sees the end of the warden, not ours
    os.waitpid(warden, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.end_all(alone=False)  # what a killed warden left, where there is no process namespace
    files.remove(plan.fallback)
