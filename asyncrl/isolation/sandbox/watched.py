"""A process that the warden started: its bounded output, and its end."""

from __future__ import annotations

import os
import select
import struct
import time

from asyncrl.isolation.sandbox import interpreter

LINK_FD = 0  # the warden's connection to the owner
PIPE_BYTES = 65_536


class BoundedOutput:
    """Keep the first and the last `limit_bytes` / 2 of an output; the middle is left out."""

    def __init__(self, limit_bytes: int) -> None:
        self._half_limit = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._seen_bytes = 0

    def add_bytes(self, data: bytes) -> None:
        self._seen_bytes += len(data)
        room = self._half_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half_limit + PIPE_BYTES:
            del self._tail[: -self._half_limit]

    def join_ends(self) -> tuple[int, bytes]:
        """Return the number of bytes left out, and the output with a note in their place."""
        tail = bytes(self._tail[-self._half_limit :])
        omitted = self._seen_bytes - len(self._head) - len(tail)
        note = f"\n[{omitted} bytes left out]\n".encode() if omitted else b""
        return omitted, bytes(self._head) + note + tail


class WatchedProcess:
    """Watch a child and its output pipe. `control_fd`: the socket that brings cells to an interpreter, or
    -1."""

    def __init__(self, pid: int, output_fd: int, control_fd: int) -> None:
        self.pid = pid
        self.control_fd = control_fd
        self._output_fd = output_fd
        self._exit_fd = os.pidfd_open(pid)  # readable when the process has ended

    def close(self) -> None:
        for fd in {self._exit_fd, self._output_fd, self.control_fd} - {-1}:
            os.close(fd)

    def watch_output(self, output: BoundedOutput, seconds: float) -> bool:
        """Collect output. True: the process or the cell has ended; False: `seconds` have passed. EOFError:
        the owner has closed the connection."""
        deadline = time.monotonic() + seconds
        poll = select.poll()

        end_fds = {self._exit_fd, self.control_fd} - {-1}
        for fd in {LINK_FD, self._output_fd, *end_fds} - {-1}:
            poll.register(fd, select.POLLIN)

        while (remaining := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(remaining * 1000):
                if fd == LINK_FD:
                    raise EOFError
                if fd in end_fds:
                    return True
                if not self._read_output(output):
                    poll.unregister(fd)  # every writer has closed the pipe
        return False

    def drain_output(self, output: BoundedOutput) -> None:
        """Read the rest of the pipe, up to a limit: a running process could write for ever."""
        for _ in range(PIPE_BYTES // 4096):
            if not self._read_output(output):
                return

    def send_cell(self, cell_number: int, source: bytes) -> bool:
        """Send a cell. False: the interpreter has not taken the cell."""
        frame = interpreter.CELL_HEADER.pack(cell_number, len(source)) + source
        try:
            return os.write(self.control_fd, frame) == len(frame)
        except OSError:
            return False

    def cell_raised(self, cell_number: int) -> bool | None:
        """Return whether the cell raised. None: the interpreter has ended or broken the protocol."""
        try:
            answered_number, raised = interpreter.CELL_REPLY.unpack(os.read(self.control_fd, 64))
        except (OSError, struct.error):
            return None
        return raised if answered_number == cell_number else None

    def _read_output(self, output: BoundedOutput) -> bool:
        try:
            data = os.read(self._output_fd, PIPE_BYTES)
        except BlockingIOError:
            return False
        output.add_bytes(data)
        return bool(data)
