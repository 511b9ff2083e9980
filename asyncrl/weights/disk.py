"""Weights through a directory: both ends of the file protocol.

A version is a directory `e<epoch>-v<version>` with a manifest and either all tensors (`model.safetensors`, so
that anything that reads Hugging Face's format can load it) or what changed since an earlier
version (`delta.bin`; `weights.full_every` > 1 writes those). It is written under a temporary name and renamed
when complete, so a reader sees all of it or nothing. One process publishes to a directory; any number read.
Nothing is synced to the disk: a version lost in a power cut is published again, and a damaged one does not
pass its checksums.

Locked versions, and base versions of kept versions, are not pruned. A version without a lock may be deleted
at any time: mapped files stay readable, every other access raises WeightsError. A reader locks a version by
its manifest (flock), which works on network file systems, too.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from asyncrl.config import RunConfig
from asyncrl.errors import UNDECODABLE, ConfigError
from asyncrl.types import PolicyVersion
from asyncrl.weights import codec, ranges
from asyncrl.weights.manifest import ITEM_BYTES, Manifest, WeightsError, WeightsRef, overall_checksum
from asyncrl.weights.ranges import Arrays

if TYPE_CHECKING:  # processes that only check and prune files do not import torch
    import torch

PAYLOAD = "model.safetensors"
DELTA = "delta.bin"
MANIFEST = "manifest.json"
SHARED_MEMORY = Path("/dev/shm")
KEPT_VERSIONS = 3  # so that no version is deleted during a load, and late engines find a version
_TEMPORARY = ".writing-"
log = logging.getLogger("asyncrl.weights")


@contextmanager
def new_version(directory: Path, version: PolicyVersion) -> Iterator[Path]:
    """Yield a directory to fill, which becomes a version's directory when the body succeeds. Publishing a
    version again replaces the old files. Raises OSError, naming a file, if the disk is full."""
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    work_directory = _temporary_path(directory)
    version_directory = Path(ref_to(directory, version).path)
    work_directory.mkdir()

    try:
        yield work_directory
        if version_directory.exists():
            version_directory.rename(_temporary_path(directory))
        work_directory.rename(version_directory)
    except OSError as error:
        error.filename = error.filename or str(directory)  # a full disk does not say where it is
        raise
    finally:
        _remove_leftovers(directory)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def ref_to(directory: Path, version: PolicyVersion) -> WeightsRef:
    return WeightsRef(version, str(directory / f"e{version.epoch:04d}-v{version.step:08d}"))


def payload_path(directory: Path) -> Path:
    """Return the file of a version beside its manifest."""
    delta = directory / DELTA
    return delta if delta.exists() else directory / PAYLOAD


def read_manifest(ref: WeightsRef) -> Manifest:
    """Read a version's manifest, without the tensors. Raises WeightsError."""
    path = Path(ref.path) / MANIFEST
    with WeightsError.instead_of(OSError, *UNDECODABLE, text=f"weights {ref.path}: no usable {MANIFEST}"):
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)

    if manifest.version != ref.version:
        raise WeightsError(f"weights {ref.path}: expected {ref.label}, found {manifest.version.label}")
    if manifest.checksum != overall_checksum(manifest.tensors):
        raise WeightsError(f"weights {ref.path}: {MANIFEST} does not match its own checksum")

    return manifest


def read_tensors(ref: WeightsRef) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Return a version's manifest and tensors (on the CPU), every checksum verified. Raises WeightsError."""
    import torch

    manifest, arrays = read_arrays(ref)
    return manifest, {
        spec.name: torch.from_numpy(arrays[spec.name]).view(getattr(torch, spec.dtype)).reshape(spec.shape)
        for spec in manifest.layout
    }


def verify_version(ref: WeightsRef) -> Manifest:
    """Check every byte of a version. Raises WeightsError."""
    return read_arrays(ref)[0]


def read_arrays(ref: WeightsRef) -> tuple[Manifest, Arrays]:
    """Return a version's manifest and the bytes of its tensors, verified; deltas are applied in this
    process's memory. Raises WeightsError."""
    lineage = list(lineage_of(ref))
    return lineage[0][1], assemble_arrays(lineage, Path(lineage[-1][0].path) / PAYLOAD, "c")


def assemble_arrays(
    lineage: Sequence[tuple[WeightsRef, Manifest]], payload_file: Path, mode: Literal["c", "r+"]
) -> Arrays:
    """Turn the bytes of a lineage's last version, in a file, into the bytes of the first, and verify the
    result; `mode`: see `map_file`. Raises WeightsError."""
    ref, manifest = lineage[0]
    _, whole_manifest = lineage[-1]
    arrays = ranges.map_file(payload_file, whole_manifest.layout, mode)
    for delta_ref, delta_manifest in reversed(lineage[:-1]):
        _apply_delta(arrays, delta_ref, delta_manifest)

    for entry in manifest.tensors:
        if ranges.tensor_entry(entry.spec, arrays[entry.name]) != entry:
            raise WeightsError(f"weights {ref.path}: tensor {entry.name} does not match its manifest entry")

    return arrays


def lineage_of(ref: WeightsRef) -> Iterator[tuple[WeightsRef, Manifest]]:
    """Yield a version and its base versions, newest first; the last version is whole. Raises WeightsError."""
    manifest = read_manifest(ref)
    yield ref, manifest

    while (delta := manifest.delta) is not None:
        base_ref = ref_to(Path(ref.path).parent, delta.version)
        manifest = read_manifest(base_ref)
        if base_ref.version >= ref.version or manifest.checksum != delta.checksum:
            raise WeightsError(f"weights {ref.path}: {base_ref.path} is not the base version of {ref.label}")
        yield base_ref, manifest
        ref = base_ref


def _apply_delta(arrays: Arrays, ref: WeightsRef, manifest: Manifest) -> None:
    """Turn the bytes of the base version of `ref`, a delta, into the bytes of `ref`, in place."""
    assert manifest.delta is not None
    try:
        data = (Path(ref.path) / DELTA).read_bytes()
        if len(data) != manifest.delta.size:
            raise WeightsError("it is truncated")

        delta_offset = 0
        for spec, changed_ranges in zip(manifest.layout, manifest.delta.ranges, strict=True):
            tensor_offset = 0
            for count, size in changed_ranges:
                target = arrays[spec.name][tensor_offset : tensor_offset + count]
                codec.apply_changes(target, data[delta_offset : delta_offset + size], ITEM_BYTES[spec.dtype])
                delta_offset = delta_offset + size
                tensor_offset = tensor_offset + count
    except (OSError, KeyError, ValueError, WeightsError) as error:
        raise WeightsError(f"weights {ref.path}: no usable {DELTA} ({error})") from error


@contextmanager
def lock_version(ref: WeightsRef) -> Iterator[None]:
    """Keep a version and its base versions from being pruned during the body. The lock ends with this process
    at the latest. Raises WeightsError when the version is gone already."""
    path = Path(ref.path) / MANIFEST
    with ExitStack() as stack:
        with WeightsError.instead_of(OSError, text=f"weights {ref.path}: no usable {MANIFEST}"):
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a `prune` that is about to delete the version
            is_current = os.path.samestat(os.fstat(descriptor), path.stat())

        if not is_current:
            raise WeightsError(f"weights {ref.path}: no usable {MANIFEST} (it was replaced in the meantime)")
        yield


def published_versions(directory: Path) -> list[WeightsRef]:
    """Return the complete versions in a directory, oldest first by (epoch, version)."""
    refs = []
    for path in directory.glob("e*-v*"):
        epoch, _, step = path.name[1:].partition("-v")
        if epoch.isdecimal() and step.isdecimal():
            refs.append(WeightsRef(PolicyVersion(int(epoch), int(step)), str(path)))
    return sorted(refs, key=lambda ref: ref.version)


def prune(directory: Path, keep: int = KEPT_VERSIONS) -> list[WeightsRef]:
    """Delete all but the newest `keep` versions, locked versions and base versions; return the deleted."""
    refs = published_versions(directory)
    old_refs = refs[: max(0, len(refs) - keep)]

    with ExitStack() as stack:  # a version without a lock cannot be locked before the deletion
        locked_refs = [ref for ref in old_refs if not stack.enter_context(_claimed(ref))]
        needed_versions = set[PolicyVersion]().union(
            *(_needed_versions(ref) for ref in [*locked_refs, *refs[len(old_refs) :]])
        )
        deleted_refs = [ref for ref in old_refs if ref.version not in needed_versions]
        for ref in deleted_refs:
            delete_version(ref)

    return deleted_refs


def delete_version(ref: WeightsRef) -> None:
    """Delete a version, all at once for readers. Files that cannot be removed are removed with the next
    version that is written."""
    aside_directory = _temporary_path(Path(ref.path).parent)
    with suppress(OSError):
        Path(ref.path).rename(aside_directory)
    shutil.rmtree(aside_directory, ignore_errors=True)


def delete_damaged(ref: WeightsRef) -> None:
    """Delete the parts of a version and of its base versions that may be damaged: whole versions that do not
    match their checksums, and deltas, which cannot be checked alone."""
    for version in _needed_versions(ref):
        part_ref = ref_to(Path(ref.path).parent, version)
        with suppress(WeightsError):
            if read_manifest(part_ref).delta is None:
                verify_version(part_ref)
                continue
        delete_version(part_ref)


def bytes_needed(version_bytes: int, deltas: bool, caches: int, served_adapters: int = 0) -> int:
    """Return the bytes that all versions kept at once may take, with one being written and one being read.
    With deltas: two lineages, each a whole version and deltas of about the same size, and readers' `caches`,
    if beside the versions. `served_adapters`: versions of a server, which maps copies in its reader's
    cache."""
    return version_bytes * (KEPT_VERSIONS + 2 + (2 + caches if deltas else 0) + caches * served_adapters)


def space_needed(config: RunConfig, version_bytes: int) -> int:
    """Return the bytes that a run's versions may take at once."""
    return bytes_needed(
        version_bytes,
        deltas=config.weights.full_every > 1,
        caches=config.engine.server_count,
        served_adapters=config.versions_held,
    )


def weights_directory(setting: str, run_dir: Path, run_name: str, needed_bytes: int) -> Path:
    """Choose where a run publishes, by the key weights.directory: in shared memory with room for
    `needed_bytes` (all versions kept at once), in the run's own directory, or under an absolute path.
    `new_version` creates the directory. Raises ConfigError for `shm` without enough room, and for any other
    text."""
    on_disk = run_dir / "weights"
    if setting == "run":
        return on_disk

    unique_name = unique_run_name(run_dir, run_name)
    if setting not in ("auto", "shm"):
        if not Path(setting).is_absolute():
            raise ConfigError(
                f"weights.directory: {setting!r} is invalid; use auto, shm, run or an absolute path"
            )
        return Path(setting) / unique_name

    shared_directory = SHARED_MEMORY / f"asyncrl-{unique_name}"
    free_bytes = 0
    if SHARED_MEMORY.is_dir():  # the run's own files are written over
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free + _bytes_in(shared_directory)

    if free_bytes >= needed_bytes:
        return shared_directory

    if setting == "shm":
        problem = f"{SHARED_MEMORY} has {free_bytes} bytes free, but the weights need {needed_bytes}"
        raise ConfigError(f"{problem}; set weights.directory=run")

    return on_disk


def unique_run_name(run_dir: Path, run_name: str) -> str:
    """Return a name that no other run has: runs may share a name, and on a path that machines share even the
    path of their directory."""
    origin = f"{socket.gethostname()}:{run_dir.resolve()}"
    return f"{run_name}-{blake2s(origin.encode(), digest_size=4).hexdigest()}"


def cache_directory(setting: str, run_dir: Path, run_name: str, needed_bytes: int, index: int) -> Path:
    """Choose where reader `index` makes deltas whole: always on its own machine, beside the versions unless
    machines may share the path of the versions."""
    local_setting = "auto" if Path(setting).is_absolute() else setting
    return weights_directory(local_setting, run_dir, run_name, needed_bytes) / f"cache-{index}"


def _bytes_in(directory: Path) -> int:
    """Return the size of a directory's files; files may be deleted meanwhile."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total


def _needed_versions(ref: WeightsRef) -> set[PolicyVersion]:
    """Return a version and its base versions, as far as the manifests can be read."""
    versions = {ref.version}
    with suppress(WeightsError):
        versions |= {base.version for base, _ in lineage_of(ref)}
    return versions


@contextmanager
def _claimed(ref: WeightsRef) -> Iterator[bool]:
    """Yield True if no reader has locked the version; then no reader can during the body. False also for a
    version that cannot be locked."""
    claimed = True  # also without a manifest: another process has begun to delete the version
    with ExitStack() as stack:
        try:
            # Opened for writing: on NFS an exclusive lock needs this.
            descriptor = os.open(Path(ref.path) / MANIFEST, os.O_RDWR)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            claimed = isinstance(error, FileNotFoundError)
            if not isinstance(error, FileNotFoundError | BlockingIOError):
                log.warning("keeping weights %s, because they cannot be locked (%s)", ref.path, error)

        yield claimed


def _temporary_path(directory: Path) -> Path:
    return directory / f"{_TEMPORARY}{uuid.uuid4().hex}"


def _remove_leftovers(directory: Path) -> None:
    """Remove the leftovers of a crashed publish."""
    for leftover in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)
