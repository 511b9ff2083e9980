"""Messages of servers' keepers, and of versions of the weights on their way to machines that do not see the
trainer's files.

A machine opens a version at the coordinator, is told from whom to read it, and reads its bytes there: those
of the one file beside the manifest.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.types import PolicyVersion
from asyncrl.wire.messages.shared import PIECE, Count, Share, WireMessage

Short = Annotated[str, Meta(max_length=300)]


class OpenVersion(WireMessage, frozen=True):
    """Asks who has this version. `address`, `key`: where others may read it from the asker, as far as it has
    got, and the public key of that server. `anew`: the source that the asker was told before does not
    deliver."""

    version: PolicyVersion
    address: Short
    key: Short
    anew: bool = False


class OpenedVersion(WireMessage, frozen=True):
    """Answer to OpenVersion: its manifest, how many bytes there are beside it, and where to read them."""

    version: PolicyVersion
    manifest: bytes
    size: Count
    address: str
    key: str


class ReadBytes(WireMessage, frozen=True):
    """Asks for a range of a version's bytes."""

    version: PolicyVersion
    offset: Count
    size: Annotated[int, Meta(ge=1, le=PIECE)]


class VersionBytes(WireMessage, frozen=True):
    """Answer to ReadBytes. One frame: the bytes; none: they are not here so far, and will be sent when they
    are."""

    offset: Count


class VersionGone(WireMessage, frozen=True):
    """The version is not here (any more). `newer`: a newer one is."""

    version: PolicyVersion
    newer: bool


# -- keepers of servers ------------------------------------------------------------------------------------


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
