"""A trainer's ranks that publish tiny weights, and the coordinator that hears of it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.trainer.model import load_policy
from asyncrl.trainer.publishing import Publishing
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk, ranges
from asyncrl.wire.messages.channels import ToCoordinatorControl
from asyncrl.wire.messages.trainer import Published
from asyncrl.wire.sockets import Endpoints, Gate, Hub, Poller, choose_endpoints
from tests.fakes.training import full_state, save_tiny_qwen, tiny_config

DEADLINE = 60.0
EPOCH = 3


class Trainer:
    """One rank that publishes and changes its weights in between."""

    def __init__(
        self,
        world: World,
        folder: Path,
        patience: float = DEADLINE,
        lora_rank: int = 0,
        model: Mapping[str, Any] = {},
        **weights: Any,
    ) -> None:
        if world.rank == 0:
            save_tiny_qwen(folder / "model")
            endpoints = choose_endpoints("127.0.0.1", 0)
            self.hub = Hub(endpoints.control, ToCoordinatorControl, Gate(endpoints))

        self.world = world
        self.step = 0
        endpoints = world.gather(endpoints if world.rank == 0 else Endpoints("", ""), Endpoints)[0]
        path = str(folder / "model")
        weights = {"directory": "run", "bucket_bytes": 2048} | weights
        broadcast = weights.get("transport") == "collective"
        engine = {"name": "sglang", "servers": 2} if broadcast else {"name": "torch"}
        config = tiny_config(
            path,
            model={"lora_rank": lora_rank, **model},
            weights=weights,
            engine=engine,
            launch={"stall_timeout": patience},
        )
        self.policy = load_policy(config.model, world)
        self.publishing = Publishing(config, endpoints, folder / "run", world, self.policy)

    @torch.no_grad()
    def publish(self) -> dict[str, torch.Tensor]:
        """The weights that were published."""
        for parameter in self.policy.parameters():
            parameter.mul_(1.01)
        state = full_state(self.policy)
        self.step += 1
        self.publishing.publish(PolicyVersion(EPOCH, self.step))
        return state

    def announced_version(self) -> Published:
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            Poller(self.hub).wait(0.1)
            received = self.hub.receive()
            if received is not None and isinstance(received[1], Published):
                return received[1]
        raise AssertionError("no version was announced")


def publish_four(world: World, folder: Path, **weights: Any) -> list[tuple[bool, str, list[tuple[str, str]]]]:
    """Four versions: whole, two deltas, whole. Returns of each whether it is a delta, its checksum, and those
    of its tensors; they are the trainer's weights."""
    ranges.GRID_BYTES = 256
    ranges.MAX_FIELD_BYTES = 100

    trainer = Trainer(world, folder, full_every=3, **weights)
    versions = []
    for _ in range(4):
        state = trainer.publish()
        if world.rank == 0:
            announcement = trainer.announced_version()
            assert announcement == trainer.publishing.announced and announcement.ref.version == (
                EPOCH,
                trainer.step,
            )

            assert 0 < announcement.snapshot_s < DEADLINE and 0 < announcement.write_s < DEADLINE
            manifest, read = disk.read_tensors(announcement.ref)
            assert read.keys() == state.keys()
            assert all(torch.equal(read[name], tensor) for name, tensor in state.items())

            sums = [(entry.name, entry.xxh3) for entry in manifest.tensors]
            versions.append((manifest.delta is not None, manifest.checksum, sums))

        world.gather(0, int)

    trainer.publishing.drain()
    return versions


def main() -> None:
    """A rank on a machine of its own."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "size", "address", "folder", "result"):
        parser.add_argument(name)
    options = parser.parse_args()

    torch.set_num_threads(1)
    world = join_ranks(
        int(options.rank), int(options.size), f"tcp://{options.address}", "cpu", timeout_s=DEADLINE
    )
    versions = publish_four(world, Path(options.folder), directory="shm")
    if world.rank == 0:
        torch.save(versions, options.result)

    leave_ranks()


if __name__ == "__main__":
    main()
