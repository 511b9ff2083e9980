"""Snapshots of the files of an episode's sandboxes lie on this machine: an episode that goes on here after a
crash gets its files back, and runs no recorded call again.

    /var/tmp/asyncrl-UID/snapshots/RUN/EPISODE/TOOL/{TURN-HISTORY, DIGEST, DIGEST, …}

A snapshot is a list of files; each large content is a file of its own, once. HISTORY stands for all turns and
replies up to TURN: only an episode of which the same is recorded takes the snapshot. It is written before the
replies of its turn are posted, so it may be of a turn whose replies are never recorded. Therefore the one
before it is kept, too: its replies are durable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_128_digest, xxh3_128_hexdigest

from asyncrl.errors import UNDECODABLE, AsyncrlError
from asyncrl.isolation.sandbox import emptying
from asyncrl.isolation.sandbox.changes import Entry, packed, read_entries
from asyncrl.types import Turn

PARENT = Path(f"/var/tmp/asyncrl-{os.getuid()}")
SMALL = 4096  # bytes of a content that lies in the list
DIGEST = 16  # bytes before a list
FORGOTTEN = 86_400.0  # seconds after which snapshots are removed that nobody took


class SnapshotError(AsyncrlError):
    """A snapshot cannot be kept."""


_Listed = tuple[bytes, bytes, int, int, bytes, str]
"""An entry, its path as bytes, and the digest of its content if that is a file of its own."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Listed]).decode


def history(before: str, turn: Turn) -> str:
    """Name all turns up to this one, with their replies. `before`: the name of those before it."""
    replies = [(reply.call.name, reply.call.arguments, reply.content) for reply in turn.replies]
    return xxh3_64_hexdigest(_encode((before, turn.ids, replies)))


class Snapshots:
    """Owns the snapshots of a worker. `run`: names the run. `most`: bytes of all snapshots together."""

    def __init__(self, run: str, most: int) -> None:
        self._directory = PARENT / "snapshots" / xxh3_64_hexdigest(run.encode())
        self._most = most
        self._sizes: dict[Path, int] = {}
        _sweep(PARENT / "snapshots")

    def of(self, episode: str, tool: str) -> ToolSnapshots:
        return ToolSnapshots(self._place(episode) / quote(tool, ""), self._sizes, self._most)

    def kept(self, episode: str) -> bool:
        """True if there may be something to forget."""
        return os.path.exists(f"{self._directory}/{quote(episode, '')}")

    def forget(self, episode: str) -> None:
        """Remove those of an episode that is over. Blocks."""
        place = self._place(episode)
        for directory in [*self._sizes]:  # a copy: other threads save
            if directory.parent == place:
                del self._sizes[directory]
        emptying.remove(str(place))
        with suppress(OSError):  # there are others
            self._directory.rmdir()

    def _place(self, episode: str) -> Path:
        return self._directory / quote(episode, "")


class ToolSnapshots:
    """Owns the snapshots of one tool, or of tools that share an object, in an episode. All of it blocks."""

    def __init__(self, directory: Path, sizes: dict[Path, int], most: int) -> None:
        self._directory = directory
        self._sizes = sizes
        self._most = most
        self._kept: list[dict[str, int]] = []  # files of each snapshot, and their bytes

    def save(self, turn: int, history: str, archive: bytes) -> None:
        """Keep what changed up to a turn, and the snapshot before it. SnapshotError when all snapshots would
        take too much: then the one before it is the newest."""
        contents = dict[str, bytes]()
        listed = list[_Listed]()
        for kind, path, mode, mtime_ns, content in read_entries(archive):
            digest = xxh3_128_hexdigest(content) if len(content) > SMALL else ""
            if digest:
                contents[digest] = content
            listed.append((kind, os.fsencode(path), mode, mtime_ns, b"" if digest else content, digest))
        data = _encode(listed)
        contents[f"{turn}-{history}"] = xxh3_128_digest(data) + data  # the last file that is written
        kept = [*self._kept[-1:], {name: len(content) for name, content in contents.items()}]
        total = sum({name: size for files in kept for name, size in files.items()}.values())
        if sum([*self._sizes.values()]) - self._sizes.get(self._directory, 0) + total > self._most:
            raise SnapshotError(f"snapshots would take more than {self._most} bytes; raise store.keep_bytes")
        emptying.make_private(str(PARENT))
        self._directory.mkdir(0o700, parents=True, exist_ok=True)
        there = {name for files in self._kept for name in files}
        for name in (name for name in contents if name not in there):
            (self._directory / "new").write_bytes(contents[name])
            (self._directory / "new").rename(self._directory / name)
        self._keep(kept)

    def find(self, histories: Sequence[str]) -> tuple[int, bytes] | None:
        """Find the newest snapshot of an episode's recorded turns: (turn, archive). Others are removed."""
        for turn in reversed(range(len(histories))):
            with suppress(OSError, ValueError, *UNDECODABLE):
                return turn, self._read(f"{turn}-{histories[turn]}")
        self._keep([])
        return None

    def _read(self, name: str) -> bytes:
        """Read a snapshot, which becomes the only one. ValueError when something of it is damaged."""
        data = (self._directory / name).read_bytes()
        if xxh3_128_digest(data[DIGEST:]) != data[:DIGEST]:
            raise ValueError(f"{name} is damaged")
        files = {name: len(data)}
        entries = list[Entry]()
        for kind, path, mode, mtime_ns, content, digest in _decode(data[DIGEST:]):
            if digest:
                content = (self._directory / digest).read_bytes()
                files[digest] = len(content)
                if xxh3_128_hexdigest(content) != digest:
                    raise ValueError(f"{digest} is damaged")
            entries.append(Entry(kind, os.fsdecode(path), mode, mtime_ns, content))
        self._keep([files])
        return packed(entries)

    def _keep(self, kept: list[dict[str, int]]) -> None:
        """Remove all files but those of `kept`."""
        self._kept = kept
        files = {name: size for files in kept for name, size in files.items()}
        self._sizes[self._directory] = sum(files.values())
        with suppress(FileNotFoundError):
            for name in set(os.listdir(self._directory)) - files.keys():
                (self._directory / name).unlink()


def _sweep(directory: Path) -> None:
    """Remove what no worker has changed for long: a run that was killed leaves it."""
    for place in directory.glob("*/*"):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (place, *place.iterdir()))
            if newest < time.time() - FORGOTTEN:
                emptying.remove(str(place))
