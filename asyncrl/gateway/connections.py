"""Limits what the connections of all listeners take together, so that nobody keeps agents away.

A connection is a stranger until a request on it has shown a known key; strangers are closed after
HEADER_SECONDS. When there are too many, the oldest connection of the episode with the most is closed. A
stranger counts for the episode of its listener; at the worker's own listener for none. A known connection
counts for the episode whose key it showed last, until that episode ends.

What an episode sends costs the worker's loop time, whatever it is: one-byte chunks, broken requests, large
JSON. An episode that takes more than its share is not read from until its share has grown again.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from aiohttp import web

T = TypeVar("T")

HEADER_SECONDS = 10.0
UNREAD_SECONDS = 5.0  # after an answer; a connection that is reset later was idle, and the answer read
STRANGERS = 256
KNOWN = 4096
READ_BYTES = 1 << 15  # of a connection that are read and parsed at once
LOOP_SHARE = 0.25  # of the loop's time, for all episodes together that take more than they may
LOOP_BURST = 0.5  # seconds of the loop's time that an episode may take at once
HELD_SECONDS = 0.05  # for which nothing is read of an episode that took too much, at least
# Of the loop's time, for what is not measured: an accepted connection, a request with a key, a byte that is
# received.
CONNECTION_SECONDS = 2e-4
REQUEST_SECONDS = 1e-4
BYTE_SECONDS = 1e-9


@dataclass(eq=False)
class _LoopTime:
    """Time of the loop that an episode has left: seconds of CPU, which grow with LOOP_SHARE. While it is not
    `released`, it is held: nothing is read of its connections, and none of its requests is decoded."""

    left: float = field(default_factory=lambda: LOOP_BURST)
    updated: float = field(default_factory=time.monotonic)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.released.set()

    @property
    def held(self) -> bool:
        return not self.released.is_set()

    def take(self, seconds: float) -> None:
        now = time.monotonic()
        self.left = min(LOOP_BURST, self.left + (now - self.updated) * LOOP_SHARE) - seconds
        self.updated = now


class Connections:
    """Makes the protocols of connections from those of `make`, which have no limits."""

    def __init__(self, make: Callable[[], web.RequestHandler]) -> None:
        self._make = make
        self._strangers: dict[asyncio.BaseProtocol, _Bounded] = {}  # the oldest first
        self._known: dict[asyncio.BaseProtocol, _Bounded] = {}
        self._loop_times: WeakKeyDictionary[object, _LoopTime] = WeakKeyDictionary()  # by episode
        self.received = memoryview(bytearray(READ_BYTES))  # what any connection has just received

    def of(self, episode: object = None) -> Callable[[], asyncio.BufferedProtocol]:
        """Return the factory of a listener's protocols. `episode`: the only one that it serves; None: all."""
        return lambda: _Bounded(self, self._make(), episode)

    def trust(self, request: web.Request, episode: object) -> bool:
        """Note that the connection has shown the key of this episode. False if its listener is another's."""
        connection = self._known.get(request.protocol) or self._strangers.get(request.protocol)
        if connection is None or connection.episode not in (None, episode):
            return False

        connection.forget_answer()  # the client has read the answer before
        connection.owner = episode
        self.take(episode, REQUEST_SECONDS)
        connection.hold(self._is_held(episode))
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
                connection.hold(False)

    @contextmanager
    def charged(self, episode: object) -> Iterator[None]:
        """Count the loop's time that the body takes, in which it does not wait, for this episode."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.take(episode, time.thread_time() - started)

    @coroutine
    def charging(self, episode: object, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await `work`, and count the loop's time of each of its steps for this episode."""
        steps = work.__await__()
        try:
            while True:
                with self.charged(episode):
                    try:
                        awaited = next(steps)
                    except StopIteration as end:
                        return cast(T, end.value)
                yield awaited
        finally:
            steps.close()

    def take(self, episode: object, seconds: float) -> None:
        """Count so much of the loop's time for an episode (None: for none). One that took too much is held:
        nothing is read of its connections until its share has grown again."""
        if episode is None:
            return

        loop_time = self._loop_times.setdefault(episode, _LoopTime())
        loop_time.take(seconds)
        if loop_time.left < 0 and not loop_time.held:
            loop_time.released.clear()
            all_held = sum(other.held for other in self._loop_times.values())
            wait = max(HELD_SECONDS, -loop_time.left / LOOP_SHARE * all_held)
            asyncio.get_running_loop().call_later(wait, self._release, episode)
            self._hold(episode, True)

    def _release(self, episode: object) -> None:
        self._loop_times[episode].released.set()
        self._hold(episode, False)
        self.take(episode, 0.0)  # it may have been charged meanwhile

    async def until_released(self, episode: object) -> None:
        """Wait until the episode may take more of the loop's time. Its requests go on one after the other:
        each may make the next one wait again."""
        loop_time = self._loop_times.get(episode)
        while loop_time is not None and loop_time.held:
            await loop_time.released.wait()

    def _hold(self, episode: object, held: bool) -> None:
        for connection in (*self._strangers.values(), *self._known.values()):
            if connection.owner is episode:
                connection.hold(held)

    def _is_held(self, episode: object) -> bool:
        loop_time = self._loop_times.get(episode) if episode is not None else None
        return loop_time is not None and loop_time.held

    def opened(self, one: _Bounded) -> None:
        if len(self._strangers) >= STRANGERS:
            _close_one(self._strangers)
        self._strangers[one.inner] = one
        self.take(one.owner, CONNECTION_SECONDS)
        one.hold(self._is_held(one.owner))

    def closed(self, one: _Bounded) -> None:
        self._strangers.pop(one.inner, None)
        self._known.pop(one.inner, None)


def _close_one(held: dict[asyncio.BaseProtocol, _Bounded]) -> None:
    """Close the oldest connection of the episode with the most."""
    most, _ = Counter(one.owner for one in held.values()).most_common(1)[0]
    oldest = next(inner for inner, one in held.items() if one.owner is most)
    held.pop(oldest).transport.abort()


class _Bounded(asyncio.BufferedProtocol):
    """Hands everything to `inner`, READ_BYTES at most at once. `episode`: that of its listener; `owner`: the
    one that it counts for; None: for none, or that one has ended."""

    transport: asyncio.Transport
    timer: asyncio.TimerHandle
    lose: Callable[[], None] | None = None  # takes note that the last answer was not read
    answer_timer: asyncio.TimerHandle | None = None  # until the last answer counts as read

    def __init__(self, all_of_them: Connections, inner: web.RequestHandler, episode: object) -> None:
        self._all, self.inner, self.episode, self.owner = all_of_them, inner, episode, episode
        self._held, self._paused = False, False
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.timer = asyncio.get_running_loop().call_later(HEADER_SECONDS, transport.abort)
        self._all.opened(self)
        self.inner.connection_made(cast(asyncio.Transport, _Transport(self)))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._all.received

    def buffer_updated(self, nbytes: int) -> None:
        self._all.take(self.owner, nbytes * BYTE_SECONDS)
        with self._all.charged(self.owner):
            self.inner.data_received(bytes(self._all.received[:nbytes]))

    def hold(self, held: bool) -> None:
        """Read nothing until this is called with False."""
        if held is not self._held:
            self._held = held
            self._read_or_wait()

    def pause(self, paused: bool) -> None:
        """Do the same for `inner`, which has too much of what it was given."""
        self._paused = paused
        self._read_or_wait()

    def _read_or_wait(self) -> None:
        if self._held or self._paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

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


class _Transport:
    """The transport of a connection as `inner` has it: what it does not read for now is not read, and what it
    would read again only if its episode is not held."""

    def __init__(self, bounded: _Bounded) -> None:
        self._bounded = bounded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bounded.transport, name)

    def pause_reading(self) -> None:
        self._bounded.pause(True)

    def resume_reading(self) -> None:
        self._bounded.pause(False)
