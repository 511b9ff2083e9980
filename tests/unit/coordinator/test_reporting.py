"""The coordinator's part of a metrics row, and the transcripts that it keeps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl.buffer.batches import Batch
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.buffer.shifts import Shift, Shifts
from asyncrl.config import ValidationConfig
from asyncrl.coordinator.reporting import Reporter, result_entry, transcribed_questions
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.validation import Validation
from asyncrl.observe.files import read_status, read_summary
from asyncrl.observe.metrics import FILTERED, REWARD
from asyncrl.observe.transcripts import is_kept
from asyncrl.types import EpisodeResult, EpisodeStats, FailReason, Message, Sample
from asyncrl.wire.messages.trainer import Checkpointed, PlanRequest, TrainerHeartbeat, TrainerHello
from asyncrl.wire.messages.worker import Assign, Failed, Finished
from tests.unit.buffer.machine import admit
from tests.unit.coordinator.test_workers import A, WorkerSetup
from tests.unit.weights.test_delta import Training


@pytest.fixture
def reporter(tmp_path: Path) -> Reporter:
    setup = WorkerSetup(tmp_path)
    return Reporter(
        setup.state, setup.handler, setup.engines, TrainerHandler(setup.state, lambda commit: None)
    )


def row(reporter: Reporter, step: int, groups: int) -> dict[str, float]:
    """The row of a batch of so many groups."""
    reporter.ledger.batches.by_step[step] = Batch(step, groups=set(range(groups)))
    return reporter.step_row(step, {})


def landed(
    reporter: Reporter,
    reward: float,
    counts: dict[str, int] | None = None,
    greedy: bool = False,
    sample: int = 0,
    answer: str = "",
    **earned: Any,
) -> None:
    result = EpisodeResult(reward, 10, **earned)
    stats = EpisodeStats(**{"turns": 1, **(counts or {})})
    record = EpisodeRecord("0.0", 0, 0, greedy=greedy, result=result, stats=stats)
    reporter.note_landed(record, sample, answer)


def test_what_became_of_groups_is_counted_since_the_last_row(reporter: Reporter) -> None:
    settled = reporter.ledger.buffer.settled_counts
    settled.update({"usable": 3, State.FILTERED: 5, State.DROPPED: 2})
    first = row(reporter, 1, groups=2)
    assert first["flow/filtered_frac"] == 0.5
    assert first["rollout/discarded_group_frac"] == 0.7
    assert first["rollout/groups_per_trained_group"] == 5.0
    settled.update({"usable": 1})
    second = row(reporter, 2, groups=1)
    assert (second["flow/filtered_frac"], second["rollout/groups_per_trained_group"]) == (0.0, 1.0)
    third = row(reporter, 3, groups=1)
    assert "flow/filtered_frac" not in third and third["rollout/groups_per_trained_group"] == 0.0


def test_an_episode_counts_half_when_it_lands_and_whole_when_it_is_taken(reporter: Reporter) -> None:
    """The default batch is of 32 groups of 8 episodes."""
    episodes = list(reporter.ledger.buffer.episodes.values())
    for episode, state in zip(episodes, (State.LANDED, State.TAKEN), strict=False):
        reporter.ledger.buffer.set_state(episode, state)
    assert len(episodes) > 1 and reporter.batch_fraction() == 1.5 / (32 * 8)


def test_scores_are_before_shaping_and_without_greedy_episodes(reporter: Reporter) -> None:
    landed(reporter, 0.5, {"answered": 1, "failed": 1}, shaping=-0.5, components={"format": 1.0})
    landed(
        reporter, 0.0, {"turns": 2, "answered": 7, "refused": 4, "declined": 2}, components={"format": 0.5}
    )
    landed(reporter, 0.25, greedy=True)
    metrics = row(reporter, 1, groups=1)
    assert metrics["rollout/score/mean"] == 0.5 and metrics["rollout/landed"] == 2.0
    assert metrics["rollout/greedy_score/mean"] == 0.25
    assert metrics["rollout/component/format/mean"] == 0.75
    assert (metrics["num_turns/mean"], metrics["num_turns/min"], metrics["num_turns/max"]) == (1.5, 1.0, 2.0)
    assert metrics["rollout/end/answered"] == 1.0
    assert (metrics["rollout/tool_failed_frac"], metrics["rollout/tool_refused_frac"]) == (1 / 8, 4 / 8)
    assert metrics["rollout/tool_declined_frac"] == 2 / 8
    assert "rollout/greedy_score/mean" not in row(reporter, 2, groups=1)


def test_answers_are_compared_between_samples_and_repeated_text_is_counted(reporter: Reporter) -> None:
    landed(reporter, 0.0, {"repeated": 5}, sample=0, answer="7")
    landed(reporter, 0.0, sample=1, answer="7")
    landed(reporter, 0.0, sample=2)
    metrics = row(reporter, 1, groups=1)
    assert metrics["rollout/answer/same_frac"] == metrics["rollout/answer/empty_frac"] == pytest.approx(1 / 3)
    assert metrics["rollout/answer/refusal_frac"] == 0.0
    assert metrics["rollout/repeated_frac/max"] == 0.5  # of the 10 tokens that each episode has here
    assert "rollout/answer/same_frac" not in row(reporter, 2, groups=1)


@pytest.mark.parametrize(
    ("scores", "episodes", "said"),
    [
        ((0.0, 0.0), 512, "all 512 episodes scored 0"),
        ((0.0, 0.0), 510, ""),
        ((0.0, 0.5), 512, ""),
    ],
)
def test_before_any_step_the_status_has_the_score_and_why_nothing_is_learned(
    reporter: Reporter, scores: tuple[float, float], episodes: int, said: str
) -> None:
    """The default batch is of 32 groups of 8 episodes: less than two of them tell nothing."""
    for at in range(episodes):
        landed(reporter, scores[at % 2])
    reporter.ledger.buffer.settled_counts.update({State.FILTERED: 64})
    status = reporter.write_status("running")
    written = read_status(reporter.run_dir)
    assert [alert.what for alert in status.alerts if alert.name == "constant reward"] == [said] * bool(said)
    assert [alert_entry["name"] for alert_entry in written["alerts"]] == [
        alert.name for alert in status.alerts
    ]
    assert written["gauges"][REWARD] == sum(scores) / 2 and written["gauges"][FILTERED] == 1.0
    row(reporter, 1, groups=32)  # afterwards they are those of the last step
    assert FILTERED in read_status(reporter.run_dir)["gauges"]
    assert FILTERED not in reporter.write_status("running").gauges


def test_the_status_tells_the_start_phase_from_what_came_after(reporter: Reporter) -> None:
    reporter.started -= 1000.0
    reporter.begin_running()
    reporter.write_status("running")
    written = read_status(reporter.run_dir)
    assert written["running"] < 500 < 1000 <= written["seconds"]


def test_demonstrations_earn_no_reward_and_none_is_missed(reporter: Reporter) -> None:
    for _ in range(512):
        landed(reporter, 0.0)
    reporter.ledger.samples = [replace(reporter.ledger.samples[0], given=0)]  # type: ignore[assignment]
    assert not any(alert.name == "constant reward" for alert in reporter.write_status("running").alerts)


def test_who_waits_for_the_same_is_named_together_and_once(reporter: Reporter) -> None:
    trainer = reporter.trainer
    for rank in range(4):
        trainer.welcome_rank(f"trainer/{rank}/x".encode(), TrainerHello(rank, 4, "x", 0), 0.0)
        waiting = "trajectories of step 0" if rank < 3 else ""  # the last one computes
        trainer.note_heartbeat(f"trainer/{rank}/x".encode(), TrainerHeartbeat(rank, 0, 0, waiting), 0.0)
    trainer.note_request(b"trainer/0/x", PlanRequest(1, 1, 0))
    reporter.fleet.waits = []
    trainer.serve_request()
    assert reporter.describe_waits() == ("trainer 0 and 2 more: trajectories of step 0",)
    for rank in range(3):
        trainer.note_heartbeat(f"trainer/{rank}/x".encode(), TrainerHeartbeat(rank, 0, 0), 0.0)
    assert reporter.describe_waits() == ()


def test_checkpoints_that_cannot_be_written_are_an_alert_until_one_is(reporter: Reporter) -> None:
    """Reason first, the directory, the newest step; on console and status, page (status.json) and summary. A
    trainer that was just started, and a rank whose beat comes late, do not end or renew the alert."""
    trainer = reporter.trainer
    reported = list[str]()
    problem = "OSError: [Errno 28] No space left on device; checkpoint /runs/t/checkpoints/step-5"

    def alerts() -> list[str]:
        status = read_status(reporter.run_dir) if reporter.write_status("running") else {}
        return [alert["what"] for alert in status["alerts"] if alert["name"] == "checkpoints are not written"]

    for incarnation, beats in (("x", (problem, "")), ("y", ("", problem))):
        trainer.welcome_rank(b"trainer/0/" + incarnation.encode(), TrainerHello(0, 2, incarnation, 0), 0.0)
        for reported_problem in beats:
            beat = TrainerHeartbeat(0, 0, 0, checkpoint_problem=reported_problem)
            trainer.note_heartbeat(b"trainer/0/" + incarnation.encode(), beat, 0.0)
            reported += alerts()
    assert reported == [f"{problem}; no checkpoint exists yet"] * 4
    epoch = reporter.fleet.trainer_epoch
    trainer.welcome_rank(b"trainer/1/y", TrainerHello(1, 2, "y", 0), 0.0)
    trainer.record_checkpoint(b"trainer/0/y", Checkpointed(epoch, 0, 0), 0.0)
    trainer.note_heartbeat(b"trainer/1/y", TrainerHeartbeat(1, 0, 0, checkpoint_problem=problem), 0.0)
    assert alerts() == []
    trainer.note_heartbeat(b"trainer/0/y", TrainerHeartbeat(0, 0, 0, checkpoint_problem=problem), 0.0)
    assert alerts() == [f"{problem}; the newest checkpoint is from step 0"]
    assert read_status(reporter.run_dir)["checkpoint_problem"] == alerts()[0], "the page reads it there"
    reporter.journal.persist()
    reporter.write_summary("failed", "")
    (line,) = read_summary(reporter.run_dir)["alerts"]
    assert line.startswith(f"checkpoints are not written: {problem}; the newest checkpoint is from step 0; ")


def test_live_groups_are_those_of_rule_1(reporter: Reporter) -> None:
    """Of one group, which a committed batch took, members still run: it is not counted."""
    buffer = reporter.ledger.buffer
    admit(buffer, 3)
    buffer.tally.mark_taken(buffer.live_groups[0], 1)
    buffer.tally.mark_taken(buffer.live_groups[1], 2)  # of the batch under way
    buffer.committed = 1
    assert reporter.gauges()["async/live_groups"] == len(buffer.live_groups) - 1


def test_retired_samples_are_reported(reporter: Reporter) -> None:
    reporter.ledger.buffer.prompts.retired_samples = {3, 4}
    assert row(reporter, 5, groups=1)["data/retired_samples"] == 2.0


def test_generation_is_reported_per_second_of_the_step_and_per_token(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timing_s/gen` is the mean of the workers' busy seconds since the last row: here 3 and 1."""
    totals = {"one": (1.0, 0.0), "two": (4.0, 2.0), "trainer/x/0": (5.0, 5.0)}
    monkeypatch.setattr(reporter, "_busy_totals", lambda: totals)
    reporter.begin_running()
    totals = {"one": (4.0, 1.0), "two": (5.0, 5.0), "trainer/x/0": (9.0, 5.0)}
    reporter.count_turn(tokens=400)
    metrics = reporter._idle_metrics(4.0)
    assert metrics["timing_s/gen"] == 2.0 and metrics["rollout/tokens_per_s"] == 100.0
    assert metrics["timing_per_token_ms/gen"] == 5.0 and metrics["async/rollout_idle_frac"] == 0.5
    assert "timing_per_token_ms/gen" not in reporter._idle_metrics(4.0), "nothing was generated since"


def test_engines_that_are_busy_in_all_of_their_short_halves_are_not_idle(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has 0.2 seconds for the engine, whose beats come after every third one. After it the trainer
    takes another batch at once. At last the engine is idle."""
    now = 0.0
    busy = 0.0
    sampled = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(reporter, "_busy_totals", lambda: {"one": (busy, 0.0)})
    monkeypatch.setattr(reporter.workers, "peers", ["one"])
    shifts = reporter.fleet.shifts = Shifts("auto", now, Shift.ROLLOUT)
    reporter.begin_running()
    idle_fractions = []
    for step in range(40):
        shifts.clock.go(now)
        now += 0.2
        shifts.clock.stop(now)
        now += 0.1
        sampled += 0.2 * (step < 30)
        busy = busy if step % 3 else sampled
        idle_fractions.append(reporter._idle_metrics(0.3).get("async/rollout_idle_frac"))
        if step % 3 == 0:
            now += 0.1
            idle_fractions.append(reporter._idle_metrics(0.1).get("async/rollout_idle_frac"))
    shares = [share for share in idle_fractions if share is not None]
    assert len(shares) == 40 and max(shares[3:-9]) < 1e-9 and min(shares[-4:]) > 1 - 1e-9


# -- which episodes are kept as text ------------------------------------------------------------------------


def entries(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "transcripts" / name).read_text().splitlines()]


def test_questions_are_spread_over_the_file_and_always_the_same() -> None:
    assert transcribed_questions(256) == transcribed_questions(256) == {0, 32, 64, 96, 128, 160, 192, 224}
    assert transcribed_questions(3) == {0, 1, 2} and transcribed_questions(0) == set()


def test_a_validation_keeps_its_questions_whoever_ends_first_and_whoever_fails(tmp_path: Path) -> None:
    """The first to end are the short ones, and the short ones are right: 8 of 9 shown were, at 36%."""
    training = Training(tmp_path / "weights")
    setup = WorkerSetup(tmp_path)
    training.publish(1)
    setup.state.fleet.versions.ref = training.ref(0)
    limits = ValidationConfig(samples=64)
    setup.state.config = msgspec.structs.replace(setup.state.config, validation=limits)
    samples = [Sample(row, "s", (Message("user", "?"),), f'"truth {row}"') for row in range(64)]
    setup.join(A, slots=128)
    (worker,) = setup.handler.peers
    worker.eval_version = training.ref(0).version
    validation = Validation(setup.state, setup.handler, setup.engines, samples)
    assert validation.begin_session(step=2, final=False, now=0.0)
    while validation.is_busy:
        validation.assign_episodes(0.0, exclusive=True)
        setup.state.journal.persist()
        assert not setup.state.ledger.held_out.texts
        for _, message in reversed(setup.sent.take(Assign)):  # in another order than they were asked
            row = int(message.attempt.uid.split("/")[2])
            assert message.transcript == (row % 8 == 0)
            text = "text" if message.transcript else ""
            result = EpisodeResult(0.5, components={"acc": float(row < 32)})
            good = Finished(0, message.attempt, result, EpisodeStats(3), text, {"pred": "7"})
            failed = Failed(0, message.attempt, FailReason.TOOL_ERROR, "KeyError: 'b' (bad.py:41)")
            slow = row == 56 and message.attempt.attempt < 2
            setup.play(message.attempt, failed if row == 8 or slow else good)
            results = (
                setup.state.ledger.held_out.results.values()
            )  # of a large evaluation texts are gigabytes
            assert not any(isinstance(done, Finished) and done.text for done in results)
    transcripts = entries(tmp_path, "validation/step-2.jsonl")
    order = [(row, mode) for row in range(0, 64, 8) for mode in ("sampled", "greedy")]
    assert [(entry["sample"], entry["mode"]) for entry in transcripts] == order
    assert transcripts[0] == {
        "uid": "val2/sampled/0",
        "sample": 0,
        "data_source": "s",
        "ground_truth": "truth 0",
        "mode": "sampled",
        "success": True,
        "score": 0.5,
        "components": {"acc": 1.0},
        "end": "answered",
        "turns": 3,
        "notes": {"pred": "7"},
        "text": "text",
    }
    assert [entry["text"] for entry in transcripts if "text" in entry] == ["text"] * 14
    assert (
        transcripts[2]["failed"] == "tool_error: KeyError: 'b' (bad.py:41)" and "text" not in transcripts[2]
    )
    assert [entry["success"] for entry in transcripts if "success" in entry] == [True] * 6 + [False] * 8


def test_of_training_the_first_members_of_one_group_for_each_batch_are_kept(tmp_path: Path) -> None:
    transcribed = [(group, member) for group in range(17) for member in range(8) if is_kept(group, member, 8)]
    assert transcribed == [(group, member) for group in (0, 8, 16) for member in range(4)]
    setup = WorkerSetup(tmp_path)
    setup.join(A)
    first, second = (attempt for _, attempt in setup.tick())
    for seq, (attempt, text) in enumerate(((first, "text"), (second, "")), start=1):
        setup.turn(A, 2 * seq - 1, attempt)
        end = Finished(2 * seq, attempt, EpisodeResult(0.5, shaping=-0.25), EpisodeStats(1), text)
        setup.records.process_record(A, end, [], 0.0)
    (entry,) = entries(tmp_path, "training/step-1.jsonl")
    assert (entry["uid"], entry["ground_truth"], entry["text"]) == (first.uid, 1, "text")
    assert (entry["score"], entry["reward"], entry["versions"]) == (0.75, 0.5, [0, 0])


def test_what_each_agent_earned_is_reported() -> None:
    """In a zero-sum game the score, their sum, says nothing."""
    game = EpisodeResult(0.0, 5, (1.0, -1.0), agents=("w", "b"), turn_tokens=(3, 2))
    assert result_entry(game)["agents"] == {"w": 1.0, "b": -1.0}
