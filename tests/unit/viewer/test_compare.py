from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.observe.held_out import bootstrap_interval
from asyncrl.viewer.compare import QUESTIONS_QUERY, compare, evaluation_measures, paired_statistics
from asyncrl.viewer.views import Views
from tests.fakes import planted
from tests.fakes.planted import ended, save_run


def test_a_paired_difference_by_hand() -> None:
    statistics = paired_statistics([(0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
    assert (statistics["means"], statistics["difference"]) == ([0.5, 0.75], 0.25)
    assert (statistics["wins"], statistics["losses"], statistics["questions"]) == (2, 1, 4)
    assert statistics["interval"] == bootstrap_interval([1.0, 0.0, -1.0, 1.0])


def test_two_runs_are_compared_question_by_question(tmp_path: Path) -> None:
    runs = [planted.regression(tmp_path / str(worse), worse=worse) for worse in (False, True)]
    comparison = compare(runs, [None, None])
    (mode,) = comparison["modes"]
    assert (mode["mode"], mode["means"], mode["wins"], mode["losses"]) == ("sampled", [1.0, 0.5], 0, 12)
    assert {name: part["difference"] for name, part in mode["components"].items()} == {
        "form": -0.5,
        "polite": 0,
    }
    assert (mode["flips"], comparison["warnings"]) == ({"lost": 12, "won": 0}, [])
    before, after = mode["lost"][0]
    assert (before.question, before.answer, before.truth) == ("What is 1 plus 1?", "2", "2")
    assert (after.answer, after.score, after.components["form"]) == ("101", 0.0, 0.0)
    back = compare(runs[::-1], [12, 0])["modes"][0]
    assert back["flips"] == {"lost": 0, "won": 12} and back["won"][-1][0].answer == "101"


def test_two_validations_of_a_run_with_what_was_lost_and_won(tmp_path: Path) -> None:
    run = planted.flipped(tmp_path / "a")
    comparison = compare([run, run], [None, None])
    assert (comparison["steps"], comparison["validations"]) == ([6, 12], [[6, 12], [6, 12]])
    (mode,) = comparison["modes"]
    assert [pair[0].question for pair in mode["lost"] + mode["won"]] == [
        "What is 3 plus 3?",
        "What is 7 plus 7?",
    ]


def test_what_is_not_alike_is_said(tmp_path: Path) -> None:
    keys = {"validation": {"success": 2.0}, "rollout": {"reward": "exact"}}
    first_run = planted.PlantedRun(tmp_path / "a", data={"train": "z", "test": "y"})
    second_run = planted.PlantedRun(tmp_path / "b", **keys)
    first_run.validate(0, [planted.right(row) for row in range(4)])
    second_run.validate(0, [planted.right(row) for row in range(3)])
    comparison = compare([first_run.save(), second_run.save()], [None, None])
    assert comparison["warnings"] == [
        "The scores are not comparable: the configurations differ in rollout.reward, validation.success",
        "Questions that differ between the validations (left out): 1",
    ]
    assert comparison["modes"][0]["questions"] == 3


def test_several_episodes_of_a_question_are_one(tmp_path: Path) -> None:
    """Two of four are right; then one of four."""
    run = planted.regression(tmp_path / "a", worse=False)
    with sqlite3.connect(run / "run.db") as db:
        for step, wrong_answers in ((0, 2), (12, 3)):
            of = f"SELECT val.uid FROM episodes val WHERE step = {step} AND kind = 'held out' LIMIT"
            db.execute(f"UPDATE episodes SET group_id = -1, score = 1 WHERE uid IN ({of} 4)")
            db.execute(f"UPDATE episodes SET score = 0 WHERE uid IN ({of} {wrong_answers})")

    comparison = compare([run, run], [None, None])["modes"][0]
    ((before, after),) = comparison["lost"]
    assert (before.score, before.right, after.score, after.right) == (0.5, 1, 0.25, 0)


def test_an_episode_that_failed_has_the_lowest_score(tmp_path: Path) -> None:
    """As in the numbers of validations: 9 questions earn 1, two -1, and one failed."""
    run = planted.flipped(tmp_path / "a")
    with sqlite3.connect(run / "run.db") as db:
        db.execute("UPDATE episodes SET score = -1 WHERE step = 12 AND kind = 'held out' AND score = 0")
        failed = "score = NULL, components = NULL, state = 'failed'"
        db.execute(f"UPDATE episodes SET {failed} WHERE uid = 'val12/sampled/5'")

    comparison = compare([run, run], [None, None])
    assert comparison["modes"][0]["means"] == [0.75, 0.5]
    assert comparison["warnings"] == [
        "Episodes of step 12 that failed or did not finish in time (counted as wrong): 1"
    ]


def test_episodes_that_are_over_while_a_validation_is_read_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [planted.regression(tmp_path / str(worse), worse=worse) for worse in (False, True)]
    monkeypatch.setattr("asyncrl.viewer.compare.QUESTIONS_QUERY", f"{QUESTIONS_QUERY} LIMIT 5")
    (mode,) = compare(runs, [None, None])["modes"]
    assert (mode["questions"], mode["components"]["form"]["questions"]) == (5, 5)


def test_without_a_validation_nothing_is_compared(tmp_path: Path) -> None:
    runs = save_run(tmp_path / "a"), save_run(tmp_path / "b")
    comparison = compare(runs, [None, None])
    assert (comparison["modes"], comparison["validations"]) == ([], [[], []])
    with pytest.raises(ConfigError, match="from=x: expected a number"):
        Views(runs, ended).answer("compare", {"from": "x"})


def test_of_a_run_of_an_older_version_all_but_its_episodes_is_shown(tmp_path: Path) -> None:
    run = planted.flipped(tmp_path / "a")
    with sqlite3.connect(run / "run.db") as db:
        db.execute("PRAGMA user_version=3")
    views = Views([run], ended)
    assert views.answer("runs", {})["runs"][0]["name"] == "a"
    assert views.answer("overview", {})["outcome"].startswith("Held-out success 75%")
    with pytest.raises(ConfigError, match=r"written by .* \(schema \d+\), so"):
        views.answer("compare", {})


def test_what_an_evaluation_found_by_measure_and_task(tmp_path: Path) -> None:
    with_interval = {"mean": 0.5, "low": 0.25, "high": 0.75, "samples": 2}
    evaluation = {"val-core/all/sampled/pass@2": with_interval, "val-core/x/sampled/pass@2": with_interval}
    evaluation |= {"val-task/org/fix/sampled/pass@2": {"mean": 1.0}, "val-core/all/nll": {"mean": 1.5}}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    passed, loss = evaluation_measures(tmp_path)
    after = {"value": 0.5, "interval": (0.25, 0.75), "step": 0, "questions": 2}
    assert passed == {
        "label": "sampled/pass@2",
        "title": "sampled/pass@2",
        "unit": "share",
        "curve": [],
        "after": after,
    } | {"tasks": {"org/fix": 1.0}}
    assert (loss["label"], loss["unit"], loss["after"]["interval"]) == ("nll", "", None)
    assert loss["title"] == "held-out loss per token"
    assert not [*evaluation_measures(tmp_path / "other")]
