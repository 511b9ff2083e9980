"""Checkpoints: models, optimizers and RNG by torch's distributed checkpointing, with a manifest.

    step-N.tmp/ ──save (all ranks)──► hash, fsync, read back ──rename──► step-N/{state, manifest.json, hf}

The rename comes last, so a directory called step-N is complete. Loading verifies the hashes and works
with any number of ranks. Collectives: `save` and `load`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.optim import Optimizer

from asyncrl.errors import one_line, reason
from asyncrl.store.manifests import MANIFEST, CheckpointError, CheckpointManifest, read_manifest
from asyncrl.trainer.export import export_hf
from asyncrl.trainer.step import Learner

logger = logging.getLogger(__name__)
STATE = "state"


def save(directory: Path, learner: Learner, manifest: CheckpointManifest, *, hf: bool = True) -> Path:
    """Write and verify `directory`/step-N on all ranks' behalf; returns it once it is in place.

    `hf` adds an export that `from_pretrained` reads. An existing step-N is replaced (a step can be
    reached twice after a rollback). Raises CheckpointError, on all ranks alike, when it cannot be written, or
    not be read back; nothing of it is left then.
    """
    final = directory / f"step-{manifest.step}"
    partial = directory / f"step-{manifest.step}.tmp"
    manifest = msgspec.structs.replace(manifest, state=_carried(learner, learner.state))
    first = learner.world.rank == 0
    try:
        _together(learner, lambda: _clear(partial) if first else None)
        _together(learner, lambda: save_shards(_state(learner), checkpoint_id=partial / STATE))
        if hf:
            model = learner.config.model
            _together(learner, lambda: export_hf(partial / "hf", learner.policy, model.path, model.template))
        _together(learner, lambda: _seal(partial, final, manifest, learner.pulse) if first else None)
    except CheckpointError as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final}: {error}") from error
    return final


def _together(learner: Learner, work: Callable[[], object]) -> None:
    """A part of saving. When it fails on one rank it has failed on all: CheckpointError."""
    problem = ""
    try:
        work()
    except CheckpointException as error:  # of all ranks already
        problem = one_line(next(iter(error.failures.values()))[0])
    except (OSError, CheckpointError) as error:
        problem = reason(error)
    if problem := next(filter(None, learner.world.gather(problem, str)), ""):
        raise CheckpointError(problem)


def _clear(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def load(path: Path, learner: Learner) -> CheckpointManifest:
    """Restore models, optimizers, RNG, `state` and `step` in place, not the reference: that stays the initial
    policy. The path must be one that `newest` verified. Raises CheckpointError when it is of other models."""
    manifest = read_manifest(path)
    state = _state(learner)
    saved = FileSystemReader(path / STATE).read_metadata().state_dict_metadata
    if f"rng.{learner.world.rank}" not in saved:  # more ranks than were saved: they keep their seed
        state.pop("rng")
    if "critic" in state and not any(name.startswith("critic.") for name in saved):
        logger.warning("checkpoint %s has no critic: it starts anew", path)
        state.pop("critic")
    try:
        load_shards(state, checkpoint_id=path / STATE)
    except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise CheckpointError(f"{path} does not fit this model: {one_line(error)}") from error
    _restore(learner.policy.lm, learner.optimizer, state)
    if learner.critic is not None and "critic" in state:
        _restore(learner.critic, learner.critic.optimizer, state["critic"])
    if "rng" in state:
        torch.set_rng_state(state["rng"][str(learner.world.rank)])
    learner.state |= _carried(learner, manifest.state)
    learner.step = manifest.step
    return manifest


def newest(directory: Path) -> Path | None:
    """The newest checkpoint whose files are as written; a damaged one is passed over with a warning."""
    for path in _steps(directory):
        problem = verify(path)
        if not problem:
            return path
        logger.warning("checkpoint %s is damaged (%s): falling back to the one before", path, problem)
    return None


def prune(directory: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints and what crashes left half-written."""
    for path in (*_steps(directory)[keep:], *directory.glob("step-*.tmp")):
        shutil.rmtree(path, ignore_errors=True)


def verify(path: Path, pulse: Callable[[], None] = lambda: None) -> str:
    """What is wrong with a checkpoint's files, in one line; '' when nothing is. `pulse` is called again and
    again, as a sign of life."""
    try:
        manifest = read_manifest(path)
        for name, (size, digest) in manifest.files.items():
            if _fingerprint(path / name, pulse) != (size, digest):
                return f"{name} is not as written"
    except (CheckpointError, OSError) as error:
        return one_line(error)
    return "" if manifest.files else "the manifest names no file"


def _state(learner: Learner) -> dict[str, Any]:
    state = _of(learner.policy.lm, learner.optimizer)
    if learner.critic is not None:
        state["critic"] = _of(learner.critic, learner.critic.optimizer)
    return state | {"rng": {str(learner.world.rank): torch.get_rng_state()}}


def _carried(learner: Learner, state: dict[str, float]) -> dict[str, float]:
    """The part of `state` that a resumed run takes over. A fixed KL coefficient comes from the config."""
    kl = learner.config.kl
    adapts = kl.where != "none" and kl.target > 0
    return {name: value for name, value in state.items() if adapts or name != "kl_coef"}


def _of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _restore(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Weights and moments; the optimizer's settings are those of the config."""
    settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _seal(partial: Path, final: Path, manifest: CheckpointManifest, pulse: Callable[[], None]) -> None:
    """Rank 0, when all files are written: manifest, fsync, verify, rename."""
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    files = {str(path.relative_to(partial)): _fingerprint(path, pulse) for path in paths}
    encoded = msgspec.json.encode(msgspec.structs.replace(manifest, files=files))
    (partial / MANIFEST).write_bytes(msgspec.json.format(encoded, indent=1))
    for path in (*partial.rglob("*"), partial):
        _fsync(path)
        pulse()
    if problem := verify(partial, pulse):
        raise CheckpointError(problem)
    replaced = final.with_name(f"{final.name}.old.tmp")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _fsync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _steps(directory: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    found = [path for path in directory.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _fingerprint(path: Path, pulse: Callable[[], None]) -> tuple[int, str]:
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
            pulse()
    return size, digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
