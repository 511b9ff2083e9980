"""Keeps what the coordinator knows of the fleet: the processes of the run, and the engines' versions."""

from __future__ import annotations

import time

import msgspec

from asyncrl.buffer.shifts import Shifts
from asyncrl.config import RunConfig
from asyncrl.coordinator.pending_samples import PendingSamples
from asyncrl.coordinator.versions import VersionLedger
from asyncrl.runtime.liveness import Liveness
from asyncrl.store import launches
from asyncrl.store.runstore import RunStore
from asyncrl.types import MAX_VOCABULARY


class Fleet:
    """What concerns all processes at once: engines' versions and samples, liveness, shifts, trainer epoch and
    waits.

    The processes themselves are in the `Peers` of the handlers.
    """

    def __init__(self, config: RunConfig, versions: VersionLedger, store: RunStore) -> None:
        self._config = config
        self._store = store
        self.versions = versions
        self.samples = PendingSamples()
        self.liveness = Liveness(config, time.monotonic())
        self.shifts: Shifts | None = None  # None unless engines and trainer share devices

        self.launch = ""  # incarnation of the launch of this coordinator
        self.trainer_epoch = int(store.reader.meta("trainer_epoch", "0"))
        self.vocabulary = MAX_VOCABULARY  # token ids are smaller; known once a rank has reported in
        self.stopping = False  # the run was told to stop: processes that end from then on are no loss
        self.waits: list[str] = []  # what the run waits for in this pass of the loop
        self._launches = launches.decode_launches(store.reader.meta(launches.LAUNCHES_KEY, "[]"))

    def engine_time(self, now: float) -> float:
        """Return the time of the engines' clock, which stands still while they sleep.

        Groups age by this time.
        """
        return now if self.shifts is None else self.shifts.clock(now)

    def record_launch(self, step: int) -> None:
        """Record that this launch trains all steps after `step`, perhaps again, with the configuration of
        this launch."""
        self._launches = launches.with_launch(self._launches, step, self._config)
        self._store.put_meta(launches.LAUNCHES_KEY, msgspec.json.encode(self._launches).decode())
