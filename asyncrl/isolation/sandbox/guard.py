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
from asyncrl.isolation.sandbox.warden import PASSAGE_FD, Warden
from asyncrl.isolation.sandbox.watched import LINK_FD

GUARD_PROGRAM = """import sys
sys.path.insert(0, {root!r})
from asyncrl.isolation.sandbox.guard import main
main(*{arguments!r})"""


def main(limits: tuple[int, ...], packages: str, *plan_fields: Any) -> None:
    """Run a sandbox. `limits`, `plan_fields`: see confine.ConfinementPlan. `packages`: the directory
    site-packages, which the code may import."""
    plan = confine.ConfinementPlan(os.getpid(), SandboxLimits(*limits), *plan_fields)
    notes: list[str] = []
    memory_group = make_group(plan.limits.resident << 20) if plan.limits.resident else None
    new_namespaces = confine.new_process_namespace(notes)

    warden_pid = os.fork()
    if warden_pid == 0:
        run_warden(plan, new_namespaces, notes, packages, memory_group)
    wait_for_warden(warden_pid, plan, memory_group)


def run_warden(
    plan: confine.ConfinementPlan,
    new_namespaces: set[str],
    notes: list[str],
    packages: str,
    memory_group: MemoryGroup | None,
) -> None:
    """Be the warden's process. When the warden ends, the kernel kills every process of its process
    namespace."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a handler the kernel lets no code send it
    try:
        kernel.go_first_without_memory()
        with suppress(OSError, ValueError):  # the limit may be 0 already
            # With 0 the machine's handler of crashes would run as root; the code cannot change this limit
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        with open(interpreter.__file__) as file:
            interpreter_source = file.read()

        confinement = confine.confine(plan, new_namespaces, notes)
        os.environ.update(plan.environment, HOME=confinement.home)
        sys.meta_path.clear()  # nothing of an image or the code is ever imported here

        python_command = ["python3", "-c", interpreter_source]
        if not plan.layers:
            os.environ["TMPDIR"] = confinement.home
            interpreter_source += f"sys.path[:] = [{confinement.home!r}, *sys.path, {packages!r}]"
            python_command = [sys.executable, "-I", "-S", "-c", interpreter_source]
        Warden(plan, confinement, python_command, memory_group).serve_requests()
    finally:
        os._exit(0)


def wait_for_warden(warden_pid: int, plan: confine.ConfinementPlan, memory_group: MemoryGroup | None) -> None:
    """Wait until the warden has ended; SIGTERM and the owner's death also end the warden. Then clean up."""
    signal.signal(signal.SIGTERM, lambda *_: kernel.kill(warden_pid, signal.SIGKILL))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    for fd in (LINK_FD, PASSAGE_FD):
        os.close(fd)  # the owner must see the end of the warden, not the guard's
    os.waitpid(warden_pid, 0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Processes left by a killed warden, without a process namespace
    kernel.end_all(signals_are_contained=False)
    emptying.remove_directory(plan.fallback_home)
    if memory_group:
        memory_group.remove_group()
