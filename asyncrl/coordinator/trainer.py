"""The coordinator's side of the trainer ranks: answers requests for plans, records commits and checkpoints.

consumes: hellos, commits, versions, checkpoints (control); requests for plans and payloads (bulk)
waits for: a micro-batch's worth of ready trajectories; all ranks of a start
unblocks: the ranks (plans, payloads, committed), and through `MinVersion` the workers
"""

from __future__ import annotations

import math
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
from asyncrl.types import DropReason, PolicyVersion, start_version
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
    """Answers the ranks' requests for plans and payloads, and records commits, versions and checkpoints.

    `on_commit` is called with each new commit.
    """

    def __init__(self, state: RunState, on_commit: Callable[[trainer.Commit], None]) -> None:
        self.config = state.config
        self.ledger = state.ledger
        self.batches = state.ledger.batches
        self.fleet = state.fleet
        self.store = state.journal.store
        self.outbox = state.journal.outbox
        self.timeline = state.journal.timeline
        self._state = state
        self.on_commit = on_commit
        self.ranks = Ranks(Peers(state, "trainer"), self.store.reader.meta("trainer_incarnation"))

        self.stopping = False  # the last checkpoint was requested
        self.checkpoint_written = False  # the last checkpoint was written
        # Plans up to this step are not needed.
        self._covered_step = int(self.store.reader.meta("to_forget", "0"))
        self._stop_step: int | None = None  # step after which the ranks were told to stop

        # Step of the newest checkpoint.
        self.checkpoint_step = max(self.store.reader.checkpoints(), default=-1)
        self._checkpoint_problem = ""  # why the newest checkpoint was not written; "" after a success
        # Trajectories trained by the count of a checkpoint of the last step.
        self.checkpoint_trained: int | None = None

        stored_scores = self.store.reader.meta("validated", "{}")
        # Score of each validated step.
        self._scores = msgspec.json.decode(stored_scores, type=dict[int, float])
        self.best_step = int(self.store.reader.meta("best", "-1"))  # step of the best checkpoint

        # Seconds of the newest publish.
        self.snapshot_s = 0.0
        self.write_s = 0.0
        # The last step with a spike, and the number of its batches in a row with a spike.
        self._spiked_step = -1
        self._spike_count = 0

        # Ranks that have loaded nothing yet, by peer.
        self.waiting_for_devices: dict[bytes, trainer.AskDevices] = {}
        self._waiting_incarnation = ""  # incarnation of the newest of these ranks
        # Ranks before their hello: heartbeat and its time.
        self.starting_ranks: dict[bytes, tuple[trainer.TrainerHeartbeat, float]] = {}

        # Newest trainer epoch that gave up a batch.
        self._given_up_epoch = int(self.store.reader.meta("given_up", "-1"))

    # -- control -------------------------------------------------------------------------------------

    def welcome_rank(self, peer: bytes, message: trainer.TrainerHello, now: float) -> None:
        """Handle the hello of a rank.

        A new incarnation begins a trainer epoch: messages of earlier epochs are refused from then on.
        """
        peers = self.ranks.peers
        new_rank = RankRecord(peer, f"trainer {message.index}", message, now)
        is_accepted = peers.accept_hello(new_rank, now, self.ranks.incarnation) is not None
        self.starting_ranks.pop(peer, None)
        if not is_accepted:
            return

        is_new_start = message.incarnation != self.ranks.incarnation
        first_hello = not self.ranks.rank_count
        if is_new_start or first_hello:
            if is_new_start:
                self.fleet.trainer_epoch += 1
                self.store.put_meta("trainer_epoch", str(self.fleet.trainer_epoch))
                self.store.put_meta("trainer_incarnation", message.incarnation)
                self.store.request_sync()  # a power cut must not lead to the same number again

            self.ranks = Ranks(peers, message.incarnation, message.ranks)
            for rank in [rank for rank in peers if rank.hello.incarnation != message.incarnation]:
                peers.remove_process(rank.peer, "replaced by a restarted trainer", now)
            log.info("trainer epoch %d begins at step %d", self.fleet.trainer_epoch, message.step)

            if message.step > self.batches.committed:
                recover_commits(self._state, message.step, now)
                self.checkpoint_step = message.step
            if first_hello:  # after recovery, as trained episodes need no payload
                self.ledger.cut_back_unreadable()

            self._check_position(message.step)
            self.fleet.record_launch(message.step)
            self.fleet.liveness.note_alive(now)  # a repeated hello is no sign of life

        self.fleet.vocabulary = message.vocabulary
        self._state.send_welcome(peer)

    def note_device_request(self, peer: bytes, message: trainer.AskDevices) -> None:
        """Note a rank that waits for the devices.

        The ranks that it replaces have ended, and need no answers.
        """
        if is_older(message.incarnation, self._waiting_incarnation):
            return

        if message.incarnation != self._waiting_incarnation:
            self._waiting_incarnation = message.incarnation
            self.waiting_for_devices = {}
            self.ranks.open_request = None
            self.ranks.last_plan_kind = ""

        self.waiting_for_devices[peer] = message

    def _check_position(self, step: int) -> None:
        """Raise a ProtocolError unless the store has the plans of all committed steps after `step`, that of
        the trainer's checkpoint: the ranks repeat these steps."""
        retained_batches = self.batches.by_step
        committed = self.batches.committed
        if any(number not in retained_batches for number in range(step + 1, committed + 1)):
            steps = (
                f"only the plans for steps {min(retained_batches)} to {max(retained_batches)}"
                if retained_batches
                else "no plans"
            )
            raise ProtocolError(
                f"the trainer's checkpoint is from step {step}, but the run store has {steps}, so the two "
                "belong to different runs; restore both from the same copy"
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
            self.fleet.liveness.note_progress(now)
        elif message.written > (previous.written if previous else 0):
            # No progress, as on a full disk the same bytes are written again.
            self.fleet.liveness.note_alive(now)

    def starting_waits(self, now: float) -> list[tuple[str, str]]:
        """Return name and wait of each rank without a hello that was heard of within a lease."""
        return [
            (f"trainer {heartbeat.rank}", heartbeat.waiting)
            for heartbeat, heard_at in self.starting_ranks.values()
            if now - heard_at < self.config.launch.lease
        ]

    def is_hanging(self, now: float) -> bool:
        """Return True if a rank is silent, in a run that has stalled. A rank that waits sends heartbeats."""
        peers = self.ranks.peers
        return not self.waiting_for_devices and (
            len(peers) < max(1, self.ranks.rank_count) or bool(peers.silent_processes(now))
        )

    def _stop_if_earlier(self, peer: bytes, message: trainer.Commit | trainer.Checkpointed) -> bool:
        """Return whether a message is of an earlier trainer, which is then told to end."""
        if is_earlier := message.trainer_epoch != self.fleet.trainer_epoch:
            self.outbox.to_control(peer, shared.Stop("a newer trainer has taken over"))
        return is_earlier

    def record_commit(self, peer: bytes, message: trainer.Commit, now: float) -> None:
        """Record a commit. A repeated commit of a step gets the same answer; another plan is a ProtocolError.

        The ranks report which episodes were trained, as they may hold payloads that cannot be read any more.
        """
        if self._stop_if_earlier(peer, message):
            return

        stored_hash = self.store.reader.plan_hash(message.step)
        batch = self.batches.by_step.get(message.step)
        expected_hash = batch.plan_hash if batch is not None else stored_hash
        if message.plan_hash != expected_hash:
            raise ProtocolError(f"the commit for step {message.step} names a plan that was never issued")

        first_commit = message.step > self.batches.committed
        if batch is not None:
            self.batches.commit_batch(message.step, message.trained, lost_uids=message.lost)

        if first_commit:
            self.store.put_commit(message.step, self.fleet.trainer_epoch, message.plan_hash)
            self.checkpoint_trained = None
            self.timeline.record_past("commit", 0.0, step=message.step)
            took_step = "actor/grad_norm" in message.metrics or not message.metrics.get("actor/skipped_steps")
            self.ledger.skipped_batches = 0 if took_step else self.ledger.skipped_batches + 1
            self.on_commit(message)

        self.ranks.committed_step = max(self.ranks.committed_step, message.step)
        self.fleet.liveness.note_progress(now)
        # While a restarted trainer repeats steps, the engines keep their newer weights.
        self.outbox.to_control(
            peer,
            trainer.Committed(message.step, message.step >= self.batches.committed, self._choose_best()),
        )

    def record_score(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the score of a validated step."""
        scores = [metrics[name] * sign for name, sign in BEST_SCORES if name in metrics]
        if scores:
            self._scores[step] = scores[0]
            self.store.put_meta("validated", msgspec.json.encode(self._scores).decode())

    def _choose_best(self) -> int:
        """Return the step of the best validated checkpoint; -1 without one, or without `checkpoint.best`.

        Candidates are the newest `checkpoint.keep` checkpoints and the best checkpoint so far: others are
        deleted.
        """
        if not self.config.checkpoint.best:
            return -1

        retained_steps = self.store.reader.checkpoints()[-self.config.checkpoint.keep :]
        scored_steps = sorted(self._scores.keys() & {*retained_steps, self.best_step})
        self.best_step = max(scored_steps, key=lambda step: self._scores[step], default=-1)
        self.store.put_meta("best", str(self.best_step))
        return self.best_step

    def record_given_up(self, peer: bytes, message: trainer.GaveUp) -> list[EpisodeRecord]:
        """Handle ranks that gave a batch up, for which a supervisor starts new ranks.

        After too little memory the next trainer epoch recomputes more layers, or trains the recorded plans in
        smaller micro-batches. After a spike the next epoch leaves the batch out and goes back to the newest
        checkpoint. Only the first message of an epoch changes anything.

        Returns the episodes that were running for a batch that is left out. Raises ConfigError or
        ProtocolError if the run ends.
        """
        running_episodes = list[EpisodeRecord]()
        limits = self.ledger.memory_limits

        if message.trainer_epoch == self.fleet.trainer_epoch != self._given_up_epoch:
            if message.reason == "memory":
                limits.tighten(message, self.store)
                change = limits.describe_change(message)
                log.warning("trainer rank %d: %s; %s", message.rank, message.detail, change)
            else:
                running_episodes = self._leave_out_batch(message)

            self._given_up_epoch = message.trainer_epoch
            self.store.put_meta("given_up", str(self._given_up_epoch))

        stop_reason = "skipping the batch, and returning to the newest checkpoint"
        if message.reason == "memory":
            stop_reason = f"retrying the step: {limits.describe_change(message)}"
        self.outbox.to_control(peer, shared.Stop(stop_reason))
        return running_episodes

    def _leave_out_batch(self, message: trainer.GaveUp) -> list[EpisodeRecord]:
        step = message.step
        batch = self.batches.by_step.get(step)
        if batch is None or not batch.closed:  # the batch was left out before a restart of the coordinator
            return []

        self._spike_count = self._spike_count + 1 if self._spiked_step == step else 1
        self._spiked_step = step

        if self.config.trainer.on_spike == "stop" or self._spike_count > MAX_SPIKES:
            remedy = ", or skip such batches with trainer.on_spike=rollback"
            if self._spike_count > MAX_SPIKES:
                remedy = f" ({MAX_SPIKES} other batches have already been skipped at this step)"
            raise ProtocolError(
                f"{message.detail}; the step was not applied, and resume=auto repeats its plan from the "
                f"newest checkpoint; before that, set a smaller trainer.lr or another loss{remedy}"
            )

        log.warning("%s; skipped: %s", message.detail, " ".join(batch.uids))
        return self.batches.leave_out_batch(DropReason.SPIKE)

    def record_version(self, message: trainer.Published, now: float) -> None:
        ref = message.ref
        if ref.version.epoch == self.fleet.trainer_epoch and self.fleet.versions.set_newest(ref):
            self.snapshot_s = message.snapshot_s
            self.write_s = message.write_s
            self.store.put_meta("version", msgspec.json.encode(ref).decode())
            self.timeline.record_past("write_weights", message.write_s, version=ref.version)
            self.fleet.liveness.note_alive(now)

    def record_probe(self, message: trainer.Probed, now: float) -> None:
        if message.version.epoch == self.fleet.trainer_epoch:
            self.fleet.versions.add_probe(message, now)

    def record_checkpoint(self, peer: bytes, message: trainer.Checkpointed, now: float) -> None:
        """Record a checkpoint. Plans that the oldest retained checkpoint covers can be forgotten."""
        if self._stop_if_earlier(peer, message):
            return

        self._checkpoint_problem = ""
        # Ranks that repeat steps after a crash are stopped before the last committed step.
        required_step = self.batches.committed if self._stop_step is None else self._stop_step
        self.checkpoint_written = self.checkpoint_written or (self.stopping and message.step >= required_step)

        if message.resting and not self.ranks.last_plan_kind:  # an earlier coordinator has sent the last plan
            self.ranks.last_plan_kind = "end"
        self.ranks.offloaded |= message.resting and self.ranks.last_plan_kind == "end"

        if message.step == self.checkpoint_step:
            return  # a repetition, for a restarted coordinator that may have missed the message

        self.store.put_checkpoint(message.step)
        self.timeline.record_past("checkpoint", 0.0, step=message.step)
        self.checkpoint_step = message.step
        covers_all = message.step == self.batches.committed
        self.checkpoint_trained = message.trained_total if covers_all else None

        retained_count = self.config.checkpoint.keep
        retained_steps = sorted({*self.store.reader.checkpoints(), message.step})[-retained_count:]
        self._covered_step = max(
            self._covered_step, retained_steps[0] if len(retained_steps) == retained_count else 0
        )
        self.store.put_meta("to_forget", str(self._covered_step))

        self.store.copies.copy_due = True
        self.store.request_sync()
        self.fleet.liveness.note_progress(now)

    def forget_covered(self) -> None:
        """Forget plan and payloads of a batch that the oldest retained checkpoint covers.

        The loop calls this in each pass, as there may be many batches between two checkpoints.
        """
        if not self._covers_more:
            return

        oldest_step = next(iter(self.batches.by_step))
        forgotten_uids = self.batches.forget_covered_plans(oldest_step)
        for uid in forgotten_uids:
            self.store.release_frames(uid)
        self.store.cover_steps(oldest_step, len(forgotten_uids))

        if not self._covers_more:
            self.store.request_sync()  # the store then removes payloads beyond store.keep_bytes

    @property
    def is_forgetting(self) -> bool:
        """True while plans or payloads that checkpoints cover are not yet forgotten."""
        return self._covers_more or self.store.pruning

    @property
    def _covers_more(self) -> bool:
        return next(iter(self.batches.by_step), math.inf) <= self._covered_step

    def request_checkpoint(self) -> None:
        """Let the ranks write a checkpoint after the part of the plan under way, unless the newest covers all
        training."""
        committed = self.batches.committed
        self.stopping = True
        self.checkpoint_written = self.checkpoint_step >= committed or not committed

    @property
    def checkpoint_problem(self) -> str:
        """Why no checkpoint can be written, and where a resume would begin; '' without a problem."""
        if not self._checkpoint_problem:
            return ""
        if self.checkpoint_step < 0:
            return f"{self._checkpoint_problem}; no checkpoint exists yet"
        return f"{self._checkpoint_problem}; the newest checkpoint is from step {self.checkpoint_step}"

    def describe_unsaved_stop(self, reason: str) -> str:
        """Return the message for a stop without a checkpoint."""
        step = self.batches.committed
        saved_step = self.checkpoint_step
        waits = (rank.heartbeat.waiting for rank in self.ranks.peers if rank.heartbeat)
        reason = "; ".join(filter(None, (reason, *waits)))
        starting_point = f"the checkpoint from step {saved_step}" if saved_step >= 0 else "the start"
        repeated = f"resume=auto repeats the steps since {starting_point}"
        return f"stopped without a checkpoint at step {step}: {reason}; {repeated}"

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
            message.trainer_epoch != self.fleet.trainer_epoch or message.step <= self.ranks.committed_step
        )
        is_replaced = is_older(self.ranks.incarnation, self._waiting_incarnation)
        return None if is_late or is_replaced else self.ranks.peers.get(peer)

    def serve_request(self) -> None:
        """Answer rank 0's request if possible. Until then the rank's heartbeat reports the wait."""
        request = self.ranks.open_request
        shifts = self.fleet.shifts

        if self.waiting_for_devices and (self.stopping or shifts is None or shifts.shift is Shift.TRAIN):
            for peer in self.waiting_for_devices:
                self.outbox.to_control(peer, trainer.GrantDevices())
            self.waiting_for_devices = {}
            self.ranks.offloaded = False

        first_rank = next((rank for rank in self.ranks.peers if rank.hello.index == 0), None)
        if request is None or first_rank is None or (plan := self._plan_in_shift(request)) is None:
            return

        self.ranks.open_request = None
        self.ranks.offloaded = False
        self.ranks.last_plan_kind = plan.kind
        self.outbox.to_bulk(first_rank.peer, plan)

    def _plan_in_shift(self, request: trainer.PlanRequest) -> trainer.WorkPlan | None:
        """Return the requested plan if the trainer has the devices, or the order to rest before engines wake.

        Before the ranks rest, the trainer must have scored the probe for the version that engines will load.
        Ranks at rest are stopped, too.
        """
        shifts = self.fleet.shifts
        version = PolicyVersion(self.fleet.trainer_epoch, start_version(request.step))
        if shifts is None or shifts.shift is Shift.TRAIN or self.stopping:
            return self._make_plan(request)

        if shifts.shift is Shift.ROLLOUT or self.ranks.offloaded:
            return None

        is_newest = version.step == self.batches.committed
        lacks_probe = is_newest and self.fleet.versions.lacks_probe(version, always=True)
        return trainer.WorkPlan(request.step, request.part, "probe" if lacks_probe else "rest")

    def _make_plan(self, request: trainer.PlanRequest) -> trainer.WorkPlan | None:
        """Return the requested plan. None: the request has to wait."""
        batches = self.batches
        step = request.step
        version = PolicyVersion(self.fleet.trainer_epoch, start_version(step))
        make_plan = partial(trainer.WorkPlan, step, request.part)

        if version.step > batches.committed:
            raise ProtocolError(f"the trainer requested step {step} before committing step {version.step}")

        if self.stopping:
            self._stop_step = version.step
            return make_plan("stop")
        if step > self.config.total_steps:
            return make_plan("end")

        if version.step == batches.committed and self.fleet.versions.lacks_probe(version):
            return make_plan("probe")  # ranks that repeat steps score no probe
        if version.step == batches.committed and (samples := self.fleet.samples.take(version)):
            return make_plan("probe_samples", samples=samples)

        ranks = self.ranks.rank_count // self.config.trainer.sequence_parallel
        uids = batches.next_part(step, request.part, ranks, self.ledger.memory_limits.tokens)
        batch = batches.by_step[step]

        if uids is None:
            return make_plan("end") if batches.over and not batch.planned else None
        if not uids:
            return make_plan("step", plan_hash=batch.plan_hash)

        # Lost episodes are sent, too, so that ranks partition the plan as before.
        episodes = [batches.planned_episodes[uid] for uid in uids]
        temperature = self.config.rollout.temperature
        return make_plan(
            "work",
            tuple(
                trainer.PlannedTrajectory.of(episode, batches.baselines[episode.group], temperature)
                for episode in episodes
            ),
        )

    def send_payloads(self, peer: bytes, message: trainer.PayloadRequest) -> None:
        """Send a rank payloads of its share of a plan. There are none for a batch that was left out."""
        batch = self.batches.by_step.get(message.step)
        if self._rank_of(peer, message) is None or batch is None:
            return
        if not set(batch.planned).issuperset(message.uids):
            return

        lost_uids = list[str]()
        frames = list[bytes]()
        for uid in message.uids:
            turns = [] if uid in batch.lost else self.ledger.read_turns(self.batches.planned_episodes[uid])
            if not turns:
                self.batches.mark_lost(message.step, uid)
                lost_uids.append(uid)
            frames += turns

        self.outbox.to_bulk(peer, trainer.Payloads(message.step, message.uids, tuple(lost_uids)), frames)
