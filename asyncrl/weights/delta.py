"""Versions whole and as what changed since the one before: the publisher's end, and a reader's with a cache.

    published:  e0-v0 whole ◄── e0-v1 delta ◄── e0-v2 delta     e0-v3 whole ◄── e0-v4 delta
    cached:     e0-v1 whole, which becomes e0-v2 in place, or e0-v3 by a copy

A delta can be applied only to the exact bytes it was made from. The publisher's ranks keep their copies of
those, a reader has them in its cache. The manifest names the version that they must be, and the checksums of
the result show whether they were.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.weights import disk
from asyncrl.weights.manifest import AdapterSpec, Delta, Manifest, WeightsError, WeightsRef, describe, split
from asyncrl.weights.ranges import file_header, joined

if TYPE_CHECKING:  # readers do not import torch
    from asyncrl.weights.snapshot import Pinned, Snapshot

log = logging.getLogger("asyncrl.weights")

Version = tuple[WeightsRef, Manifest]


class VersionWriter:
    """Publishes versions to a directory: a whole one, then up to `full_every` - 1 deltas, fewer when these
    add up to a whole one. The copy that the last one was made of is kept until the next one is made.
    `adapters`: versions are of these alone, by agent."""

    def __init__(
        self,
        directory: Path,
        bucket_bytes: int,
        full_every: int = 1,
        adapters: Mapping[str, AdapterSpec] | None = None,
    ) -> None:
        self.directory = directory
        self.bucket_bytes = bucket_bytes
        self.full_every = full_every
        self._adapters = dict(adapters or {})
        self._base: tuple[Manifest, Pinned] | None = None  # of the last version
        self._reading = ExitStack()  # it
        self._deltas = self._bytes = 0  # since the last whole version

    def write(self, snapshot: Snapshot) -> WeightsRef:
        """Publish a version, whole or not at all. Raises Superseded, WeightsError, and OSError; the next one
        may be a delta still."""
        base = self._base
        full = self._deltas + 1 >= self.full_every or self._bytes >= snapshot.total_bytes
        if base is None or full or base[0].layout != snapshot.layout:
            base = None
        with ExitStack() as reading:
            pinned = reading.enter_context(snapshot.pin())
            with disk.new_version(self.directory, snapshot.version) as work:
                manifest = self._filled(work, snapshot, pinned, base)
                disk.write_manifest(work, manifest)
            if self.full_every > 1:
                self._reading.close()
                self._base = (manifest, pinned)
                self._reading = reading.pop_all()
        delta = manifest.delta
        self._deltas, self._bytes = (self._deltas + 1, self._bytes + delta.size) if delta else (0, 0)
        return disk.ref_to(self.directory, snapshot.version)

    def _filled(
        self, work: Path, snapshot: Snapshot, pinned: Pinned, base: tuple[Manifest, Pinned] | None
    ) -> Manifest:
        """Have ranks write their bytes, or write what has changed in them."""
        entries = []
        changed = []
        path = work / (disk.DELTA if base else disk.PAYLOAD)
        with path.open("wb") as file:
            at = file.write(b"" if base else file_header(snapshot.layout))
            for part in split(snapshot.layout, self.bucket_bytes):
                of_ranks = pinned.shares(part, base=base[1]) if base else pinned.shares(part, str(path))
                for spec, shares in zip(snapshot.layout[part], of_ranks, strict=True):
                    entries.append(joined(spec, shares))
                    changed.append(tuple((one.count, one.size) for one in shares if one.count))
                    for one in shares:
                        file.seek(at)
                        file.writelines(one.data)
                        at += one.size if base else one.count
        delta = Delta(base[0].version, base[0].checksum, tuple(changed)) if base else None
        return describe(snapshot.version, tuple(entries), delta, self._adapters)


def materialise(ref: WeightsRef, cache: Path) -> WeightsRef:
    """The version as a directory of whole weights in `cache`, which has one reader and holds nothing else.

    It is made from the version that the cache holds, if `ref` builds upon that and it is undamaged, else
    from the last whole version published; the cached version is used up. Raises WeightsError when there is
    no way to `ref`, and OSError when the cache has no room for one version.
    """
    lineage = list(disk.lineage_of(ref))
    shorter = _from(_cached(cache), lineage)
    if shorter is not None:
        try:
            return _build(shorter, cache)
        except WeightsError as error:
            log.warning("%s is made from the last whole version: %s", ref.label, error)
    return _build(lineage, cache)


def _cached(cache: Path) -> Version | None:
    """Returns the version that the cache holds, unread."""
    for ref in reversed(disk.published(cache)):
        with suppress(WeightsError):
            return ref, disk.read_manifest(ref)
    return None


def _from(held: Version | None, lineage: list[Version]) -> list[Version] | None:
    """The lineage, newest first, as far back as the held version only; None if that is not of it."""
    if held is not None:
        for index, (ref, manifest) in enumerate(lineage):
            if (ref.version, manifest.checksum) == (held[0].version, held[1].checksum):
                return [*lineage[:index], held]
    return None


def _build(lineage: list[Version], cache: Path) -> WeightsRef:
    """Change the bytes of the last of `lineage` into those of the first, in the cache."""
    (ref, manifest), (start, _) = lineage[0], lineage[-1]
    with ExitStack() as stack:
        for version, _ in lineage:
            stack.enter_context(disk.lock_version(version))
        work = stack.enter_context(disk.new_version(cache, ref.version))
        _take(start, cache, work / disk.PAYLOAD)
        disk.assembled(lineage, work / disk.PAYLOAD, "r+")
        disk.write_manifest(work, describe(manifest.version, manifest.tensors))
    return disk.ref_to(cache, ref.version)


def _take(start: WeightsRef, cache: Path, target: Path) -> None:
    """Move a whole payload out of the cache, or copy one into it; either way the cache is empty otherwise,
    for it need not have room for two."""
    source = Path(start.path) / disk.PAYLOAD
    with WeightsError.instead_of(FileNotFoundError, text=f"weights {start.path}: no usable {disk.PAYLOAD}"):
        if source.parent.parent == cache:
            source.rename(target)
        for other in disk.published(cache):
            shutil.rmtree(other.path, ignore_errors=True)
        if not target.exists():
            shutil.copyfile(source, target)
