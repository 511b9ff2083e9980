"""Does one trainer rank's part in publishing a version.

consumes: the policy, after a step
waits for: the copy to host memory only; collecting, writing and announcing go on in the background
unblocks: the coordinator (published), which sends the version to the engines

trainer's thread, all ranks:  Publishing.publish ── copy to host memory ──► the next step
publisher's thread, rank 0:   PublisherThread ── write (collects from all ranks), or offer ──► announce
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.config import RunConfig
from asyncrl.errors import disk_full, one_line
from asyncrl.trainer.float32 import float32_meanwhile, narrow_head_meanwhile
from asyncrl.trainer.model import Policy, PublishedShards, adapter_shards, copied_buffers, score_sequences
from asyncrl.trainer.packing import padded_meanwhile
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.collective import Sender
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.manifest import LogprobGaps, Probe, Superseded
from asyncrl.weights.pause import TrainingPause
from asyncrl.weights.shards import HostShards
from asyncrl.weights.snapshot import Snapshot
from asyncrl.wire.addresses import local_address
from asyncrl.wire.messages.channels import ToTrainerControl
from asyncrl.wire.messages.trainer import Published
from asyncrl.wire.sockets import Endpoints, Link, identity

log = logging.getLogger("asyncrl.weights")

# A token whose router chooses other experts after rounding changes the later tokens of its text: many short
# texts, so that few tokens are changed.
PROBE_SEQUENCES = 32
PROBE_TOKENS = 17  # of a text; all but the first are scored
LARGER_BATCH = 2  # copies of the texts in the probe's larger batch, as other shapes round otherwise
FULL_RETRY_SECONDS = 5.0  # seconds until the next try after a write failed on a full disk


class Publishing:
    """Publishes versions of the policy. Made by all ranks together. `rounding`: how far the trainer's own
    log-probs of the newest probe are from those of a forward in float32; no engine can be expected to come
    closer. Where forwards compute in float32 at least: from those in a larger batch. None: not measured
    yet."""

    def __init__(
        self, config: RunConfig, endpoints: Endpoints, run_dir: Path, world: World, policy: Policy
    ) -> None:
        self.config = config
        self.world = world
        self.policy = policy
        self._endpoints = endpoints
        self.rounding: LogprobGaps | None = None
        self._probe_count = 0  # probes scored, on all ranks alike

        weights_config = config.weights
        collector_count = readers(config, world.size)
        # If set, only adapters are published.
        self._adapters = policy.adapters if config.adapters_apart else None
        self._host = HostShards(
            self._published_shards(),
            self._adapters.published if self._adapters else policy.published,
            policy.export_dtype,
            deadline=config.launch.stall_timeout,
            collectors=collector_count,
            buffers=self._buffers(),
            deltas=weights_config.full_every > 1,
        )

        # Versions go to files, or from senders to engines.
        self._files: VersionWriter | None = None
        if weights_config.transport == "disk":
            version_bytes = sum(spec.nbytes for spec in self._host.layout)
            needed_bytes = disk.space_needed(config, version_bytes)
            directory = disk.weights_directory(weights_config.directory, run_dir, config.name, needed_bytes)
            self._files = VersionWriter(
                directory,
                weights_config.bucket_bytes,
                full_every=weights_config.full_every,
                adapters=self._adapters.specs if self._adapters else None,
            )
        self._pause: TrainingPause | None = None
        self._sender = None if self._files else self._make_sender(collector_count)

        self._publisher: PublisherThread | None = None
        if world.rank == 0:
            version_target = self._files or self._sender
            assert version_target is not None, "rank 0 is the first sender"
            self._publisher = PublisherThread(version_target, endpoints)

    def publish(self, version: PolicyVersion) -> None:
        """Copy the weights to host memory, and leave writing and announcing to the publisher. A collective.
        Raises the error of an earlier publish."""
        started_at = time.monotonic()
        buffers = self._buffers()  # small, and not to wait for the copies behind them
        snapshot = self._host.copy_version(
            version, self._published_shards(), lambda busy: self.world.gather(busy, list[int]), buffers
        )

        self.raise_failure()
        if self._publisher is not None:
            self._publisher.submit_snapshot(snapshot, copy_seconds=time.monotonic() - started_at)
        elif self._sender is not None:
            self._sender.offer_snapshot(snapshot)

    def _published_shards(self) -> Mapping[str, DTensor]:
        return adapter_shards(self.policy) if self._adapters else PublishedShards(self.policy)

    def _buffers(self) -> dict[str, Tensor]:
        return {} if self._adapters else copied_buffers(self.policy)

    def score_probe(self) -> Probe:
        """Return a probe with the log-probs of the current policy. A collective. Scoring takes as long as
        many copies of the weights, so the coordinator asks for it apart from `publish`. Servers may join
        after each forward, which may compile for minutes."""
        # Other texts each time: an engine that was replaced for an unlucky probe is not judged by it again.
        generator = random.Random(self._probe_count)
        self._probe_count += 1
        sequences = tuple(
            tuple(generator.choices(range(self.policy.vocabulary), k=PROBE_TOKENS))
            for _ in range(PROBE_SEQUENCES)
        )
        probe = Probe(sequences, self._score_sequences(sequences))

        # Rounding grows as the policy becomes sharper. In float32 it stays far below every limit.
        if self.config.model.dtype == "bfloat16":
            self.rounding = self._measure_rounding(probe)
        elif self.rounding is None:
            with padded_meanwhile(self.policy):
                larger_batch_logprobs = self._score_sequences(LARGER_BATCH * sequences)
            self.rounding = probe.compare(larger_batch_logprobs[: len(sequences)])

        return msgspec.structs.replace(probe, rounding=self.rounding)

    def _measure_rounding(self, probe: Probe) -> LogprobGaps:
        """Compare log-probs in bfloat16 with those in float32. Engines compute the output layer in bfloat16,
        also where the trainer computes it in float32 (`model.fp32_head`)."""
        rounded_probe = probe
        if self.config.model.fp32_head:
            with narrow_head_meanwhile(self.policy):
                rounded_probe = Probe(probe.sequences, self._score_sequences(probe.sequences))

        with padded_meanwhile(self.policy), float32_meanwhile(self.policy):
            return rounded_probe.compare(self._score_sequences(probe.sequences))

    def _score_sequences(self, sequences: tuple[tuple[int, ...], ...]) -> tuple[tuple[float, ...], ...]:
        logprobs = score_sequences(self.policy, sequences, self.world.device)
        self.allow_pause()
        return logprobs

    def raise_failure(self) -> None:
        """Raise the error of a failed write or broadcast."""
        for worker in (self._publisher, self._sender):
            if worker is not None and worker.error is not None:
                raise worker.error

    def allow_pause(self) -> None:
        """Stand still while a server joins this rank's group. Called where this rank is in no collective."""
        if self._pause is not None:
            self._pause.allow_pause()

    @property
    def announced(self) -> Published | None:
        """Return the last version that this rank has announced."""
        return self._publisher.announced if self._publisher is not None else None

    @property
    def unwritten_reason(self) -> str:
        """Says why the newest version is not written yet, on a full disk; else ''."""
        full_disk = self._publisher.full_error if self._publisher is not None else ""
        return full_disk and f"cannot write the weights ({full_disk}); free some space"

    def drain(self) -> None:
        """Write the published versions before this rank ends. Called on all ranks."""
        timeout = self.config.launch.stop_timeout / 2
        if self._publisher is not None:
            self._publisher.close(timeout)
        if self._sender is not None:
            self._sender.close()
        self._host.close(timeout)

    def _make_sender(self, sender_count: int) -> Sender | None:
        """Return this rank's sender, if it is among the first `sender_count` ranks; each sender serves a part
        of the servers, when their supervisors ask. Rank 0 announces the addresses of all senders. A
        collective."""
        weights_config = self.config.weights
        sender = None
        if self.world.rank < sender_count:
            host = local_address(self._endpoints.control)
            device = self.world.device
            self._pause = TrainingPause(device) if device.type == "cuda" else None
            sender = Sender(host, weights_config.bucket_bytes, weights_config.deadline, device, self._pause)

        addresses = ",".join(self.world.gather(sender.address if sender else "", str)[:sender_count])
        if sender is not None and self.world.rank == 0:
            sender.address = addresses

        return sender


class PublisherThread:
    """Rank 0's thread, which writes versions, or offers them to engines, and announces them. The thread has a
    mailbox of one: a newer snapshot replaces a snapshot that still waits.

    `announced`: the last announced version. A failed write ends the thread, and `error` is for the owner to
    raise. On a full disk the newest version waits, and `full_error` is the error's text.
    """

    def __init__(self, version_target: VersionWriter | Sender, endpoints: Endpoints) -> None:
        self.announced: Published | None = None
        self.error: Exception | None = None
        self.full_error = ""
        self._version_target = version_target
        self._endpoints = endpoints
        self._link: Link | None = None  # belongs to the thread while that lives
        self._pending: tuple[Snapshot, float] | None = None  # a snapshot, and the seconds that its copy took
        self._closing = False

        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def submit_snapshot(self, snapshot: Snapshot, copy_seconds: float) -> None:
        """Submit a snapshot, without blocking. Raises the error that ended an earlier write."""
        if self.error is not None:
            raise self.error
        with self._wake:
            self._pending = (snapshot, copy_seconds)
            self._wake.notify()

    def close(self, timeout: float) -> bool:
        """Write a pending snapshot and end; False after `timeout` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)

        has_ended = not self._thread.is_alive()
        if has_ended and self._link is not None:
            self._link.close()
        return has_ended

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending is not None or self._closing)
                pending = self._pending
                self._pending = None
            if pending is None:
                return

            snapshot, copy_seconds = pending
            try:
                started_at = time.monotonic()
                if isinstance(self._version_target, Sender):
                    ref = self._version_target.offer_snapshot(snapshot)
                else:
                    ref = self._version_target.write_version(snapshot)
                    disk.prune(self._version_target.directory)

                self.full_error = ""
                self._announce_version(Published(ref, copy_seconds, time.monotonic() - started_at))
            except Superseded:
                log.info("v%d was replaced by a newer version before it was written", snapshot.version.step)
            except Exception as error:
                if disk_full(error):
                    log.warning("v%d was not written: %s", snapshot.version.step, error)
                    with self._wake:
                        self.full_error = one_line(error)
                        if not self._wake.wait_for(lambda: self._closing, FULL_RETRY_SECONDS):
                            self._pending = self._pending or pending
                    continue

                log.exception("publishing v%d failed", snapshot.version.step)
                self.error = error  # the owner raises it at its next submit
                return

    def _announce_version(self, announcement: Published) -> None:
        """Send Published over a socket that belongs to this thread."""
        if self._link is None:
            name = identity("trainer", 0)
            self._link = Link(self._endpoints.control, ToTrainerControl, name, self._endpoints.keys)
        self.announced = announcement
        self._link.send(announcement)


def readers(config: RunConfig, rank_count: int) -> int:
    """Count the ranks that may collect versions, one version per rank at a time."""
    return 1 if config.weights.transport == "disk" else max(1, min(rank_count, config.engine.server_count))
