"""Versions of the weights on their way to machines that do not see the trainer's files.

A machine opens a version at the coordinator, is told from whom to read it, and reads its files there.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.types import PolicyVersion
from asyncrl.wire.messages.shared import Count, WireMessage

PIECE = 1 << 20  # bytes that one request is for, at most
FileName = Literal["model.safetensors", "delta.bin"]  # any other name could be a path to elsewhere
Short = Annotated[str, Meta(max_length=300)]


class OpenVersion(WireMessage, frozen=True):
    """Who has this version? `address`, `key`: where others may read it from the asker, as far as it has got,
    and the public key of that server. `anew`: the source that the asker was told before does not deliver."""

    version: PolicyVersion
    address: Short
    key: Short
    anew: bool = False


class VersionFile(WireMessage, frozen=True):
    """A file of a version, and its size in bytes."""

    name: FileName
    size: Count


class OpenedVersion(WireMessage, frozen=True):
    """Answer to OpenVersion: what the version consists of, and where to read all but the manifest."""

    version: PolicyVersion
    manifest: bytes
    files: tuple[VersionFile, ...]
    address: str
    key: str


class ReadFile(WireMessage, frozen=True):
    """Asks for bytes of a file."""

    version: PolicyVersion
    name: FileName
    offset: Count
    size: Annotated[int, Meta(ge=1, le=PIECE)]


class FileBytes(WireMessage, frozen=True):
    """Answer to ReadFile. One frame: the bytes; none: they are not here so far, and will be sent when they
    are."""

    name: FileName
    offset: Count


class VersionGone(WireMessage, frozen=True):
    """The version is not here (any more). `newer`: a newer one is."""

    version: PolicyVersion
    newer: bool
