"""`asyncrl generate` and `eval`: real processes, killed in the middle, and the same command again."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl import cli
from asyncrl.errors import ConfigError
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StoreError
from tests.integration.runs import ROOT, Run

MODEL = ROOT / "examples/multiturn/calculator/model"
ASKED = ["samples=40", "episodes=2", "rollout.slots=4", "resume=auto"]


def test_an_evaluation_that_was_killed_goes_on_and_gives_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that is over is sampled again: what it took, to the microsecond, stays as it was."""
    generated = {name: generate(tmp_path, name, kill=name == "run") for name in ("run", "whole")}
    assert generated["run"] == generated["whole"]
    assert len(generated["run"]) == 40
    for row in generated["run"]:
        assert [len(row[name]) for name in ("responses", "rewards", "stop_reasons", "tokens")] == [2] * 4
        talk = [json.loads(conversation) for conversation in row["conversations"]]
        assert all(conversation[: len(row["prompt"])] == row["prompt"] for conversation in talk)
        right = [float(row["ground_truth"] in text.split()[-1]) for text in row["responses"]]
        assert right == row["rewards"], "the reward looks at the last number"
    arguments = [f"run_dir={tmp_path}", "name=run", *SAME, "--baseline", str(tmp_path / "whole")]
    assert cli.main(["eval", str(MODEL), *arguments]) == 0
    numbers = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    of_baseline = json.loads((tmp_path / "whole" / "evaluation.json").read_text())  # Compare has it beside
    assert of_baseline.keys() == numbers.keys()
    assert "difference" not in of_baseline["val-core/all/sampled/mean@2"]
    scores = [score for row in generated["run"] for score in row["rewards"]]
    mean = numbers["val-core/all/sampled/mean@2"]
    assert mean["mean"] == pytest.approx(sum(scores) / 80) and 0 < mean["low"] < mean["mean"] < mean["high"]
    assert mean["difference"] == mean["difference_low"] == mean["difference_high"] == 0.0
    solved = sum(any(row["rewards"]) for row in generated["run"])
    assert numbers["val-core/all/sampled/pass@2"]["mean"] == pytest.approx(solved / 40)
    capsys.readouterr()
    assert cli.main(["runs", "transcripts", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("<|im_start|>system") == 80


SAME = ["experiment=calculator", "validation.greedy=false", *ASKED]


def generate(tmp_path: Path, name: str, kill: bool) -> list[dict[str, Any]]:
    out = tmp_path / f"{name}.jsonl"
    arguments: dict[str, Any] = {"name": name, "command": f"generate {MODEL}"}
    before: dict[str, bytes] = {}
    if kill:
        with Run(tmp_path, *ASKED, f"out={out}", **arguments) as run:
            run.until(lambda: len(over(run.path)) >= 8, "episodes that are over")
            children = [*run.children().values()]
            os.kill(run.process.pid, signal.SIGKILL)
            _, left = psutil.wait_procs(children, timeout=60)
            assert not left, "roles outlived their launcher"
            before = over(run.path)
        assert 8 <= len(before) < 80 and not out.exists()
    with Run(tmp_path, *ASKED, f"out={out}", **arguments) as run:
        assert run.wait() == 0, f"{run.text()}\n{run.logs()}"
        after = over(run.path)
    assert len(after) == 80 and before.items() <= after.items()
    return [json.loads(line) for line in out.read_text().splitlines()]


def over(run_dir: Path) -> dict[str, bytes]:
    """The records of the episodes that are over; none before there is a store with its tables."""
    try:
        with closing(RunReader.open(run_dir)) as reader:
            return dict(reader.held_out("val0/"))
    except (StoreError, ConfigError, OSError):
        return {}
