"""The version of a validation stays readable for workers that come late, and no longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import asdict, replace

from asyncrl.config import ValidationConfig
from asyncrl.coordinator.held_out import HeldOutAccount, HeldOutEpisodes
from asyncrl.coordinator.validation import Validation
from asyncrl.coordinator.workers import WorkerRecord
from asyncrl.observe.held_out import GREEDY, SAMPLED, HeldOut, uid_prefix
from asyncrl.observe.summary import summary_notes
from asyncrl.store.listing import Listing, episode_page
from asyncrl.store.runstore import RunStore
from asyncrl.types import EpisodeResult, EpisodeStats, FailReason, PolicyVersion, Sample
from asyncrl.weights import disk
from asyncrl.weights.manifest import LogprobGaps, Probe
from asyncrl.wire.messages.shared import Attempt, Loaded, LoadWeights, ProbeGap
from asyncrl.wire.messages.trainer import Probed
from asyncrl.wire.messages.worker import Assign, Failed, Fenced, Finished, Generated, WorkerHeartbeat
from tests.unit.buffer.machine import turn_payload
from tests.unit.coordinator.test_mismatches import mismatches as make_mismatches
from tests.unit.coordinator.test_workers import SAMPLE, A, B, WorkerSetup
from tests.unit.weights.test_delta import Training


def session(setup: WorkerSetup, samples: Sequence[Sample] = (SAMPLE,)) -> Validation:
    return Validation(setup.state, setup.handler, setup.engines, samples)


def test_a_version_and_what_it_builds_upon_is_kept_until_the_session_ends(tmp_path: Path) -> None:
    training = Training(tmp_path / "weights")
    training.publish(3)  # one whole, and two that build upon it
    setup = WorkerSetup(tmp_path)
    validation = session(setup)
    setup.state.fleet.versions.ref = training.ref(1)
    assert validation.begin_session(step=1, final=False, now=0.0)
    training.publish(6)  # the fifth is whole again, the ninth, too
    disk.prune(training.directory, keep=1)
    training.check(training.ref(1))
    validation.assign_episodes(validation.deadline + 1, exclusive=True)
    assert not validation.is_busy
    disk.prune(training.directory, keep=1)
    assert disk.published_versions(training.directory) == [training.ref(8)]


def test_a_version_that_is_gone_is_not_validated(tmp_path: Path) -> None:
    training = Training(tmp_path / "weights")
    setup = WorkerSetup(tmp_path)
    validation = session(setup)
    training.publish(5)
    setup.state.fleet.versions.ref = training.ref(0)
    disk.prune(training.directory, keep=1)
    assert not validation.begin_session(step=1, final=False, now=0.0)
    assert not validation.is_busy


def test_a_result_in_the_turn_in_which_a_session_goes_on_counts(tmp_path: Path) -> None:
    """After a restart of the coordinator a worker's result may come ahead of the session."""
    uids = [HeldOut(3, SAMPLED, row, 0).uid for row in range(2)]
    before = HeldOutEpisodes(RunStore(tmp_path), retries=2, keeps_turns=False)
    before.begin_session(uid_prefix(3), uids, continues=False)
    for uid in uids:
        before.assign(before.episodes[uid], "worker", sequence_number=1, min_version=0, now=0.0)
    before.put_changes()
    before._store.commit()
    before._store.close()
    after = HeldOutEpisodes(RunStore(tmp_path), retries=2, keeps_turns=False)
    after.finish_episode(
        after.episodes[uids[0]], Finished(1, Attempt(uids[0], 0), EpisodeResult(1.0), EpisodeStats(1))
    )
    after.begin_session(uid_prefix(3), uids, continues=True)
    after.put_changes()
    after._store.commit()
    assert after.account() == HeldOutAccount(issued=2, scored=1, in_flight=1)
    assert list(after.results) == uids[:1] and after.audit()


def validating(run_dir: Path, *samples: Sample) -> tuple[WorkerSetup, WorkerRecord, Validation]:
    """A session of one sample, or of these, with a worker that is ready for it."""
    training = Training(run_dir / "weights")
    setup = WorkerSetup(run_dir)
    training.publish(1)
    setup.state.fleet.versions.ref = training.ref(0)
    setup.join(A)
    (worker,) = setup.handler.peers
    worker.eval_version = training.ref(0).version
    validation = session(setup, samples or [SAMPLE])
    assert validation.begin_session(step=1, final=False, now=0.0)
    return setup, worker, validation


BROKE = Failed(0, Attempt("", 0), FailReason.AGENT_ERROR, "it broke")


def scored(result: EpisodeResult) -> Finished:
    return Finished(0, Attempt("", 0), result, EpisodeStats(1))


def play(setup: WorkerSetup, validation: Validation, answer: Callable[[HeldOut], Finished | Failed]) -> dict:
    """What the session has measured, once all of its attempts were answered so."""
    while validation.is_busy:
        validation.assign_episodes(0.0, exclusive=True)
        setup.state.journal.persist()
        for _, message in setup.sent.take(Assign):
            setup.play(message.attempt, answer(HeldOut.from_uid(message.attempt.uid)))
    ((_, metrics),) = validation.results
    return metrics


@pytest.mark.parametrize("reward", [1.0, -1.0])
def test_a_failed_episode_is_tried_again_and_then_counts_as_nothing(tmp_path: Path, reward: float) -> None:
    """Else an agent that breaks on bad answers would be judged by the good ones. Where rewards are negative,
    0 would be a prize."""
    (setup, worker, validation), tries = validating(tmp_path), Counter[str]()

    def answer(identity: HeldOut) -> Finished | Failed:
        tries[identity.mode] += 1
        return BROKE if identity.mode == SAMPLED else scored(EpisodeResult(reward))

    metrics = play(setup, validation, answer)
    assert "the validation of step 1: 1 of 2 episodes finished" in setup.state.fleet.waits
    assert tries == {SAMPLED: 1 + setup.state.config.rollout.retries, GREEDY: 1}
    assert metrics["val-core/all/sampled/success"] == 0.0
    assert metrics["val-core/all/greedy/success"] == float(reward == 1.0)
    assert metrics["val-core/all/greedy/mean@1"] == reward
    assert metrics["val-core/all/sampled/mean@1"] == min(reward, 0.0)
    assert metrics["val-aux/failed"] == metrics["val-aux/samples"] == 1.0, "of one sample, both episodes"
    assert not worker.running and setup.state.ledger.held_out.audit()
    assert setup.state.ledger.held_out.account() == HeldOutAccount(issued=2, scored=1, failed=1)
    assert (
        setup.state.ledger.failed_attempts.counts == {} and setup.state.ledger.first_attempts.landed is False
    ), "no training"


def test_what_a_session_has_scored_is_listed_and_can_be_read(tmp_path: Path) -> None:
    """As long as the store has room for it; a session that begins anew has nothing of the one before."""
    setup, _, validation = validating(tmp_path)
    store = setup.state.journal.store
    validation.assign_episodes(0.0, exclusive=True)
    setup.state.journal.persist()
    for seq, (_, message) in enumerate(setup.sent.take(Assign)):
        setup.turn(A, 2 * seq + 1, message.attempt)
        end = Finished(2 * seq + 2, message.attempt, EpisodeResult(0.5), EpisodeStats(1), answer="so be it")
        setup.records.process_record(
            A, end if seq else replace(BROKE, seq=2, attempt=message.attempt), [], 0.0
        )
    validation.assign_episodes(validation.deadline + 1, exclusive=True)
    setup.state.journal.persist()
    held_out = Listing.of('[["kind","=","held out"]]', "-mode", "", "")
    failed, scored = episode_page(store.reader, held_out)
    assert (scored["kind"], scored["mode"], scored["step"], scored["score"]) == ("held out", GREEDY, 1, 0.5)
    assert (scored["answer"], scored["truth"], scored["state"]) == ("so be it", "1", "landed")
    assert (failed["state"], failed["reason"], failed["score"]) == ("failed", FailReason.AGENT_ERROR, None)
    assert store.reader.episode(scored["uid"]).result.reward == 0.5
    assert store.reader.counts() == setup.state.ledger.buffer.state_counts(), (
        "they are not counted with those of training"
    )
    assert store.reader.rows("SELECT DISTINCT spare FROM frames") == [(1,)]
    assert all(store.reader.turn_frames(scored["uid"], 1, ["generated"]))
    again = session(setup)
    again.begin_session(step=1, final=False, now=0.0)
    setup.state.journal.persist()
    assert episode_page(store.reader, held_out) == [] and store.reader.rows("SELECT * FROM frames") == []
    assert store.reader.rows("SELECT * FROM answers") == [] and setup.state.ledger.held_out.audit()


@pytest.mark.parametrize(
    ("threshold", "result", "success"),
    [
        (1.0, EpisodeResult(0.5), 0.0),  # half a point is no half success
        (1.0, EpisodeResult(1.2), 1.0),
        (1.0, EpisodeResult(sum([0.1] * 10)), 1.0),  # 0.9999999999999999
        (-10.0, EpisodeResult(-3.0), 1.0),
        (200.0, EpisodeResult(199.0), 0.0),
        (1.0, EpisodeResult(-1.0, components={"acc": 1.0}), 1.0),
        (1.0, EpisodeResult(7.0, components={"acc": 0.0}), 0.0),
    ],
)
def test_success_is_what_the_threshold_says_and_the_score_stays_a_number(
    threshold: float, result: EpisodeResult, success: float, tmp_path: Path
) -> None:
    setup, _, validation = validating(tmp_path)
    limits = ValidationConfig(success=threshold)
    validation.config = replace(setup.state.config, validation=limits)
    metrics = play(setup, validation, lambda which: scored(result))
    assert metrics["val-core/all/greedy/success"] == success
    assert metrics["val-core/all/greedy/mean@1"] == result.reward
    assert metrics["val-aux/score/max"] == result.judged
    if result.components:
        assert metrics["val-aux/all/greedy/acc/mean@1"] == result.components["acc"]


def test_demonstrations_are_scored_once_and_their_loss_is_of_all_tokens(tmp_path: Path) -> None:
    """Beside prompts, which are sampled as ever. Where one could not be scored there is no loss."""
    demonstrations = [replace(SAMPLE, given=0, data_source=source) for source in "xxyy"]
    setup, _, validation = validating(tmp_path, *demonstrations, SAMPLE)
    losses = {0: (1.0, 15), 1: (4.0, 5), 2: (2.0, 5)}
    modes: list[str] = []

    def answer(identity: HeldOut) -> Finished | Failed:
        modes.append(identity.mode)
        nll, tokens = losses.get(identity.row, (0.0, 0))
        end = scored(EpisodeResult(0.0, tokens, components={"nll": nll} if tokens else {}))
        return replace(BROKE, reason=FailReason.ENGINE_ERROR) if identity.row == 3 else end

    metrics = play(setup, validation, answer)
    assert sorted(set(modes)) == ["greedy", "sampled", "scored"] and modes.count("greedy") == 1
    assert metrics["val-core/x/nll"] == pytest.approx((15 + 20) / 20)
    assert not metrics.keys() & {"val-core/y/nll", "val-core/all/nll"}
    assert metrics["val-core/all/greedy/success"] == 0.0 and metrics["val-aux/failed"] == 1.0
    assert not [name for name in metrics if "scored" in name]
    saved = (setup.state.run_dir / "transcripts/validation/step-1.jsonl").read_text()
    assert '"mode":"scored"' in saved and '"components":{"nll":1.0}' in saved


def test_an_assignment_that_was_lost_is_issued_again_after_a_lease(tmp_path: Path) -> None:
    """The last ones: no later one tells the worker that something is missing."""
    setup, _, validation = validating(tmp_path)
    validation.assign_episodes(0.0, exclusive=True)
    lost = {message.attempt.uid for _, message in setup.sent.take(Assign)}
    for now, again in ((1.0, set[str]()), (31.0, set()), (32.0, lost)):
        setup.beat(A, WorkerHeartbeat(0, (), 0, 0, 0), now)
        for _ in range(2):
            validation.assign_episodes(now, exclusive=True)
        sent = [message.attempt for _, message in setup.sent.take(Assign)]
        assert {attempt.uid for attempt in sent} == again and all(attempt.attempt for attempt in sent)


def test_episodes_of_a_lost_worker_go_on_from_their_durable_turns(tmp_path: Path) -> None:
    """It is back at once: what it was given before is fenced, and takes none of its slots."""
    setup, worker, validation = validating(tmp_path)
    validation.assign_episodes(0.0, exclusive=True)
    before = [message.attempt for _, message in setup.sent.take(Assign)]
    setup.turn(A, 1, before[0])
    setup.handler.peers.remove_process(A, "silent", 0.0)
    setup.join(A)
    (again,) = setup.handler.peers
    for seq, attempt in enumerate(before, 1):
        setup.finish(A, seq, attempt)
    assert [message.attempt for _, message in setup.sent.take(Fenced)] == before
    validation.assign_episodes(0.0, exclusive=True)
    again.eval_version = worker.eval_version
    validation.assign_episodes(0.0, exclusive=True)
    after = [message.attempt for _, message in setup.sent.take(Assign)]
    assert {(a.uid, a.attempt + 1) for a in before} == {(a.uid, a.attempt) for a in after}
    assert [episode.turns for episode in setup.state.ledger.held_out.episodes.values()] == [1, 0]
    assert len(again.running) == len(after) and again.free_slots == again.hello.slots - len(after)


def test_who_failed_and_cannot_be_tried_again_in_time_counts_as_failed(tmp_path: Path) -> None:
    """One slow failure must not cost the whole report."""
    setup, _, validation = validating(tmp_path)
    validation.assign_episodes(0.0, exclusive=True)
    for _, message in setup.sent.take(Assign):
        setup.play(message.attempt, BROKE)
    validation.assign_episodes(validation.deadline + 1, exclusive=True)
    ((_, metrics),) = validation.results
    assert metrics["val-core/all/greedy/mean@1"] == 0.0 and metrics["val-aux/failed"] == 2.0


def test_a_session_that_a_restart_cut_short_begins_again(tmp_path: Path) -> None:
    setup, _, before = validating(tmp_path)
    setup.state.journal.persist()
    ref = setup.state.fleet.versions.ref
    setup.state.fleet.versions.ref = None  # a newer one by now, or not known yet
    after = session(setup)
    after.resume_session(0.0, training_over=False)
    assert after.session is not None and before.session is not None
    assert (after.session.step, after.session.ref) == (1, ref) and after.session == before.session
    assert [episode.uid for episode in after.episodes.waiting] == ["val1/sampled/0", "val1/greedy/0"]
    after.assign_episodes(after.deadline + 1, exclusive=True)  # ended, however
    setup.state.journal.persist()
    again = session(setup)
    again.resume_session(0.0, training_over=False)
    assert not again.is_busy


def test_a_session_whose_weights_are_gone_is_done_with_the_newest(tmp_path: Path) -> None:
    training = Training(tmp_path / "weights")
    setup = WorkerSetup(tmp_path)
    training.publish(5)
    setup.state.fleet.versions.ref = training.ref(0)
    before = session(setup)
    assert before.begin_session(step=1, final=False, now=0.0)
    setup.state.journal.persist()
    before._session_resources.close()  # as when its process ends
    disk.prune(training.directory, keep=1)
    setup.state.fleet.versions.ref = training.ref(4)
    setup.state.ledger.buffer.committed = 5
    after = session(setup)
    after.resume_session(0.0, training_over=False)
    assert after.session is not None and (after.session.step, after.session.ref) == (5, training.ref(4))


def test_a_session_that_no_weights_are_left_for_has_failed_and_the_account_says_so(tmp_path: Path) -> None:
    setup, _, validation = validating(tmp_path)
    validation.assign_episodes(0.0, exclusive=True)
    uids = [message.attempt.uid for _, message in setup.sent.take(Assign)]
    setup.play(Attempt(uids[0], 0), Finished(0, Attempt(uids[0], 0), EpisodeResult(1.0), EpisodeStats(1)))
    setup.state.journal.persist()
    validation._session_resources.close()
    assert setup.state.fleet.versions.ref is not None
    disk.delete_version(setup.state.fleet.versions.ref)
    held_out = setup.state.ledger.held_out
    held_out.restore_episodes()  # as the next coordinator does
    assert held_out.account() == HeldOutAccount(issued=2, scored=1, in_flight=1) and held_out.audit()
    del held_out.results[uids[0]]
    assert not held_out.audit(), "what the store has is compared"
    held_out.restore_episodes()
    after = Validation(setup.state, setup.handler, setup.engines, [SAMPLE])
    after.resume_session(0.0, training_over=False)
    setup.state.journal.persist()
    assert not after.is_busy and held_out.account() == HeldOutAccount(issued=2, scored=1, failed=1)
    assert held_out.audit() and held_out.results.keys() == {*uids}
    assert after._stored_session() is None


def test_rounds_that_are_begun_anew_are_no_failures(tmp_path: Path) -> None:
    setup, _, _ = validating(tmp_path)
    held_out = setup.state.ledger.held_out
    for step in (3, 3, 6):  # under other settings, then of another step
        uids = [HeldOut(step, mode, 0).uid for mode in (SAMPLED, GREEDY)]
        held_out.begin_session(uid_prefix(step), uids, continues=False)
        setup.state.journal.persist()
    held_out.restore_episodes()
    flow = HeldOutAccount(issued=8, in_flight=2, begun_anew=6)
    assert held_out.account() == flow and flow.conserved and held_out.audit()
    assert summary_notes({"held_out": asdict(flow)}) == [
        "held out: 8 issued = 0 scored + 0 failed + 2 in flight + 6 started again"
    ]
    held_out.end_session()
    assert held_out.account() == HeldOutAccount(issued=8, failed=2, begun_anew=6)


def test_an_engine_that_refuses_the_version_is_asked_again_after_a_while(tmp_path: Path) -> None:
    setup, worker, validation = validating(tmp_path)
    worker.eval_version = None
    request_times = []
    for tenth in range(600, 650):
        now = tenth / 10
        validation.assign_episodes(now, exclusive=False)
        for _, message in setup.sent.take(LoadWeights):
            request_times.append(now)
            validation.confirm_load(A, Loaded(message.ref, "eval", "", 0.1, "refused"), now)
    assert 1 <= len(request_times) <= 5  # in five seconds


def test_an_engine_that_differs_from_the_trainer_validates_nothing(tmp_path: Path) -> None:
    """Neither does its successor, before the engine for training is compared. Both engines of a worker are
    judged apart: a good one does not refute a bad one."""
    setup, worker, validation = validating(tmp_path)
    setup.engines.mismatches = mismatches = make_mismatches("replace")
    assert validation.session is not None
    published_ref = replace(validation.session.ref, version=PolicyVersion(1, 0))

    def loaded(lane: str, gap: float) -> Loaded:
        rounding = LogprobGaps(1e-6, 1e-6, 1e-6)
        probe_gap = ProbeGap(gap, gap, gap, tokens=512, rounding=rounding)
        return Loaded(published_ref, lane, "sum", 0.1, probe_gap=probe_gap)

    setup.engines.confirm_load(A, loaded("train", 0.5), 0.0)
    validation.assign_episodes(0.0, exclusive=True)
    assert worker.eval_version == validation.session.ref.version and setup.sent.take(Assign) == []

    successor = b"rollout/0/b"
    setup.join(successor)
    validation.assign_episodes(100.0, exclusive=True)
    assert [message.lane for _, message in setup.sent.take(LoadWeights)] == []
    setup.engines.confirm_load(successor, loaded("train", 0.0), 100.0)
    validation.assign_episodes(100.0, exclusive=True)
    assert [(peer, message.lane) for peer, message in setup.sent.take(LoadWeights)] == [(successor, "eval")]
    validation.confirm_load(successor, loaded("eval", 0.5), 100.0)
    assert (
        "worker 0 (validation) reports log-probs" in mismatches.newest
        and successor in mismatches.replacements
    )
    validation.assign_episodes(100.0, exclusive=True)
    assert setup.sent.take(Assign) == []


def test_a_late_worker_of_a_session_gets_the_probe_of_the_session(tmp_path: Path) -> None:
    """Also if the trainer has scored a later version since."""
    setup, worker, validation = validating(tmp_path)
    ref = setup.state.fleet.versions.ref
    assert ref is not None
    probe = Probe(((1, 2),), ((-1.0,),))
    setup.state.fleet.versions.add_probe(Probed(ref.version, probe), 0.0)
    validation.assign_episodes(100.0, exclusive=True)
    setup.state.fleet.versions.recent_probes = []
    worker.eval_version = None
    validation.assign_episodes(200.0, exclusive=True)
    assert [message.probe for _, message in setup.sent.take(LoadWeights)] == [probe]


def test_the_last_validation_is_left_to_the_end_of_the_run(tmp_path: Path) -> None:
    setup, _, _ = validating(tmp_path)
    setup.state.journal.persist()
    setup.state.ledger.buffer.committed = 1
    after = session(setup)
    after.resume_session(0.0, training_over=True)
    assert not after.is_busy


def test_a_session_that_was_cut_short_goes_on_with_what_is_left(tmp_path: Path) -> None:
    """By a coordinator that is started again; under other settings it begins anew."""
    setup, worker, validation = validating(tmp_path, SAMPLE, SAMPLE, SAMPLE)
    first_version = worker.eval_version
    validation.assign_episodes(0.0, exclusive=True)
    first = {message.attempt.uid: message for _, message in setup.sent.take(Assign)}
    assert len(first) == 6
    over = {"val1/sampled/0": 4, "val1/greedy/2": 5}
    for seq, (uid, version) in enumerate(over.items()):
        turn = Generated(2 * seq + 1, first[uid].attempt, 0)
        setup.records.process_record(A, turn, [turn_payload(0, version)], 0.0)
        setup.finish(A, 2 * seq + 2, first[uid].attempt)
    setup.turn(A, 5, first["val1/sampled/1"].attempt)
    setup.state.journal.persist()

    def again(peer: bytes) -> tuple[Validation, dict[str, Assign]]:
        setup.join(peer)
        setup.state.ledger.held_out.restore_episodes()
        setup.handler.reissue_orphans(0.0)
        next_session = session(setup, 3 * [SAMPLE])
        next_session.resume_session(now=0.0, training_over=False)
        (worker,) = setup.handler.peers
        worker.eval_version = first_version
        next_session.assign_episodes(0.0, exclusive=True)
        return next_session, {message.attempt.uid: message for _, message in setup.sent.take(Assign)}

    resumed, left = again(B)
    assert left.keys() == first.keys() - over.keys()
    assert all(message.key == first[uid].key for uid, message in left.items())
    episodes = setup.state.ledger.held_out.episodes
    seq = 0
    assert episodes["val1/sampled/1"].turns == 1
    for message in left.values():
        if not episodes[message.attempt.uid].turns:
            setup.turn(B, seq := seq + 1, message.attempt)
        end = Finished(seq := seq + 1, message.attempt, EpisodeResult(0.0), EpisodeStats(1))
        setup.records.process_record(B, end, [], 0.0)
    resumed.assign_episodes(0.0, exclusive=True)
    ((_, metrics),) = resumed.results
    assert metrics["val-core/all/sampled/success"] == metrics["val-core/all/greedy/success"] == 1 / 3
    assert (metrics["val-aux/policy_version_min"], metrics["val-aux/policy_version"]) == (0.0, 5.0)

    setup.state.journal.store.rollback()  # the end was not written
    limits = ValidationConfig(success=0.5)
    setup.state.config = replace(setup.state.config, validation=limits)
    assert again(b"rollout/0/c")[1].keys() == first.keys()
