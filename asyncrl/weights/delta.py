"""Whole versions and deltas, the changes since the version before: a publisher, and a reader with a cache.

    published:  e0-v0 whole ◄── e0-v1 delta ◄── e0-v2 delta     e0-v3 whole ◄── e0-v4 delta
    cached:     e0-v1 whole, which becomes e0-v2 in place, or e0-v3 by a copy

A delta can be applied only to the exact bytes of its base version. The publisher's ranks keep copies of these
bytes, a reader has them in its cache. The manifest names the base version, and the checksums of the result
show whether the base was right.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.weights import disk
from asyncrl.weights.manifest import (
    AdapterSpec,
    Delta,
    Manifest,
    WeightsError,
    WeightsRef,
    build_manifest,
    split_buckets,
)
from asyncrl.weights.ranges import file_header, join_parts

if TYPE_CHECKING:  # readers do not import torch
    from asyncrl.weights.snapshot import HeldCopy, Snapshot

log = logging.getLogger("asyncrl.weights")

Version = tuple[WeightsRef, Manifest]


class VersionWriter:
    """Publishes versions to a directory: a whole version, then up to `full_every` - 1 deltas, fewer when the
    deltas add up to the size of a whole version. The copy of the last version is kept until the next version
    is written. `adapters`: versions hold these adapters only, by agent."""

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
        self._base_copy: tuple[Manifest, HeldCopy] | None = None  # the last version
        self._base_lock = ExitStack()  # keeps the base's buffer from being overwritten
        self._delta_count = 0  # since the last whole version
        self._delta_bytes = 0  # since the last whole version

    def write_version(self, snapshot: Snapshot) -> WeightsRef:
        """Publish a version, completely or not at all. Raises Superseded, WeightsError, and OSError; after an
        error the next version may still be a delta."""
        base_copy = self._base_copy
        is_full = self._delta_count + 1 >= self.full_every or self._delta_bytes >= snapshot.total_bytes
        if base_copy is None or is_full or base_copy[0].layout != snapshot.layout:
            base_copy = None

        with ExitStack() as copy_lock:
            held_copy = copy_lock.enter_context(snapshot.hold_copy())
            with disk.new_version(self.directory, snapshot.version) as work_directory:
                manifest = self._write_payload(work_directory, snapshot, held_copy, base_copy)
                disk.write_manifest(work_directory, manifest)

            if self.full_every > 1:
                self._base_lock.close()
                self._base_copy = (manifest, held_copy)
                self._base_lock = copy_lock.pop_all()

        if manifest.delta:
            self._delta_count += 1
            self._delta_bytes += manifest.delta.size
        else:
            self._delta_count = 0
            self._delta_bytes = 0
        return disk.ref_to(self.directory, snapshot.version)

    def _write_payload(
        self,
        work_directory: Path,
        snapshot: Snapshot,
        held_copy: HeldCopy,
        base_copy: tuple[Manifest, HeldCopy] | None,
    ) -> Manifest:
        """Have ranks write their bytes, or write the changes in the bytes of all ranks."""
        entries = []
        changed_ranges = []

        payload_path = work_directory / (disk.DELTA if base_copy else disk.PAYLOAD)
        with payload_path.open("wb") as file:
            offset = file.write(b"" if base_copy else file_header(snapshot.layout))
            for bucket_slice in split_buckets(snapshot.layout, self.bucket_bytes):
                parts_by_tensor = (
                    held_copy.collect_parts(bucket_slice, base=base_copy[1])
                    if base_copy
                    else held_copy.collect_parts(bucket_slice, str(payload_path))
                )
                for spec, range_parts in zip(snapshot.layout[bucket_slice], parts_by_tensor, strict=True):
                    entries.append(join_parts(spec, range_parts))
                    changed_ranges.append(
                        tuple(
                            (range_part.count, range_part.size)
                            for range_part in range_parts
                            if range_part.count
                        )
                    )

                    for range_part in range_parts:
                        file.seek(offset)
                        file.writelines(range_part.data)
                        offset += range_part.size if base_copy else range_part.count

        delta = (
            Delta(base_copy[0].version, base_copy[0].checksum, tuple(changed_ranges)) if base_copy else None
        )
        return build_manifest(snapshot.version, tuple(entries), delta, self._adapters)


def materialise(ref: WeightsRef, cache: Path) -> WeightsRef:
    """Make a version a directory of whole weights in `cache`, which has one reader and holds nothing else.

    The version is made from the cached version, if `ref` builds upon this and the cache is undamaged, else
    from the last whole version published; the cached version is used up. Raises WeightsError when `ref`
    cannot be made, and OSError when the cache has no room for one version.
    """
    lineage = list(disk.lineage_of(ref))  # newest first
    cached_version: Version | None = None
    for cached_ref in reversed(disk.published_versions(cache)):
        with suppress(WeightsError):
            cached_version = (cached_ref, disk.read_manifest(cached_ref))
            break

    if cached_version is not None:
        cached_identity = (cached_version[0].version, cached_version[1].checksum)
        identities = [(lineage_ref.version, manifest.checksum) for lineage_ref, manifest in lineage]
        if cached_identity in identities:
            try:
                shorter_lineage = [*lineage[: identities.index(cached_identity)], cached_version]
                return _build_version(shorter_lineage, cache)
            except WeightsError as error:
                log.warning("building %s from the last full version: %s", ref.label, error)

    return _build_version(lineage, cache)


def _build_version(lineage: list[Version], cache: Path) -> WeightsRef:
    """Change the bytes of the lineage's last version into the bytes of the first, in the cache."""
    ref, manifest = lineage[0]
    start_ref, _ = lineage[-1]
    with ExitStack() as stack:
        for lineage_ref, _ in lineage:
            stack.enter_context(disk.lock_version(lineage_ref))
        work_directory = stack.enter_context(disk.new_version(cache, ref.version))
        _take_payload(start_ref, cache, work_directory / disk.PAYLOAD)
        disk.assemble_arrays(lineage, work_directory / disk.PAYLOAD, "r+")
        disk.write_manifest(work_directory, build_manifest(manifest.version, manifest.tensors))

    return disk.ref_to(cache, ref.version)


def _take_payload(start_ref: WeightsRef, cache: Path, target: Path) -> None:
    """Move a whole payload out of the cache, or copy a payload into the cache. All other versions there are
    deleted first, as the cache need not have room for two."""
    source = Path(start_ref.path) / disk.PAYLOAD
    with WeightsError.instead_of(
        FileNotFoundError, text=f"weights {start_ref.path}: no usable {disk.PAYLOAD}"
    ):
        if source.parent.parent == cache:
            source.rename(target)

        for cached_ref in disk.published_versions(cache):
            shutil.rmtree(cached_ref.path, ignore_errors=True)

        if not target.exists():
            shutil.copyfile(source, target)
