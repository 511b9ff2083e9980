"""Keeps the newest policy version, and for each engine the one it was sent and the one it has confirmed."""

from __future__ import annotations

import msgspec

from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.weights.manifest import Probe, WeightsRef
from asyncrl.wire.messages.shared import LoadWeights
from asyncrl.wire.messages.trainer import Probed

PROBE_INTERVAL = 50  # steps between two comparisons of all engines with the trainer: scoring takes it a while

MAX_PROBES = 64  # versions whose probe is kept: while a disk is full, none of them becomes the newest


class EngineRecord(msgspec.Struct):
    """Holds an engine on a peer: the embedded one of a worker, or the server of a keeper. NO_VERSION: none.

    `unproven`: it has loaded a version, but must compare the probe with the trainer's log-probs before it may
    sample. `quarantined`: its weights are not what they should be; it gets no work before it has loaded them
    anew. `pinned`: it is set aside for validation, and keeps what it has. `up`: a server has told its URL.
    `asleep`: it has said that it holds neither KV cache nor weights, and was sent no version since;
    `woken`: it has loaded one since.
    """

    name: str
    up: bool = True
    quarantined: bool = False
    held_for_validation: bool = False
    push_s: float = 0.0  # seconds of the newest load
    pushed: PolicyVersion = NO_VERSION
    acked: PolicyVersion = NO_VERSION
    pushed_at: float = 0.0
    send_at: float = 0.0
    unproven: bool = False
    asleep: bool = False
    woken: bool = False
    kv_use: float | None = None  # newest known share of a server's KV memory in use

    def resend(self, send_at: float) -> None:
        """From `at` on, it is to be sent the newest version, whatever it was sent before."""
        self.pushed = NO_VERSION
        self.send_at = send_at


class VersionLedger:
    """Compares what was pushed with what was acked. An engine that missed a version gets the newest one.

    Args:
        newest: the newest published version.
        ref: where it is; None: unknown, until the trainer publishes it again.
    """

    def __init__(self, newest: PolicyVersion = NO_VERSION, ref: WeightsRef | None = None) -> None:
        self.newest = newest
        self.ref = ref
        self.engines: dict[bytes, EngineRecord] = {}  # by the identity of their peer
        self.recent_probes: list[
            Probed
        ] = []  # of the newest version, and of later ones that are not written yet
        self._newest_checksum = (NO_VERSION, "")  # of the newest version that was loaded, as first loaded

    def set_newest(self, ref: WeightsRef) -> bool:
        """A version can be loaded. False when that was known, or a newer one can."""
        if ref.version < self.newest or (ref.version == self.newest and self.ref is not None):
            return False
        self.newest = ref.version
        self.ref = ref
        return True

    def needs_push(self, engine: EngineRecord, now: float) -> bool:
        """True when the engine is to be sent the newest version now; an unproven one, with its probe."""
        probe_ready = not engine.unproven or self._find_probe(self.newest) is not None
        return engine.pushed < self.newest and now >= engine.send_at and probe_ready

    def load_message(self, ref: WeightsRef, lane: str) -> LoadWeights:
        """The message that tells an engine to load a version, with its probe if the trainer has scored it."""
        return LoadWeights(ref, lane, self._find_probe(ref.version))

    def _find_probe(self, version: PolicyVersion) -> Probe | None:
        """Return the probe with the trainer's log-probs of this version; None: it has not scored it."""
        return next((probed.probe for probed in self.recent_probes if probed.version == version), None)

    def lacks_probe(self, version: PolicyVersion, always: bool = False) -> bool:
        """True when the trainer, which has this version now, is to score the probe with it: an engine waits
        for that, or the last time is PROBE_EVERY steps ago; or `always`, before the trainer rests."""
        if self._find_probe(version) is not None:
            return False
        if always:
            return True

        probe_due = (
            bool(self.recent_probes) and version.step >= self.recent_probes[-1].version.step + PROBE_INTERVAL
        )
        return probe_due or any(engine.unproven for engine in self.engines.values())

    def add_probe(self, probed: Probed, now: float) -> None:
        """The trainer has scored the probe. If that is with the newest version, engines may have loaded it
        already: they are sent it again, and only compare. Where writing takes longer than a step, newer
        probes come before it is written. A rank repeats its newest one after a quiet time."""
        if self._find_probe(probed.version) is not None:
            return
        retained_probes = [
            earlier for earlier in self.recent_probes if self.newest <= earlier.version < probed.version
        ]
        self.recent_probes = [*retained_probes, probed][-MAX_PROBES:]
        if probed.version == self.newest:
            for engine in self.engines.values():
                engine.resend(now)

    def same_weights(self, version: PolicyVersion, checksum: str) -> bool:
        """False when the checksum of the newest version is not the one that the first engine reported."""
        if version > self._newest_checksum[0]:
            self._newest_checksum = (version, checksum)
        return version < self._newest_checksum[0] or checksum == self._newest_checksum[1]

    @property
    def acked_step(self) -> int:
        """Step that the slowest engine has confirmed; of the newest version without engines."""
        return min((engine.acked.step for engine in self.engines.values()), default=self.newest.step)
