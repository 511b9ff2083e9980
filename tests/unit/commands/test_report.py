"""`asyncrl report` on the files that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from asyncrl.commands.report import main
from asyncrl.config import RunConfig, parse
from asyncrl.coordinator import transcripts
from asyncrl.errors import ConfigError
from asyncrl.observe.files import write_summary
from asyncrl.observe.machine import record_machine, recorded_machine
from asyncrl.observe.summary import REWARD, SAMPLED, SAMPLED_SCORE, summarize
from asyncrl.observe.timeline import Timeline
from asyncrl.store.launches import KEY, LaunchRecord, since
from asyncrl.store.runstore import RunStore

EVIL = "</pre><script>alert(1)</script> $x$"
FLOW = {"issued": 8, "trained": 5, "filtered": 3}
ROWS = [
    {"training/step": 0.0, "time_s": 1.0, SAMPLED: 0.25, SAMPLED_SCORE: 0.25},
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
    {"training/step": 2.0, "time_s": 12.0, SAMPLED: 0.75, SAMPLED_SCORE: 0.75},
]


def make_run(parent: Path, name: str, over: bool = True, **more: object) -> Path:
    run_dir = parent / name
    run_dir.mkdir(parents=True)
    model, data = {"path": "m"}, {"train": "t"}
    config: RunConfig = parse({"name": name, "model": model, "data": data, **more})
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for step, text in ((0, "I guess 3."), (1, "in between"), (2, f"4 {EVIL}")):
        entry = {"sample": 7, "mode": "sampled", "score": step / 2, "ground_truth": "4", "text": text}
        transcripts.save(run_dir, "validation", step, [entry])
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


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.replace("\\", "").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_report_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path, "a$b$", trainer={"lr": 0.5})
    record_machine(run_dir)
    assert main(["a$b$", "--run-dir", str(tmp_path)]) == 0
    page, text = run_dir / "report.html", (run_dir / "report.md").read_text()
    assert capsys.readouterr().out.splitlines() == [str(page), str(run_dir / "report.md")]
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    found = cells(text)
    for row in (
        ["outcome", "completed"],
        ["success, sampled (held out, ≥ –)", "25.0% → 75.0%"],
        ["trainer.lr", "0.5"],
        ["0", "60 (75.0%) " + "█" * 22],
        ["wait for data", "2.0 s (25.0%) " + "█" * 8],
        ["forward and backward of the policy", "4.0 s (50.0%) " + "█" * 15],
        ["other", "2.0 s (25.0%) " + "█" * 8],
        ["trainer-0: train", "3.0 s (75.0%) " + "█" * 22],  # what overlaps counts once
    ):
        assert row in found, row
    machine = recorded_machine(run_dir)
    assert machine and ["CPU", " ".join(machine["CPU"].split())] in found
    for part in (
        "8 issued = 5 trained + 3 filtered",
        "reasons: 3 filtered/zero",
        "2 deadline",
        "score 0 → score 1",
    ):
        assert part in text.replace("\\", "")
    assert "I guess 3." in text and "in between" not in text
    html = page.read_text()
    assert "<script" not in html and "&lt;script&gt;" in html and "http" not in html.replace("http-equiv", "")


def test_two_runs_side_by_side_and_one_that_is_not_over(tmp_path: Path) -> None:
    first = make_run(tmp_path / "x", "a", trainer={"lr": 0.5})
    second = make_run(tmp_path / "y", "a", over=False, seed=3)
    out = tmp_path / "both.html"
    assert main([str(first), str(second), "--out", str(out)]) == 0
    found = cells(out.with_suffix(".md").read_text())
    assert ["outcome", "completed", "not over, or killed"] in found
    assert ["trainer.lr", "0.5", "default"] in found and ["seed", "default", "3"] in found
    text = out.with_suffix(".md").read_text().replace("\\", "")
    assert f"{second}: 8 issued = 5 trained + 3 filtered" in text  # by its last row
    assert "no record; described instead is the machine that wrote this report" in text


def test_what_a_later_launch_changed_is_said_and_an_account_that_is_not_exact(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", trainer={"lr": 0.5})
    launches = [LaunchRecord(0, msgspec.yaml.decode((run_dir / "config.yaml").read_bytes()))]
    config = msgspec.convert(launches[0].config | {"seed": 3}, RunConfig)
    store = RunStore(run_dir)
    store.put_meta(KEY, msgspec.json.encode(since(launches, 1, config)).decode())
    store.commit()
    store.close()
    (run_dir / "config.yaml").write_text("of no interest")
    write_summary(run_dir, summarize(ROWS, FLOW, False))
    assert main([str(run_dir)]) == 1
    text = (run_dir / "report.md").read_text()
    for row in (["trainer.lr", "0.5"], ["seed", "3"], ["seed, from step 2", "0 → 3"]):
        assert row in cells(text)
    assert "NOT CONSERVED" in text


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"--out r\.pdf: give a name that ends with \.html"):
        main([str(run_dir), "--out", "r.pdf"])
    (run_dir / "config.yaml").write_text("name: a\nold_key: 1\n")
    assert main([str(run_dir)]) == 0
    assert "cannot be read by this version" in (run_dir / "report.md").read_text()
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no row yet; wait for the first step"):
        main([str(run_dir)])
