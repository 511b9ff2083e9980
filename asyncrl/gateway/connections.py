"""Limits the connections of all listeners together, so that nobody keeps agents away.

A connection is a stranger until a request on it has shown a known key; strangers are closed after
HEADER_SECONDS. When there are too many, the oldest connection of the episode with the most is closed. A
stranger counts for the episode of its listener; at the worker's own listener for none. A known connection
counts for the episode whose key it showed last, until that episode ends.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable

from aiohttp import web

HEADER_SECONDS = 10.0
UNREAD_SECONDS = 5.0  # after an answer; a connection that is reset later was idle, and the answer read
STRANGERS = 256
KNOWN = 4096


class Connections:
    """Makes the protocols of connections from those of `make`, which have no limits."""

    def __init__(self, make: Callable[[], web.RequestHandler]) -> None:
        self._make = make
        self._strangers: dict[asyncio.BaseProtocol, _Bounded] = {}  # the oldest first
        self._known: dict[asyncio.BaseProtocol, _Bounded] = {}

    def of(self, episode: object = None) -> Callable[[], asyncio.Protocol]:
        """Return the factory of a listener's protocols. `episode`: the only one that it serves; None: all."""
        return lambda: _Bounded(self, self._make(), episode)

    def trust(self, request: web.Request, episode: object) -> bool:
        """Note that the connection has shown the key of this episode. False if its listener is another's."""
        connection = self._known.get(request.protocol) or self._strangers.get(request.protocol)
        if connection is None or connection.episode not in (None, episode):
            return False

        connection.forget_answer()  # the client has read the answer before
        connection.owner = episode
        if self._strangers.pop(request.protocol, None):
            connection.timer.cancel()
            self._known[request.protocol] = connection
            if len(self._known) > KNOWN:
                _close_one(self._known)
        return True

    def answered(self, request: web.Request, lose: Callable[[], None]) -> None:
        """An answer was written. `lose` is called if the client closes the connection without reading it."""
        connection = self._known.get(request.protocol)
        if connection is not None and connection.owner is not None:
            connection.remember_answer(lose)

    def end(self, episode: object) -> None:
        """Close the connections of the episode's own listeners, and let go of the episode: clients keep their
        connections to the worker's listener for long."""
        for connection in (*self._strangers.values(), *self._known.values()):
            if connection.episode is episode:
                connection.transport.abort()
            if connection.owner is episode:
                connection.owner = None
                connection.forget_answer()

    def opened(self, one: _Bounded) -> None:
        if len(self._strangers) >= STRANGERS:
            _close_one(self._strangers)
        self._strangers[one.inner] = one

    def closed(self, one: _Bounded) -> None:
        self._strangers.pop(one.inner, None)
        self._known.pop(one.inner, None)


def _close_one(held: dict[asyncio.BaseProtocol, _Bounded]) -> None:
    """Close the oldest connection of the episode with the most."""
    most, _ = Counter(one.owner for one in held.values()).most_common(1)[0]
    oldest = next(inner for inner, one in held.items() if one.owner is most)
    held.pop(oldest).transport.abort()


class _Bounded(asyncio.Protocol):
    """Hands everything to `inner`. `episode`: that of its listener; `owner`: the one that it counts for;
    None: for none, or that one has ended."""

    transport: asyncio.Transport
    timer: asyncio.TimerHandle
    lose: Callable[[], None] | None = None  # takes note that the last answer was not read
    answer_timer: asyncio.TimerHandle | None = None  # until the last answer counts as read

    def __init__(self, all_of_them: Connections, inner: web.RequestHandler, episode: object) -> None:
        self._all, self.inner, self.episode, self.owner = all_of_them, inner, episode, episode
        self.data_received, self.eof_received = inner.data_received, inner.eof_received  # type: ignore[method-assign]
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.timer = asyncio.get_running_loop().call_later(HEADER_SECONDS, transport.abort)
        self._all.opened(self)
        self.inner.connection_made(transport)

    def remember_answer(self, lose: Callable[[], None]) -> None:
        self.lose = lose
        self.answer_timer = asyncio.get_running_loop().call_later(UNREAD_SECONDS, self._assume_read)

    def forget_answer(self) -> None:
        self.lose = None
        if self.answer_timer is not None:
            self.answer_timer.cancel()
            self.answer_timer = None

    def _assume_read(self) -> None:
        if self.transport.is_closing():
            return  # with an empty buffer, whatever was in it: `connection_lost` is about to decide

        lose = self.lose
        self.forget_answer()
        if lose is not None and self.transport.get_write_buffer_size() > 0:
            self.remember_answer(lose)  # the client still reads

    def connection_lost(self, exc: BaseException | None) -> None:
        self.timer.cancel()
        self._all.closed(self)
        if self.lose is not None and (exc is not None or _was_reset(self.transport)):
            self.lose()
        self.forget_answer()
        self.inner.connection_lost(exc)


def _was_reset(transport: asyncio.Transport) -> bool:
    """True if the peer closed the connection before it had read all."""
    connection = transport.get_extra_info("socket")
    return connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
