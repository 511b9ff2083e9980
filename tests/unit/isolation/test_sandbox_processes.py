"""Who is below whom: both ways to find out, on real processes."""

from __future__ import annotations

import os
import subprocess

from asyncrl.isolation.sandbox import processes


def test_both_ways_find_children_and_their_children() -> None:
    script = "sh -c 'echo $$; sleep 60' & echo $$; wait"
    shell = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    pids = {int(shell.stdout.readline()), int(shell.stdout.readline())}
    try:
        assert pids <= set(processes.descendants())
        searched = processes._searched()
        child = next(iter(pids - {shell.pid}))
        assert child in searched(shell.pid) and shell.pid in searched(os.getpid())
        assert child in processes._told(shell.pid) and shell.pid in processes._told(os.getpid())
    finally:
        for pid in processes.descendants():
            os.kill(pid, 9)
        shell.communicate()
