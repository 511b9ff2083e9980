"""A process that the warden started: its output, which is bounded, and its end."""

from __future__ import annotations

import os
import select
import struct
import time

from asyncrl.isolation.sandbox import interpreter

LINK = 0  # the warden's connection to the owner
PIPE = 65_536


class BoundedOutput:
    """The first and the last `limit` / 2 bytes of an output; the middle is left out."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0

    def add(self, data: bytes) -> None:
        self._seen += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half + PIPE:
            del self._tail[: -self._half]

    def join(self) -> tuple[int, bytes]:
        """Return how many bytes were left out, and the output with a note in their place."""
        tail = bytes(self._tail[-self._half :])
        omitted = self._seen - len(self._head) - len(tail)
        note = f"\n[{omitted} bytes left out]\n".encode() if omitted else b""
        return omitted, bytes(self._head) + note + tail


class WatchedProcess:
    """A child, its output pipe and `control`, the socket that brings an interpreter its cells; or -1."""

    def __init__(self, pid: int, output: int, control: int) -> None:
        self.pid = pid
        self.control = control
        self._output = output
        self._ended = os.pidfd_open(pid)  # readable when it has ended

    def close(self) -> None:
        for fd in {self._ended, self._output, self.control} - {-1}:
            os.close(fd)

    def watch(self, kept: BoundedOutput, seconds: float) -> bool:
        """Collect output. True when the process or its cell has ended, False after `seconds`. EOFError when
        the owner has closed the connection."""
        until = time.monotonic() + seconds
        poll = select.poll()
        ends = {self._ended, self.control} - {-1}
        for fd in {LINK, self._output, *ends} - {-1}:
            poll.register(fd, select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                if fd == LINK:
                    raise EOFError
                if fd in ends:
                    return True
                if not self._collect(kept):
                    poll.unregister(fd)  # every writer has closed it
        return False

    def drain(self, kept: BoundedOutput) -> None:
        """Read what is left in the pipe. Bounded: a process that still runs could write for ever."""
        for _ in range(PIPE // 4096):
            if not self._collect(kept):
                return

    def send_cell(self, number: int, source: bytes) -> bool:
        """False when the interpreter has not taken it."""
        frame = interpreter.CELL.pack(number, len(source)) + source
        try:
            return os.write(self.control, frame) == len(frame)
        except OSError:
            return False

    def cell_raised(self, number: int) -> bool | None:
        """True if the cell raised. None when the interpreter has ended or sent something else."""
        try:
            found, raised = interpreter.DONE.unpack(os.read(self.control, 64))
        except (OSError, struct.error):
            return None
        return raised if found == number else None

    def _collect(self, kept: BoundedOutput) -> bool:
        try:
            data = os.read(self._output, PIPE)
        except BlockingIOError:
            return False
        kept.add(data)
        return bool(data)
