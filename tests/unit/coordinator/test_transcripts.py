"""Which episodes are kept as text, and what stands beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import ValidationConfig
from asyncrl.coordinator.reporting import earned, kept_questions
from asyncrl.coordinator.validation import Validation
from asyncrl.observe.transcripts import is_kept
from asyncrl.types import EpisodeResult, EpisodeStats, FailReason, Message, Sample
from asyncrl.wire.messages.worker import Assign, Failed, Finished
from tests.unit.coordinator.test_workers import A, WorkerSetup
from tests.unit.weights.test_delta import Training


def entries(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "transcripts" / name).read_text().splitlines()]


def test_questions_are_spread_over_the_file_and_always_the_same() -> None:
    assert kept_questions(256) == kept_questions(256) == {0, 32, 64, 96, 128, 160, 192, 224}
    assert kept_questions(3) == {0, 1, 2} and kept_questions(0) == set()


def test_a_validation_keeps_its_questions_whoever_ends_first_and_whoever_fails(tmp_path: Path) -> None:
    """The first to end are the short ones, and the short ones are right: 8 of 9 shown were, at 36%."""
    training, setup = Training(tmp_path / "weights"), WorkerSetup(tmp_path)
    training.publish(1)
    setup.state.versions.ref = training.ref(0)
    limits = ValidationConfig(samples=64)
    setup.state.config = msgspec.structs.replace(setup.state.config, validation=limits)
    samples = [Sample(row, "s", (Message("user", "?"),), f'"truth {row}"') for row in range(64)]
    setup.join(A, slots=128)
    (worker,) = setup.handler.peers
    worker.eval_version = training.ref(0).version
    validation = Validation(setup.state, setup.handler, setup.engines, samples)
    assert validation.begin(step=2, final=False, now=0.0)
    while validation.busy:
        validation.tick(0.0, exclusive=True)
        setup.state.persist()
        assert not setup.state.held_out.texts
        for _, message in reversed(setup.sent.take(Assign)):  # in another order than they were asked
            row = int(message.attempt.uid.split("/")[2])
            assert message.transcript == (row % 8 == 0)
            text = "text" if message.transcript else ""
            result = EpisodeResult(0.5, components={"acc": float(row < 32)})
            good = Finished(0, message.attempt, result, EpisodeStats(3), text, {"pred": "7"})
            failed = Failed(0, message.attempt, FailReason.TOOL_ERROR, "KeyError: 'b' (bad.py:41)")
            slow = row == 56 and message.attempt.attempt < 2
            setup.play(message.attempt, failed if row == 8 or slow else good)
            found = setup.state.held_out.over.values()  # of a large evaluation texts are gigabytes
            assert not any(isinstance(done, Finished) and done.text for done in found)
    kept = entries(tmp_path, "validation/step-2.jsonl")
    order = [(row, mode) for row in range(0, 64, 8) for mode in ("sampled", "greedy")]
    assert [(entry["sample"], entry["mode"]) for entry in kept] == order
    assert kept[0] == {
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
    assert [entry["text"] for entry in kept if "text" in entry] == ["text"] * 14
    assert kept[2]["failed"] == "tool_error: KeyError: 'b' (bad.py:41)" and "text" not in kept[2]
    assert [entry["success"] for entry in kept if "success" in entry] == [True] * 6 + [False] * 8


def test_of_training_the_first_members_of_one_group_for_each_batch_are_kept(tmp_path: Path) -> None:
    kept = [(group, member) for group in range(17) for member in range(8) if is_kept(group, member, 8)]
    assert kept == [(group, member) for group in (0, 8, 16) for member in range(4)]
    setup = WorkerSetup(tmp_path)
    setup.join(A)
    first, second = (attempt for _, attempt in setup.tick())
    for seq, (attempt, text) in enumerate(((first, "text"), (second, "")), start=1):
        setup.turn(A, 2 * seq - 1, attempt)
        end = Finished(2 * seq, attempt, EpisodeResult(0.5, shaping=-0.25), EpisodeStats(1), text)
        setup.records.record(A, end, [], 0.0)
    (entry,) = entries(tmp_path, "training/step-1.jsonl")
    assert (entry["uid"], entry["ground_truth"], entry["text"]) == (first.uid, 1, "text")
    assert (entry["score"], entry["reward"], entry["versions"]) == (0.75, 0.5, [0, 0])


def test_what_each_agent_earned_is_told() -> None:
    """In a zero-sum game the score, their sum, says nothing."""
    game = EpisodeResult(0.0, 5, (1.0, -1.0), agents=("w", "b"), turn_tokens=(3, 2))
    assert earned(game)["agents"] == {"w": 1.0, "b": -1.0}
