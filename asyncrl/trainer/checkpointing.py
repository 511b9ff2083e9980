"""Does one trainer rank's part in checkpoints.

consumes: the learner, after a commit
waits for: the copy to main memory only; writing and hashing go on in the background
unblocks: the coordinator (checkpointed), which forgets the payloads that the oldest kept one covers

One checkpoint is written at a time: one that is due meanwhile is put off to the first step after. Until its
manifest is there, a checkpoint counts for nothing: what was trained since the one before is still unsaved.
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
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.resting import Resting
from asyncrl.trainer.world import World

log = logging.getLogger("asyncrl.trainer")

WRITE_RATE = 20e6  # bytes a second of the slowest place for checkpoints
HOST = socket.gethostname()
PATIENCE = 600.0  # seconds beyond that in which a rank must have written its part
ROOM = 1.2  # of a copy's bytes: what must be free in main memory for it


class Job(NamedTuple):
    manifest: CheckpointManifest
    began: float
    result: Future[str]  # what went wrong; '' for nothing


def shared_place(config: RunConfig, run_dir: Path, world: World) -> Checkpoints:
    """The checkpoints of a run. A collective: ConfigError, on all ranks, unless each of them sees what rank
    0 writes. A place that cannot be written to now may be later, and is not looked at."""
    place = checkpoints_of(config, run_dir)
    token = secrets.token_hex(8)
    try:
        if world.rank == 0:
            place.put_token(token)
    except OSError as error:
        place.problem = f"{one_line(error)}; {place.root} cannot be written to"
        log.error("%s", place.problem)
        token = ""
    if not (token := world.gather(token, str)[0]):
        return place
    found = world.gather((place.sees_token(token), HOST), tuple[bool, str])
    blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(found) if not sees]
    if world.rank == 0:
        place.drop_token()
    if blind:
        raise ConfigError(
            f"checkpoint.directory: {place.root} is not one place for all trainer ranks, {', '.join(blind)} "
            "does not see what the others write there; set it to one that all nodes share, or to a URL"
        )
    return place


class Checkpointing:
    """Made by all ranks together; a method without another word is a collective. `newest`: manifest of the
    newest checkpoint in place. `problem`: why the last one could not be written. `best`: step of the one to
    keep for its validation."""

    def __init__(self, config: RunConfig, place: Checkpoints, learner: Learner) -> None:
        self._config = config.checkpoint
        self._learner = learner
        self._world = learner.world
        self.place = place
        self.newest: CheckpointManifest | None = None
        self.problem = place.problem
        self.best = -1
        self.trained_total = 0
        self._trained: list[str] = []  # since the newest checkpoint, or the one under way
        self._due = False
        self._job: Job | None = None
        self._bytes = checkpoint.size(checkpoint.snapshot(learner, copy=False))
        largest = max(self._world.gather(self._bytes, int))
        self._limit = PATIENCE + largest * self._world.size / WRITE_RATE
        self._apart = self._world.apart(self._limit)
        self._thread = ThreadPoolExecutor(1, "checkpoints", self._world.use_device)
        self._neighbours = self._world.gather(HOST, str).count(HOST)

    # -- not collectives -------------------------------------------------------------------------------

    @property
    def parent(self) -> int:
        """Return the step of the newest checkpoint; -1: none."""
        return self.newest.step if self.newest else -1

    @property
    def under_way(self) -> str:
        """Names what is being written; '' for nothing."""
        written = f"{self.place.written / 1e6:,.0f} MB since the start"
        return f"a checkpoint is being written, {written}" if self.busy else ""

    @property
    def checkpoint_problem(self) -> str:
        """Says why the newest checkpoint could not be written, as soon as that is known; '' once one was."""
        if self._job is None or not self._job.result.done() or self._job.result.exception():
            return self.problem
        return self._job.result.result() or self.problem

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written, or nobody has looked whether it still is."""
        return self._job is not None

    def add(self, uids: Sequence[str]) -> None:
        """These are trained, and committed."""
        self._trained += uids
        self.trained_total += len(uids)

    def mark_due(self) -> bool:
        """Notes that a checkpoint is due after this step; True if one may begin now."""
        self._due = self._due or self._learner.step % self._config.pause == 0
        return self._due and not self.busy

    # -- collectives -----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Start from the newest sound checkpoint of the run, the same on all ranks."""
        found = checkpoint.newest(self.place) if self._world.rank == 0 else -1
        step = self._world.gather(found, int)[0]
        if step >= 0:
            self.newest = checkpoint.load(self.place, step, self._learner)
            self.trained_total = self.newest.trained_total
            log.info("resumed from %s", self.place.path(step))

    def begin(self, trainer_epoch: int, resting: Resting | None = None) -> bool:
        """A checkpoint of the last committed step. False: training must wait until it is written, as there is
        no memory for a copy. Micro-batches of an open batch are not in it: their plan is in the store, and is
        trained again."""
        assert self._job is None, "one at a time"
        free = main_memory().available > ROOM * self._bytes * self._neighbours
        copied = all(self._world.gather(free, bool))
        if not copied:
            log.warning(
                "no memory for a copy of %.1f GB: training waits for the checkpoint", self._bytes / 1e9
            )
        manifest = checkpoint.manifest_of(
            self._learner,
            trainer_epoch=trainer_epoch,
            parent=self.parent,
            trained=tuple(self._trained),
            trained_total=self.trained_total,
        )
        state = checkpoint.snapshot(self._learner, copy=copied, resting=resting)
        self._job = Job(manifest, time.monotonic(), self._thread.submit(self._write, state, manifest))
        self._trained = []
        self._due = False
        return copied

    def poll(self) -> bool:
        """True if the checkpoint under way has been completed. Raises DeadlineError when it takes longer than
        its bytes allow."""
        if self._job is None:
            return False
        manifest, began, result = self._job
        if result.done() and (error := result.exception()) is not None:
            raise error  # the other ranks' parts cannot end without this one's
        if not all(self._world.gather(result.done(), bool)):
            if time.monotonic() - began > self._limit:
                raise DeadlineError(f"the checkpoint of step {manifest.step} took over {self._limit:.0f} s")
            return False
        self._job = None
        self.problem = result.result()
        if self.problem:  # the next one lists what this one did
            log.error("not saved: %s", self.problem)
            self._trained[:0] = manifest.trained
            self._due = True
            return False
        self.newest = manifest
        return True

    def _write(self, state: checkpoint.State, manifest: CheckpointManifest) -> str:
        """In the thread."""
        try:
            checkpoint.write(self.place, state, manifest, self._learner, self._apart)
        except CheckpointError as error:
            return str(error)
        if self._world.rank == 0:
            try:
                self.place.prune(manifest.step, self._config.keep, self.best)
            except OSError as error:
                log.warning("older checkpoints are not deleted: %s", error)
        return ""
