"""Plans, go, commits and stops, as two ranks see them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl.buffer.batches import Batch, Batches
from asyncrl.buffer.records import State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.config import parse
from asyncrl.coordinator.failures import MemoryLimits
from asyncrl.coordinator.state import RunState
from asyncrl.coordinator.trainer import MAX_SPIKES, TrainerHandler
from asyncrl.coordinator.versions import EngineRecord, VersionLedger
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.store.launches import launches_of
from asyncrl.store.runstore import RunStore
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import Probe, WeightsRef
from asyncrl.wire.messages.shared import ProbeSamples, SampledSequence, Stop, Welcome
from asyncrl.wire.messages.trainer import (
    Checkpointed,
    Commit,
    Committed,
    GaveUp,
    PayloadRequest,
    Payloads,
    PlanRequest,
    Probed,
    Published,
    TrainerHeartbeat,
    TrainerHello,
    WorkPlan,
)
from tests.fakes.mail import Sent
from tests.unit.buffer.machine import admit, land, make, turn_payload

PEERS = [b"trainer/0/x", b"trainer/1/x"]


class TrainerSetup:
    def __init__(self, run_dir: Path, buffer: ReplayBuffer, batches: Batches) -> None:
        config = parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}, "total_steps": 3})
        self.sent = Sent()
        self.state = RunState(
            config,
            run_dir,
            [],
            buffer,
            batches,
            VersionLedger(),
            RunStore(run_dir),
            self.sent,  # type: ignore[arg-type]
        )
        self.commits: list[Commit] = []
        self.handler = TrainerHandler(self.state, self.commits.append)

    def hello(self, incarnation: str = "x", step: int = 0) -> None:
        for rank, peer in enumerate(PEERS):
            self.handler.welcome_rank(peer, TrainerHello(rank, 2, incarnation, step), 0.0)
        self.state.fleet.trainer_epoch = self.sent.take(Welcome)[-1][1].trainer_epoch

    def take(self, step: int, micro: int, peer: bytes = PEERS[0]) -> WorkPlan | None:
        self.handler.note_request(peer, PlanRequest(self.state.fleet.trainer_epoch, step, micro))
        self.handler.serve_request()
        answers = self.sent.take(WorkPlan)
        assert all(to == PEERS[0] for to, _ in answers)
        return answers[0][1] if answers else None

    def payloads(self, rank: int, *uids: str, step: int = 1) -> list[Payloads]:
        request = PayloadRequest(self.state.fleet.trainer_epoch, step, uids)
        self.handler.send_payloads(PEERS[rank], request)
        return [
            payloads_message for peer, payloads_message in self.sent.take(Payloads) if peer == PEERS[rank]
        ]


@pytest.fixture
def setup(tmp_path: Path) -> TrainerSetup:
    buffer, batches = make()
    admit(buffer, 2)
    for uid in ("0.0", "0.1", "1.0", "1.1"):
        land(buffer, uid)
    setup = TrainerSetup(tmp_path, buffer, batches)
    for uid in buffer.episodes:
        setup.state.journal.store.put_frame(uid, 0, "generated", turn_payload())
    setup.hello()
    return setup


def uids(plan: WorkPlan) -> set[str]:
    return {planned.uid for planned in plan.trajectories}


def test_rank_0_alone_is_given_a_plan_and_each_rank_its_payloads(
    setup: TrainerSetup,
) -> None:
    """A retry gets the same; what is not of the batch is not given."""
    assert setup.take(1, 0, PEERS[1]) is None
    plan = setup.take(1, 0)
    assert plan is not None and uids(plan) == {"0.0", "0.1", "1.0", "1.1"} and setup.take(1, 0) == plan
    assert {(p.frames, p.tokens, p.width) for p in plan.trajectories} == {(1, 20, 20)}
    for _ in range(2):
        assert setup.payloads(1, "0.1", "1.0") == [Payloads(1, ("0.1", "1.0"))]
    setup.state.journal.store.forget_frames("1.1")
    setup.state.journal.persist()
    assert setup.payloads(0, "0.0", "1.1") == [Payloads(1, ("0.0", "1.1"), ("1.1",))]
    assert setup.state.ledger.batches.by_step[1].lost == {"1.1"}
    assert setup.payloads(0, "9.9") == setup.payloads(0, "0.0", step=2) == []


def test_ranks_that_have_yet_to_meet_are_named_until_their_hello(setup: TrainerSetup) -> None:
    handler = setup.handler
    lease = setup.state.config.launch.lease
    waits = TrainerHeartbeat(1, 0.0, 0.0, "trainer ranks 0 of 2 to join")
    setup.hello("2")
    handler.note_heartbeat(b"trainer/1/1", waits, 0.0)
    assert handler.starting_waits(0.0) == [], "of ranks that were replaced"
    handler.note_heartbeat(b"trainer/1/3", waits, 0.0)
    assert handler.starting_waits(lease / 2) == [("trainer 1", waits.waiting)]
    assert handler.starting_waits(lease + 1) == [], "it may be gone"
    handler.welcome_rank(b"trainer/1/3", TrainerHello(1, 2, "3", 0), 1.0)
    assert handler.starting_waits(1.0) == []


def test_the_probe_is_asked_for_until_it_is_scored_and_is_no_part_of_the_plan(setup: TrainerSetup) -> None:
    """An engine was started: without the probe it may not sample, and nothing may ever become ready."""
    versions = setup.state.fleet.versions
    kinds = list[str]()

    def asked(micro: int) -> str:
        plan = setup.take(1, micro)
        return plan.kind if plan else ""

    assert asked(0) == "work"
    versions.engines[b"engine"] = EngineRecord("engine")
    versions.engines[b"engine"].uncompared = True
    kinds = [asked(1), asked(1)]
    for epoch in (0, setup.state.fleet.trainer_epoch):  # one of a trainer that was replaced does not count
        assert versions.lacks_probe(PolicyVersion(setup.state.fleet.trainer_epoch, 0))
        setup.handler.record_probe(Probed(PolicyVersion(epoch, 0), Probe(((1, 2),), ((-1.0,),))), 0.0)
    assert [*kinds, asked(1)] == ["probe", "probe", "step"]
    assert [*map(len, setup.state.ledger.batches.by_step[1].parts)] == [4]
    commit_first(setup)
    setup.hello("y")
    assert asked(0) == "work"  # ranks that repeat a step score no probe


def test_samples_are_scored_once_and_only_with_the_version_that_sampled(setup: TrainerSetup) -> None:
    samples = setup.state.fleet.samples
    epoch = setup.state.fleet.trainer_epoch
    sequence = SampledSequence((1, 2, 3), (-0.5,))

    def kinds_after(version: PolicyVersion, step: int, part: int) -> list[str]:
        samples.add(b"engine", ProbeSamples(version, (sequence,)), vocabulary=40)
        plans = [setup.take(step, part) for _ in range(2)]
        return [plan.kind for plan in plans if plan]

    assert kinds_after(PolicyVersion(epoch - 1, 0), 1, 0) == ["work", "work"]
    assert kinds_after(PolicyVersion(epoch, 0), 1, 1) == ["probe_samples", "step"]  # no part of the plan
    commit_first(setup)
    assert "probe_samples" not in kinds_after(PolicyVersion(epoch, 0), 2, 0)
    setup.hello("y")
    epoch = setup.state.fleet.trainer_epoch
    assert kinds_after(PolicyVersion(epoch, 0), 1, 0) == ["work", "work"]  # ranks that repeat a step


def test_a_trainer_that_waits_for_data_is_given_the_probe_and_no_batch(tmp_path: Path) -> None:
    setup = TrainerSetup(tmp_path, *make())
    setup.hello()
    versions = setup.state.fleet.versions
    versions.engines[b"engine"] = EngineRecord("engine")
    assert setup.take(1, 0) is None
    versions.engines[b"engine"].uncompared = True
    setup.handler.serve_request()  # the request still waits
    assert [plan.kind for _, plan in setup.sent.take(WorkPlan)] == ["probe"]
    versions.engines[b"engine"].uncompared = False
    assert setup.take(1, 0) is None  # a batch without trajectories is no step
    setup.state.ledger.buffer.prompts.retired_samples.update(range(100))  # the data is over
    end_plan = setup.take(1, 0)
    assert end_plan is not None and end_plan.kind == "end"


def test_a_stop_is_the_answer_from_then_on(setup: TrainerSetup) -> None:
    assert setup.take(1, 0) is not None
    setup.handler.request_checkpoint()
    assert [plan.kind for _ in range(2) if (plan := setup.take(1, 1))] == ["stop", "stop"]


def checkpointed(setup: TrainerSetup, step: int) -> None:
    message = Checkpointed(setup.state.fleet.trainer_epoch, step, 0)
    setup.handler.record_checkpoint(PEERS[0], message, 0.0)


def test_a_stop_is_over_with_the_checkpoint_of_the_last_step(setup: TrainerSetup) -> None:
    commit_first(setup)
    setup.handler.request_checkpoint()
    assert not setup.handler.checkpoint_written
    checkpointed(setup, 0)  # was on its way
    assert not setup.handler.checkpoint_written
    checkpointed(setup, 1)
    assert setup.handler.checkpoint_written


def test_a_stop_has_nothing_to_wait_for_when_nothing_was_trained_since(setup: TrainerSetup) -> None:
    setup.handler.request_checkpoint()
    assert setup.handler.checkpoint_written
    setup.handler.stopping = setup.handler.checkpoint_written = False
    commit_first(setup)
    checkpointed(setup, 1)
    setup.handler.request_checkpoint()
    assert setup.handler.checkpoint_written


def test_ranks_that_repeat_steps_save_what_they_have_repeated(setup: TrainerSetup) -> None:
    """A restarted trainer, at step 0 of 1 when it is asked to stop."""
    commit_first(setup)
    setup.hello("y")
    setup.handler.request_checkpoint()
    plan = setup.take(1, 0)
    assert plan is not None and plan.kind == "stop"
    checkpointed(setup, 0)
    assert setup.handler.checkpoint_written


def commit_first(setup: TrainerSetup) -> None:
    """Ranks take and commit the first batch."""
    setup.take(1, 0)
    done = setup.take(1, 1)
    assert done is not None and done.kind == "step"
    setup.handler.record_commit(PEERS[0], commit_of(setup, 1), 0.0)


def commit_of(setup: TrainerSetup, step: int) -> Commit:
    """All of its plan is trained."""
    batch = setup.state.ledger.batches.by_step[step]
    return Commit(
        setup.state.fleet.trainer_epoch, step, batch.plan_hash, tuple(batch.uids), {}, tuple(batch.lost)
    )


def test_a_commit_is_idempotent_and_another_plan_is_fatal(setup: TrainerSetup) -> None:
    setup.take(1, 0)
    done = setup.take(1, 1)
    assert done is not None and done.kind == "step"
    commit = commit_of(setup, 1)
    assert commit.plan_hash == done.plan_hash
    for _ in range(2):
        setup.handler.record_commit(PEERS[0], commit, 0.0)
    assert [message.step for _, message in setup.sent.take(Committed)] == [1, 1]
    assert len(setup.commits) == 1 and setup.state.ledger.buffer.account().trained == 4
    with pytest.raises(ProtocolError, match="never issued"):
        setup.handler.record_commit(PEERS[0], msgspec.structs.replace(commit, plan_hash="other"), 0.0)
    first, *other_uids = commit.trained
    for odd, trained in ((first, other_uids), ("9.0", [first, *other_uids, "9.0"])):
        with pytest.raises(
            ProtocolError, match=f"does not match the step's plan; these episodes differ: {odd}$"
        ):
            setup.handler.record_commit(
                PEERS[0], msgspec.structs.replace(commit, trained=tuple(trained)), 0.0
            )


def test_batches_in_a_row_without_an_optimizer_step_are_counted(setup: TrainerSetup) -> None:
    """Of several steps a batch, one that was taken is enough."""
    skipping = {"actor/skipped_steps": 2.0}
    stepping = {"actor/skipped_steps": 1.0, "actor/grad_norm": 0.5}
    counts = []
    for step, metrics in enumerate((skipping, skipping, stepping, {}), start=1):
        setup.state.ledger.batches.by_step[step] = Batch(step)
        commit = commit_of(setup, step)
        setup.handler.record_commit(PEERS[0], msgspec.structs.replace(commit, metrics=metrics), 0.0)
        counts.append(setup.state.ledger.skipped_batches)
    assert counts == [1, 2, 0, 0]


def test_a_new_trainer_fences_the_old_one_and_repeats_the_plans(setup: TrainerSetup) -> None:
    plan = setup.take(1, 0)
    old_epoch = setup.state.fleet.trainer_epoch
    setup.hello("y")
    assert setup.state.fleet.trainer_epoch == old_epoch + 1
    setup.handler.note_request(PEERS[0], PlanRequest(old_epoch, 1, 0))
    setup.handler.serve_request()
    assert setup.sent.take(WorkPlan) == []
    again = setup.take(1, 0)
    assert plan is not None and again is not None and again.trajectories == plan.trajectories


def test_a_launch_trains_all_after_the_checkpoint_that_its_trainer_resumes_from(setup: TrainerSetup) -> None:
    """Of one committed step: the next launch goes on after it, then a damaged checkpoint takes it back."""
    commit_first(setup)
    setup.state.journal.persist()
    setup.state.fleet._config = msgspec.structs.replace(setup.state.config, seed=9)
    for incarnation, step, expected in (("y", 1, [(0, 0), (1, 9)]), ("z", 0, [(0, 9)])):
        setup.hello(incarnation, step)
        setup.state.journal.persist()
        launches = launches_of(setup.state.run_dir)
        assert [(launch.step, launch.config["seed"]) for launch in launches] == expected


def test_the_best_validated_checkpoint_is_known_after_a_restart_too(setup: TrainerSetup) -> None:
    """Of those that there are: two are kept beside it. Of equal ones the first."""
    state = setup.state
    config = msgspec.structs.replace(state.config.checkpoint, best=True)
    state.config = setup.handler.config = msgspec.structs.replace(state.config, checkpoint=config)
    assert setup.handler._choose_best() == -1
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.5), (5, 0.1)):
        if step != 2:  # validated without a checkpoint
            state.journal.store.put_checkpoint(step)
        state.journal.persist()
        setup.handler.record_score(step, {"val-core/all/sampled/mean@1": score})
        setup.handler._choose_best()
    state.journal.store.put_checkpoint(6)
    setup.handler.record_score(4, {"val-core/all/sampled/mean@1": 0.8})  # late: it is deleted
    setup.handler.record_score(5, {"val-aux/episodes": 0.0})  # it was abandoned
    state.journal.persist()
    assert setup.handler._choose_best() == TrainerHandler(state, lambda commit: None)._choose_best() == 3
    setup.handler.config = msgspec.structs.replace(
        state.config, checkpoint=msgspec.structs.replace(config, best=False)
    )
    assert setup.handler._choose_best() == -1


def test_a_loss_on_held_out_demonstrations_is_better_when_it_is_lower(setup: TrainerSetup) -> None:
    for step, nll in ((1, 0.7), (2, 0.3)):
        setup.handler.record_score(step, {"val-core/all/nll": nll})
    assert setup.handler._scores == {1: -0.7, 2: -0.3}


def test_a_checkpoint_of_a_trainer_that_was_replaced_covers_nothing(setup: TrainerSetup) -> None:
    """Its steps may be of a branch that the new trainer has left; the plans are still needed."""
    old = setup.state.fleet.trainer_epoch
    setup.hello("y")
    setup.handler.record_checkpoint(PEERS[0], Checkpointed(old, 5, 20), 0.0)
    setup.state.journal.persist()
    assert setup.state.journal.store.reader.checkpoints() == [] and setup.handler.checkpoint_step == -1
    assert [peer for peer, _ in setup.sent.take(Stop)] == [PEERS[0]]


def test_a_dead_trainers_late_hello_does_not_strand_its_successor(setup: TrainerSetup) -> None:
    setup.state.fleet.launch = "l"
    setup.hello("l.10")
    epoch = setup.state.fleet.trainer_epoch
    for incarnation in ("l.9", "earlier.11"):
        hello = TrainerHello(0, 2, incarnation, 0)
        setup.handler.welcome_rank(b"trainer/0/late", hello, 0.0)
        assert [peer for peer, _ in setup.sent.take(Stop)] == [b"trainer/0/late"]
    assert setup.state.fleet.trainer_epoch == epoch and setup.handler.ranks.peers.get(PEERS[0])
    assert setup.take(1, 0) is not None


def test_a_checkpoint_of_another_run_is_refused(setup: TrainerSetup) -> None:
    with pytest.raises(ProtocolError, match="belong to different runs"):
        setup.hello("z", step=2)


def test_a_restarted_coordinator_learns_again_where_a_broadcast_version_is(setup: TrainerSetup) -> None:
    """Its store has the version, but an address is no directory that could be looked into."""
    epoch = setup.state.fleet.trainer_epoch
    published = Published(WeightsRef(PolicyVersion(epoch, 3), "tcp://host:1"), 0.0, 0.0)
    setup.state.fleet.versions = VersionLedger(newest=PolicyVersion(epoch, 3))
    setup.handler.record_version(
        Published(WeightsRef(PolicyVersion(epoch, 2), "tcp://host:1"), 0.0, 0.0), 0.0
    )
    assert setup.state.fleet.versions.ref is None
    setup.handler.record_version(published, 0.0)
    assert setup.state.fleet.versions.ref == published.ref


def test_a_beat_is_progress_only_if_work_was_done_since_the_one_before(setup: TrainerSetup) -> None:
    """Two ranks behind a barrier. Each row: when, which rank, its micro-batches so far, newest progress."""
    rows = [(1, 0, 0, 0), (2, 0, 3, 2), (3, 0, 3, 2), (4, 1, 3, 4), (5, 1, 3, 4), (6, 0, 4, 6), (7, 0, 4, 6)]
    setup.state.fleet.liveness.note_progress(0.0)
    for now, rank, work, moved in rows:
        setup.handler.note_heartbeat(PEERS[rank], TrainerHeartbeat(rank, 0.0, 0.0, work=work), float(now))
        assert setup.state.fleet.liveness.progress_at == moved


def test_a_restarted_trainer_counts_from_the_start(setup: TrainerSetup) -> None:
    setup.handler.note_heartbeat(PEERS[0], TrainerHeartbeat(0, 0.0, 0.0, work=9), 1.0)
    setup.hello("y")
    setup.handler.note_heartbeat(PEERS[0], TrainerHeartbeat(0, 0.0, 0.0, work=1), 2.0)
    assert setup.state.fleet.liveness.progress_at == 2.0


def test_a_trainer_that_was_replaced_makes_no_progress(setup: TrainerSetup) -> None:
    """It would hide that its successor hangs."""
    setup.handler.note_heartbeat(b"trainer/0/gone", TrainerHeartbeat(0, 0.0, 0.0, work=9), 1.0)
    assert setup.state.fleet.liveness.alive_at == 0.0


def lacking(setup: TrainerSetup, tokens: int, episodes: int, epoch: int | None = None) -> int:
    """A rank has told of too little memory; what the ranks are allowed then."""
    epoch = setup.state.fleet.trainer_epoch if epoch is None else epoch
    setup.handler.record_given_up(PEERS[1], GaveUp(epoch, 1, 1, "memory", "MemoryError", tokens, episodes))
    assert [peer for peer, _ in setup.sent.take(Stop)] == [PEERS[1]]
    return setup.state.ledger.memory_limits.tokens


def test_what_took_too_much_memory_is_halved_once_per_epoch_and_kept(setup: TrainerSetup) -> None:
    plan = setup.take(1, 0)
    assert lacking(setup, 4000, 4) == lacking(setup, 4000, 4) == 2000
    setup.state.journal.store.commit()
    setup.handler = TrainerHandler(setup.state, setup.commits.append)  # of a coordinator that was restarted
    assert lacking(setup, 4000, 4) == 2000, "the rank had not got its Stop"
    again = MemoryLimits.load_from(setup.state.journal.store.reader, 8192)
    assert (
        again.tokens == 2000 and MemoryLimits.load_from(setup.state.journal.store.reader, 4096).tokens == 4096
    )
    setup.handler.welcome_rank(PEERS[0], TrainerHello(0, 2, "y", 0), 0.0)
    welcome = setup.sent.take(Welcome)[-1][1]
    assert welcome.micro_tokens == 2000 and welcome.trainer_epoch == setup.state.fleet.trainer_epoch
    setup.handler.welcome_rank(PEERS[1], TrainerHello(1, 2, "y", 0), 0.0)
    assert setup.take(1, 0) == plan  # the plan as recorded; the ranks cut it
    assert lacking(setup, 500, 1, epoch=welcome.trainer_epoch - 1) == 2000  # of the ranks before


def test_more_layers_are_computed_again_before_micro_batches_are_cut(setup: TrainerSetup) -> None:
    """The level is the rank's to choose; the coordinator keeps it, and tells it to the next ranks."""
    for name, every, layers in (("y", 2, "1 layer in 2 is"), ("z", 1, "all layers are")):
        epoch = setup.state.fleet.trainer_epoch
        message = GaveUp(epoch, 1, 1, "memory", "MemoryError", 4000, 4, recompute_every=every)
        for _ in range(2):  # sent again until the rank has its Stop
            setup.handler.record_given_up(PEERS[1], message)
        assert setup.sent.take(Stop)[0][1].reason.endswith(f"{layers} recomputed from now on")
        setup.state.journal.store.commit()
        setup.handler = TrainerHandler(setup.state, setup.commits.append)
        setup.handler.welcome_rank(PEERS[0], TrainerHello(0, 2, name, 0), 0.0)
        welcome = setup.sent.take(Welcome)[-1][1]
        assert (welcome.recompute_every, welcome.micro_tokens) == (every, 8192)
        setup.handler.welcome_rank(PEERS[1], TrainerHello(1, 2, name, 0), 0.0)
    stored = MemoryLimits.load_from(setup.state.journal.store.reader, 8192)
    assert (stored.recompute_every, stored.tokens) == (1, 8192)
    assert lacking(setup, 4000, 4) == 2000, "nothing more can be recomputed"
    assert setup.state.ledger.memory_limits.recompute_every == 1


@pytest.mark.parametrize(("recomputed", "advised"), [(0, True), (2, True), (1, False)])
def test_the_advice_leaves_out_what_the_rank_did(setup: TrainerSetup, recomputed: int, advised: bool) -> None:
    message = GaveUp(setup.state.fleet.trainer_epoch, 1, 1, "memory", "MemoryError", 9000, 1, recomputed)
    with pytest.raises(ConfigError, match="9000 tokens") as raised:
        setup.handler.record_given_up(PEERS[1], message)
    assert ("trainer.activation_checkpointing=full" in str(raised.value)) == advised


def test_one_episode_that_does_not_fit_ends_the_run_and_names_the_keys(setup: TrainerSetup) -> None:
    assert lacking(setup, 3000, 1) == 1500  # it may have been the other rank's memory
    setup.hello("y")
    with pytest.raises(ConfigError, match=r"3000 tokens.*trainer\.activation_checkpointing"):
        lacking(setup, 3000, 1)


def spiked(setup: TrainerSetup, step: int, epoch: int | None = None) -> None:
    """Both ranks tell of it, and are told to end."""
    epoch = setup.state.fleet.trainer_epoch if epoch is None else epoch
    for peer in PEERS:
        setup.handler.record_given_up(
            peer, GaveUp(epoch, 0, step, "spike", f"step {step} spiked: its norm is 80")
        )
    assert [peer for peer, _ in setup.sent.take(Stop)] == PEERS


def batch_of(setup: TrainerSetup, groups: int = 2) -> set[str]:
    """What is taken for the batch under way, of new groups."""
    buffer = setup.state.ledger.buffer
    step = buffer.current_step
    admit(buffer, groups)
    for uid in [uid for uid, e in buffer.episodes.items() if e.state is State.PENDING]:
        land(buffer, uid)
        setup.state.journal.store.put_frame(uid, 0, "generated", turn_payload())
    plan = setup.take(step, 0)
    end = setup.take(step, 1)
    assert plan is not None and end is not None and end.kind == "step"
    return uids(plan)


def on_spike(setup: TrainerSetup, value: str) -> None:
    trainer = msgspec.structs.replace(setup.state.config.trainer, on_spike=value)
    setup.handler.config = msgspec.structs.replace(setup.state.config, trainer=trainer)


def test_a_batch_that_spiked_is_left_out_by_name(
    setup: TrainerSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """The next ranks repeat the batches before it, and then another one of the same number."""
    on_spike(setup, "rollback")
    first = batch_of(setup, groups=0)
    setup.handler.record_commit(PEERS[0], commit_of(setup, 1), 0.0)
    left_out = batch_of(setup)
    spiked(setup, 2)
    spiked(setup, 2)  # the answer was lost
    state = setup.state
    flow = state.ledger.buffer.account()
    assert flow.conserved and flow.dropped == len(left_out) == 4 and flow.trained == 4
    assert state.ledger.buffer.reasons == {"dropped/spike": 4}
    assert caplog.text.count("step 2 spiked") == 1 and all(uid in caplog.text for uid in left_out)
    state.journal.persist()
    stored_run = state.journal.store.reader.load_run()
    assert stored_run.pruned_counts == state.ledger.buffer.state_counts() and [
        batch.uids for batch in stored_run.batches
    ][1:] == [[]]
    setup.hello("y")  # from the start: there is no checkpoint
    again = setup.take(1, 0)
    assert again is not None and uids(again) == first
    next_batch = batch_of(setup)
    assert len(next_batch) == 4 and not next_batch & (first | left_out)
    setup.handler.record_commit(PEERS[0], commit_of(setup, 2), 0.0)
    assert state.ledger.buffer.account().trained == 8 and state.ledger.buffer.account().conserved


def test_spikes_in_a_row_end_the_run_with_what_to_do(setup: TrainerSetup) -> None:
    on_spike(setup, "rollback")
    batch_of(setup, groups=0)
    for _ in range(MAX_SPIKES):
        spiked(setup, 1)
        setup.hello(f"y{setup.state.fleet.trainer_epoch}")
        batch_of(setup)
    with pytest.raises(ProtocolError, match=r"step 1 spiked: its norm is 80; .* \(3 other"):
        spiked(setup, 1)
    assert setup.state.ledger.batches.by_step[1].closed, "its plan is kept"


def test_a_spike_stops_a_run_that_wants_it(setup: TrainerSetup) -> None:
    on_spike(setup, "stop")
    batch_of(setup, groups=0)
    spiked(setup, 1, epoch=0)  # of ranks that were replaced
    with pytest.raises(ProtocolError, match=r"on_spike=rollback"):
        spiked(setup, 1)
