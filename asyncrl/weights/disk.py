"""Weights through a directory: both ends of the file protocol.

A version is a directory `e<epoch>-v<version>` with `model.safetensors` and `manifest.json`. It is written
under a temporary name and renamed when complete, so a reader sees all of it or nothing. One process publishes
to a directory; any number read. Nothing is synced to the disk: a version lost in a power cut is published
again, and a damaged one does not pass its checksums.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import (
    Manifest,
    Probe,
    TensorEntry,
    WeightsError,
    WeightsRef,
    overall_checksum,
    xxh3,
)

PAYLOAD = "model.safetensors"
MANIFEST = "manifest.json"
SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = ".writing-"


def publish(
    tensors: Mapping[str, torch.Tensor],
    directory: Path,
    trainer_epoch: int,
    version: int,
    probe: Probe | None = None,
) -> WeightsRef:
    """Write one version, whole or not at all. Of tensors that share their storage (tied weights) the first
    name is written. Publishing a version again replaces it. Raises OSError if it does not fit."""
    directory.mkdir(parents=True, exist_ok=True)
    _clean(directory)
    target = directory / f"e{trainer_epoch:04d}-v{version:08d}"
    work = _temporary(directory)
    work.mkdir()
    try:
        payload = _untied(tensors)
        save_file(payload, work / PAYLOAD)
        manifest = _describe(payload, trainer_epoch, version, probe)
        (work / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        if target.exists():
            target.rename(_temporary(directory))
        work.rename(target)
    finally:
        _clean(directory)
    return WeightsRef(trainer_epoch, version, str(target))


def read_manifest(ref: WeightsRef) -> Manifest:
    """What a version holds, without its tensors. Raises WeightsError."""
    path = Path(ref.path) / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"weights {ref.path}: no usable {MANIFEST} ({error})") from error
    if (manifest.trainer_epoch, manifest.version) != ref.order:
        found = f"epoch {manifest.trainer_epoch}, version {manifest.version}"
        wanted = f"epoch {ref.trainer_epoch}, version {ref.version}"
        raise WeightsError(f"weights {ref.path}: expected {wanted}; found {found}")
    if manifest.checksum != overall_checksum(manifest.tensors, manifest.probe):
        raise WeightsError(f"weights {ref.path}: {MANIFEST} does not match its own checksum")
    return manifest


def read(ref: WeightsRef) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """A version's manifest and tensors (on the CPU), every checksum verified. Raises WeightsError."""
    manifest = read_manifest(ref)
    try:
        tensors = load_file(Path(ref.path) / PAYLOAD)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"weights {ref.path}: no usable {PAYLOAD} ({error})") from error
    if tensors.keys() != {entry.name for entry in manifest.tensors}:
        raise WeightsError(f"weights {ref.path}: {PAYLOAD} and {MANIFEST} name different tensors")
    for entry in manifest.tensors:
        if _entry(entry.name, tensors[entry.name]) != entry:
            raise WeightsError(f"weights {ref.path}: tensor {entry.name} does not match its manifest entry")
    return manifest, tensors


def published(directory: Path) -> list[WeightsRef]:
    """The complete versions in a directory, oldest first by (epoch, version)."""
    refs = []
    for path in directory.glob("e*-v*"):
        epoch, _, version = path.name[1:].partition("-v")
        if epoch.isdecimal() and version.isdecimal():
            refs.append(WeightsRef(int(epoch), int(version), str(path)))
    return sorted(refs, key=lambda ref: ref.order)


def prune(directory: Path, keep: int, in_use: Collection[WeightsRef] = ()) -> list[WeightsRef]:
    """Delete all but the newest `keep` versions and those in use; returns what was deleted."""
    held = {ref.order for ref in in_use}
    refs = published(directory)
    doomed = [ref for ref in refs[: max(0, len(refs) - keep)] if ref.order not in held]
    for ref in doomed:
        shutil.rmtree(ref.path, ignore_errors=True)
    return doomed


def weights_directory(
    kind: Literal["auto", "shm", "run"], run_dir: Path, run_name: str, needed_bytes: int
) -> Path:
    """Where a run publishes: shared memory when it has room for `needed_bytes` (all versions kept at once),
    or the run's own directory. `publish` creates it. Raises ConfigError if `shm` is asked for and full."""
    on_disk = run_dir / "weights"
    if kind == "run":
        return on_disk
    tag = blake2s(str(run_dir.resolve()).encode(), digest_size=4).hexdigest()  # two runs may share a name
    shared = SHARED_MEMORY / f"asyncrl-{run_name}-{tag}"
    own = sum(path.stat().st_size for path in shared.rglob("*") if path.is_file())  # is written over
    free = own + shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free >= needed_bytes:
        return shared
    if kind == "shm":
        room = f"{SHARED_MEMORY} has {free} bytes free and the weights need {needed_bytes}"
        raise ConfigError(f"{room}; set weights.directory=run")
    return on_disk


def _untied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors, each storage once."""
    seen: set[tuple] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor.detach().cpu().contiguous()
    return kept


def _describe(
    tensors: Mapping[str, torch.Tensor], trainer_epoch: int, version: int, probe: Probe | None
) -> Manifest:
    entries = tuple(_entry(name, tensor) for name, tensor in tensors.items())
    return Manifest(trainer_epoch, version, entries, overall_checksum(entries, probe), probe)


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return TensorEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), xxh3(data))


def _temporary(directory: Path) -> Path:
    return directory / f"{_TEMPORARY}{uuid.uuid4().hex}"


def _clean(directory: Path) -> None:
    """Remove what a crashed publish left behind."""
    for leftover in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)
