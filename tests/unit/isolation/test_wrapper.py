"""The wrapper around programs: exit codes, signals, and nothing left of a process tree."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.isolation import wrapper
from asyncrl.isolation.child import wrapped_command

DAEMON = "setsid sleep 600 > /dev/null 2>&1 & echo $!;"  # a child in a session of its own


def start(script: str, grace: float = math.inf) -> subprocess.Popen[str]:
    return subprocess.Popen(wrapped_command(["sh", "-c", script], grace), stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("script", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("kill -SEGV $$", -11), ("kill -9 0", -9)]
)
def test_it_ends_as_its_program_does(script: str, code: int) -> None:
    assert start(script).wait(60) == code


def test_a_program_that_is_not_there() -> None:
    done = subprocess.run(wrapped_command(["no-such-program"]), capture_output=True, text=True)
    assert done.returncode == wrapper.CANNOT_RUN
    assert done.stderr == "no-such-program cannot be run: No such file or directory\n"


@pytest.mark.parametrize("end", [None, wrapper.KILL_SIGNAL], ids=["exit", "KILL"])
def test_nothing_is_left_when_it_has_ended(end: signal.Signals | None) -> None:
    process = start(DAEMON + ("exit 0" if end is None else "wait"))
    daemon = int(first_line(process))
    if end is not None:
        process.send_signal(end)
    assert process.wait(60) == (0 if end is None else -signal.SIGKILL)
    assert not Path(f"/proc/{daemon}").exists()


def test_it_can_be_killed_where_signals_were_blocked() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {wrapper.KILL_SIGNAL})
    try:
        process = start("echo up; sleep 600")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert first_line(process) == "up"
    process.send_signal(wrapper.KILL_SIGNAL)
    assert process.wait(60) == -signal.SIGKILL


STOPS_IT = "kill -STOP $PPID; echo $$; exec sleep 600"


def test_it_can_be_killed_where_its_program_has_stopped_it() -> None:
    process = start(STOPS_IT)
    program = int(first_line(process))
    wrapper.kill(process.pid)
    assert process.wait(60) == -signal.SIGKILL
    assert not Path(f"/proc/{program}").exists()


def test_nothing_is_left_when_we_die_while_it_is_stopped() -> None:
    code = (
        "import subprocess, sys; from asyncrl.isolation.child import wrapped_command; "
        "p = subprocess.Popen(wrapped_command(['sh', '-c', sys.argv[1]])); "
        "print(p.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, STOPS_IT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ours:
        pids = [int(first_line(ours)), int(first_line(ours))]
        ends = [os.pidfd_open(pid) for pid in pids]
        ours.kill()
    for end in ends:
        assert select.select([end], [], [], 30)[0], "a process is left"
        os.close(end)


def test_a_program_gets_its_signals_and_has_time_to_end() -> None:
    process = start("trap 'exit 5' TERM; echo up; while :; do sleep 0.01; done")
    assert first_line(process) == "up"
    process.terminate()
    assert process.wait(60) == 5


def test_one_that_ignores_them_is_killed_after_a_while() -> None:
    process = start("trap '' TERM; echo up; while :; do sleep 0.01; done", grace=0.1)
    assert first_line(process) == "up"
    process.terminate()
    assert process.wait(60) == -signal.SIGKILL


def test_pipes_reach_their_end_when_the_program_closes_them() -> None:
    process = start("exec 1>&-; exec sleep 600")
    assert first_line(process) == ""
    process.send_signal(wrapper.KILL_SIGNAL)
    assert process.wait(60) == -signal.SIGKILL


def test_descendants_are_found() -> None:
    process = start("sleep 600 & echo $!; wait")
    grandchild = int(first_line(process))
    try:
        assert {process.pid, grandchild} <= set(wrapper.descendants(os.getpid()))
    finally:
        process.send_signal(wrapper.KILL_SIGNAL)
        process.wait(60)
