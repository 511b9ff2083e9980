"""Snapshots of the files of an episode's sandboxes, on this machine: an episode that continues here after a
crash gets its files back, and runs no recorded call again.

    /var/tmp/asyncrl-UID/snapshots/RUN/EPISODE/TOOL/{TURN-HISTORY, DIGEST, DIGEST, …}

A snapshot is a list of files; each large content is a separate file, stored once. HISTORY is the hash of all
turns and replies up to TURN: only an episode with the same recorded history takes the snapshot. A snapshot
is written before the replies of its turn are posted, and so may belong to a turn whose replies are never
recorded. Therefore the snapshot before is also kept: the replies of its turn are durable."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_128_digest, xxh3_128_hexdigest

from asyncrl.errors import UNDECODABLE, AsyncrlError
from asyncrl.isolation.sandbox import emptying
from asyncrl.isolation.sandbox.changes import Entry, pack_entries, read_entries
from asyncrl.types import Turn

PARENT = Path(f"/var/tmp/asyncrl-{os.getuid()}")
MAX_INLINE_BYTES = 4096  # a larger content is a separate file
DIGEST_BYTES = 16  # the digest before a list
KEEP_SECONDS = 86_400.0  # older snapshots are removed


class SnapshotError(AsyncrlError):
    """A snapshot cannot be kept."""


_ListedEntry = tuple[bytes, bytes, int, int, bytes, str]
"""The fields of an entry, with the path as bytes, and the digest of the content if the content is stored
in a separate file."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_ListedEntry]).decode


def hash_history(earlier_history: str, turn: Turn) -> str:
    """Return the hash of all turns up to this turn, with the replies. `earlier_history`: the hash of
    all earlier turns."""
    replies = [(reply.call.name, reply.call.arguments, reply.content, reply.images) for reply in turn.replies]
    return xxh3_64_hexdigest(_encode((earlier_history, turn.generation.ids, replies)))


class Snapshots:
    """Owns the snapshots of a worker. `run`: the run's name. `max_bytes`: the limit of all snapshots
    together."""

    def __init__(self, run: str, max_bytes: int) -> None:
        self._run_directory = PARENT / "snapshots" / xxh3_64_hexdigest(run.encode())
        self._max_bytes = max_bytes
        self._directory_sizes: dict[Path, int] = {}

        # Remove snapshots that no worker has changed for long, as killed runs leave theirs behind.
        for directory in (PARENT / "snapshots").glob("*/*"):
            with suppress(OSError):
                last_change = max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
                if last_change < time.time() - KEEP_SECONDS:
                    emptying.remove_directory(str(directory))

    def tool_snapshots(self, episode: str, tool: str) -> ToolSnapshots:
        return ToolSnapshots(
            self._episode_directory(episode) / quote(tool, ""), self._directory_sizes, self._max_bytes
        )

    def may_have_snapshots(self, episode: str) -> bool:
        """Return whether the episode may have snapshots."""
        return os.path.exists(self._episode_directory(episode))  # False, too, if it cannot be read

    def forget_episode(self, episode: str) -> None:
        """Remove the snapshots of an episode that is over. Blocks."""
        episode_directory = self._episode_directory(episode)

        for directory in [*self._directory_sizes]:  # a copy, as other threads save
            if directory.parent == episode_directory:
                del self._directory_sizes[directory]

        emptying.remove_directory(str(episode_directory))
        with suppress(OSError):  # other episodes have snapshots
            self._run_directory.rmdir()

    def _episode_directory(self, episode: str) -> Path:
        return self._run_directory / quote(episode, "")


@dataclass(eq=False)
class ToolSnapshots:
    """Owns the snapshots of one tool, or of tools that share an object, in an episode. All methods block.
    `directory_sizes`: the bytes in each directory of the worker, at most `max_bytes` together."""

    directory: Path
    directory_sizes: dict[Path, int]
    max_bytes: int
    _kept_snapshots: list[dict[str, int]] = field(default_factory=list, init=False)
    """The files of each snapshot, with the size of each file in bytes."""

    def save_snapshot(self, turn: int, history: str, archive: bytes) -> None:
        """Keep a snapshot of the changes up to a turn, and the snapshot before. SnapshotError: all snapshots
        would take too much; the snapshot before stays the newest."""
        contents = dict[str, bytes]()
        listed_entries = list[_ListedEntry]()

        for kind, path, mode, mtime_ns, content in read_entries(archive):
            digest = xxh3_128_hexdigest(content) if len(content) > MAX_INLINE_BYTES else ""
            if digest:
                contents[digest] = content
            listed_entries.append(
                (kind, os.fsencode(path), mode, mtime_ns, b"" if digest else content, digest)
            )

        encoded_list = _encode(listed_entries)
        # written as the last file
        contents[f"{turn}-{history}"] = xxh3_128_digest(encoded_list) + encoded_list
        kept_snapshots = [
            *self._kept_snapshots[-1:],
            {name: len(content) for name, content in contents.items()},
        ]
        total_bytes = sum({name: size for files in kept_snapshots for name, size in files.items()}.values())

        # a copy of the values, as other threads save
        other_bytes = sum([*self.directory_sizes.values()]) - self.directory_sizes.get(self.directory, 0)
        if other_bytes + total_bytes > self.max_bytes:
            raise SnapshotError(
                f"snapshots would take more than {self.max_bytes} bytes; raise store.keep_bytes"
            )

        emptying.make_private_directory(str(PARENT))
        self.directory.mkdir(0o700, parents=True, exist_ok=True)

        stored_names = {name for files in self._kept_snapshots for name in files}
        new_file = self.directory / "new"
        for name in (name for name in contents if name not in stored_names):
            new_file.write_bytes(contents[name])
            new_file.rename(self.directory / name)

        self._keep_only(kept_snapshots)

    def find_snapshot(self, histories: Sequence[str]) -> tuple[int, bytes] | None:
        """Find the newest snapshot of an episode's recorded turns: (turn, archive). Other snapshots are
        removed."""
        for turn in reversed(range(len(histories))):
            with suppress(OSError, ValueError, *UNDECODABLE):
                return turn, self._read_snapshot(f"{turn}-{histories[turn]}")
        self._keep_only([])
        return None

    def _read_snapshot(self, name: str) -> bytes:
        """Read a snapshot, and remove all other snapshots. ValueError: a file is damaged."""
        encoded_list = (self.directory / name).read_bytes()
        if xxh3_128_digest(encoded_list[DIGEST_BYTES:]) != encoded_list[:DIGEST_BYTES]:
            raise ValueError(f"{name} is damaged")

        files = {name: len(encoded_list)}
        entries = list[Entry]()

        for kind, path, mode, mtime_ns, content, digest in _decode(encoded_list[DIGEST_BYTES:]):
            if digest:
                content = (self.directory / digest).read_bytes()
                files[digest] = len(content)
                if xxh3_128_hexdigest(content) != digest:
                    raise ValueError(f"{digest} is damaged")
            entries.append(Entry(kind, os.fsdecode(path), mode, mtime_ns, content))

        self._keep_only([files])
        return pack_entries(entries)

    def _keep_only(self, kept_snapshots: list[dict[str, int]]) -> None:
        """Remove all files except the files of the kept snapshots."""
        self._kept_snapshots = kept_snapshots
        files = {name: size for files in kept_snapshots for name, size in files.items()}
        self.directory_sizes[self.directory] = sum(files.values())

        with suppress(FileNotFoundError):
            for name in set(os.listdir(self.directory)) - files.keys():
                (self.directory / name).unlink()
