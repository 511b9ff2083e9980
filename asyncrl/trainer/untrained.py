"""Replaces the trainer where nothing is trained: publishes the unchanged model to the engines as version 0.

    consumes: welcome, stop (control)
    waits for: the end of the run
    unblocks: the engines (the published version)

Computation is on the CPU, so that engines have the GPUs; there are neither optimizer nor gradients.

The wait is not that of `CoordinatorClient`: there are no requests, no other ranks, and neither a learner nor
checkpoints for heartbeats to report.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import assert_never

import torch

from asyncrl.config import RunConfig
from asyncrl.errors import DeadlineError
from asyncrl.runtime.liveness import progress_limit, silence_limit
from asyncrl.trainer import world
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.publishing import Publishing
from asyncrl.types import PolicyVersion
from asyncrl.wire.messages.channels import ToTrainerControl
from asyncrl.wire.messages.shared import Stop, Welcome
from asyncrl.wire.messages.trainer import Committed, GrantDevices, Probed, TrainerHeartbeat, TrainerHello
from asyncrl.wire.sockets import Endpoints, Link, identity

log = logging.getLogger("asyncrl.trainer")
HEARTBEAT_SECONDS = 0.5
HELLO_SECONDS = 4.0


def run(config: RunConfig, endpoints: Endpoints, rank: int, incarnation: str, rendezvous: str = "") -> int:
    """Publish once, then send heartbeats until the coordinator sends Stop. Returns the exit code.

    A silent coordinator, which may have been restarted, gets a hello again, and the messages that it may not
    know. DeadlineError if the first answer does not come.
    """
    torch.set_num_threads(config.launch.threads)
    torch.manual_seed(config.seed)
    trainer_world = world.join_ranks(0, 1, rendezvous, "cpu", progress_limit(config))
    policy = load_policy(config.model, trainer_world, adapters=config.adapters, frozen=True)

    link = Link(endpoints.control, ToTrainerControl, identity("trainer", 0, incarnation), endpoints.keys)
    publishing = Publishing(config, endpoints, Path(config.run_dir) / config.name, trainer_world, policy)
    hello_message = TrainerHello(0, 1, incarnation, 0, policy.vocabulary)
    probed_message = None
    heard_at = time.monotonic()
    hello_at = heard_at

    try:
        link.send(hello_message)
        while True:
            now = time.monotonic()
            publishing.raise_failure()
            if probed_message is None and now > heard_at + silence_limit(config):
                raise DeadlineError(
                    f"waited {silence_limit(config):g} s for the coordinator's welcome message"
                )

            if now > max(heard_at, hello_at) + HELLO_SECONDS:
                hello_at = now
                link.send(hello_message)

            link.send(TrainerHeartbeat(0, 0.0, 0.0, publishing.unwritten_reason, 0, 0))

            received = link.receive(HEARTBEAT_SECONDS)
            while received is not None:
                message: ToTrainerControl = received[0]
                heard_at = time.monotonic()

                match message:
                    case Stop():
                        log.info("leaving: %s", message.reason)
                        publishing.drain()
                        return 0
                    case Welcome() if probed_message is None:
                        version = PolicyVersion(message.trainer_epoch, 0)
                        publishing.publish(version)
                        probed_message = Probed(version, publishing.score_probe())
                        link.send(probed_message)
                    case Welcome():
                        for earlier_message in filter(None, (probed_message, publishing.announced)):
                            link.send(earlier_message)
                    case Committed() | GrantDevices():
                        pass  # nothing is trained
                    case _:
                        assert_never(message)

                received = link.receive(0.0)
    finally:
        link.close()
        world.leave_ranks()
