"""A TCP proxy between the coordinator and its peers, whose connections can be made bad in mid-run."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

CHUNK = 1 << 16
SLOW = 20_000  # bytes a second that go each way in the mode `slow`


class Proxy:
    """Listens on `port` and passes everything on to `target`, in a thread of its own, until `close`.

    `mode` is one of: pass; hold (connections stay, nothing goes through); slow; duplicate (a chunk now and
    then is sent twice); corrupt (a byte of a chunk now and then is flipped). `cut` ends all connections.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target = target
        self.mode = "pass"
        self.changed = 0
        self._dice = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

        self._thread.start()

    def cut(self) -> None:
        """End all connections; the peers dial again."""
        self._loop.call_soon_threadsafe(self._abort)

    def garble(self, to_peers_only: bool = False) -> None:
        """Both ends of all connections, or those that dialled, are sent bytes that make no sense."""
        for writer in list(self._writers):
            if to_peers_only and writer.get_extra_info("peername")[1] == self.target:
                continue
            self._loop.call_soon_threadsafe(writer.write, b"\xff" * 64)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # -- in the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        serve = asyncio.start_server(self._connected, sock=self._socket)
        self._loop.run_until_complete(serve)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            further, onwards = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # the coordinator is being restarted
            writer.transport.abort()
            return

        self._writers |= {writer, onwards}
        ways = [asyncio.ensure_future(self._pump(*ends)) for ends in ((reader, onwards), (further, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self._writers -= {writer, onwards}
            writer.transport.abort()
            onwards.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        modes: dict[str, Callable[[bytes], Coroutine[Any, Any, bytes]]] = {
            "hold": self._hold_back,
            "slow": self._slowly,
            "duplicate": self._twice,
            "corrupt": self._flipped,
        }
        try:
            while chunk := await reader.read(CHUNK):
                if mode := modes.get(self.mode):
                    chunk = await mode(chunk)
                writer.write(chunk)
                await writer.drain()
        except OSError:
            return

    async def _hold_back(self, chunk: bytes) -> bytes:
        while self.mode == "hold":  # noqa: ASYNC110 (it is set in another thread)
            await asyncio.sleep(0.05)
        return chunk

    async def _slowly(self, chunk: bytes) -> bytes:
        await asyncio.sleep(len(chunk) / SLOW)
        return chunk

    async def _twice(self, chunk: bytes) -> bytes:
        if self._dice.random() < 0.1:
            self.changed += 1
            return chunk + chunk
        return chunk

    async def _flipped(self, chunk: bytes) -> bytes:
        if self._dice.random() < 0.1:
            self.changed += 1
            position = self._dice.randrange(len(chunk))
            return (
                chunk[:position]
                + bytes([chunk[position] ^ (1 << self._dice.randrange(8))])
                + chunk[position + 1 :]
            )
        return chunk
