"""In place of the trainer where nothing is trained: it gives the engines the model as it is, as version 0.

consumes: welcome, stop (control)
waits for: the end of the run
unblocks: the engines (the published version)

It computes on the CPU, so that engines have the GPUs, and has neither optimizer nor gradients.
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
from asyncrl.wire.messages.trainer import Committed, GrantDevices, Probed, TrainerBeat, TrainerHello
from asyncrl.wire.sockets import Endpoints, Link, identity

log = logging.getLogger("asyncrl.trainer")
BEAT_EVERY = 0.5
HELLO_EVERY = 4.0


def run(config: RunConfig, endpoints: Endpoints, rank: int, incarnation: str, rendezvous: str = "") -> int:
    """Publish once, then beat until the coordinator sends Stop. Returns the exit code."""
    torch.set_num_threads(config.launch.threads)
    torch.manual_seed(config.seed)
    mesh = world.join(0, 1, rendezvous, "cpu", progress_limit(config))
    policy = load_policy(config.model, mesh, adapters=config.adapters, frozen=True)
    link = Link(endpoints.control, ToTrainerControl, identity("trainer", 0, incarnation), endpoints.keys)
    publishing = Publishing(config, endpoints, Path(config.run_dir) / config.name, mesh, policy)
    try:
        log.info("leaving: %s", _serve(config, link, publishing, incarnation, policy.vocabulary))
        publishing.drain()
    finally:
        link.close()
        world.leave()
    return 0


def _serve(config: RunConfig, link: Link, publishing: Publishing, incarnation: str, vocabulary: int) -> str:
    """The reason of the stop. A coordinator that is silent, as it was started again, is greeted anew, and
    told again what it may not know. DeadlineError without its first answer."""
    hello = TrainerHello(0, 1, incarnation, 0, vocabulary)
    probed = None
    heard_at = hello_at = time.monotonic()
    link.send(hello)
    while True:
        now = time.monotonic()
        publishing.check()
        if probed is None and now > heard_at + silence_limit(config):
            raise DeadlineError(f"waited {silence_limit(config):g} s for the coordinator's welcome")
        if now > max(heard_at, hello_at) + HELLO_EVERY:
            hello_at = now
            link.send(hello)
        link.send(TrainerBeat(0, 0.0, 0.0, publishing.unwritten, 0, 0))
        received = link.receive(BEAT_EVERY)
        while received is not None:
            message: ToTrainerControl = received[0]
            heard_at = time.monotonic()
            match message:
                case Stop():
                    return message.reason
                case Welcome() if probed is None:
                    version = PolicyVersion(message.trainer_epoch, 0)
                    publishing.publish(version)
                    probed = Probed(version, publishing.probe())
                    link.send(probed)
                case Welcome():
                    for known in filter(None, (probed, publishing.announced)):
                        link.send(known)
                case Committed() | GrantDevices():
                    pass  # nothing is trained
                case _:
                    assert_never(message)
            received = link.receive(0.0)
