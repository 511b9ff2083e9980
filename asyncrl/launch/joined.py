"""Runs a process on another machine. Such a process has joined the run: Ray has placed the process, or a
person has invited it.

A ticket describes the process. `JoinedProcess` is the small parent of the role: it makes a directory, starts
the role as the launcher starts its own roles, and sends the files of the role to the coordinator, which
appends the bytes to the files of the run directory:

    RUN_DIR/NAME/elsewhere/LAUNCH-HOST/NAME/logs/rollout-1.log  ──►  RUN_DIR/NAME/logs/rollout-1.log

Files that were sent are removed at the end. Files that could not be sent are kept, and their place is
reported. The next launch removes the files of a launch that was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.launch.placement import TRAINER
from asyncrl.launch.process import LocalSpawner, ProcessSpec, log_path
from asyncrl.launch.run_directory import run_directory
from asyncrl.observe.files import replace_file
from asyncrl.weights.disk import weights_directory
from asyncrl.wire.addresses import launch_of
from asyncrl.wire.messages.channels import ToFileSender
from asyncrl.wire.messages.shared import MAX_PIECE_BYTES, WrittenBytes
from asyncrl.wire.sockets import Endpoints, Link, identity

POLL_SECONDS = 0.1  # Seconds between two polls of the role.
# Seconds between two looks at the role's files, and the deadline for sending new bytes.
SEND_INTERVAL = 2.0
SEND_TIMEOUT = 5.0


@dataclass(frozen=True)
class Ticket:
    """Describes a process of a run to another machine. `start_file_text`: content of the launcher's file
    `started`, which gives the day of the run; `working_directory`: the launcher's directory, "" to stay in
    the current one; `secret_variables`: secrets that the process needs."""

    process_spec: ProcessSpec
    config: RunConfig
    endpoints: Endpoints
    start_file_text: str
    working_directory: str = ""
    secret_variables: dict[str, str] = field(default_factory=dict, repr=False)

    def enter_directory(self) -> None:
        """Enter the launcher's directory, and set the secret variables. Raises ConfigError."""
        if self.working_directory and not Path(self.working_directory).is_dir():
            raise ConfigError(
                f"{socket.gethostname()}: the launcher's directory {self.working_directory} does not exist "
                "on this machine; start asyncrl in a directory that all machines have"
            )

        os.chdir(self.working_directory or ".")
        os.environ.update(self.secret_variables)


class JoinedProcess:
    """Starts the role of a ticket as its parent process. Raises ConfigError if the run directory cannot be
    written on this machine."""

    def __init__(self, ticket: Ticket) -> None:
        host = socket.gethostname()
        process_spec = ticket.process_spec
        run_name = ticket.config.name
        launch_name = f"{launch_of(process_spec.incarnation)}-{host}"
        launch_directory = run_directory(ticket.config).absolute() / "elsewhere" / launch_name
        run_dir = launch_directory / run_name
        config = replace(ticket.config, run_dir=str(launch_directory))
        # The directory holds the configuration of the process, and records how much of its files was sent.
        process_directory = run_dir / process_spec.process.name

        with ConfigError.instead_of(OSError, text=f"run_dir: cannot be written on {host}"):
            self._directory_lock = claim_directory(launch_directory, run_name, host)
            process_directory.mkdir(parents=True, exist_ok=True)
            (process_directory / "started").write_text(ticket.start_file_text)
            # Written elsewhere first: other processes of the launch may read the file now.
            (process_directory / "started").replace(run_dir / "started")
            (process_directory / "config.yaml").write_bytes(msgspec.yaml.encode(config))

        self._process_directory = process_directory
        self._sent_files = SentFiles(process_directory, ticket)
        self.role_process = LocalSpawner(run_dir, ticket.endpoints, process_directory)(process_spec)

    def wait_for_exit(self, show_log: bool = False) -> tuple[int, str]:
        """Send what the role writes until the role has ended. Return its exit code, and the place of files
        that could not be sent ('' if all were sent). `show_log`: copy the role's log to standard output."""
        last_sent_at = 0.0
        with log_path(self._process_directory.parent, self.role_process.name).open("rb") as log:
            exit_code = None
            while exit_code is None:
                time.sleep(POLL_SECONDS)
                exit_code = self.role_process.poll()
                if show_log:
                    show_log = copy_log_to_stdout(log)
                if time.monotonic() > last_sent_at + SEND_INTERVAL:
                    self._sent_files.send_new()
                    last_sent_at = time.monotonic()

        if all_sent := self._sent_files.send_new(is_last=True):
            (self._process_directory / "config.yaml").unlink(missing_ok=True)
        self._sent_files.link.close()
        release_directory(self._directory_lock, self._process_directory.parent)
        return exit_code, "" if all_sent else f"{socket.gethostname()}:{self._process_directory.parent}"


def copy_log_to_stdout(log: BinaryIO) -> bool:
    """Write the new part of a log to standard output. Return False if standard output is closed; the role
    goes on."""
    if log.tell() > os.fstat(log.fileno()).st_size:  # The log was cut because of its length
        log.seek(0, os.SEEK_END)

    try:
        sys.stdout.buffer.write(log.read())
        sys.stdout.flush()
    except OSError:
        # Python flushes standard output at exit, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


class SentFiles:
    """Sends the files that a role writes, piece by piece. A file records how much was sent, so that a process
    that is started again on this machine continues from there."""

    def __init__(self, process_directory: Path, ticket: Ticket) -> None:
        process = ticket.process_spec.process
        self._endpoints = ticket.endpoints
        self._run_dir = process_directory.parent
        self._identity = identity(process.role, process.index)
        self._last_name = f"logs/{process.name}.log"  # file whose bytes were sent last
        self._file_patterns = [self._last_name, f"timeline/{process.name}.jsonl"]
        if process.role == TRAINER:
            self._file_patterns.append(f"ratios/step-*-{process.index}-*.jsonl")

        self._progress_file = process_directory / "sent.json"
        self.link = self._open_link()
        self._sent_bytes: dict[str, int] = {}
        with suppress(OSError, msgspec.DecodeError):
            self._sent_bytes = msgspec.json.decode(self._progress_file.read_bytes(), type=dict[str, int])

    def send_new(self, is_last: bool = False) -> bool:
        """Send all new bytes. Return False if the coordinator has not confirmed them within SEND_TIMEOUT. In
        that case the socket is closed, so that nothing waits in the socket, and the next call dials again and
        first sends no bytes."""
        deadline = time.monotonic() + SEND_TIMEOUT
        all_taken = self._send_piece(self._last_name, b"", deadline) and all(
            self._send_piece(name, data, deadline) for name, data in self._unsent_pieces()
        )
        if all_taken and is_last:
            all_taken = self._send_piece(self._last_name, b"", deadline, is_last)

        if not all_taken:
            self.link.close()
            self.link = self._open_link()
        return all_taken

    def _unsent_pieces(self) -> Iterator[tuple[str, bytes]]:
        """Yield the bytes of each file that were not sent yet, at most MAX_PIECE_BYTES at once."""
        matching_paths = (
            path for pattern in self._file_patterns for path in sorted(self._run_dir.glob(pattern))
        )
        paths = {str(path.relative_to(self._run_dir)): path for path in matching_paths}
        self._sent_bytes = {name: sent for name, sent in self._sent_bytes.items() if name in paths}

        for name, path in paths.items():
            with suppress(FileNotFoundError), path.open("rb") as file:  # old ratio files are deleted
                size = file.seek(0, os.SEEK_END)
                # A long log is cut, and may be shorter than the bytes that were sent.
                self._sent_bytes[name] = min(self._sent_bytes.get(name, 0), size)
                while file.seek(self._sent_bytes[name]) < size:
                    yield name, file.read(MAX_PIECE_BYTES)

    def _send_piece(self, name: str, piece: bytes, deadline: float, is_last: bool = False) -> bool:
        """Send bytes of a file, and wait until the coordinator has confirmed them."""
        offset = self._sent_bytes.get(name, 0)
        self._last_name = name
        self.link.send(WrittenBytes(name, offset, is_last), (piece,))

        while (seconds_left := deadline - time.monotonic()) > 0 and not self.link.refused:
            answer = None
            with suppress(ProtocolError):
                answer = self.link.receive(min(seconds_left, POLL_SECONDS))

            if answer and answer[0].name == name and answer[0].size >= offset:
                self._sent_bytes[name] = answer[0].size
                with suppress(OSError):
                    replace_file(self._progress_file, msgspec.json.encode(self._sent_bytes))
                return True

        return False

    def _open_link(self) -> Link:
        return Link(self._endpoints.bulk, ToFileSender, self._identity, self._endpoints.keys)


def claim_directory(launch_directory: Path, run_name: str, host: str) -> int:
    """Make the directory of a launch on this machine, and lock the directory while this process lives; remove
    directories of earlier launches on this machine that no process has locked. Return the lock. Raises
    OSError."""
    while (lock := lock_shared(launch_directory)) is None:
        pass

    for other_launch in launch_directory.parent.glob(f"*-{host}"):
        with suppress(OSError):  # Another process has just removed the directory
            if other_launch != launch_directory:
                release_directory(
                    os.open(other_launch, os.O_RDONLY), other_launch / run_name, launch_over=True
                )
    return lock


def lock_shared(directory: Path) -> int | None:
    """Make a directory and lock it. Return None if the last process of an earlier launch has just removed
    it."""
    with suppress(FileNotFoundError):
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if directory.exists() and os.path.samestat(os.fstat(lock), directory.stat()):
            return lock
        os.close(lock)
    return None


def release_directory(lock: int, run_dir: Path, launch_over: bool = False) -> None:
    """Remove the files of a launch on this machine, unless a process has locked the directory: weights, also
    the caches of server supervisors in shared memory; and all other files, if the files of every process were
    sent or if `launch_over`."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        cache_directory = weights_directory("shm", run_dir, run_dir.name, needed_bytes=0)
        all_sent = launch_over or not any(run_dir.glob("*/config.yaml"))
        for directory in (cache_directory, run_dir.parent if all_sent else run_dir / "weights"):
            shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)
