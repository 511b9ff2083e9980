"""`asyncrl sft`: the demo's model learns from conversations what it would never say."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from asyncrl.data import load_samples
from tests.fakes.audit import manifests, trained_uids
from tests.integration.runs import ROOT, Run

STEPS = 28
BATCH = 16


@pytest.mark.parametrize(
    "killed", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)]
)
def test_a_model_learns_a_format(tmp_path: Path, killed: bool) -> None:
    """The answer to every question is `Ready.` `killed`: all processes, in mid-run, and the run goes on."""
    data = ROOT / "examples/multiturn/calculator/data"
    answer = {"role": "assistant", "content": "Ready."}
    for split, count in (("train", 256), ("test", 4)):  # of the 8 held-out samples 4 are conversations
        rows = (
            [*(m.openai() for m in s.prompt), answer] for s in load_samples(data / f"{split}.parquet")[:count]
        )
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    reward = tmp_path / "ready.py"
    reward.write_text("def ready(solution_str, **_):\n    return float(solution_str == 'Ready.')\n")
    keys = [f"data.train={tmp_path}/train.jsonl", f"data.test=[{tmp_path}/test.jsonl,{data}/test.parquet]"]
    keys += [f"rollout.reward={reward}:ready", "rollout.tools=[]", f"total_steps={STEPS}", "trainer.lr=7e-3"]
    keys += ["trainer.lr_schedule=constant", "checkpoint.every=8", f"buffer.groups_per_batch={BATCH}"]
    keys += ["buffer.episodes_per_group=1", "buffer.filter_zero_variance=false"]
    keys += ["buffer.max_staleness=1000", "weights.every=1000"]
    if killed:
        with Run(tmp_path, *keys, command="sft") as run:
            run.until_step(14)
            run.process.send_signal(signal.SIGKILL)
            run.wait()
    with Run(tmp_path, *keys, "resume=auto", command="sft") as run:
        summary = run.completed(STEPS)
    assert summary["flow"]["trained"] == STEPS * BATCH and max(trained_uids(run.path).values()) == 1
    assert max(manifest.trained_total for manifest in manifests(run.path)) == STEPS * BATCH
    assert summary["nll_last"] < 0.5 < 5 < summary["nll_first"]
    assert (summary["success_before"], summary["greedy_after"]) == (0.0, 1.0)
    assert summary["success_after"] > 0  # of four: at the loss of the last step all fail in 2e-5 of runs
    assert summary["nll_held_out_after"] < 0.5 < 5 < summary["nll_held_out_before"]
    first = next(row["actor/nll"] for row in run.rows() if row["training/step"] == 1)
    assert summary["nll_held_out_before"] == pytest.approx(first, abs=1)  # of other questions
    assert "held-out loss per token" in run.text()
