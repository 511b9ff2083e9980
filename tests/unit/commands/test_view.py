"""`asyncrl view --html`, and what the tab Overview says, on the files that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.commands.view import main
from asyncrl.config import RunConfig, parse
from asyncrl.coordinator.reporting import save_transcripts
from asyncrl.errors import ConfigError
from asyncrl.observe.files import write_summary
from asyncrl.observe.machine import record_machine, recorded_machine
from asyncrl.observe.metrics import REWARD, SAMPLED, SAMPLED_SCORE
from asyncrl.observe.summary import summarize
from asyncrl.observe.timeline import Timeline
from asyncrl.store.launches import LAUNCHES_KEY, LaunchRecord, with_launch
from asyncrl.store.runstore import RunStore
from asyncrl.viewer.overview import overview

EVIL = "</script><script>alert(1)</script>"
FLOW = {"issued": 8, "trained": 5, "filtered": 3}
ROWS = [
    {"training/step": 0.0, "time_s": 1.0, SAMPLED: 0.25, SAMPLED_SCORE: 0.25, "val-aux/samples": 12.0},
    *(
        {
            "training/step": step,
            "time_s": 4.0 * step,
            "timing_s/step": 4.0,
            REWARD: 0.5 * step,
            "staleness/lag_tokens/0": 30.0,
            "staleness/lag_tokens/1": 10.0,
            "timing_s/wait_data": 1.0,
            "timing_s/update_actor": 2.0,
            "flow/issued": 8.0,
            "flow/trained": 5.0,
            "flow/filtered": 3.0,
        }
        for step in (1.0, 2.0)
    ),
    {"training/step": 2.0, "time_s": 12.0, SAMPLED: 0.75, SAMPLED_SCORE: 0.75, "val-aux/samples": 12.0},
]


def make_run(parent: Path, name: str, over: bool = True, **more: object) -> Path:
    run_dir = parent / name
    run_dir.mkdir(parents=True)
    model = {"path": "m"}
    data = {"train": "t"}
    config: RunConfig = parse({"name": name, "model": model, "data": data, **more})
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for step, text in ((0, "I guess 3."), (1, "in between"), (2, f"4 {EVIL}")):
        entry = {"sample": 7, "mode": "sampled", "score": step / 2, "ground_truth": "4", "text": text}
        save_transcripts(run_dir, "validation", step, [entry])
    timeline = Timeline(run_dir / "timeline" / "trainer-0.jsonl")
    timeline.record("train", 10.0, 12.0)
    timeline.record("train", 11.0, 13.0)
    timeline.record("step", 13.0, 14.0)
    timeline.close()
    if over:
        failed = {"attempts_failed": {"deadline": 2}, "newest_failure": EVIL}
        ending = {"outcome": "completed", "error": "", "reasons": {"filtered/zero_variance": 3}}
        write_summary(run_dir, summarize(ROWS, FLOW, True) | ending | failed)
    return run_dir


def keys(view: dict[str, Any]) -> dict[str, Any]:
    """The keys that differ from the defaults."""
    return {key: value for key, value, _ in view["configuration"]}


def recorded(page: Path) -> dict[str, Any]:
    text = page.read_text().split('id="recorded">')[1].split("</script>")[0]
    return json.loads(text)  # type: ignore[no-any-return]


def test_the_page_of_a_run_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path, "a$b$", trainer={"lr": 0.5})
    record_machine(run_dir, {"codex": "0.1"})
    page = tmp_path / "page.html"
    assert main(["a$b$", "--run-dir", str(tmp_path), "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(page)]
    found = recorded(page)["overview?run=0"]
    assert found["outcome"] == "Held-out success 25% → 75% in 2 steps: no clear change (12 questions)"
    (judged,) = found["held_out"]  # the score is the success
    before = judged["before"]
    after = judged["after"]
    assert (before["value"], after["value"], after["step"]) == (0.25, 0.75, 2)
    low, high = after["interval"]
    assert low == pytest.approx(0.4677, abs=1e-4) and high == pytest.approx(0.9110, abs=1e-4)
    (reward, step) = found["figures"]
    assert (reward["first"], reward["last"], reward["curve"]) == (0.5, 1.0, [[1, 0.5], [2, 1.0]])
    assert (step["label"], step["last"], step["unit"]) == ("seconds/step", 4.0, "")
    (trainer,) = found["waits"]
    assert trainer["parts"] == {"wait for data": 0.25, "policy forward and backward": 0.5}
    assert (found["flow"], found["conserved"]) == (FLOW, True)
    assert found["reasons"] == {"filtered/zero_variance": 3}
    assert keys(found)["trainer.lr"] == 0.5 and "name" not in keys(found)
    assert found["notes"] == [f"attempts failed: 2 deadline; latest: {EVIL}"]
    assert found["tables"]["All numbers"]["steps"] == "2"
    assert found["tables"]["Machine of the newest launch"] == recorded_machine(run_dir)


def test_two_runs_side_by_side_and_one_that_is_not_over(tmp_path: Path) -> None:
    first = make_run(tmp_path / "x", "a", trainer={"lr": 0.5})
    second = make_run(tmp_path / "y", "a", over=False, seed=3)
    out = tmp_path / "new" / "both.html"
    assert main([str(first), str(second), str(first), "--html", str(out)]) == 0
    recorded_answers = recorded(out)
    assert [run["name"] for run in recorded_answers["runs"]["runs"]] == [
        str(first),
        str(second),
    ]  # of one name
    one = recorded_answers["overview?run=1"]
    assert keys(one)["seed"] == 3 and "trainer.lr" not in keys(one)
    assert one["flow"] == dict.fromkeys(one["flow"], 0) | FLOW  # by its last row
    assert "machine.json is missing or unreadable" in one["notes"][-1]
    assert (
        one["outcome"] == "Killed: held-out success 25% → 75% after 2 steps: no clear change (12 questions)"
    )


def test_what_a_later_launch_changed_is_said_and_an_account_that_is_not_exact(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", trainer={"lr": 0.5})
    launches = [LaunchRecord(0, msgspec.yaml.decode((run_dir / "config.yaml").read_bytes()))]
    config = msgspec.convert(launches[0].config | {"seed": 3}, RunConfig)
    store = RunStore(run_dir)
    store.put_meta(LAUNCHES_KEY, msgspec.json.encode(with_launch(launches, 1, config)).decode())
    store.commit()
    store.close()
    (run_dir / "config.yaml").write_text("of no interest")
    write_summary(run_dir, summarize(ROWS, FLOW, False))
    assert main([str(run_dir), "--html", str(tmp_path / "a.html")]) == 1
    overview_page = overview(run_dir, "completed")
    assert (keys(overview_page)["trainer.lr"], keys(overview_page)["seed"]) == (0.5, 3) and not overview_page[
        "conserved"
    ]
    assert overview_page["alerts"][-1].line.startswith("resumed with changed keys at step 2: seed: 0 → 3")


def test_what_cannot_be_read_is_said_in_the_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    (run_dir / "config.yaml").write_text("name: a\nold_key: 1\n")
    (run_dir / "metrics.jsonl").write_text("")
    page = str(tmp_path / "a.html")
    assert main([str(run_dir), "--html", page]) == 0
    assert keys(overview(run_dir, "")) == {"old_key": 1}  # of a version that had it
    (run_dir / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match=r"summary\.json: cannot be read"):
        main([str(run_dir), "--html", page])
    with pytest.raises(ConfigError, match=r"a\.md: use a file name that ends with \.html"):
        main([str(run_dir), "--html", str(tmp_path / "a.md")])
