"""Bounds on the connections of a listener, so that strangers cannot keep agents away.

A connection is a stranger's until a request on it has shown a known key. Of strangers the newest are served:
the oldest is closed when there are too many, and each after HEADER_SECONDS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

HEADER_SECONDS = 10.0
STRANGERS = 256
KNOWN = 4096


class Connections:
    """Makes the protocols of a listener's connections: `make` makes one without bounds."""

    def __init__(self, make: Callable[[], web.RequestHandler]) -> None:
        self._make = make
        self._strangers: dict[asyncio.BaseProtocol, _Bounded] = {}  # the oldest first
        self._known: set[asyncio.BaseProtocol] = set()

    def __call__(self) -> asyncio.Protocol:
        return _Bounded(self, self._make())

    def trust(self, request: web.Request) -> None:
        """The request's connection has shown a known key. It is closed if there are too many of them."""
        stranger = self._strangers.pop(request.protocol, None)
        if stranger is not None:
            stranger.timer.cancel()
            self._known.add(request.protocol)
            if len(self._known) > KNOWN:
                stranger.transport.abort()

    def opened(self, one: _Bounded) -> None:
        if len(self._strangers) >= STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).transport.abort()
        self._strangers[one.inner] = one

    def closed(self, one: _Bounded) -> None:
        self._strangers.pop(one.inner, None)
        self._known.discard(one.inner)


class _Bounded(asyncio.Protocol):
    """Hands everything to `inner`."""

    transport: asyncio.Transport
    timer: asyncio.TimerHandle

    def __init__(self, all_of_them: Connections, inner: web.RequestHandler) -> None:
        self._all, self.inner = all_of_them, inner
        self.data_received, self.eof_received = inner.data_received, inner.eof_received  # type: ignore[method-assign]
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.timer = asyncio.get_running_loop().call_later(HEADER_SECONDS, transport.abort)
        self._all.opened(self)
        self.inner.connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.timer.cancel()
        self._all.closed(self)
        self.inner.connection_lost(exc)
