"""Versions as what changed since the one before: the publisher's end, and that of a reader with a cache.

    published:  e0-v0 whole ◄── e0-v1 delta ◄── e0-v2 delta     e0-v3 whole ◄── e0-v4 delta
    cached:     e0-v1 whole, which becomes e0-v2 in place, or e0-v3 by a copy

A delta can be applied only to the exact bytes it was made from. The publisher keeps those in a file of its
own, a reader in its cache. The manifest names the version that they must be, and the checksums of the result
show whether they were.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import disk_full
from asyncrl.weights import codec, disk, tensorfile
from asyncrl.weights.manifest import ITEM_BYTES, Delta, Manifest, WeightsError, WeightsRef, describe, entry

if TYPE_CHECKING:  # readers do not import torch
    from asyncrl.weights.snapshot import Snapshot

log = logging.getLogger("asyncrl.weights")

Version = tuple[WeightsRef, Manifest]

BASE = "base.safetensors"  # beside the versions: the bytes of the last one


class DeltaWriter:
    """Publishes a process's versions to a directory: a whole one, then up to `full_every` - 1 deltas, fewer
    when these add up to a whole one."""

    def __init__(self, directory: Path, bucket_bytes: int, full_every: int) -> None:
        self.directory, self.bucket_bytes, self.full_every = directory, bucket_bytes, full_every
        self._base: Manifest | None = None  # what BASE holds; None while that is between two versions
        self._copied = 0  # number of the copy that BASE holds
        self._deltas = self._bytes = 0  # since the last whole version

    def write(self, snapshot: Snapshot) -> WeightsRef:
        """Publish a version, as `disk.write` does."""
        base = self._base
        full = self._deltas + 1 >= self.full_every or self._bytes >= snapshot.total_bytes
        if base is None or full or base.layout != snapshot.layout:
            return self._whole(snapshot)
        return self._delta(snapshot, base)

    def _whole(self, snapshot: Snapshot) -> WeightsRef:
        ref = disk.write(snapshot, self.directory, self.bucket_bytes)
        self._base = None
        try:
            shutil.copyfile(Path(ref.path) / disk.PAYLOAD, self.directory / BASE)
        except OSError as error:
            if not disk_full(error):
                raise
            log.warning("no room to make deltas of v%d: the next version is whole, too", ref.version.step)
            (self.directory / BASE).unlink(missing_ok=True)
            return ref
        self._base, self._copied = disk.read_manifest(ref), snapshot.copied
        self._deltas = self._bytes = 0
        return ref

    def _delta(self, snapshot: Snapshot, base: Manifest) -> WeightsRef:
        with disk.new_version(self.directory, snapshot.version) as work:
            manifest = self._encode(snapshot, base, work / disk.DELTA)
            disk.write_manifest(work, manifest)
        assert manifest.delta is not None
        self._base, self._copied = manifest, snapshot.copied
        self._deltas, self._bytes = self._deltas + 1, self._bytes + sum(manifest.delta.sizes)
        return disk.ref_to(self.directory, snapshot.version)

    def _encode(self, snapshot: Snapshot, base: Manifest, path: Path) -> Manifest:
        """Write what changed, and bring BASE up to date with it, a tensor at a time."""
        own = tensorfile.mapped(self.directory / BASE, base.layout, "r+")
        earlier = tensorfile.Earlier(self._copied, own) if self._copied else None
        entries, sizes = [], []
        with path.open("wb") as file:
            for spec, data in snapshot.chunks(self.bucket_bytes, earlier):
                self._base = None
                sizes.append(file.write(codec.encode(own[spec.name], data, ITEM_BYTES[spec.dtype])))
                own[spec.name][:] = data
                entries.append(entry(spec, data))
        delta = Delta(base.version, base.checksum, tuple(sizes))
        return describe(snapshot.version, tuple(entries), delta)


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
    """What the cache holds, unread."""
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
    (ref, manifest), (start, origin) = lineage[0], lineage[-1]
    with ExitStack() as stack:
        for version, _ in lineage:
            stack.enter_context(disk.lock_version(version))
        work = stack.enter_context(disk.new_version(cache, ref.version))
        _take(start, cache, work / disk.PAYLOAD)
        arrays = tensorfile.mapped(work / disk.PAYLOAD, origin.layout, "r+")
        for version, changes in reversed(lineage[:-1]):
            disk.apply_delta(arrays, version, changes)
        disk.check(arrays, ref, manifest)
        disk.write_manifest(work, describe(manifest.version, manifest.tensors))
    return disk.ref_to(cache, ref.version)


def _take(start: WeightsRef, cache: Path, target: Path) -> None:
    """Move a whole payload out of the cache, or copy one into it; either way the cache is empty otherwise,
    for it need not have room for two."""
    source = Path(start.path) / disk.PAYLOAD
    try:
        if source.parent.parent == cache:
            source.rename(target)
        for other in disk.published(cache):
            shutil.rmtree(other.path, ignore_errors=True)
        if not target.exists():
            shutil.copyfile(source, target)
    except FileNotFoundError as error:
        raise WeightsError(f"weights {start.path}: no usable {disk.PAYLOAD} ({error})") from error
