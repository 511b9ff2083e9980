"""The coordinator's side of the trainer ranks.

consumes: hellos, commits, versions, checkpoints (control); requests for plans and payloads (bulk)
waits for: a micro-batch's worth of ready trajectories; all ranks of one start
unblocks: the ranks (plans, payloads, committed), through the clock the workers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from asyncrl.buffer.records import EpisodeRecord
from asyncrl.buffer.shifts import Shift
from asyncrl.coordinator.lost_tail import recover_commits
from asyncrl.coordinator.peers import Peers
from asyncrl.coordinator.state import RunState, log
from asyncrl.errors import ProtocolError
from asyncrl.observe.metrics import NLL_HELD_OUT, SAMPLED_SCORE
from asyncrl.types import DropReason, PolicyVersion
from asyncrl.wire.addresses import is_older
from asyncrl.wire.messages import shared, trainer

# Scores of a validation that choose the best checkpoint; the first one present counts. -1: lower is better.
BEST_SCORES = ((SAMPLED_SCORE, 1), (NLL_HELD_OUT, -1))
MAX_SPIKES = 3  # batches in a row that are left out of one step: then it is not them, but the weights


@dataclass
class RankRecord:
    """Holds a connected rank."""

    peer: bytes
    name: str
    hello: trainer.TrainerHello
    seen: float
    heartbeat: trainer.TrainerBeat | None = None


@dataclass
class Ranks:
    """The ranks of one trainer start."""

    peers: Peers[RankRecord]
    incarnation: str = ""
    rank_count: int = 0
    open_request: trainer.PlanRequest | None = None  # rank 0's, that is not answered
    offloaded: bool = False  # they hold nothing on their devices
    last_plan_kind: str = ""  # the kind of the last plan
    committed_step: int = 0  # the newest step that they have committed


class TrainerHandler:
    """Answers requests for plans and records commits. `on_commit` is called with each new commit."""

    def __init__(self, state: RunState, on_commit: Callable[[trainer.Commit], None]) -> None:
        self.state = state
        self.on_commit = on_commit
        self.ranks = Ranks(Peers(state, "trainer"), state.store.read.meta("trainer_incarnation"))

        self.stopping = self.checkpoint_written = False  # asked to write a checkpoint; it is written
        self._covered_step = int(
            state.store.read.meta("to_forget", "0")
        )  # steps before this one are not needed
        self._stop_step: int | None = None  # the step at which the ranks were asked

        self.checkpoint_step = max(state.store.read.checkpoints(), default=-1)  # of the newest one
        self._checkpoint_problem = ""  # why the newest checkpoint was not written, until one is
        self.checkpoint_trained: int | None = None  # what a checkpoint of the last step counts as trained

        stored_scores = state.store.read.meta("validated", "{}")
        self._scores = msgspec.json.decode(stored_scores, type=dict[int, float])  # of validated steps
        self.best_step = int(
            state.store.read.meta("best", "-1")
        )  # step of the checkpoint that was kept for it

        self.snapshot_s = self.write_s = 0.0  # of the newest publish
        # the last step that spiked, and batches in a row that did there
        self._spiked_step = -1
        self._spike_count = 0

        self.waiting_for_devices: dict[bytes, trainer.AskDevices] = {}  # ranks that have loaded nothing yet
        self.newest_asker = ""  # the incarnation of the newest of them
        self.starting_ranks: dict[
            bytes, tuple[trainer.TrainerBeat, float]
        ] = {}  # no hello yet; and when heard

        self._given_up_epoch = int(
            state.store.read.meta("given_up", "-1")
        )  # the newest epoch that gave up a batch

    # -- control -------------------------------------------------------------------------------------

    def welcome_rank(self, peer: bytes, message: trainer.TrainerHello, now: float) -> None:
        """A rank reports in. A new incarnation begins a new trainer epoch, which fences the earlier ones."""
        rank_name = f"trainer {message.index}"
        newest_incarnation = self.ranks.incarnation
        rank = self.ranks.peers.accept_hello(
            peer, message, now, lambda: RankRecord(peer, rank_name, message, now), newest_incarnation
        )

        self.starting_ranks.pop(peer, None)
        if rank is None:
            return

        state = self.state
        if message.incarnation != self.ranks.incarnation or not self.ranks.rank_count:
            if message.incarnation != self.ranks.incarnation:
                state.trainer_epoch += 1
                state.store.put_meta("trainer_epoch", str(state.trainer_epoch))
                state.store.put_meta("trainer_incarnation", message.incarnation)
                state.store.sync()  # after a power cut the number must not be given again

            first_hello = not self.ranks.rank_count
            peers = self.ranks.peers
            self.ranks = Ranks(peers, message.incarnation, message.ranks)
            for replaced in [
                process for process in peers if process.hello.incarnation != message.incarnation
            ]:
                peers.remove_process(replaced.peer, "replaced by a new start", now)
            log.info("trainer epoch %d begins at step %d", state.trainer_epoch, message.step)

            if message.step > state.batches.committed:
                recover_commits(state, message.step, now)
                self.checkpoint_step = message.step
            if first_hello:  # after `recover`: what is trained needs no payload
                state.cut_back_unreadable()

            self._check_position(message.step)
            state.record_launch(message.step)
            state.liveness.alive(now)  # a hello that is only repeated is no sign of life

        state.vocabulary = message.vocabulary
        state.send_welcome(peer)

    def note_device_request(self, peer: bytes, message: trainer.AskDevices) -> None:
        """A rank waits until engines sleep. The ranks that it replaces have ended, and need no answers."""
        if is_older(message.incarnation, self.newest_asker):
            return

        if message.incarnation != self.newest_asker:
            self.newest_asker = message.incarnation
            self.waiting_for_devices = {}
            self.ranks.open_request = None
            self.ranks.last_plan_kind = ""

        self.waiting_for_devices[peer] = message

    def _check_position(self, step: int) -> None:
        retained_batches = self.state.batches.batches
        committed = self.state.batches.committed
        if any(number not in retained_batches for number in range(step, committed)):
            raise ProtocolError(
                f"the trainer's checkpoint is of step {step}, but the run store holds the plans of steps "
                f"{min(retained_batches, default=committed)} to {committed}: "
                "checkpoint and store are not of one run; restore both from the same copy"
            )

    def note_heartbeat(self, peer: bytes, message: trainer.TrainerBeat, now: float) -> None:
        """A heartbeat. Only work done since the last one is progress: a long step must not trip the watchdog,
        but a rank that hangs in one must."""
        if (rank := self.ranks.peers.get(peer)) is None:
            incarnation = peer.decode().rpartition("/")[2]
            if message.waiting and not is_older(incarnation, self.ranks.incarnation):
                same_start_peers = (
                    starting_peer
                    for starting_peer in self.starting_ranks
                    if starting_peer.decode().endswith(f"/{incarnation}")
                )
                self.starting_ranks = {
                    starting_peer: self.starting_ranks[starting_peer] for starting_peer in same_start_peers
                }
                self.starting_ranks[peer] = message, now
            return

        previous = rank.heartbeat
        rank.heartbeat = message

        if message.rank == 0:  # its beats and its Checkpointed come in order; a new start has not tried yet
            self._checkpoint_problem = message.checkpoint_problem or self._checkpoint_problem

        if message.work > (previous.work if previous else 0):
            self.state.liveness.progress(now)
        elif message.written > (previous.written if previous else 0):
            self.state.liveness.alive(now)  # no progress: on a full disk the same bytes are written again

    def starting_waits(self, now: float) -> list[tuple[str, str]]:
        """Name and wait of each rank that has not said hello, and was heard of within a lease."""
        lease = self.state.config.launch.lease
        return [
            (f"trainer {beat.rank}", beat.waiting)
            for beat, heard_at in self.starting_ranks.values()
            if now - heard_at < lease
        ]

    def hangs_since_stall(self, now: float) -> bool:
        """True where some rank is silent; asked when nothing has moved for long. Who waits sends beats."""
        peers = self.ranks.peers
        return not self.waiting_for_devices and (
            len(peers) < max(1, self.ranks.rank_count) or bool(peers.silent_processes(now))
        )

    def _superseded(self, peer: bytes, message: trainer.Commit | trainer.Checkpointed) -> bool:
        """True for a message of an earlier trainer, which is told to end."""
        if is_earlier := message.trainer_epoch != self.state.trainer_epoch:
            self.state.outbox.to_control(peer, shared.Stop("a newer trainer has taken over"))
        return is_earlier

    def record_commit(self, peer: bytes, message: trainer.Commit, now: float) -> None:
        """Idempotent on the step: a repeat gets the same answer. Another plan under that step is an error.
        The ranks say what of it was trained: they may hold payloads that cannot be read any more."""
        state = self.state
        if self._superseded(peer, message):
            return

        stored_hash = state.store.read.plan_hash(message.step)
        batch = state.batches.batches.get(message.step - 1)
        expected_hash = batch.plan_hash if batch is not None else stored_hash
        if message.plan_hash != expected_hash:
            raise ProtocolError(f"commit of step {message.step} names a plan that was never issued")

        first_commit = message.step > state.batches.committed
        if batch is not None:
            state.batches.commit(message.step, message.trained)

        if first_commit:
            state.store.put_commit(message.step, state.trainer_epoch, message.plan_hash)
            self.checkpoint_trained = None
            state.timeline.past("commit", 0.0, step=message.step)
            took_step = "actor/grad_norm" in message.metrics or not message.metrics.get("actor/skipped_steps")
            state.skipped_batches = 0 if took_step else state.skipped_batches + 1
            self.on_commit(message)

        self.ranks.committed_step = max(self.ranks.committed_step, message.step)
        state.liveness.progress(now)
        # While a restarted trainer repeats steps the engines keep the newer weights they have.
        state.outbox.to_control(
            peer,
            trainer.Committed(message.step, message.step >= state.batches.committed, self._choose_best()),
        )

    def record_score(self, step: int, metrics: Mapping[str, float]) -> None:
        """The validation of a step is over. Its score is kept with the run."""
        scores = [metrics[name] * sign for name, sign in BEST_SCORES if name in metrics]
        if scores:
            self._scores[step] = scores[0]
            self.state.store.put_meta("validated", msgspec.json.encode(self._scores).decode())

    def _choose_best(self) -> int:
        """Name the best so far and the newest `checkpoint.keep`, which are there; others are deleted."""
        if not self.state.config.checkpoint.best:
            return -1

        retained_steps = self.state.store.read.checkpoints()[-self.state.config.checkpoint.keep :]
        scored_steps = sorted(self._scores.keys() & {*retained_steps, self.best_step})
        self.best_step = max(scored_steps, key=lambda step: self._scores[step], default=-1)
        self.state.store.put_meta("best", str(self.best_step))
        return self.best_step

    def record_given_up(self, peer: bytes, message: trainer.GaveUp) -> list[EpisodeRecord]:
        """Ranks gave a batch up; their supervisor starts others. After too little memory the next trainer
        epoch recomputes more layers, or trains the recorded plans in smaller micro-batches; after a spike
        it leaves the batch out and goes back to the newest checkpoint. Only the first message of an epoch
        changes anything.

        Returns the episodes that were running for a batch that is left out. Raises ConfigError or
        ProtocolError where the run ends.
        """
        state = self.state
        running_episodes = list[EpisodeRecord]()

        first_message = message.trainer_epoch == state.trainer_epoch != self._given_up_epoch
        if first_message and message.reason == "memory":
            state.memory_limits.tighten(message, state.store)
            failure = f"trainer rank {message.rank}: {message.detail}"
            log.warning("%s; %s", failure, state.memory_limits.describe_change(message))
        elif first_message:
            running_episodes = self._leave_out_batch(message)
        if first_message:
            self._given_up_epoch = message.trainer_epoch
            state.store.put_meta("given_up", str(self._given_up_epoch))

        stop_reasons = {
            "memory": f"it is tried again: {state.memory_limits.describe_change(message)}",
            "spike": "it is left out, back to the newest checkpoint",
        }
        state.outbox.to_control(peer, shared.Stop(stop_reasons[message.reason]))
        return running_episodes

    def _leave_out_batch(self, message: trainer.GaveUp) -> list[EpisodeRecord]:
        step = message.step
        batch = self.state.batches.batches.get(message.step - 1)
        if batch is None or not batch.closed:  # left out before this coordinator was restarted
            return []

        self._spike_count = self._spike_count + 1 if self._spiked_step == step else 1
        self._spiked_step = step

        if self.state.config.trainer.on_spike == "stop" or self._spike_count > MAX_SPIKES:
            remedy = ", or leave it out by trainer.on_spike=rollback"
            if self._spike_count > MAX_SPIKES:
                remedy = f"; {MAX_SPIKES} other batches were left out of this step before it"
            raise ProtocolError(
                f"{message.detail}; it is not trained, and its plan is kept; resume=auto repeats it, from "
                f"the newest checkpoint: set a smaller trainer.lr or another loss{remedy}"
            )

        log.warning("%s; left out: %s", message.detail, " ".join(batch.uids))
        return self.state.batches.leave_out_batch(DropReason.SPIKE)

    def record_version(self, message: trainer.Published, now: float) -> None:
        state = self.state
        ref = message.ref
        if ref.version.epoch == state.trainer_epoch and state.versions.set_newest(ref):
            self.snapshot_s = message.snapshot_s
            self.write_s = message.write_s
            state.store.put_meta("version", msgspec.json.encode(ref).decode())
            state.timeline.past("write_weights", message.write_s, version=ref.version)
            state.liveness.alive(now)

    def record_probe(self, message: trainer.Probed, now: float) -> None:
        if message.version.epoch == self.state.trainer_epoch:
            self.state.versions.add_probe(message, now)

    def record_checkpoint(self, peer: bytes, message: trainer.Checkpointed, now: float) -> None:
        """A checkpoint is in place: what the oldest retained one covers can be forgotten."""
        state = self.state
        if self._superseded(peer, message):
            return

        self._checkpoint_problem = ""
        # Ranks that repeat steps after a crash are stopped before the last committed one.
        required_step = state.batches.committed if self._stop_step is None else self._stop_step
        self.checkpoint_written = self.checkpoint_written or (self.stopping and message.step >= required_step)

        if message.resting and not self.ranks.last_plan_kind:  # an earlier coordinator has told them
            self.ranks.last_plan_kind = "end"
        self.ranks.offloaded |= message.resting and self.ranks.last_plan_kind == "end"

        if message.step == self.checkpoint_step:
            return  # sent again, as a restarted coordinator may have missed it

        state.store.put_checkpoint(message.step)
        state.timeline.past("checkpoint", 0.0, step=message.step)
        self.checkpoint_step = message.step
        covers_all = message.step == state.batches.committed
        self.checkpoint_trained = message.trained_total if covers_all else None

        retained_count = state.config.checkpoint.keep
        retained_steps = sorted({*state.store.read.checkpoints(), message.step})[-retained_count:]
        self._covered_step = max(
            self._covered_step, retained_steps[0] if len(retained_steps) == retained_count else 0
        )
        state.store.put_meta("to_forget", str(self._covered_step))

        state.store.copies.due = True
        state.store.sync()
        state.liveness.progress(now)

    def forget_covered(self) -> None:
        """Forget one batch that the oldest retained checkpoint covers: its plan and payloads. It is called in
        each turn of the loop, as there may be many batches between two checkpoints."""
        state = self.state
        if not self._covers_more:
            return

        first_step = next(iter(state.batches.batches))
        forgotten_uids = state.batches.retain(first_step + 1)
        for uid in forgotten_uids:
            state.store.release_frames(uid)
        state.store.cover(first_step + 1, len(forgotten_uids))

        if not self._covers_more:
            state.store.sync()  # the store forgets what is beyond store.keep_bytes

    @property
    def is_forgetting(self) -> bool:
        """True while not all that checkpoints cover is forgotten."""
        return self._covers_more or self.state.store.pruning

    @property
    def _covers_more(self) -> bool:
        return next(iter(self.state.batches.batches), self._covered_step) < self._covered_step

    def request_checkpoint(self) -> None:
        """Let the ranks write a checkpoint at the next micro-batch, unless nothing was trained since the
        newest one."""
        committed = self.state.batches.committed
        self.stopping = True
        self.checkpoint_written = self.checkpoint_step >= committed or not committed

    @property
    def checkpoint_problem(self) -> str:
        """Say why no checkpoint can be written, and from where a crash would go on; '' while they are."""
        if not self._checkpoint_problem:
            return ""
        saved_step = self.checkpoint_step
        newest_checkpoint = (
            f"the newest checkpoint is of step {saved_step}"
            if saved_step >= 0
            else "there is no checkpoint yet"
        )
        return f"{self._checkpoint_problem}; {newest_checkpoint}"

    def describe_unsaved_stop(self, reason: str) -> str:
        """Say what a stop without a checkpoint means."""
        step = self.state.batches.committed
        saved_step = self.checkpoint_step
        waits = (rank.heartbeat.waiting for rank in self.ranks.peers if rank.heartbeat)
        reason = "; ".join(filter(None, (reason, *waits)))
        starting_point = f"the one of step {saved_step}" if saved_step >= 0 else "the start"
        repeated = f"resume=auto repeats the steps since {starting_point}"
        return f"stopped without a checkpoint of step {step}: {reason}; {repeated}"

    # -- bulk ----------------------------------------------------------------------------------------

    def note_request(self, peer: bytes, message: trainer.PlanRequest) -> None:
        """Remember the request; `serve` answers it when there is something to train. One that comes late, for
        a step that they have committed, is not answered: what cannot be read by now was trained."""
        rank = self._rank_of(peer, message)
        if rank is not None and rank.hello.index == 0:
            self.ranks.open_request = message  # one at rest may have been sent twice, and be answered already
            self.ranks.offloaded = message.resting and self.ranks.last_plan_kind in ("", "rest")

    def _rank_of(
        self, peer: bytes, message: trainer.PlanRequest | trainer.PayloadRequest
    ) -> RankRecord | None:
        """The rank that asks, if its trainer is the newest, for a step that is not committed by it."""
        is_late = (
            message.trainer_epoch != self.state.trainer_epoch or message.step < self.ranks.committed_step
        )
        is_replaced = is_older(self.ranks.incarnation, self.newest_asker)
        return None if is_late or is_replaced else self.ranks.peers.get(peer)

    def serve_request(self) -> None:
        """Answer rank 0's request if it can be answered; else its beat says what it waits for."""
        request = self.ranks.open_request
        shifts = self.state.shifts

        if self.waiting_for_devices and (self.stopping or shifts is None or shifts.shift is Shift.TRAIN):
            for peer in self.waiting_for_devices:
                self.state.outbox.to_control(peer, trainer.GrantDevices())
            self.waiting_for_devices = {}
            self.ranks.offloaded = False

        first_rank = next((rank for rank in self.ranks.peers if rank.hello.index == 0), None)
        if request is None or first_rank is None or (plan := self._plan_in_shift(request)) is None:
            return

        self.ranks.open_request = None
        self.ranks.offloaded = False
        self.ranks.last_plan_kind = plan.kind
        self.state.outbox.to_bulk(first_rank.peer, plan)

    def _plan_in_shift(self, request: trainer.PlanRequest) -> trainer.WorkPlan | None:
        """Return the plan asked for if the trainer has the devices. It rests where engines are to have them,
        once they can compare the version that they will load. A stop is for ranks that rest, too."""
        shifts = self.state.shifts
        version = PolicyVersion(self.state.trainer_epoch, request.step)
        if shifts is None or shifts.shift is Shift.TRAIN or self.stopping:
            return self._make_plan(request)

        if shifts.shift is Shift.ROLLOUT or self.ranks.offloaded:
            return None

        is_newest = request.step == self.state.batches.committed
        lacks_probe = is_newest and self.state.versions.lacks_probe(version, always=True)
        return trainer.WorkPlan(request.step, request.micro, "probe" if lacks_probe else "rest")

    def _make_plan(self, request: trainer.PlanRequest) -> trainer.WorkPlan | None:
        """Return the plan asked for. None: the request has to wait."""
        state = self.state
        batches = self.state.batches
        step = request.step
        make_plan = partial(trainer.WorkPlan, step, request.micro)

        if step > batches.committed:
            raise ProtocolError(f"the trainer asks for step {step} before committing {step - 1}")

        if self.stopping:
            self._stop_step = step
            return make_plan("stop")
        if step >= state.config.total_steps:
            return make_plan("end")

        if step == batches.committed and state.versions.lacks_probe(PolicyVersion(state.trainer_epoch, step)):
            return make_plan("probe")  # ranks that repeat steps score none

        ranks = self.ranks.rank_count // state.config.trainer.sequence_parallel
        uids = batches.plan(step, request.micro, ranks, state.memory_limits.tokens)
        batch = batches.batches[step]

        if uids is None:
            return make_plan("end") if batches.over and not batch.planned else None
        if not uids:
            return make_plan("step", plan_hash=batch.plan_hash)

        episodes = map(
            batches.planned_episodes.__getitem__, uids
        )  # the lost ones, too: ranks deal the others as before
        temperature = state.config.rollout.temperature
        return make_plan(
            "work",
            tuple(trainer.PlannedTrajectory.of(e, batches.baselines[e.group], temperature) for e in episodes),
        )

    def send_payloads(self, peer: bytes, message: trainer.PayloadRequest) -> None:
        """Send a rank the payloads of its part of a plan; of a batch that is left out there are none."""
        state = self.state
        batch = self.state.batches.batches.get(message.step)
        if self._rank_of(peer, message) is None or batch is None:
            return
        if not set(batch.planned).issuperset(message.uids):
            return

        lost_uids = list[str]()
        frames = list[bytes]()
        for uid in message.uids:
            turns = [] if uid in batch.lost else state.read_turns(state.batches.planned_episodes[uid])
            if not turns:
                state.batches.mark_lost(message.step, uid)
                lost_uids.append(uid)
            frames += turns

        state.outbox.to_bulk(peer, trainer.Payloads(message.step, message.uids, tuple(lost_uids)), frames)
