"""Speaks with the coordinator for one trainer rank.

    consumes: requests of the rank; answers on both channels, welcome, stop (control)
    waits for: the answer to a request, rank 0's word, all ranks at a meeting, each by name
    unblocks: the coordinator, which learns from heartbeats that the rank lives and what the rank waits for

A rank that waits is never silent: every wait sends heartbeats, lets servers join a broadcast of weights, and
ends with the coordinator's Stop. Rank 0 alone asks for plans and commits; the other ranks get the answers
from rank 0. The loop that decides on requests is in `trainer/rank.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
from torch.distributed import DistNetworkError

from asyncrl.config import RunConfig
from asyncrl.errors import DeadlineError
from asyncrl.runtime.liveness import progress_limit, silence_limit
from asyncrl.trainer.checkpointing import Checkpointing
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.publishing import Publishing
from asyncrl.trainer.world import MEET_POLL, RankZeroBroadcast, World
from asyncrl.wire.messages import shared, trainer
from asyncrl.wire.messages.channels import ToTrainerBulk, ToTrainerControl
from asyncrl.wire.sockets import Endpoints, Link, Poller, identity

Received = tuple[Any, list[bytes]]  # a message with its frames
HEARTBEAT_SECONDS = 0.5  # seconds between two heartbeats
RESEND_SECONDS = 2.0  # seconds after which a request is sent again
BROADCAST_POLL_SECONDS = 0.01  # seconds between two checks for rank 0's next word


class Stopped(Exception):
    """The coordinator sent Stop."""


# These two waits come before a rank has a learner, so a CoordinatorClient: each opens a link of its own.


def await_devices(endpoints: Endpoints, rank: int, incarnation: str) -> None:
    """Wait until engines have left the devices to this rank, which has loaded nothing yet. There is no
    deadline: the coordinator gives engines a limit to fall asleep. Stop ends the wait."""
    with closing(_control_link(endpoints, rank, incarnation)) as link:
        answer = None
        while not isinstance(answer, trainer.GrantDevices):
            link.send(trainer.AskDevices(rank, incarnation))
            answer = _receive_unless_stopped(link, RESEND_SECONDS)


def meet_others(endpoints: Endpoints, rank: int, incarnation: str, wait_names: Iterator[str]) -> None:
    """Wait until all ranks have met, and let the coordinator name this wait meanwhile. Stop ends the wait."""
    next_heartbeat = 0.0
    with closing(_control_link(endpoints, rank, incarnation)) as link:
        for name in wait_names:
            if time.monotonic() > next_heartbeat:
                next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
                link.send(trainer.TrainerHeartbeat(rank, 0.0, 0.0, name))
            _receive_unless_stopped(link, MEET_POLL)


def _control_link(endpoints: Endpoints, rank: int, incarnation: str) -> Link:
    return Link(endpoints.control, ToTrainerControl, identity("trainer", rank, incarnation), endpoints.keys)


def _receive_unless_stopped(link: Link, timeout: float) -> Any:
    """Return the next message; None after `timeout` seconds."""
    message, _ = link.receive(timeout) or (None, [])
    if isinstance(message, shared.Stop):
        raise Stopped(message.reason)
    return message


class CoordinatorClient:
    """Sends the requests and heartbeats of one rank. Made by all ranks together.

    `waiting_for`: the name of the wait, or of the long work, under way; else ''. `committed_step`: the newest
    acknowledged step; the learner is ahead during a commit. `probed_message`: rank 0's newest score of the
    probe, sent again to a restarted coordinator.
    """

    def __init__(
        self,
        config: RunConfig,
        endpoints: Endpoints,
        world: World,
        incarnation: str,
        learner: Learner,
        checkpointing: Checkpointing,
        publishing: Publishing,
    ) -> None:
        self._world = world
        self._incarnation = incarnation
        self._broadcast = RankZeroBroadcast(world)
        self._learner = learner
        self._checkpointing = checkpointing
        self._publishing = publishing
        self._silence_limit = silence_limit(config)
        self._progress_limit = progress_limit(config)

        name = identity("trainer", world.rank, incarnation)
        self.control = _control_link(endpoints, world.rank, incarnation)
        self.bulk = Link(endpoints.bulk, ToTrainerBulk, name, endpoints.keys)
        self._poller = Poller(self.control, self.bulk)

        self.waiting_for = ""
        self.committed_step = learner.step
        self.probed_message: trainer.Probed | None = None
        self._work_count = 0
        self._reported_wait = ""  # the wait in the newest heartbeat
        self._heard_at = time.monotonic()
        self._next_heartbeat_at = self._heard_at

    # -- requests --------------------------------------------------------------------------------------

    def request(self, message: shared.WireMessage, wait_name: str, is_patient: bool = False) -> Received:
        """Send a request, again every RESEND_SECONDS (all are idempotent), until its answer comes. Plans,
        payloads and images go over the bulk channel, all others over the control channel.

        A patient wait is for data and ends with the coordinator's Stop only; any other raises DeadlineError
        after the run's limit for silence, which is longer than the coordinator waits for room on a full disk.
        """
        is_bulk = isinstance(message, trainer.PlanRequest | trainer.PayloadRequest | shared.ImageRequest)
        link = self.bulk if is_bulk else self.control
        deadline = time.monotonic() + self._silence_limit
        self.waiting_for = wait_name
        resend_at = 0.0

        while True:
            now = time.monotonic()
            self._publishing.raise_failure()
            self._publishing.allow_pause()

            if now >= resend_at:
                link.send(message)
                resend_at = now + RESEND_SECONDS

            if now > deadline and not is_patient:
                raise DeadlineError(f"waited {self._silence_limit:g} s for {wait_name}")
            self._send_heartbeat_or_hello(now)
            self._poller.wait(HEARTBEAT_SECONDS)

            for received in self._received_messages():
                if trainer.is_answer(received[0], message):
                    self.waiting_for = ""
                    self._send_heartbeat_if_due(now)
                    return received

    def request_for_all(self, message: shared.WireMessage, wait_name: str, is_patient: bool = False) -> Any:
        """Return the coordinator's answer to rank 0, on all ranks. Not a collective: a wait for data must not
        hit the timeout of collectives."""
        if self._world.rank != 0:
            encoded_answer = self._await_ranks(
                f"rank 0, which is waiting for {wait_name}", self._broadcast.next_word, is_patient
            )
            return msgspec.msgpack.decode(encoded_answer, type=trainer.WorkPlan | trainer.Committed)

        answer, _ = self.request(message, wait_name, is_patient)
        self._broadcast.send_word(msgspec.msgpack.encode(answer))
        return answer

    # -- waits -----------------------------------------------------------------------------------------

    def meet_ranks(self, wait_name: str) -> None:
        """Wait for all ranks to be here."""
        self._broadcast.arrive_at_meeting()
        self._await_ranks(wait_name, lambda: self._broadcast.all_arrived or None)

    def wait_for(self, seconds: float) -> None:
        """Send heartbeats, and let servers join, for some seconds. Stop ends the wait."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self._publishing.allow_pause()
            self._send_heartbeat_or_hello(now)
            self._poller.wait(min(HEARTBEAT_SECONDS, end - now))
            list(self._received_messages())

    def _await_ranks(self, wait_name: str, poll_value: Callable[[], Any], is_patient: bool = False) -> Any:
        """Wait for other ranks, with heartbeats. A patient wait is rank 0's for data; any other raises
        DeadlineError after the run's limit for progress, which is longer than the other ranks' waits. If rank
        0 is gone it may have been stopped, and this rank's Stop may be on its way."""
        deadline = time.monotonic() + self._progress_limit
        try:
            while (value := poll_value()) is None:
                if time.monotonic() > deadline and not is_patient:
                    raise DeadlineError(f"waited {self._progress_limit:g} s for {wait_name}")
                self.waiting_for = wait_name
                self._publishing.raise_failure()
                self.wait_for(BROADCAST_POLL_SECONDS)
        except DistNetworkError:
            self.wait_for(RESEND_SECONDS)
            raise

        self.announce_wait("")

        return value

    def _received_messages(self) -> Iterator[Received]:
        """Yield the messages that have arrived on both links. Stop ends the rank in any wait."""
        for link in (self.control, self.bulk):
            while (received := link.receive(0)) is not None:
                self._heard_at = time.monotonic()
                if isinstance(received[0], shared.Stop):
                    raise Stopped(received[0].reason)
                if isinstance(received[0], shared.Welcome):  # a restarted coordinator may not know these
                    for message in filter(None, (self.probed_message, self._publishing.announced)):
                        self.control.send(message)
                yield received

    # -- heartbeats ------------------------------------------------------------------------------------

    def announce_wait(self, wait_name: str) -> None:
        """Name the wait, or the long work, that begins now, in a heartbeat at once; '' ends the wait."""
        self.waiting_for = wait_name
        self._send_heartbeat_if_due(time.monotonic())

    def note_work(self) -> None:
        """Count a micro-batch, or some images that were read; send heartbeats, and let servers join, during a
        long batch."""
        self._work_count += 1
        self._send_heartbeat_if_due(time.monotonic())
        self._publishing.allow_pause()

    def hello_message(self) -> trainer.TrainerHello:
        return trainer.TrainerHello(
            self._world.rank,
            self._world.size,
            self._incarnation,
            self.committed_step,
            self._learner.policy.vocabulary,
        )

    def heartbeat_message(self) -> trainer.TrainerHeartbeat:
        stopwatch = self._learner.stopwatch
        problem = self._checkpointing.problem
        not_saved = f"not saved: {problem}" if problem else ""
        wait_texts = (self.waiting_for, not_saved, self._publishing.unwritten_reason)

        return trainer.TrainerHeartbeat(
            self._world.rank,
            stopwatch.busy_s,
            stopwatch.idle_s,
            "; ".join(filter(None, wait_texts)),
            self._work_count,
            self._checkpointing.checkpoints.written_bytes,
            checkpoint_problem=problem,
        )

    def _send_heartbeat_if_due(self, now: float) -> bool:
        """Send a heartbeat every HEARTBEAT_SECONDS, and when a wait begins or is over. Returns whether it was
        sent."""
        if now < self._next_heartbeat_at and self.waiting_for == self._reported_wait:
            return False
        self._next_heartbeat_at = now + HEARTBEAT_SECONDS
        self._reported_wait = self.waiting_for
        self.control.send(self.heartbeat_message())
        return True

    def _send_heartbeat_or_hello(self, now: float) -> None:
        """Send a heartbeat while waiting, and after silence a hello, for a coordinator that was restarted."""
        if self._send_heartbeat_if_due(now) and now - self._heard_at > 2 * RESEND_SECONDS:
            self._heard_at = now
            self.control.send(self.hello_message())

    def close(self) -> None:
        self.control.close()
        self.bulk.close()
