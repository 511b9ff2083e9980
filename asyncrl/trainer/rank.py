"""One trainer rank.

consumes: plans with their trajectories (bulk), welcome, committed, stop (control)
waits for: ready trajectories, the other ranks (words, collectives), the ack of a commit -- each by name
unblocks: the coordinator (commits), the engines (published versions, devices)

The loop: `_take` a plan, `_train` its micro-batch or `_finish` the optimizer step (commit, then publish, then
perhaps save), until a plan of kind end or stop. All ranks run the same sequence of collectives: rank 0 alone
asks for plans and commits, the others do what it was told, and none starts before all hold their payloads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch.distributed import DistNetworkError

from asyncrl.config import RunConfig
from asyncrl.errors import DeadlineError, GaveUpError, users_code
from asyncrl.observe.timeline import START, Timeline
from asyncrl.runtime.liveness import progress_limit, silence_limit
from asyncrl.trainer import world
from asyncrl.trainer.batch import with_turns
from asyncrl.trainer.checkpointing import Checkpointing, shared_checkpoints
from asyncrl.trainer.learner import Learner, Work
from asyncrl.trainer.memory import give_up_message, is_tiny, try_largest
from asyncrl.trainer.optimizer import SpikeError
from asyncrl.trainer.performance import peak_flops, performance
from asyncrl.trainer.publishing import Publishing
from asyncrl.trainer.report import Ratios
from asyncrl.trainer.device_offload import Resting, await_devices
from asyncrl.types import PolicyVersion, Turn
from asyncrl.weights.memory import trim_heap
from asyncrl.wire.messages import shared, trainer
from asyncrl.wire.messages.channels import ToTrainerBulk, ToTrainerControl
from asyncrl.wire.sockets import Endpoints, Link, Poller, identity

Answer = tuple[Any, list[bytes]]  # with its frames
log = logging.getLogger("asyncrl.trainer")
BEAT_EVERY = 0.5
RESEND_EVERY = 2.0
SAVE_POLL = 0.05
WORD_POLL = 0.01  # seconds between two looks for what rank 0 tells
SAVE_AGAIN = 5.0  # seconds after a last checkpoint that could not be written


class Stopped(Exception):
    """The coordinator sent Stop."""


def run(config: RunConfig, endpoints: Endpoints, rank: int, incarnation: str, rendezvous: str = "") -> int:
    """Run a trainer rank until the coordinator sends Stop. Returns the exit code."""
    torch.set_num_threads(config.launch.threads)
    torch.manual_seed(config.seed)
    if not await_devices(config, endpoints, rank, incarnation):
        return 0
    try:
        mesh = world.join(
            rank,
            config.trainer.ranks,
            rendezvous,
            config.model.device,
            timeout_s=progress_limit(config),
            meet_s=silence_limit(config),
            meet=partial(meet_others, endpoints, rank, incarnation),
        )
    except Stopped as stop:
        log.info("leaving: %s", stop)
        return 0
    mesh = mesh.arranged(config.trainer.replicas, config.trainer.sequence_parallel, progress_limit(config))
    role = TrainerRank(config, endpoints, mesh, incarnation)
    try:
        with users_code():  # losses, advantages
            role.loop()
    except Stopped as stop:
        log.info("leaving: %s", stop)
        role.publishing.drain()
    except Exception as error:
        told = role.report(error)
        if isinstance(error, SpikeError):  # on all ranks: a lack of memory leaves others in a collective
            role.publishing.drain()
            if config.trainer.on_spike == "stop":
                return 0
        raise GaveUpError(told) from error
    finally:
        role.close()
        world.leave()
    return 0


def meet_others(endpoints: Endpoints, rank: int, incarnation: str, waits: Iterator[str]) -> None:
    """Wait until all ranks have met, and let the coordinator name this wait meanwhile."""
    link = Link(endpoints.control, ToTrainerControl, identity("trainer", rank, incarnation), endpoints.keys)
    next_beat = 0.0
    try:
        for name in waits:
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + BEAT_EVERY
                link.send(trainer.TrainerBeat(rank, 0.0, 0.0, name))
            answer, _ = link.receive(world.MEET_POLL) or (None, [])
            if isinstance(answer, shared.Stop):
                raise Stopped(answer.reason)
    finally:
        link.close()


class TrainerRank:
    """Runs the loop of one rank around a Learner."""

    def __init__(self, config: RunConfig, endpoints: Endpoints, mesh: world.World, incarnation: str) -> None:
        self.config = config
        self.mesh = mesh
        self.incarnation = incarnation
        self.run_dir = Path(config.run_dir) / config.name
        self.rank = mesh.rank
        self.first = mesh.rank == 0
        self.words = world.Words(mesh)
        place = shared_checkpoints(config, self.run_dir, mesh)
        self.learner = Learner(config, mesh)
        self.saving = Checkpointing(config, place, self.learner)
        self.saving.resume()
        self.committed = self.learner.step  # acknowledged; the learner is ahead during a commit
        name = identity("trainer", self.rank, incarnation)
        self.control = Link(endpoints.control, ToTrainerControl, name, endpoints.keys)
        self.bulk = Link(endpoints.bulk, ToTrainerBulk, name, endpoints.keys)
        self._poller = Poller(self.control, self.bulk)
        self.timeline = Timeline(self.run_dir / "timeline" / f"trainer-{self.rank}.jsonl")
        self.timeline.past(START, 0.0)
        self.resting = Resting(self.learner, self.timeline, self.run_dir)
        self.watch = self.learner.watch
        self.peak_flops = peak_flops(mesh.device, config.model.dtype)
        self.waiting = self._named = ""  # now, and in the newest beat
        self._silence = silence_limit(config)
        self._progress = progress_limit(config)
        self.trainer_epoch = self.work = 0  # work: micro-batches done, for the beats
        self.learner.pulse = self._pulse
        self.ratios = self.learner.ratios = Ratios(self.run_dir, self.rank, config.buffer.groups_per_batch)
        self._beat_at = self._heard_at = time.monotonic()
        self._batch: list[str] = []
        self.published_step = -1
        self.repeating = False
        self.probed: trainer.Probed | None = None
        self.publishing = Publishing(config, endpoints, self.run_dir, mesh, self.learner.policy)

    # -- the loop --------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Take, train, commit, publish, until the coordinator sends Stop."""
        frontier = self._hello().step
        self.repeating = self.committed < frontier  # the engines keep their newer weights meanwhile
        self._probe()
        if not frontier:  # ranks that are started again lose no time on what has been shown
            self.waiting = "trying the largest micro-batch"
            self._beat_if_due(time.monotonic())
            with self.timeline.span(self.waiting):
                try_largest(self.learner)
        micro = 0
        while True:
            plan, work = self._take(micro)
            if plan.kind not in ("rest", "stop"):  # a checkpoint is made of shards that rest, too
                self.resting.wake()
            match plan.kind:
                case "rest":
                    self.resting.rest(self._meet)
                case "work":
                    self._train(plan, work)
                    micro += 1
                case "probe":
                    self._probe()
                case "step":
                    self._finish(plan)
                    micro = 0
                case "end" | "stop":
                    if plan.kind == "end":  # no plan follows, and engines may still be started
                        self._probe()
                    self._save_last()
                    if plan.kind == "end" and self.config.shifts:  # engines still evaluate
                        self.resting.rest(self._meet)
                    self._await_stop()

    def _train(self, plan: trainer.WorkPlan, work: Work) -> None:
        uids = [planned.uid for planned, _ in work]
        self.mesh.check_shared(uids, list[str])  # a payload may have become unreadable in between
        at = {"step": plan.step + 1, "micro": plan.micro}
        with self.timeline.span("train", **at), self.watch.phase("update_actor"):
            self.learner.accumulate(work)
        self._batch += uids

    def _finish(self, plan: trainer.WorkPlan) -> None:
        """The optimizer step, its commit, and what follows only after the ack."""
        # What was committed once is not left out.
        self.learner.on_spike = "skip" if self.repeating else self.config.trainer.on_spike
        with self.timeline.span("step", step=plan.step + 1), self.watch.phase("update_actor"):
            metrics = self.learner.finish()
            if not is_tiny(self.learner):
                trim_heap()
        everyone = [uid for part in self.mesh.gather_data(self._batch, list[str]) for uid in part]
        self.saving.add_trained(everyone)
        self._batch = []
        metrics["trainer/trajectories_total"] = float(self.saving.trained_total)
        if self.publishing.noise_floor is not None:
            metrics["weights/probe_noise_floor"] = self.publishing.noise_floor
        metrics |= performance(*self.watch.lap(), metrics, self.peak_flops, self.mesh.size)
        with self.timeline.span("wait_commit"), self.watch.phase("wait_commit", waiting=True):
            publish = self._commit(plan, everyone, metrics)
        self.committed = self.learner.step
        self.ratios.save(self.committed)
        if publish and (self.repeating or self.learner.step % self.config.weights.every == 0):
            self.repeating = False
            self._publish()
        self._save_if_due()

    # -- talking to the coordinator --------------------------------------------------------------------

    def _hello(self) -> shared.Welcome:
        with self.timeline.span("wait_welcome"), self.watch.phase("wait_welcome", waiting=True):
            welcome, _ = self._ask(self.control, self._greeting(), "the coordinator's welcome")
        self.trainer_epoch = welcome.trainer_epoch
        self.learner.budget = welcome.micro_tokens or self.learner.budget
        self.learner.recomputation.recompute_at_least(welcome.recompute_every)
        return welcome

    def _greeting(self) -> trainer.TrainerHello:
        vocabulary = self.learner.policy.vocabulary
        return trainer.TrainerHello(self.rank, self.mesh.size, self.incarnation, self.committed, vocabulary)

    def _take(self, micro: int) -> tuple[trainer.WorkPlan, Work]:
        """The next plan, and this rank's part of it with its turns, once all ranks hold theirs."""
        step = self.learner.step
        work = list[tuple[trainer.PlannedTrajectory, list[Turn]]]()
        rests = ", at rest while engines sample" if self.resting.now else ""
        wait = "wait_devices" if rests else "wait_data"
        with self.timeline.span(wait), self.watch.phase(wait, waiting=True):
            request = trainer.PlanRequest(self.trainer_epoch, step, micro, self.resting.now)
            plan = self._told(self.bulk, request, f"trajectories of step {step}{rests}", patient=True)
            for part in self.learner.share(plan.trajectories):
                asked = trainer.PayloadRequest(self.trainer_epoch, step, tuple(p.uid for p in part))
                found, frames = self._ask(self.bulk, asked, f"payloads of step {step}")
                work += with_turns([p for p in part if p.uid not in found.lost], frames)
            self._meet("the other ranks' payloads")
        return plan, work

    def _meet(self, name: str) -> None:
        """Wait for all ranks to be here."""
        self.words.arrive()
        self._await(name, lambda: self.words.all_arrived or None)

    def _commit(self, plan: trainer.WorkPlan, trained: list[str], metrics: dict[str, float]) -> bool:
        """True when this version is to be published."""
        epoch = self.trainer_epoch
        step = self.learner.step
        commit = trainer.Commit(epoch, step, plan.plan_hash, tuple(trained), metrics)
        answer = self._told(self.control, commit, f"the commit of step {step}")
        self.saving.best_step = answer.best
        return bool(answer.publish)

    def _told(self, link: Link, request: shared.WireMessage, name: str, patient: bool = False) -> Any:
        """Return the coordinator's answer to rank 0, on all ranks."""
        if not self.first:
            word = self._await(f"rank 0, which waits for {name}", self.words.heard, patient)
            return msgspec.msgpack.decode(word, type=trainer.WorkPlan | trainer.Committed)
        answer, _ = self._ask(link, request, name, patient)
        self.words.tell(msgspec.msgpack.encode(answer))
        return answer

    def _await(self, name: str, found: Callable[[], Any], patient: bool = False) -> Any:
        """Wait for other ranks, with beats. A patient wait is rank 0's for data; any other raises
        DeadlineError after the run's limit for progress, which is longer than their waits. A rank 0 that is
        gone may have been stopped, and this rank's stop be on its way."""
        deadline = time.monotonic() + self._progress
        try:
            while (value := found()) is None:
                if time.monotonic() > deadline and not patient:
                    raise DeadlineError(f"waited {self._progress:g} s for {name}")
                self.waiting = name
                self.publishing.check()
                self._idle(WORD_POLL)
        except DistNetworkError:
            self._idle(RESEND_EVERY)
            raise
        self.waiting = ""
        self._beat_if_due(time.monotonic())
        return value

    def _ask(self, link: Link, request: shared.WireMessage, name: str, patient: bool = False) -> Answer:
        """Send a request, again every RESEND_EVERY seconds (all are idempotent), until its answer comes.

        A patient wait is for data and ends with the coordinator's stop only; any other raises DeadlineError
        after the run's limit for silence, which is longer than the coordinator waits for room on a full disk.
        """
        deadline = time.monotonic() + self._silence
        self.waiting = name
        resend_at = 0.0
        while True:
            now = time.monotonic()
            self.publishing.check()
            self.publishing.allow_pause()
            if now >= resend_at:
                link.send(request)
                resend_at = now + RESEND_EVERY
            if now > deadline and not patient:
                raise DeadlineError(f"waited {self._silence:g} s for {name}")
            self._beat(now)
            self._poller.wait(BEAT_EVERY)
            for received in self._received():
                if trainer.is_answer(received[0], request):
                    self.waiting = ""
                    self._beat_if_due(now)
                    return received

    def _received(self) -> Iterator[tuple[Any, list[bytes]]]:
        """Returns what has arrived on both links. Stop ends the rank wherever it waits."""
        for link in (self.control, self.bulk):
            while (received := link.receive(0)) is not None:
                self._heard_at = time.monotonic()
                if isinstance(received[0], shared.Stop):
                    raise Stopped(received[0].reason)
                if isinstance(received[0], shared.Welcome):  # a restarted coordinator may not know them
                    for message in filter(None, (self.probed, self.publishing.announced)):
                        self.control.send(message)
                yield received

    def _pulse(self) -> None:
        """Called after every micro-batch, so that beats go out, and servers join, during a long batch."""
        self.work += 1
        self._beat_if_due(time.monotonic())
        self.publishing.allow_pause()

    def _beat_if_due(self, now: float) -> bool:
        """Send a beat, every BEAT_EVERY seconds and when a wait begins or is over. Whether it was sent."""
        if now < self._beat_at and self.waiting == self._named:
            return False
        self._beat_at = now + BEAT_EVERY
        self._named = self.waiting
        self.control.send(self._status())
        return True

    def _beat(self, now: float) -> None:
        """A beat while waiting; and a hello after silence, for a coordinator that was restarted."""
        if self._beat_if_due(now) and now - self._heard_at > 2 * RESEND_EVERY:
            self._heard_at = now
            self.control.send(self._greeting())

    def _idle(self, seconds: float) -> None:
        """Send beats for so long, and let servers join; Stop ends it."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self.publishing.allow_pause()
            self._beat(now)
            self._poller.wait(min(BEAT_EVERY, end - now))
            list(self._received())

    def _await_stop(self) -> NoReturn:
        """Report the checkpoint again until Stop comes: a restarted coordinator does not know it yet."""
        with self.timeline.span("wait_stop"), self.watch.phase("wait_stop", waiting=True):
            self._ask(self.control, self._checkpointed(), "the coordinator's stop", patient=True)
        raise AssertionError("unreachable: only Stop ends this wait")

    def _checkpointed(self) -> shared.WireMessage:
        """Rank 0 reports for all; the others repeat their beat."""
        if not self.first:
            return self._status()
        newest = self.saving.newest_manifest
        assert newest is not None, "there is none"
        return trainer.Checkpointed(self.trainer_epoch, newest.step, newest.trained_total, self.resting.now)

    def _status(self) -> trainer.TrainerBeat:
        spent = (self.watch.busy_s, self.watch.idle_s)
        saving = self.saving
        not_saved = saving.checkpoint_problem and f"not saved: {saving.checkpoint_problem}"
        waiting = "; ".join(filter(None, (self.waiting, not_saved, self.publishing.unwritten)))
        return trainer.TrainerBeat(
            self.rank,
            *spent,
            waiting,
            self.work,
            saving.checkpoints.written,
            checkpoint_problem=saving.checkpoint_problem,
        )

    def report(self, error: Exception) -> str:
        """Tell the coordinator that this rank gives up the batch. Returns why, and what happens now."""
        message = give_up_message(error, self.trainer_epoch, self.rank, self.learner)
        try:
            self._ask(self.control, message, "the coordinator's answer to a batch that was given up")
        except Stopped as stop:
            return f"{message.detail}: {stop}"
        raise AssertionError("unreachable: only Stop ends this wait")

    # -- publishing and saving -------------------------------------------------------------------------

    def _publish(self) -> None:
        self.published_step = self.learner.step
        version = PolicyVersion(self.trainer_epoch, self.learner.step)
        with self.timeline.span("snapshot", version=version), self.watch.phase("update_weights"):
            self.publishing.publish(version)

    def _probe(self) -> None:
        """Score the probe, for the engines to compare, with a version that is published (now, if it was not).
        Not while steps are repeated: then the engines keep their newer weights, and nothing is published."""
        if self.repeating:
            return
        if self.published_step != self.learner.step:  # the first one; or weights.every left this one out
            self._publish()
        with self.timeline.span("probe"), self.watch.phase("update_weights"):
            probe = self.publishing.probe()
        if self.first:
            self.probed = trainer.Probed(PolicyVersion(self.trainer_epoch, self.published_step), probe)
            self.control.send(self.probed)

    def _save_if_due(self) -> None:
        """Begin a checkpoint; its writing goes on beside training, where there is memory for a copy."""
        self._note_saved()
        if self.saving.mark_due():
            with self.timeline.span("checkpoint"), self.watch.phase("save_checkpoint"):
                if not self.saving.begin_checkpoint(self.trainer_epoch):
                    self._await_saved()

    def _save_last(self) -> None:
        """Return when the checkpoint of the last committed step is in place; the disk may have room later."""
        with self.timeline.span("checkpoint"), self.watch.phase("save_checkpoint"):
            while self.saving.parent_step != self.learner.step:
                if not self.saving.is_writing:
                    self.saving.begin_checkpoint(self.trainer_epoch, self.resting)
                self._await_saved()
                if self.saving.problem:
                    self._idle(SAVE_AGAIN)

    def _await_saved(self) -> None:
        """Send beats, which count what is written, until the checkpoint under way has come to its end."""
        while self.saving.is_writing:
            self.waiting = self.saving.write_progress
            self._note_saved()
            self._idle(SAVE_POLL)
        self.waiting = ""

    def _note_saved(self) -> None:
        """Once the checkpoint under way is in place, the coordinator is told."""
        if self.saving.poll_checkpoint() and self.first:
            self.control.send(self._checkpointed())

    def close(self) -> None:
        self.timeline.close()
        self.control.close()
        self.bulk.close()
