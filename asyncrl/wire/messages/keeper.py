"""Keeper of a server to coordinator, control channel."""

from __future__ import annotations

from asyncrl.wire.messages.shared import Count, Share, WireMessage


class KeeperHello(WireMessage, frozen=True):
    """First message of a keeper, repeated until welcomed, after silence and when its server is up.
    `url` is empty while the server starts; `engine` says what it is ("sglang 0.5.23")."""

    index: Count
    incarnation: str
    url: str
    pid: Count
    engine: str = ""


class KeeperBeat(WireMessage, frozen=True):
    """Sign of life of a keeper. `healthy`: its server answers and holds what it confirmed. `kv_use`: share of
    its KV memory that requests hold, if that was read since the last beat."""

    healthy: bool
    starting: bool
    waiting: str = ""
    kv_use: Share | None = None
