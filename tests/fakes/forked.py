"""Processes of tests, forked from one that has the slow imports behind it (`warm`), once per pytest process.

    pytest ──asks──► warm process ──forks──► launcher: `asyncrl train`
                                                │ forks, while it has one thread
                                                ▼
                                             forker ──forks──► wrapper ──forks──► role
                                             (ends with the launcher, and all roles end with it)

`FORKED` runs functions in such processes, `asyncrl` runs commands. A fork has only the thread that asked for
it, so a run's roles are forked by a process that does nothing else. All else is as after `exec`: variables,
sessions, signals, exit codes, and the arguments in /proc.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.forkserver import read_signed, write_signed
from pathlib import Path
from types import SimpleNamespace
from typing import IO, NoReturn
from unittest import mock

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.fakes.warm"])
REQUEST = 1 << 17  # bytes of the arguments and variables of a role, at most
ROLE = ["-m", "asyncrl.launch.role"]


class Forked:
    """A forked process, with the used methods of `subprocess.Popen`.

    `wait_for_exit` waits for so many seconds, or for ever, and returns the exit code.
    """

    def __init__(self, pid: int, wait_for_exit: Callable[[float | None], int | None]) -> None:
        self.pid = pid
        self._wait_for_exit = wait_for_exit
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._wait_for_exit(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._wait_for_exit(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def nothing() -> None: ...


def asyncrl(
    arguments: Sequence[str],
    out: Path,
    cwd: Path,
    variables: Mapping[str, str],
    stdin_text: str = "",
    first: Callable[[], None] = nothing,
) -> Forked:
    """Start a command, whose output is added to the file `out` and whose standard input is `stdin_text`.

    `first` is called in the new process before anything else.
    """
    process = FORKED.Process(target=_command, args=([*arguments], out, cwd, {**variables}, stdin_text, first))
    process.start()
    assert process.pid is not None

    def wait_for_exit(seconds: float | None) -> int | None:
        process.join(seconds)
        return process.exitcode

    return Forked(process.pid, wait_for_exit)


# -- the launcher --------------------------------------------------------------------------------------


def _command(
    arguments: list[str],
    out: Path,
    cwd: Path,
    variables: dict[str, str],
    stdin_text: str,
    first: Callable[[], None],
) -> NoReturn:
    from asyncrl import cli
    from asyncrl.launch import process

    stdin, giver = os.pipe()
    os.write(giver, stdin_text.encode())  # less than a pipe holds
    os.close(giver)

    output = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _begin([sys.executable, "-m", "asyncrl.cli", *arguments], variables, stdin, output)
    os.chdir(cwd)

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (forker := os.fork()) == 0:
        ours.close()
        _fork_roles(theirs)

    theirs.close()
    forking = SimpleNamespace(Popen=partial(_start_role, ours), STDOUT=subprocess.STDOUT)
    with mock.patch.object(process, "subprocess", forking):
        first()
        code = cli.main(arguments)

    ours.close()
    os.waitpid(forker, 0)
    sys.exit(code)


def _start_role(
    forker: socket.socket,
    command: list[str],
    stdin: int,
    stdout: IO[bytes],
    stderr: int,
    env: dict[str, str],
    start_new_session: bool,
) -> Forked:
    """In place of `subprocess.Popen`, for `LocalSpawner`."""
    assert start_new_session and stderr == subprocess.STDOUT
    status, theirs = os.pipe()
    socket.send_fds(forker, [pickle.dumps((command, env))], [stdin, stdout.fileno(), theirs])
    os.close(theirs)

    def wait_for_exit(seconds: float | None) -> int | None:
        return read_signed(status) if select.select([status], [], [], seconds)[0] else None

    return Forked(read_signed(status), wait_for_exit)


# -- the forker, and what it forks -----------------------------------------------------------------------


def _fork_roles(requests: socket.socket) -> NoReturn:
    """Fork the requested processes, and report the pid and the exit code of each, until the launcher has
    ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the other processes of a job
    running: dict[int, tuple[int, int]] = {}  # pid and the pipe that its exit code goes to
    while True:
        for ready in select.select([requests.fileno(), *running], [], [])[0]:
            if ready in running:
                pid, status = running.pop(ready)
                write_signed(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(ready)
                os.close(status)
                continue

            request, descriptors, _, _ = socket.recv_fds(requests, REQUEST, 3)
            if not request:
                os._exit(0)
            stdin, stdout, status = descriptors
            if (pid := os.fork()) == 0:
                _wrap(*pickle.loads(request), stdin, stdout)

            os.close(stdin)
            os.close(stdout)
            write_signed(status, pid)
            running[os.pidfd_open(pid)] = pid, status


def _wrap(command: list[str], variables: dict[str, str], stdin: int, stdout: int) -> NoReturn:
    """Become the wrapper of a role. `command`: the command of `isolation.child.wrapped`."""
    from asyncrl.isolation import wrapper

    at = command.index(wrapper.__file__)
    _, grace, files, *program = command[at + 1 :]
    os.setsid()
    _begin(command, variables, stdin, stdout)

    os.execvp = _become  # type: ignore[assignment]
    wrapper.main(os.getppid(), float(grace), int(files), program)
    raise AssertionError("it ends the process")


def _become(file: str, command: Sequence[str]) -> NoReturn:
    """In place of `execvp` in the wrapper's child: become the role."""
    from asyncrl.launch import role

    signal.set_wakeup_fd(-1)
    _begin([*command], dict(os.environ))
    assert command[1:3] == ROLE, command
    sys.path.insert(0, os.getcwd())
    role.leave(role.main([*command[3:]]))


def _begin(command: list[str], variables: dict[str, str], *standard: int) -> None:
    """What `exec`, and a Python that starts, would do: standard input and output, no other open files,
    variables, signals, the arguments as others see them."""
    for number, fd in enumerate((*standard, *standard[-1:])):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    multiprocessing.set_start_method(None, force=True)  # as it is before one was asked for
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # of a file that is closed

    os.environ.clear()
    os.environ.update(variables)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=bool(variables.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    with open("/proc/self/stat") as stat:
        begin, end = map(int, stat.read().rpartition(")")[2].split()[45:47])
    title = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, title.ljust(end - begin, b"\0"), end - begin)
