"""Manifests of checkpoints: what the trainer writes last, and the coordinator reads after a power cut."""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.errors import UNDECODABLE, AsyncrlError, one_line

MANIFEST = "manifest.json"


class CheckpointError(AsyncrlError):
    """A checkpoint is missing, damaged, or of another model."""


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. `trained`: uids trained since the checkpoint of step `parent` (-1: since
    the start), in order; `trained_total`: their number along the lineage. `state`: the learner's numbers
    beside its models. `files`: path → (bytes, xxh3). Both are filled in when it is written."""

    step: int
    trainer_epoch: int
    parent: int = -1
    trained: tuple[str, ...] = ()
    trained_total: int = 0
    state: dict[str, float] = {}
    files: dict[str, tuple[int, str]] = {}


def read_manifest(path: Path) -> CheckpointManifest:
    """The manifest of a checkpoint directory, `step-N` or `step-N.tmp`. CheckpointError when there is none,
    or it is of another step: its trajectories would count as trained at the wrong one."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=CheckpointManifest)
    except (OSError, *UNDECODABLE) as error:
        raise CheckpointError(f"{path}: no readable manifest ({one_line(error)})") from error
    if path.name.removesuffix(".tmp") != f"step-{manifest.step}":
        raise CheckpointError(f"{path}: it was renamed or copied, its manifest is of step {manifest.step}")
    return manifest


def lineage(directory: Path, step: int, known: int) -> list[CheckpointManifest]:
    """The manifests that lead to the checkpoint of `step`, from the first one beyond `known` batches on.
    CheckpointError when one of them is gone."""
    found: list[CheckpointManifest] = []
    while step > known:
        found.append(read_manifest(directory / f"step-{step}"))
        if found[-1].parent >= step:
            raise CheckpointError(f"{directory}/step-{step}: is its own parent")
        step = found[-1].parent
    return found[::-1]
