"""One trainer rank's part in publishing a version.

consumes: the policy, after a step
waits for: the copy to host memory only; collecting, writing and announcing go on in the background
unblocks: the coordinator (published), which sends the version to the engines
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.trainer.model import Policy, copied_buffers, score, shards
from asyncrl.trainer.packing import unpacked
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.collective import Sender
from asyncrl.weights.delta import DeltaWriter
from asyncrl.weights.manifest import Probe, WeightsRef
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.shards import HostShards
from asyncrl.weights.snapshot import Snapshot
from asyncrl.wire.addresses import local_address
from asyncrl.wire.messages.channels import ToTrainerControl
from asyncrl.wire.messages.trainer import Published
from asyncrl.wire.sockets import (
    Endpoints,
    Link,
    identity,
)

PROBE_TOKENS = 65
NOISE_ROWS = 16  # the probe in a batch of this many rows: products of other shapes are rounded otherwise


class Publishing:
    """Made by all ranks together. `announced`: the last version that rank 0 has announced. `noise_floor`:
    how far the trainer's own log-probs of the probe differ when it is scored in a larger batch (by another
    attention function, where rows are packed), the first time; an engine cannot be expected to come
    closer."""

    def __init__(
        self, config: RunConfig, endpoints: Endpoints, run_dir: Path, mesh: World, policy: Policy
    ) -> None:
        self.config, self.mesh, self.policy = config, mesh, policy
        self.announced: Published | None = None  # set by the publisher's thread
        self.noise_floor: float | None = None
        self._probe_ids = probe_ids(policy.vocabulary)
        files = config.weights.transport == "disk"
        deadline, deltas = config.launch.stall_timeout, config.weights.full_every > 1
        collectors = readers(config, mesh.size)
        self._host = HostShards(
            *(shards(policy), policy.published, policy.export_dtype, deadline, deltas, collectors),
            copied_buffers(policy),
        )
        self._publisher: Publisher | None = None
        self._sender: Sender | None = None
        self._links: list[Link] = []  # used by the publisher's thread only, while that lives
        write = self._writer(run_dir) if files else self._offerer(endpoints, collectors)
        if mesh.rank == 0:
            self._publisher = Publisher(write, self._announcer(endpoints))

    def publish(self, version: PolicyVersion) -> None:
        """Copy the weights to host memory and leave the rest to the publisher. A collective. Raises the error
        of an earlier publish."""
        start = time.monotonic()
        kept = copied_buffers(self.policy)  # small, and not to wait for the copies behind them
        index = self._host.claim(lambda busy: self.mesh.gather(busy, list[int]))
        self._host.copy(index, shards(self.policy))
        self.check()
        snapshot = self._host.snapshot(index, version, time.monotonic() - start, kept)
        if self._publisher is not None:
            self._publisher.submit(snapshot)
        elif self._sender is not None:
            self._sender.offer(snapshot)

    def probe(self) -> Probe:
        """The probe, with the log-probs of the policy as it is now. A collective. It takes as long as many
        copies of the weights, so it is not part of `publish`: the coordinator asks for it."""
        logprobs = score(self.policy, self._probe_ids, self.mesh.device)
        if self.noise_floor is None:
            with unpacked(self.policy):
                other = score(self.policy, self._probe_ids, self.mesh.device, rows=NOISE_ROWS)
            self.noise_floor = max(abs(a - b) for a, b in zip(logprobs, other, strict=True))
        return Probe(self._probe_ids, logprobs, self.noise_floor)

    def check(self) -> None:
        """Raises the error of a failed write or broadcast."""
        for part in (self._publisher, self._sender):
            if part is not None and part.error is not None:
                raise part.error

    @property
    def unwritten(self) -> str:
        """Why the newest version is not written yet, on a full disk; else ''."""
        full = self._publisher.full if self._publisher is not None else ""
        return full and f"weights are not written, free space there: {full}"

    def drain(self) -> None:
        """Write what is published, before this rank ends; on all ranks."""
        timeout = self.config.launch.stop_timeout / 2
        if self._publisher is not None and self._publisher.close(timeout):
            for link in self._links:
                link.close()
        if self._sender is not None:
            self._sender.close()
        self._host.close(timeout)

    def _directory(self, run_dir: Path) -> Path:
        weights, size = self.config.weights, sum(spec.nbytes for spec in self._host.layout)
        needed = disk.bytes_needed(size, weights.full_every > 1, self.config.engine.keepers)
        return disk.weights_directory(weights.directory, run_dir, self.config.name, needed)

    def _offerer(self, endpoints: Endpoints, senders: int) -> Callable[[Snapshot], WeightsRef]:
        """So many ranks offer the version to a part of the servers each, which get it when their keepers ask.
        Rank 0 tells where all of them are. A collective."""
        weights, address = self.config.weights, ""
        if self.mesh.rank < senders:
            host = local_address(endpoints.control)
            ipc = weights.transport == "ipc"
            self._sender = Sender(host, weights.bucket_bytes, weights.deadline, self.mesh.device, ipc)
            address = self._sender.address
        addresses = ",".join(self.mesh.gather(address, str)[:senders])

        def offer(snapshot: Snapshot) -> WeightsRef:
            assert self._sender is not None, "only senders have something to offer"
            self._sender.offer(snapshot)
            return WeightsRef(snapshot.version, addresses)

        return offer

    def _writer(self, run_dir: Path) -> Callable[[Snapshot], WeightsRef]:
        """The publisher's thread writes a version to files."""
        weights, directory = self.config.weights, self._directory(run_dir)
        deltas = None
        if weights.full_every > 1:
            deltas = DeltaWriter(directory, weights.bucket_bytes, weights.full_every)

        def write(snapshot: Snapshot) -> WeightsRef:
            if deltas is not None:
                ref = deltas.write(snapshot)
            else:
                ref = disk.write(snapshot, directory, weights.bucket_bytes)
            disk.prune(directory)
            return ref

        return write

    def _announcer(self, endpoints: Endpoints) -> Callable[[WeightsRef, float, float], None]:
        """Published goes out from the publisher's own thread, over its own socket."""

        def announce(ref: WeightsRef, snapshot_s: float, write_s: float) -> None:
            if not self._links:
                name = identity("trainer", 0)
                self._links.append(Link(endpoints.control, ToTrainerControl, name, endpoints.keys))
            self.announced = Published(ref, snapshot_s, write_s)
            self._links[0].send(self.announced)

        return announce


def readers(config: RunConfig, ranks: int) -> int:
    """How many ranks may collect versions, each another one at a time."""
    return {
        "disk": 1,
        "collective": max(1, min(ranks, config.engine.keepers)),
        "ipc": ranks,  # so that there is one on each machine with ranks
    }[config.weights.transport]


def probe_ids(vocabulary: int) -> tuple[int, ...]:
    """The fixed text that trainer and engines score; any ids do."""
    return tuple(random.Random(0).choices(range(vocabulary), k=PROBE_TOKENS))
