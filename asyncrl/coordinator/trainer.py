"""The coordinator's side of the trainer ranks: answers requests for plans, records commits and checkpoints.

consumes: hellos, commits, versions, checkpoints (control); requests for plans and payloads (bulk)
waits for: a micro-batch's worth of ready trajectories; all ranks of a start
unblocks: the ranks (plans, payloads, committed), and through the clock the workers
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

# Metrics of a validation that choose the best checkpoint, each with a sign (-1: lower is better). The first
# metric that is present counts.
BEST_SCORES = ((SAMPLED_SCORE, 1), (NLL_HELD_OUT, -1))
MAX_SPIKES = 3  # batches in a row left out of a step; after more of them the weights must be the cause


@dataclass
class RankRecord:
    """A connected rank."""

    peer: bytes
    name: str
    hello: trainer.TrainerHello
    seen: float
    heartbeat: trainer.TrainerHeartbeat | None = None


@dataclass
class Ranks:
    """The ranks of a trainer start."""

    peers: Peers[RankRecord]
    incarnation: str = ""
    rank_count: int = 0
    open_request: trainer.PlanRequest | None = None  # rank 0's unanswered request
    offloaded: bool = False  # the ranks hold nothing on their devices
    last_plan_kind: str = ""  # kind of the last plan that was sent
    committed_step: int = 0  # newest step that these ranks have committed


class TrainerHandler:
    """Answers requests for plans and records commits. `on_commit` is called with each new commit."""

    def __init__(self, state: RunState, on_commit: Callable[[trainer.Commit], None]) -> None:
        self.state = state
        self.on_commit = on_commit
        self.ranks = Ranks(Peers(state, "trainer"), state.store.reader.meta("trainer_incarnation"))

        self.stopping = False  # the last checkpoint was requested
        self.checkpoint_written = False  # the last checkpoint was written
        # Plans before this step are not needed.
        self._covered_step = int(state.store.reader.meta("to_forget", "0"))
        self._stop_step: int | None = None  # step at which the ranks were told to stop

        # Step of the newest checkpoint.
        self.checkpoint_step = max(state.store.reader.checkpoints(), default=-1)
        self._checkpoint_problem = ""  # why the newest checkpoint was not written; "" after a success
        # Trajectories trained by the count of a checkpoint of the last step.
        self.checkpoint_trained: int | None = None

        stored_scores = state.store.reader.meta("validated", "{}")
        # Score of each validated step.
        self._scores = msgspec.json.decode(stored_scores, type=dict[int, float])
        self.best_step = int(state.store.reader.meta("best", "-1"))  # step of the best checkpoint

        # Seconds of the newest publish.
        self.snapshot_s = 0.0
        self.write_s = 0.0
        # The last step with a spike, and the number of its batches in a row with a spike.
        self._spiked_step = -1
        self._spike_count = 0

        # Ranks that have loaded nothing yet, by peer.
        self.waiting_for_devices: dict[bytes, trainer.AskDevices] = {}
        self.newest_asker = ""  # incarnation of the newest of these ranks
        # Ranks before their hello: heartbeat and its time.
        self.starting_ranks: dict[bytes, tuple[trainer.TrainerHeartbeat, float]] = {}

        # Newest trainer epoch that gave up a batch.
        self._given_up_epoch = int(state.store.reader.meta("given_up", "-1"))

    # -- control -------------------------------------------------------------------------------------

    def welcome_rank(self, peer: bytes, message: trainer.TrainerHello, now: float) -> None:
        """Handle the hello of a rank.

        A new incarnation begins a trainer epoch, which fences earlier epochs.
        """
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
                state.store.request_sync()  # a power cut must not lead to the same number again

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
            if first_hello:  # after recovery, as trained episodes need no payload
                state.cut_back_unreadable()

            self._check_position(message.step)
            state.record_launch(message.step)
            state.liveness.note_alive(now)  # a repeated hello is no sign of life

        state.vocabulary = message.vocabulary
        state.send_welcome(peer)

    def note_device_request(self, peer: bytes, message: trainer.AskDevices) -> None:
        """Note a rank that waits for the devices.

        The ranks that it replaces have ended, and need no answers.
        """
        if is_older(message.incarnation, self.newest_asker):
            return

        if message.incarnation != self.newest_asker:
            self.newest_asker = message.incarnation
            self.waiting_for_devices = {}
            self.ranks.open_request = None
            self.ranks.last_plan_kind = ""

        self.waiting_for_devices[peer] = message

    def _check_position(self, step: int) -> None:
        retained_batches = self.state.batches.by_step
        committed = self.state.batches.committed
        if any(number not in retained_batches for number in range(step, committed)):
            raise ProtocolError(
                f"the trainer's checkpoint is of step {step}, but the run store holds the plans of steps "
                f"{min(retained_batches, default=committed)} to {committed}: "
                "checkpoint and store are not of one run; restore both from the same copy"
            )

    def note_heartbeat(self, peer: bytes, message: trainer.TrainerHeartbeat, now: float) -> None:
        """Note a heartbeat. Only work since the last heartbeat is progress.

        So a long step does not trip the watchdog, but a rank that hangs in a step does.
        """
        if (rank := self.ranks.peers.get(peer)) is None:
            incarnation = peer.decode().rpartition("/")[2]
            if message.waiting and not is_older(incarnation, self.ranks.incarnation):
                self.starting_ranks = {
                    starting_peer: entry
                    for starting_peer, entry in self.starting_ranks.items()
                    if starting_peer.decode().endswith(f"/{incarnation}")
                }
                self.starting_ranks[peer] = message, now
            return

        previous = rank.heartbeat
        rank.heartbeat = message

        if message.rank == 0:  # heartbeats and Checkpointed arrive in order; a new start has not tried yet
            self._checkpoint_problem = message.checkpoint_problem or self._checkpoint_problem

        if message.work > (previous.work if previous else 0):
            self.state.liveness.note_progress(now)
        elif message.written > (previous.written if previous else 0):
            # No progress, as on a full disk the same bytes are written again.
            self.state.liveness.note_alive(now)

    def starting_waits(self, now: float) -> list[tuple[str, str]]:
        """Return name and wait of each rank without a hello that was heard of within a lease."""
        lease = self.state.config.launch.lease
        return [
            (f"trainer {heartbeat.rank}", heartbeat.waiting)
            for heartbeat, heard_at in self.starting_ranks.values()
            if now - heard_at < lease
        ]

    def is_hanging(self, now: float) -> bool:
        """Return True if a rank is silent, in a run that has stalled. A rank that waits sends heartbeats."""
        peers = self.ranks.peers
        return not self.waiting_for_devices and (
            len(peers) < max(1, self.ranks.rank_count) or bool(peers.silent_processes(now))
        )

    def _superseded(self, peer: bytes, message: trainer.Commit | trainer.Checkpointed) -> bool:
        """Return True for a message of an earlier trainer, and tell that trainer to end."""
        if is_earlier := message.trainer_epoch != self.state.trainer_epoch:
            self.state.outbox.to_control(peer, shared.Stop("a newer trainer has taken over"))
        return is_earlier

    def record_commit(self, peer: bytes, message: trainer.Commit, now: float) -> None:
        """Record a commit. A repeated commit of a step gets the same answer; another plan is a ProtocolError.

        The ranks report which episodes were trained, as they may hold payloads that cannot be read any more.
        """
        state = self.state
        if self._superseded(peer, message):
            return

        stored_hash = state.store.reader.plan_hash(message.step)
        batch = state.batches.by_step.get(message.step - 1)
        expected_hash = batch.plan_hash if batch is not None else stored_hash
        if message.plan_hash != expected_hash:
            raise ProtocolError(f"commit of step {message.step} names a plan that was never issued")

        first_commit = message.step > state.batches.committed
        if batch is not None:
            state.batches.commit_batch(message.step, message.trained)

        if first_commit:
            state.store.put_commit(message.step, state.trainer_epoch, message.plan_hash)
            self.checkpoint_trained = None
            state.timeline.record_past("commit", 0.0, step=message.step)
            took_step = "actor/grad_norm" in message.metrics or not message.metrics.get("actor/skipped_steps")
            state.skipped_batches = 0 if took_step else state.skipped_batches + 1
            self.on_commit(message)

        self.ranks.committed_step = max(self.ranks.committed_step, message.step)
        state.liveness.note_progress(now)
        # While a restarted trainer repeats steps, the engines keep their newer weights.
        state.outbox.to_control(
            peer,
            trainer.Committed(message.step, message.step >= state.batches.committed, self._choose_best()),
        )

    def record_score(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the score of a validated step."""
        scores = [metrics[name] * sign for name, sign in BEST_SCORES if name in metrics]
        if scores:
            self._scores[step] = scores[0]
            self.state.store.put_meta("validated", msgspec.json.encode(self._scores).decode())

    def _choose_best(self) -> int:
        """Return the step of the best validated checkpoint; -1 without one, or without `checkpoint.best`.

        Candidates are the newest `checkpoint.keep` checkpoints and the best checkpoint so far: others are
        deleted.
        """
        if not self.state.config.checkpoint.best:
            return -1

        retained_steps = self.state.store.reader.checkpoints()[-self.state.config.checkpoint.keep :]
        scored_steps = sorted(self._scores.keys() & {*retained_steps, self.best_step})
        self.best_step = max(scored_steps, key=lambda step: self._scores[step], default=-1)
        self.state.store.put_meta("best", str(self.best_step))
        return self.best_step

    def record_given_up(self, peer: bytes, message: trainer.GaveUp) -> list[EpisodeRecord]:
        """Handle ranks that gave a batch up, for which a supervisor starts new ranks.

        After too little memory the next trainer epoch recomputes more layers, or trains the recorded plans in
        smaller micro-batches. After a spike the next epoch leaves the batch out and goes back to the newest
        checkpoint. Only the first message of an epoch changes anything.

        Returns the episodes that were running for a batch that is left out. Raises ConfigError or
        ProtocolError if the run ends.
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
        batch = self.state.batches.by_step.get(message.step - 1)
        if batch is None or not batch.closed:  # the batch was left out before a restart of the coordinator
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
            state.timeline.record_past("write_weights", message.write_s, version=ref.version)
            state.liveness.note_alive(now)

    def record_probe(self, message: trainer.Probed, now: float) -> None:
        if message.version.epoch == self.state.trainer_epoch:
            self.state.versions.add_probe(message, now)

    def record_checkpoint(self, peer: bytes, message: trainer.Checkpointed, now: float) -> None:
        """Record a checkpoint. Plans that the oldest retained checkpoint covers can be forgotten."""
        state = self.state
        if self._superseded(peer, message):
            return

        self._checkpoint_problem = ""
        # Ranks that repeat steps after a crash are stopped before the last committed step.
        required_step = state.batches.committed if self._stop_step is None else self._stop_step
        self.checkpoint_written = self.checkpoint_written or (self.stopping and message.step >= required_step)

        if message.resting and not self.ranks.last_plan_kind:  # an earlier coordinator has sent the last plan
            self.ranks.last_plan_kind = "end"
        self.ranks.offloaded |= message.resting and self.ranks.last_plan_kind == "end"

        if message.step == self.checkpoint_step:
            return  # a repetition, for a restarted coordinator that may have missed the message

        state.store.put_checkpoint(message.step)
        state.timeline.record_past("checkpoint", 0.0, step=message.step)
        self.checkpoint_step = message.step
        covers_all = message.step == state.batches.committed
        self.checkpoint_trained = message.trained_total if covers_all else None

        retained_count = state.config.checkpoint.keep
        retained_steps = sorted({*state.store.reader.checkpoints(), message.step})[-retained_count:]
        self._covered_step = max(
            self._covered_step, retained_steps[0] if len(retained_steps) == retained_count else 0
        )
        state.store.put_meta("to_forget", str(self._covered_step))

        state.store.copies.copy_due = True
        state.store.request_sync()
        state.liveness.note_progress(now)

    def forget_covered(self) -> None:
        """Forget plan and payloads of a batch that the oldest retained checkpoint covers.

        The loop calls this in each pass, as there may be many batches between two checkpoints.
        """
        state = self.state
        if not self._covers_more:
            return

        first_step = next(iter(state.batches.by_step))
        forgotten_uids = state.batches.forget_covered_plans(first_step + 1)
        for uid in forgotten_uids:
            state.store.release_frames(uid)
        state.store.cover_steps(first_step + 1, len(forgotten_uids))

        if not self._covers_more:
            state.store.request_sync()  # the store then removes payloads beyond store.keep_bytes

    @property
    def is_forgetting(self) -> bool:
        """True while plans or payloads that checkpoints cover are not yet forgotten."""
        return self._covers_more or self.state.store.pruning

    @property
    def _covers_more(self) -> bool:
        return next(iter(self.state.batches.by_step), self._covered_step) < self._covered_step

    def request_checkpoint(self) -> None:
        """Let the ranks write a checkpoint at the next micro-batch, unless the newest covers all training."""
        committed = self.state.batches.committed
        self.stopping = True
        self.checkpoint_written = self.checkpoint_step >= committed or not committed

    @property
    def checkpoint_problem(self) -> str:
        """Why no checkpoint can be written, and where a resume would begin; '' without a problem."""
        if not self._checkpoint_problem:
            return ""
        saved_step = self.checkpoint_step
        if saved_step < 0:
            return f"{self._checkpoint_problem}; there is no checkpoint yet"
        return f"{self._checkpoint_problem}; the newest checkpoint is of step {saved_step}"

    def describe_unsaved_stop(self, reason: str) -> str:
        """Return the message for a stop without a checkpoint."""
        step = self.state.batches.committed
        saved_step = self.checkpoint_step
        waits = (rank.heartbeat.waiting for rank in self.ranks.peers if rank.heartbeat)
        reason = "; ".join(filter(None, (reason, *waits)))
        starting_point = f"the one of step {saved_step}" if saved_step >= 0 else "the start"
        repeated = f"resume=auto repeats the steps since {starting_point}"
        return f"stopped without a checkpoint of step {step}: {reason}; {repeated}"

    # -- bulk ----------------------------------------------------------------------------------------

    def note_request(self, peer: bytes, message: trainer.PlanRequest) -> None:
        """Note a request, which `serve_request` answers once there is something to train.

        A late request, for a step that the ranks have committed, gets no answer: unreadable episodes of that
        step were trained.
        """
        rank = self._rank_of(peer, message)
        if rank is not None and rank.hello.index == 0:
            # At rest, a request may have been sent twice, and answered already.
            self.ranks.open_request = message
            self.ranks.offloaded = message.resting and self.ranks.last_plan_kind in ("", "rest")

    def _rank_of(
        self, peer: bytes, message: trainer.PlanRequest | trainer.PayloadRequest
    ) -> RankRecord | None:
        """Return the rank of a request; None for an outdated trainer, or a step that it has committed."""
        is_late = (
            message.trainer_epoch != self.state.trainer_epoch or message.step < self.ranks.committed_step
        )
        is_replaced = is_older(self.ranks.incarnation, self.newest_asker)
        return None if is_late or is_replaced else self.ranks.peers.get(peer)

    def serve_request(self) -> None:
        """Answer rank 0's request if possible. Until then the rank's heartbeat reports the wait."""
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
        """Return the requested plan if the trainer has the devices, or the order to rest before engines wake.

        Before the ranks rest, the trainer must have scored the probe for the version that engines will load.
        Ranks at rest are stopped, too.
        """
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
        """Return the requested plan. None: the request has to wait."""
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
            return make_plan("probe")  # ranks that repeat steps score no probe

        ranks = self.ranks.rank_count // state.config.trainer.sequence_parallel
        uids = batches.next_part(step, request.micro, ranks, state.memory_limits.tokens)
        batch = batches.by_step[step]

        if uids is None:
            return make_plan("end") if batches.over and not batch.planned else None
        if not uids:
            return make_plan("step", plan_hash=batch.plan_hash)

        # Lost episodes are sent, too, so that ranks partition the plan as before.
        episodes = [batches.planned_episodes[uid] for uid in uids]
        temperature = state.config.rollout.temperature
        return make_plan(
            "work",
            tuple(
                trainer.PlannedTrajectory.of(episode, batches.baselines[episode.group], temperature)
                for episode in episodes
            ),
        )

    def send_payloads(self, peer: bytes, message: trainer.PayloadRequest) -> None:
        """Send a rank the payloads of its part of a plan. There are none for a batch that was left out."""
        state = self.state
        batch = self.state.batches.by_step.get(message.step)
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
