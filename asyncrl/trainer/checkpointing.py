"""Does one trainer rank's part in checkpoints.

    consumes: the learner, after a commit
    waits for: the copy to main memory only; writing and hashing go on in the background
    unblocks: the coordinator (checkpointed), which forgets payloads that the oldest kept checkpoint covers

One checkpoint is written at a time: a checkpoint that becomes due meanwhile is put off to the first step
after. A checkpoint counts only once its manifest is in place: until then all training since the previous
checkpoint is unsaved.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, DeadlineError, one_line
from asyncrl.runtime.process import main_memory
from asyncrl.store.checkpoints import CheckpointError, CheckpointManifest, Checkpoints, checkpoints_of
from asyncrl.trainer import checkpoint
from asyncrl.trainer.device_offload import DeviceOffload
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World

log = logging.getLogger("asyncrl.trainer")

WRITE_RATE = 20e6  # bytes per second of the slowest storage
HOST_NAME = socket.gethostname()
WRITE_PATIENCE = 600.0  # seconds that a rank may take beyond the time by WRITE_RATE
COPY_ROOM = 1.2  # bytes that must be free in main memory, per byte of a copy


class WriteJob(NamedTuple):
    manifest: CheckpointManifest
    started_at: float
    result: Future[str]  # the problem; '' for none


def shared_checkpoints(config: RunConfig, run_dir: Path, world: World) -> Checkpoints:
    """Return the checkpoints of a run. A collective: ConfigError on all ranks, unless every rank sees the
    files that rank 0 writes. A directory that cannot be written to now may be later, so nothing is tested
    there."""
    checkpoints = checkpoints_of(config, run_dir)
    token = secrets.token_hex(8)
    try:
        if world.rank == 0:
            checkpoints.put_token(token)
    except OSError as error:
        checkpoints.write_problem = f"cannot write to {checkpoints.root} ({one_line(error)})"
        log.error("%s", checkpoints.write_problem)
        token = ""

    if not (token := world.gather(token, str)[0]):
        return checkpoints
    sightings = world.gather((checkpoints.sees_token(token), HOST_NAME), tuple[bool, str])
    blind_ranks = [
        f"rank {rank} on {host}" for rank, (sees_token, host) in enumerate(sightings) if not sees_token
    ]
    if world.rank == 0:
        checkpoints.drop_token()

    if blind_ranks:
        raise ConfigError(
            f"checkpoint.directory: {checkpoints.root} is not shared by all trainer ranks "
            f"({', '.join(blind_ranks)} cannot see the files of the other ranks); set a directory that all "
            "nodes share, or a URL"
        )

    return checkpoints


class Checkpointing:
    """Writes the checkpoints of a run in the background. Made by all ranks together; methods are collectives
    unless their section says otherwise. `newest_manifest`: of the newest complete checkpoint. `is_due`: the
    next checkpoint is to begin as soon as none is under way. `best_step`: the step kept for its validation
    score."""

    def __init__(self, config: RunConfig, checkpoints: Checkpoints, learner: Learner) -> None:
        self._config = config.checkpoint
        self._learner = learner
        self._world = learner.world
        self.checkpoints = checkpoints
        self.newest_manifest: CheckpointManifest | None = None
        self.is_due = False
        self.best_step = -1
        self.trained_total = 0
        self._trained_uids: list[str] = []  # uids since the newest checkpoint, or the checkpoint under way
        self._problem = checkpoints.write_problem
        self._write_job: WriteJob | None = None
        self._state_bytes = checkpoint.state_bytes(checkpoint.snapshot(learner, copy=False))
        largest_state = max(self._world.gather(self._state_bytes, int))
        self._write_limit = WRITE_PATIENCE + largest_state * self._world.size / WRITE_RATE
        self._background_world = self._world.with_own_group(self._write_limit)
        self._writer_thread = ThreadPoolExecutor(1, "checkpoints", self._world.use_device)
        self._ranks_on_host = self._world.gather(HOST_NAME, str).count(HOST_NAME)

    # -- not collectives -------------------------------------------------------------------------------

    @property
    def newest_step(self) -> int:
        """Return the step of the newest checkpoint; -1: none."""
        return self.newest_manifest.step if self.newest_manifest else -1

    @property
    def problem(self) -> str:
        """Say why the newest checkpoint could not be written, as soon as that is known; '' after a
        success."""
        if self._write_job is None or not self._write_job.result.done() or self._write_job.result.exception():
            return self._problem
        return self._write_job.result.result() or self._problem

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written, and until `poll_checkpoint` has noticed its end."""
        return self._write_job is not None

    def add_trained(self, uids: Sequence[str]) -> None:
        """Record the uids of committed episodes."""
        self._trained_uids += uids
        self.trained_total += len(uids)

    # -- collectives -----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Start from the newest sound checkpoint of the run, the same on all ranks."""
        newest_step = checkpoint.newest_step(self.checkpoints) if self._world.rank == 0 else -1
        resumed_step = self._world.gather(newest_step, int)[0]
        if resumed_step >= 0:
            self.newest_manifest = checkpoint.load_checkpoint(self.checkpoints, resumed_step, self._learner)
            self.trained_total = self.newest_manifest.trained_total
            log.info("resumed from %s", self.checkpoints.file_path(resumed_step))

    def begin_checkpoint(self, trainer_epoch: int, device_offload: DeviceOffload | None = None) -> bool:
        """Begin a checkpoint of the last committed step. False: there is no memory for a copy, so training
        must wait until the checkpoint is written. Micro-batches of an open batch are left out: their plan is
        in the store, and is trained again."""
        assert self._write_job is None, "one at a time"
        has_memory = main_memory().available > COPY_ROOM * self._state_bytes * self._ranks_on_host
        is_copied = all(self._world.gather(has_memory, bool))
        if not is_copied:
            log.warning(
                "not enough memory for a copy of %.1f GB, so training waits until the checkpoint is written",
                self._state_bytes / 1e9,
            )

        manifest = checkpoint.manifest_of(
            self._learner,
            trainer_epoch=trainer_epoch,
            parent=self.newest_step,
            trained=tuple(self._trained_uids),
            trained_total=self.trained_total,
        )
        state = checkpoint.snapshot(self._learner, copy=is_copied, device_offload=device_offload)
        self._write_job = WriteJob(
            manifest, time.monotonic(), self._writer_thread.submit(self._write_in_thread, state, manifest)
        )
        self._trained_uids = []
        self.is_due = False

        return is_copied

    def poll_checkpoint(self) -> bool:
        """Return whether the checkpoint under way has just been completed. Raises DeadlineError when writing
        takes longer than its bytes allow."""
        if self._write_job is None:
            return False
        manifest, started_at, result = self._write_job
        if result.done() and (error := result.exception()) is not None:
            raise error  # the other ranks' parts cannot end without this part

        if not all(self._world.gather(result.done(), bool)):
            if time.monotonic() - started_at > self._write_limit:
                raise DeadlineError(
                    f"the checkpoint of step {manifest.step} took longer than {self._write_limit:.0f} s"
                )
            return False

        self._write_job = None
        self._problem = result.result()

        if self._problem:  # the next checkpoint lists these episodes again
            log.error("not saved: %s", self._problem)
            self._trained_uids[:0] = manifest.trained
            self.is_due = True
            return False

        self.newest_manifest = manifest
        return True

    def _write_in_thread(self, state: checkpoint.State, manifest: CheckpointManifest) -> str:
        """Write the checkpoint, in the background thread. Returns the problem, '' for none."""
        try:
            checkpoint.write_checkpoint(
                self.checkpoints, state, manifest, self._learner, self._background_world
            )
        except CheckpointError as error:
            return str(error)

        if self._world.rank == 0:
            try:
                self.checkpoints.prune_steps(manifest.step, self._config.keep, self.best_step)
            except OSError as error:
                log.warning("cannot delete older checkpoints: %s", error)

        return ""
