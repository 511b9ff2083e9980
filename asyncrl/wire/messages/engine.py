"""Messages of server supervisors, and of weight versions on the way to machines that do not see the trainer's
files.

A machine opens a version at the coordinator, learns where to read the version, and reads the bytes there: the
bytes of the file beside the manifest.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.types import PolicyVersion
from asyncrl.wire.messages.shared import MAX_PIECE_BYTES, Count, Share, WireMessage

Short = Annotated[str, Meta(max_length=300)]


class OpenVersion(WireMessage, frozen=True):
    """Asks for a source of this version. `address`, `key`: where peers may read the version from the asker,
    as far as the asker has got, and the public key of that server. `anew`: the source that the asker was told
    before does not deliver."""

    version: PolicyVersion
    address: Short
    key: Short
    anew: bool = False


class OpenedVersion(WireMessage, frozen=True):
    """Answer to OpenVersion: the manifest, the number of bytes beside the manifest, and where to read the
    bytes."""

    version: PolicyVersion
    manifest: bytes
    size: Count
    address: str
    key: str


class ReadBytes(WireMessage, frozen=True):
    """Asks for a range of a version's bytes."""

    version: PolicyVersion
    offset: Count
    size: Annotated[int, Meta(ge=1, le=MAX_PIECE_BYTES)]


class VersionBytes(WireMessage, frozen=True):
    """Answer to ReadBytes. A frame holds the bytes; no frame: the bytes have not arrived so far, and will be
    sent later."""

    offset: Count


class VersionGone(WireMessage, frozen=True):
    """The version is not here (any more). `newer`: a newer version is."""

    version: PolicyVersion
    newer: bool


# -- supervisors of servers
# ------------------------------------------------------------------------------------


class SupervisorHello(WireMessage, frozen=True):
    """First message of a supervisor, repeated until welcomed, after silence and when the server is up. `url`
    is empty while the server starts; `engine` describes the server ("sglang 0.5.23")."""

    index: Count
    incarnation: str
    url: str
    pid: Count
    engine: str = ""


class SupervisorHeartbeat(WireMessage, frozen=True):
    """Sign of life of a supervisor. `healthy`: the server answers and holds the confirmed version. `kv_use`:
    fraction of the KV memory that requests hold, if known since the last heartbeat."""

    healthy: bool
    starting: bool
    waiting: str = ""
    kv_use: Share | None = None
