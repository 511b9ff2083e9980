"""Limits connections over all listeners, so that no client keeps agents away.

    connection_made ──► a stranger ──► buffer_updated ──► inner: aiohttp reads a request
          answer_request ──► trust_connection: the request has a known key ──► note_answer ──► connection_lost

A connection is a stranger until a request on it has shown a known key; strangers are closed after
HEADER_SECONDS. When there are too many, the oldest connection of the episode with the most is closed. A
stranger counts for the episode of its listener; at the worker's own listener for none. A known connection
counts for the episode whose key it showed last, until that episode ends. That episode is also charged for the
loop time of the connection (loop_time.py).
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from aiohttp import web

from asyncrl.gateway.loop_time import LoopTimes

T = TypeVar("T")

HEADER_SECONDS = 10.0
UNREAD_SECONDS = 5.0  # after an answer; a later reset means that the client has read the answer
MAX_STRANGERS = 256
MAX_KNOWN = 4096
READ_BYTES = 1 << 15  # bytes of a connection that are read and parsed at once
# Estimates of loop time that is not measured, in seconds: for an accepted connection, for a request (the
# start, and sending the answer), for a received byte.
CONNECTION_SECONDS = 2e-4
REQUEST_SECONDS = 1e-4
BYTE_SECONDS = 1e-9


class Connections:
    """Makes connection protocols with limits from the protocols of `make`, which have no limits."""

    def __init__(self, make: Callable[[], web.RequestHandler]) -> None:
        self._make_handler = make
        self._strangers: dict[asyncio.BaseProtocol, _LimitedConnection] = {}  # oldest first
        self._known_connections: dict[asyncio.BaseProtocol, _LimitedConnection] = {}
        self.loop_times = LoopTimes(self._hold_connections)
        # One buffer for all connections: the bytes that a connection has just received.
        self.receive_buffer = memoryview(bytearray(READ_BYTES))

    def protocol_factory(self, episode: object = None) -> Callable[[], asyncio.BufferedProtocol]:
        """Return the protocol factory of a listener. `episode`: the only episode served; None: all
        episodes."""
        return lambda: _LimitedConnection(self, self._make_handler(), episode)

    def note_opened(self, connection: _LimitedConnection) -> None:
        """Count a stranger; another stranger is closed if there are too many."""
        if len(self._strangers) >= MAX_STRANGERS:
            _close_oldest(self._strangers)
        self._strangers[connection.inner] = connection
        self.loop_times.charge_episode(connection.owner, CONNECTION_SECONDS)
        connection.hold_reading(self.loop_times.is_held(connection.owner))

    async def answer_request(self, request: web.Request, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which answers a request, once the connection's episode is not held, and charge the
        loop time to that episode, or to the episode whose key `work` finds."""
        connection = self._known_connections.get(request.protocol) or self._strangers.get(request.protocol)
        if connection is None:  # the connection was closed
            return await work

        try:
            await self.loop_times.until_released(connection.owner)
            self.loop_times.charge_episode(connection.owner, REQUEST_SECONDS)
            return await self.loop_times.charge_steps(work, lambda: connection.owner)
        finally:
            work.close()

    def trust_connection(self, request: web.Request, episode: object) -> bool:
        """Note that a connection has shown the key of this episode. False: the connection is closed, or its
        listener serves another episode."""
        connection = self._known_connections.get(request.protocol) or self._strangers.get(request.protocol)
        if connection is None or connection.episode not in (None, episode):
            return False

        connection.forget_answer()  # a further request shows that the client has read the previous answer
        connection.owner = episode
        connection.hold_reading(self.loop_times.is_held(episode))

        if self._strangers.pop(request.protocol, None):
            connection.become_known()
            self._known_connections[request.protocol] = connection
            if len(self._known_connections) > MAX_KNOWN:
                _close_oldest(self._known_connections)

        return True

    def note_answer(self, request: web.Request, lose: Callable[[], None]) -> None:
        """Note that an answer was written. `lose` is called if the client closes the connection unread."""
        connection = self._known_connections.get(request.protocol)
        if connection is not None and connection.owner is not None:
            connection.remember_answer(lose)

    def note_closed(self, connection: _LimitedConnection) -> None:
        self._strangers.pop(connection.inner, None)
        self._known_connections.pop(connection.inner, None)

    def end_episode(self, episode: object) -> None:
        """Close the connections of the episode's own listeners, and forget the episode: clients keep
        connections to the worker's listener for long. Requests that wait to be decoded go on."""
        self.loop_times.end_episode(episode)
        for connection in (*self._strangers.values(), *self._known_connections.values()):
            if connection.episode is episode:
                connection.transport.abort()
            if connection.owner is episode:
                connection.owner = None
                connection.forget_answer()
                connection.hold_reading(False)

    def _hold_connections(self, episode: object, is_held: bool) -> None:
        for connection in (*self._strangers.values(), *self._known_connections.values()):
            if connection.owner is episode:
                connection.hold_reading(is_held)


def _close_oldest(by_protocol: dict[asyncio.BaseProtocol, _LimitedConnection]) -> None:
    """Close the oldest connection of the episode with the most."""
    by_owner = Counter(connection.owner for connection in by_protocol.values())
    owner = by_owner.most_common(1)[0][0]
    oldest = next(inner for inner, connection in by_protocol.items() if connection.owner is owner)
    by_protocol.pop(oldest).transport.abort()


class _LimitedConnection(asyncio.BufferedProtocol):
    """Passes all data to `inner`, at most READ_BYTES at once. `episode`: the listener's episode; `owner`: the
    episode that the connection counts for (None: for no episode, or the episode has ended)."""

    transport: asyncio.Transport
    stranger_timer: asyncio.TimerHandle | None = None  # closes a stranger; stopped while the stranger is held
    note_loss: Callable[[], None] | None = None  # called if the last answer was not read
    answer_timer: asyncio.TimerHandle | None = None  # runs until the last answer counts as read

    def __init__(self, connections: Connections, inner: web.RequestHandler, episode: object) -> None:
        self._connections = connections
        self.inner = inner
        self.episode = episode
        self.owner = episode

        self._is_held = False
        self._is_paused = False
        self._is_stranger = True
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._limit_stranger()
        self._connections.note_opened(self)
        self.inner.connection_made(cast(asyncio.Transport, _LimitedTransport(self)))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connections.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        loop_times = self._connections.loop_times
        loop_times.charge_episode(self.owner, nbytes * BYTE_SECONDS)
        with loop_times.charging_episode(self.owner):
            self.inner.data_received(bytes(self._connections.receive_buffer[:nbytes]))

    def hold_reading(self, is_held: bool) -> None:
        """Read nothing until this is called with False."""
        if is_held is not self._is_held:
            self._is_held = is_held
            self._read_or_wait()
            self._limit_stranger()

    def become_known(self) -> None:
        self._is_stranger = False
        self._limit_stranger()

    def _limit_stranger(self) -> None:
        """Close a stranger after HEADER_SECONDS in which its request could be read."""
        if self.stranger_timer is not None:
            self.stranger_timer.cancel()
            self.stranger_timer = None
        if self._is_stranger and not self._is_held:
            loop = asyncio.get_running_loop()
            self.stranger_timer = loop.call_later(HEADER_SECONDS, self.transport.abort)

    def pause_inner_reading(self, is_paused: bool) -> None:
        """Stop or resume reading, as `inner` demands when data waits there."""
        self._is_paused = is_paused
        self._read_or_wait()

    def _read_or_wait(self) -> None:
        if self._is_held or self._is_paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def remember_answer(self, lose: Callable[[], None]) -> None:
        self.note_loss = lose
        self.answer_timer = asyncio.get_running_loop().call_later(UNREAD_SECONDS, self._assume_read)

    def forget_answer(self) -> None:
        self.note_loss = None
        if self.answer_timer is not None:
            self.answer_timer.cancel()
            self.answer_timer = None

    def _assume_read(self) -> None:
        if self.transport.is_closing():
            return  # with an empty buffer, whatever was in it: `connection_lost` is about to decide

        lose = self.note_loss
        self.forget_answer()
        if lose is not None and (self._is_held or self.transport.get_write_buffer_size() > 0):
            self.remember_answer(lose)  # the client still reads, or its reset is not read

    def connection_lost(self, exc: BaseException | None) -> None:
        self.become_known()  # stops the timer: the connection is closed
        self._connections.note_closed(self)

        if self.note_loss is not None:
            accepted_socket = self.transport.get_extra_info("socket")
            # A reset: the client closed the connection before reading everything.
            was_reset = (
                accepted_socket is not None
                and accepted_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
            )
            if exc is not None or was_reset:
                self.note_loss()

        self.forget_answer()
        self.inner.connection_lost(exc)


class _LimitedTransport:
    """The transport of `inner`: reading stops when `inner` pauses reading, and resumes only if the episode is
    not held either."""

    def __init__(self, bounded: _LimitedConnection) -> None:
        self._bounded = bounded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bounded.transport, name)

    def pause_reading(self) -> None:
        self._bounded.pause_inner_reading(True)

    def resume_reading(self) -> None:
        self._bounded.pause_inner_reading(False)
