"""`asyncrl sft`: the demo's model learns from conversations what it would never say."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from asyncrl.data import load_samples
from tests.integration.runs import ROOT, Run, manifests, trained_uids

STEPS = 40


@pytest.mark.parametrize(
    "killed", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)]
)
def test_a_model_learns_a_format(tmp_path: Path, killed: bool) -> None:
    """The answer to every question is `Ready.` `killed`: all processes, in mid-run, and the run goes on."""
    said = tmp_path / "said.jsonl"
    with said.open("w") as file:
        for sample in load_samples(ROOT / "examples/multiturn/calculator/data/train.parquet")[:256]:
            answer = {"role": "assistant", "content": "Ready."}
            file.write(json.dumps({"messages": [*(m.openai() for m in sample.prompt), answer]}) + "\n")
    reward = tmp_path / "ready.py"
    reward.write_text("def ready(solution_str, **_):\n    return float(solution_str == 'Ready.')\n")
    keys = [f"data.train={said}", f"rollout.reward={reward}:ready", f"total_steps={STEPS}"]
    keys += ["trainer.lr=5e-3", "trainer.lr_schedule=constant", "trainer.checkpoint_every=10"]
    keys += ["buffer.groups_per_batch=16", "buffer.episodes_per_group=1", "buffer.filter_zero_variance=false"]
    if killed:
        with Run(tmp_path, *keys, command="sft") as run:
            run.until_step(25)
            run.process.send_signal(signal.SIGKILL)
            run.wait()
    with Run(tmp_path, *keys, "resume=auto", command="sft") as run:
        summary = run.completed(STEPS)
    assert summary["flow"]["trained"] == STEPS * 16 and max(trained_uids(run.path).values()) == 1
    assert max(manifest.trained_total for manifest in manifests(run.path)) == STEPS * 16
    assert summary["nll_last"] < 0.5 < 5 < summary["nll_first"]
    assert (summary["success_before"], summary["success_after"], summary["greedy_after"]) == (0.0, 1.0, 1.0)
    assert "loss per token (training)" in run.text()
