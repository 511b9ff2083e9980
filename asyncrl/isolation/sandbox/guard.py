"""The guard is the sandbox's main program: it forks the warden, waits for it, and cleans up after it."""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from asyncrl.isolation.sandbox import confine, emptying, interpreter, kernel
from asyncrl.isolation.sandbox.cgroup import MemoryGroup, make_group
from asyncrl.isolation.sandbox.frames import SandboxLimits
from asyncrl.isolation.sandbox.kernel import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from asyncrl.isolation.sandbox.warden import PASSAGE, Warden
from asyncrl.isolation.sandbox.watched import LINK

START = """import sys
sys.path.insert(0, {root!r})
from asyncrl.isolation.sandbox.guard import main
main(*{arguments!r})"""


def main(limits: tuple[int, ...], packages: str, *rest: Any) -> None:
    """`limits`, `rest`: see confine.ConfinementPlan. `packages`: site-packages, which the code may import."""
    plan = confine.ConfinementPlan(os.getpid(), SandboxLimits(*limits), *rest)
    notes: list[str] = []
    group = make_group(plan.limits.resident << 20) if plan.limits.resident else None
    spaces = confine.new_process_namespace(notes)
    pid = os.fork()
    if pid == 0:
        run_warden(plan, spaces, notes, packages, group)
    wait(pid, plan, group)


def run_warden(
    plan: confine.ConfinementPlan,
    spaces: set[str],
    notes: list[str],
    packages: str,
    group: MemoryGroup | None,
) -> None:
    """Be the warden's process. When it ends, the kernel kills every process of its process namespace."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else the code could send it
    try:
        kernel.go_first_without_memory()
        with suppress(OSError, ValueError):  # it may be 0 already
            # with 0 the machine's handler of crashes would run as root; the code cannot change it
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        with open(interpreter.__file__) as file:
            source = file.read()
        confinement = confine.confine(plan, spaces, notes)
        os.environ.update(plan.environment, HOME=confinement.home)
        sys.meta_path.clear()  # nothing of an image or the code is ever imported here
        python = ["python3", "-c", source]
        if not plan.layers:
            os.environ["TMPDIR"] = confinement.home
            source += f"sys.path[:] = [{confinement.home!r}, *sys.path, {packages!r}]"
            python = [sys.executable, "-I", "-S", "-c", source]
        Warden(plan, confinement, python, group).serve()
    finally:
        os._exit(0)


def wait(warden: int, plan: confine.ConfinementPlan, group: MemoryGroup | None) -> None:
    """Wait until the warden has ended, which SIGTERM and the owner's death cause, too. Then clean up."""
    signal.signal(signal.SIGTERM, lambda *_: kernel.kill(warden, signal.SIGKILL))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for fd in (LINK, PASSAGE):
        os.close(fd)  # the owner sees the end of the warden, not ours
    os.waitpid(warden, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kernel.end_all(alone=False)  # what a killed warden left, where there is no process namespace
    emptying.remove(plan.fallback)
    if group:
        group.remove()
