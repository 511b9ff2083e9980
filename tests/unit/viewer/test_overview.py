from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import parse
from asyncrl.observe.alerts import WINDOW_STEPS
from asyncrl.observe.files import read_some_rows, write_status
from asyncrl.observe.metrics import ASKED, BATCH, GREEDY, SAMPLED
from asyncrl.store.launches import LAUNCHES_KEY, LaunchRecord, config_tree
from asyncrl.store.runstore import RunStore
from asyncrl.viewer.overview import overview
from asyncrl.viewer.server import ViewServer
from asyncrl.viewer.views import Views
from tests.fakes.browser import Tab, browser
from tests.fakes.planted import report
from tests.unit.observe.test_alerts import FAILED, HEALTHY, run
from tests.unit.viewer.test_browser import pytestmark as needs_chromium

COUNTS = {"issued": 12.0, "trained": 6.0, "filtered": 1.0, "ready": 2.0, "in_flight": 3.0}
FLOW = {f"flow/{name}": count for name, count in COUNTS.items()}


def save(run_dir: Path, rows: list[dict[str, float]], *rates: float, **status: Any) -> Path:
    """A run with these metrics and this status, launched at step 0, 4, … with these learning rates."""
    run_dir.mkdir()
    basis: dict[str, Any] = {"name": run_dir.name, "model": {"path": "m"}, "data": {"train": "t"}}
    basis |= {"total_steps": status["total_steps"]} if "total_steps" in status else {}
    configs = [parse(basis | {"trainer": {"lr": lr}}) for lr in rates or (0.5,)]
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(configs[-1]))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = RunStore(run_dir)
    launches = [LaunchRecord(4 * at, config_tree(config)) for at, config in enumerate(configs)]
    store.put_meta(LAUNCHES_KEY, msgspec.json.encode(launches).decode())
    store.commit()
    store.close()
    if status:
        known: dict[str, Any] = {"phase": "running", "step": 0, "total_steps": 20, "seconds": 30.0}
        write_status(run_dir, known | {"failed": "", "waits": [], "metrics": {}} | status)

    return run_dir


WAITS = [
    "trainer 0: trajectories of step 3 (5 s)",
    "worker 0 and 2 more: the reward function (12 s, 50 episodes)",
    "server 1: a version (2 s)",
    "the validation of step 2: 3 of 8 episodes are over",
]


def test_who_waits_for_whom_and_where_the_time_went(tmp_path: Path) -> None:
    """While a run goes on these are shares of its last step, afterwards of all."""
    rows = run({"timing_s/reward/mean": 7.0, "timing_s/wait_data": 0.75})
    gauges = FLOW | {"async/workers": 3.0, "async/running": 3.0}
    run_dir = save(tmp_path / "a", rows, gauges=gauges, waits=WAITS)
    roles = {role["role"]: role for role in overview(run_dir, "")["waits"]}
    assert [*roles] == ["trainer", "engines", "workers", "coordinator"]
    assert roles["trainer"]["now"] == ["trajectories of step 3 (5 s)"]
    assert roles["workers"]["now"] == ["the reward function (12 s, 50 episodes)"]
    assert roles["coordinator"]["now"] == [WAITS[3]] and roles["engines"]["now"] == ["a version (2 s)"]
    assert roles["workers"]["note"] == "workers 3, episodes running 3"

    def parts(role: dict[str, Any]) -> dict[str, float]:
        return {part_name: round(share, 3) for part_name, share in role["parts"].items()}

    assert parts(roles["workers"]) == {"sampling": 0.1, "tools": 0.2, "reward function": 0.7}
    assert parts(roles["engines"]) == {"sampling": 0.9, "wait": 0.1}
    assert parts(roles["trainer"]) == {"wait for data": 0.75}
    over = {role["role"]: role for role in overview(run_dir, "completed")["waits"]}
    assert parts(over["workers"])["reward function"] == 0.4 and not over["workers"]["now"]


def test_a_run_of_a_moment_says_what_is_known(tmp_path: Path) -> None:
    empty = overview(save(tmp_path / "a", []), "")
    assert empty["outcome"] == "Starting: the coordinator has not reported yet" and empty["alerts"] == []
    started = overview(save(tmp_path / "b", [], gauges={BATCH: 0.12}, waits=WAITS[:1]), "")
    assert started["outcome"] == "No step has finished; 12% of the first batch is ready"
    (trainer,) = started["waits"]
    assert (trainer["parts"], trainer["now"]) == ({}, ["trajectories of step 3 (5 s)"])
    first_step = overview(save(tmp_path / "c", run({})[:1], step=1), "")
    assert first_step["outcome"] == "Reward 0.4 after 1 of 20 steps; no validation was run"
    killed = overview(save(tmp_path / "d", []), "killed: its launcher is gone")
    assert killed["outcome"] == "Killed before the first step finished"


def test_intervals_are_over_questions_however_often_each_is_asked(tmp_path: Path) -> None:
    """Of ten questions, four times sampled and once greedily, half succeed."""
    counts = {"val-aux/episodes": 50.0, "val-aux/samples": 10.0}
    row = {"training/step": 4.0, SAMPLED: 0.5, GREEDY: 0.5, **counts}
    for held_out in overview(save(tmp_path / "a", [row]), "completed")["held_out"]:
        low, high = held_out["after"]["interval"]
        assert (round(low, 2), round(high, 2), held_out["after"]["questions"]) == (0.24, 0.76, 10.0)


def test_a_long_curve_is_thinned_to_means(tmp_path: Path) -> None:
    step = {"timing_s/step": 1.0}
    rows = [step | {"training/step": float(at), "rollout/score/mean": float(at % 2)} for at in range(480)]
    (reward, _) = overview(save(tmp_path / "a", rows), "completed")["figures"]
    assert len(reward["curve"]) == 120 and {value for _, value in reward["curve"]} == {0.5}


@pytest.mark.parametrize(
    ("success", "ending", "outcome"),
    [
        (0.97, "completed", "Held-out success 97%"),
        (0.25, "", "Held-out success 25%"),
        (None, "", "Evaluating: no results yet"),
        (None, "completed", "Evaluated without a reward"),
        (None, "killed: its launcher is gone", "Killed: nothing was evaluated"),
    ],
)
def test_an_evaluation_is_not_shown_steps_or_advice_to_train_on(
    tmp_path: Path, success: float | None, ending: str, outcome: str
) -> None:
    """Its numbers have the names of evaluation.json, which is not written yet."""
    rows = [] if success is None else [{"training/step": 0.0, SAMPLED: success, ASKED: 16.0}]
    run_dir = save(tmp_path / "a", rows, total_steps=0, gauges={})
    answer = overview(run_dir, ending)
    assert (answer["outcome"], answer["trains"], answer["alerts"]) == (outcome, False, [])
    assert [(held_out["label"], held_out["after"]["value"]) for held_out in answer["held_out"]] == [
        ("sampled/success", success)
    ] * (success is not None)


def test_of_a_long_run_some_rows_are_read_its_ends_and_all_validations(tmp_path: Path) -> None:
    rows = [HEALTHY | {"training/step": float(at)} for at in range(1, 5001)]
    for at in range(107, 5000, 100):
        rows.insert(at, {"training/step": float(at), "val-core/all/sampled/success": at / 5000})
    rows[-1] |= {"actor/skipped_steps": 3.0}
    run_dir = save(tmp_path / "a", rows)
    read = read_some_rows(run_dir, 10, 100)
    steps = [row["training/step"] for row in read if "timing_s/step" in row]
    assert [*steps[:10], *steps[-10:]] == [*range(1, 11), *range(4991, 5001)] and 60 < len(steps) < 220
    assert sum("val-core/all/sampled/success" in row for row in read) == 49
    answer = overview(run_dir, "")
    assert answer["outcome"] == "Held-out success 98% after 5000 steps"
    assert "skipped optimizer steps" in [alert.name for alert in answer["alerts"]]
    assert answer["tables"]["All numbers"] == {}


def test_the_last_steps_of_a_long_run_are_looked_at_whatever_follows_them(tmp_path: Path) -> None:
    rows = [HEALTHY | {"training/step": float(at)} for at in range(1, 2001)]
    rows[-WINDOW_STEPS] |= {"actor/skipped_steps": 3.0}
    answer = overview(save(tmp_path / "a", [*rows, {"training/step": 2000.0}]), "completed")
    assert [alert.what for alert in answer["alerts"]] == ["3 of the last 10 steps were skipped"]


def test_of_a_run_that_validates_at_each_step_as_many_steps_are_read(tmp_path: Path) -> None:
    """In time that grows with the rows: it takes minutes where validations are counted as chosen steps."""
    steps = [{"training/step": float(at), "timing_s/step": 1.0} for at in range(1, 20_001)]
    judged = [{"training/step": float(at), SAMPLED: 0.5} for at in range(20_000)]
    report(tmp_path, [row for both in zip(judged, steps, strict=True) for row in both])
    read = read_some_rows(tmp_path, 10, 100)
    trained = [row["training/step"] for row in read if "timing_s/step" in row]
    assert len(read) - len(trained) == 20_000
    assert trained[:10] == [*range(1, 11)] and trained[-10:] == [*range(19_991, 20_001)]
    assert 100 <= len(trained) <= 230


@needs_chromium
def test_the_tab_shows_what_is_wrong_and_links_to_the_evidence(tmp_path: Path) -> None:
    failed_text = "attempts failed: 37 reward_error; latest: KeyError: '<b>' (mine.py:41)"
    failing = save(tmp_path / "failing", [], gauges={FAILED + "reward_error": 37.0}, failed=failed_text)
    solved = save(
        tmp_path / "solved", [{"training/step": 0.0, "val-core/all/sampled/success": 0.27}, *run({}, 0.98)],
        0.5, 0.25, gauges=FLOW,
    )  # fmt: skip
    slow = {"async/trainer_idle_frac": 0.9, "timing_s/reward/mean": 7.0, "timing_s/step": 30.0}
    limited = save(tmp_path / "limited", run(slow), step=20, gauges=FLOW, waits=WAITS)
    views = Views([failing, solved, limited], lambda run_dir: "" if run_dir != solved else "completed")

    async def shown(tab: Tab, number: int, name: str) -> str:
        await tab.run(f'location.hash = "tab=overview&run={number}"')
        await tab.until(f'document.querySelector(".outcome-line b").textContent === "{name}"')
        return str(await tab.run('document.getElementById("overview").innerText'))

    async def test() -> None:
        server = ViewServer(views)
        await server.start()
        try:
            async with browser(tmp_path / "profile") as tab:
                await tab.open(server.url)
                text = await shown(tab, 0, "failing")
                assert "No step has finished" in text and "KeyError: '<b>' (mine.py:41)" in text
                assert "rollout.reward, now final_number" in text and "No held-out data" in text
                await tab.run('document.querySelector("[data-alert] a").click()')
                await tab.until('location.hash.includes("tab=episodes") && location.hash.includes("failed")')
                text = await shown(tab, 1, "solved")
                assert "Held-out success 27% → 98% in 20 steps" in text and "since step 10" in text
                assert "resumed with changed keys at step 5: trainer.lr: 0.5 → 0.25" in text
                assert await tab.run('document.querySelector("[data-alert]").className') == "alert good"
                text = await shown(tab, 2, "limited")
                assert "the reward function (7 s of the 10 s that an episode takes" in text
                assert "reward function 70%" in text and "now: the reward function (12 s" in text
                href = "document.querySelector('a.box[href*=\"filtered\"]').href"
                assert "tab=episodes" in await tab.run(href)
                await tab.run("window.kept = document.querySelector('.outcome-line')")
                again = 'delete document.body.dataset.ready; dispatchEvent(new HashChangeEvent("hashchange"))'
                await tab.run(again)
                await tab.until("document.body.dataset.ready")
                assert await tab.run("window.kept.isConnected"), "drawn anew, though nothing has changed"
                write_status(limited, json.loads((limited / "status.json").read_text()) | {"waits": []})
                await tab.run(again)
                await tab.until("!window.kept.isConnected")
                assert tab.complaints == []
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(test(), 280))
