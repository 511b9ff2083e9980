"""Keeps the newest policy version, and for each engine the versions that were sent and confirmed."""

from __future__ import annotations

import msgspec

from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.weights.manifest import Probe, WeightsRef
from asyncrl.wire.messages.trainer import Probed

PROBE_INTERVAL = 50  # largest number of steps between two comparisons of all engines with the trainer

MAX_PROBES = 64  # stored probes; while a disk is full, their versions do not become the newest


class EngineRecord(msgspec.Struct):
    """An engine on a peer: the embedded engine of a worker, or the server of a supervisor.

    is_up: a server has reported its URL.
    quarantined: the weights are wrong; the engine gets no work before it has loaded them anew.
    reserved_for_validation: the engine samples a validation only, and keeps its version.
    pushed, acked: versions that were sent and confirmed; NO_VERSION: none.
    uncompared: a version is loaded, but this coordinator knows of no comparison of the process with the
        trainer: the version must be sent again with the probe, and compared, before sampling.
    asleep: the engine has confirmed that it holds neither KV cache nor weights, and was sent no version
        since.
    woken: the engine has loaded a version since.
    """

    name: str
    is_up: bool = True
    quarantined: bool = False
    reserved_for_validation: bool = False
    push_s: float = 0.0  # seconds of the newest load
    pushed: PolicyVersion = NO_VERSION
    acked: PolicyVersion = NO_VERSION
    pushed_at: float = 0.0
    send_at: float = 0.0
    uncompared: bool = False
    asleep: bool = False
    woken: bool = False
    kv_use: float | None = None  # newest known share of a server's KV memory in use

    def resend(self, send_at: float) -> None:
        """Have the newest version sent from time `send_at` on, whatever was sent before."""
        self.pushed = NO_VERSION
        self.send_at = send_at


class VersionLedger:
    """Compares pushed with acked versions. An engine that missed a version gets the newest version.

    Args:
        newest: the newest published version.
        ref: where that version is stored; None: unknown, until the trainer publishes it again.
    """

    def __init__(self, newest: PolicyVersion = NO_VERSION, ref: WeightsRef | None = None) -> None:
        self.newest = newest
        self.ref = ref
        self.engines: dict[bytes, EngineRecord] = {}  # engines by identity of the peer
        self.recent_probes: list[Probed] = []  # probes of the newest version, and of versions not written yet
        self._expired_probe: Probed | None = None  # the newest; compared no more
        # Newest loaded version, and its checksum by the first engine.
        self._newest_checksum = (NO_VERSION, "")

    def set_newest(self, ref: WeightsRef) -> bool:
        """Note a version that can be loaded. Return False if it was known, or is not the newest."""
        if ref.version < self.newest or (ref.version == self.newest and self.ref is not None):
            return False
        self.newest = ref.version
        self.ref = ref
        return True

    def find_probe(self, version: PolicyVersion) -> Probe | None:
        """Return the probe with the trainer's log-probs of this version; None if not scored, or expired."""
        return next(
            (
                probed.probe
                for probed in self.recent_probes
                if probed.version == version and probed != self._expired_probe
            ),
            None,
        )

    def expire_probe(self, version: PolicyVersion) -> None:
        """Have the trainer score other texts with this version: an engine has failed with these, and its
        replacement is to be judged by others."""
        for probed in self.recent_probes:
            if probed.version == version:
                self._expired_probe = probed

    def lacks_probe(self, version: PolicyVersion, always: bool = False) -> bool:
        """Return True if the trainer, which has this version now, should score the probe.

        That is so if an engine waits for the probe, with `always`, before the trainer offloads, and at steps
        1, 2, 4, 8 and so on, then every PROBE_INTERVAL steps: a young run learns early of an engine that does
        not load new versions.
        """
        if self.find_probe(version) is not None:
            return False
        if always:
            return True

        probe_due = False
        if self.recent_probes:
            last_step = self.recent_probes[-1].version.step
            probe_due = version.step >= last_step + min(max(last_step, 1), PROBE_INTERVAL)
        return probe_due or any(engine.uncompared for engine in self.engines.values())

    def add_probe(self, probed: Probed, now: float) -> None:
        """Store the probe with the trainer's log-probs of a version.

        Engines that have loaded the newest version already get it again, and only compare. If writing takes
        longer than a step, probes arrive before their version is written. Ranks repeat the newest probe after
        a quiet time.
        """
        if self.find_probe(probed.version) is not None or probed == self._expired_probe:
            return
        retained_probes = [
            earlier for earlier in self.recent_probes if self.newest <= earlier.version < probed.version
        ]
        self.recent_probes = [*retained_probes, probed][-MAX_PROBES:]
        if probed.version == self.newest:
            for engine in self.engines.values():
                engine.resend(now)

    def same_weights(self, version: PolicyVersion, checksum: str) -> bool:
        """Return False if the checksum of the newest version differs from that of the first engine."""
        if version > self._newest_checksum[0]:
            self._newest_checksum = (version, checksum)
        return version < self._newest_checksum[0] or checksum == self._newest_checksum[1]

    @property
    def acked_step(self) -> int:
        """Step that the slowest engine has confirmed; without engines, the step of the newest version."""
        return min((engine.acked.step for engine in self.engines.values()), default=self.newest.step)
