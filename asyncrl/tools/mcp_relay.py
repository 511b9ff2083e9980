"""Between a worker and the MCP server that it started: bounds what the server sends.

    worker ── stdin ───────────────────────────────► server
    worker ◄─ stdout: messages ─────── this program ◄── stdout
    worker ◄─ a file: the last bytes ─ this program ◄── stderr, and lines that are no messages

`python -S mcp_relay.py COMMAND...`, with a file as standard error. Its reason: `stdio_client` of the package
`mcp` keeps a line of any length in memory, and logs a traceback for each line that is no message.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import IO

MAX_BYTES = 8 << 20  # of one message
MAX_NOISE = 1 << 18  # bytes on standard output that are no messages
TAIL = 2000  # bytes of standard error that are kept
FLUSH_SECONDS = 0.5  # to read what an ended server wrote; its children may hold its pipes open

_tail = b""
_lock = threading.Lock()


def keep(data: bytes) -> None:
    """The file on standard error holds the last TAIL bytes of all that was kept."""
    global _tail
    with _lock:
        _tail = (_tail + data)[-TAIL:]
        os.ftruncate(2, 0)
        os.pwrite(2, _tail, 0)


def keep_all(errors: IO[bytes]) -> None:
    while data := os.read(errors.fileno(), 1 << 16):
        keep(data)


def pass_on(output: IO[bytes]) -> None:
    """Pass on lines that are messages. More than MAX_NOISE bytes of other lines end the server."""
    noise = 0
    while line := output.readline(MAX_BYTES):
        if is_message(line):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            continue
        keep(line)
        noise += len(line)
        if noise > MAX_NOISE:
            keep(b"\nit sent %d bytes that are no MCP messages of at most %d bytes" % (noise, MAX_BYTES))
            os._exit(1)
    os.close(1)


def is_message(line: bytes) -> bool:
    """Servers may log in JSON, too."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "jsonrpc" in found


def main(command: list[str]) -> None:
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        keep(f"{command[0]} cannot be run: {error.strerror}".encode())
        return
    assert server.stdout is not None and server.stderr is not None
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    readers = [
        threading.Thread(target=pass_on, args=(server.stdout,), daemon=True),
        threading.Thread(target=keep_all, args=(server.stderr,), daemon=True),
    ]
    for reader in readers:
        reader.start()
    server.wait()
    for reader in readers:
        reader.join(FLUSH_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
