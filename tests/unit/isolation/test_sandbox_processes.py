"""Who is below whom, on real processes."""

from __future__ import annotations

import os
import subprocess

from asyncrl.isolation.sandbox import processes


def test_children_and_their_children_are_found() -> None:
    script = "sh -c 'echo $$; sleep 60' & echo $$; wait"
    shell = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    pids = {int(shell.stdout.readline()), int(shell.stdout.readline())}
    try:
        assert pids <= set(processes.descendants(os.getpid()))
        assert not pids - {shell.pid} - set(processes.descendants(shell.pid))
        assert shell.pid not in processes.descendants(shell.pid)
    finally:
        for pid in processes.descendants(os.getpid()):
            os.kill(pid, 9)
        shell.communicate()
