"""The whole pipeline: real processes, real sockets, the real engine and trainer, the demo's task."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.commands.plan import Measurements
from asyncrl.config.composition import recompose
from asyncrl.observe.timeline import busy_overlap
from asyncrl.weights.disk import weights_directory
from tests.fakes.forked import asyncrl
from tests.integration.runs import ROOT, TELLING, Run, leaks


def test_a_short_run_leaves_everything_it_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets_file = tmp_path / "secrets"
    with Run(tmp_path, "total_steps=6", program=("-c", TELLING, str(secrets_file))) as run:
        run.until_step(1)
        secrets = secrets_file.read_text().split()
        assert len(secrets) == 6 and not [*leaks(run, secrets)] and [*leaks(run, ["rollout"])]
        summary = run.completed(6)
    assert not [*leaks(run, secrets)]
    flow = summary["flow"]
    # Late members of the last groups; on a slow machine, whose episodes wait, groups beyond these, too.
    dropped = summary["reasons"].get("dropped/end_of_data", 0)
    assert flow["trained"] + dropped == flow["issued"] and 6 * 16 - 8 < flow["trained"] <= 6 * 16
    assert flow["issued"] == sum(flow.values()) - flow["issued"]
    assert 0 <= summary["lag_max"] <= 4 and summary["masked_token_frac"] == 0
    assert summary["logprob_diff_max_same_version"] <= 1e-4 and summary["logprob_tokens_compared"] > 0
    assert summary["probe_logprob_diff_max"] <= 1e-4 and summary["probe_tokens_compared"] >= 64
    assert summary["policy_version"] == 6 and summary["tokens_trained"] > 0
    assert None not in (summary["success_before"], summary["success_after"], summary["greedy_after"])
    rows = run.rows()
    wanted = """
        critic/score/mean critic/rewards/mean staleness/lag/p95 async/trainer_idle_frac weights/stall_s
        num_turns/mean actor/grad_norm actor/entropy_loss response_length/mean prompt_length/clip_ratio
        global_seqlen/minmax_diff perf/throughput rollout/tokens_per_s timing_s/gen timing_per_token_ms/gen
        timing_per_token_ms/adv"""
    assert not set(wanted.split()) - {name for row in rows for name in row}
    assert (run.path / "config.yaml").exists() and (run.path / "checkpoints" / "step-6" / "hf").is_dir()
    assert list((run.path / "segments").glob("*.seg")) and (run.path / "logs" / "trainer-0.log").exists()
    kept = {step: transcripts(run, f"validation/step-{step}.jsonl") for step in (0, 6)}
    assert {(row["sample"], row["mode"]) for row in kept[0]} == {
        (row["sample"], row["mode"]) for row in kept[6]
    }
    assert len(kept[6]) == 16 and all({"ground_truth", "score", "success"} <= row.keys() for row in kept[6])
    assert "<|im_start|>" in kept[6][0]["text"]
    trained = [row for step in range(1, 7) for row in transcripts(run, f"training/step-{step}.jsonl")]
    assert trained and all("<|im_start|>" in row["text"] for row in trained)
    assert busy_overlap(run.path)
    replayed_to_the_last_bit(run)
    regraded(run, tmp_path, capsys, flow["trained"])
    measured = Measurements.read_run(run.path, recompose(run.path, []))  # what `asyncrl plan` reads
    assert len(measured.rows) == 6 and measured.recorded and measured.engine_load.sampling >= 1
    assert cli.main(["status", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith(f"{run.path}: completed\nstep 6 of 6 after 0:0")
    assert "issued" in run.text() and not run.children()


def replayed(run: Run, step: int, *overrides: str) -> tuple[int, list[str]]:
    """Exit code and output of `asyncrl replay`: in a process of its own, as it makes a process group."""
    out = run.path.parent / f"replay-{step}.out"
    command = ["replay", str(run.path), "--step", str(step), *overrides]
    code = asyncrl(command, out, ROOT, os.environ | {"OMP_NUM_THREADS": "1"}).wait(200)
    return code, out.read_text().splitlines()


def replayed_to_the_last_bit(run: Run) -> None:
    """From the initial policy and from a checkpoint; another learning rate changes what follows. Nothing of
    the run changes."""
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    rows = {int(row["training/step"]): row for row in run.rows() if "timing_s/step" in row}
    wanted: list[tuple[int, int, tuple[str, ...]]] = [(2, 1, ()), (6, 4, ()), (5, 4, ("trainer.lr=0.5",))]
    for last, first, overrides in wanted:
        code, lines = replayed(run, last, *overrides)
        assert code == 0, lines
        columns_by_step = {int(line.split()[0]): line.split()[1:] for line in lines[1 : 2 + last - first]}
        assert list(columns_by_step) == list(range(first, last + 1))
        for step, (loss, again, norm, norm_again) in columns_by_step.items():
            names = ("actor/pg_loss", "actor/grad_norm")
            assert [loss, norm] == [repr(rows[step][name]) for name in names]
            same = step == first or not overrides  # the first step's weights are those of the checkpoint
            assert ((loss, norm) == (again, norm_again)) is same
        changed = "steps after 0 were trained with different settings: trainer.lr: "
        assert (changed in "\n".join(lines)) is bool(overrides)
    kept = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    assert before.items() <= kept.items()
    code, lines = replayed(run, 7)
    assert code == 2 and "this step was not committed; replayable steps: 1 to 6 (" in lines[-1]


LENGTHS = """
from asyncrl.rewards.base import runs

@runs("loop")
def length(given):
    return float(len(given.messages)) if given.messages[0].role == "user" else 1 / 0
"""


def regraded(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: int) -> None:
    """Its own reward again gives the same; another one sees the whole conversation."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    out = tmp_path / "regraded.jsonl"
    for reward, same in (("final_number", True), (f"{tmp_path}/lengths.py:length", False)):
        assert cli.main(["regrade", str(run.path), "--reward", reward, "--out", str(out)]) == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        # A late member that landed after the last batch is scored, too.
        assert len([row for row in rows if row["state"] == "trained"]) == trained
        assert {row["step"] for row in rows} == set(range(1, 7))
        assert any(row["advantage"] for row in rows), "nothing is compared"
        for row in rows:
            assert (row["score"], row["advantage"]) == (row["score_new"], row["advantage_new"]) or not same
            assert same or row["score_new"] >= 2
    assert "groups with a signal (of" in capsys.readouterr().out
    assert cli.main(["regrade", str(run.path), "--reward", "none", "--steps", "7..9"]) == 2


def transcripts(run: Run, name: str) -> list[dict[str, Any]]:
    path = run.path / "transcripts" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_two_workers_two_ranks_and_several_steps_per_batch(tmp_path: Path) -> None:
    """Weights travel as deltas, in buckets smaller than a layer; stale groups are waited for."""
    weights = ["weights.full_every=16", "weights.directory=run", "weights.bucket_bytes=65536"]
    hold = ["buffer.on_stale=hold", "buffer.max_staleness=2", "algorithm=decoupled_ppo"]
    processes = ["rollout.workers=2", "trainer.ranks=2"]
    with Run(tmp_path, "total_steps=4", "data.test=''", *processes, *weights, *hold) as run:
        summary = run.completed(4)
    assert summary["flow"]["trained"] == 4 * 16
    assert summary["lag_max"] <= 2 and summary["masked_token_frac"] == 0
    assert summary["probe_logprob_diff_max"] <= 1e-4 and summary["probe_tokens_compared"] >= 64
    assert list((run.path / "weights").glob("*/delta.bin")), "every version was published whole"


@pytest.mark.long
def test_ranks_that_share_micro_batches_and_then_hold_replicas_instead(tmp_path: Path) -> None:
    two = ("trainer.ranks=2", "data.test=''", "resume=auto")
    two += ("buffer.group_policy=complete",)  # every batch is of 16 episodes
    with Run(tmp_path, "total_steps=3", "trainer.sequence_parallel=2", *two) as run:
        run.completed(3)
    with Run(tmp_path, "total_steps=6", "trainer.replicas=2", *two) as run:
        summary = run.completed(6)
    assert summary["flow"]["trained"] == 6 * 16
    assert summary["probe_logprob_diff_max"] <= 1e-4 and summary["logprob_diff_max_same_version"] <= 1e-4


def test_zero_staleness_is_synchronous_and_trains_folded_episodes_token_for_token(tmp_path: Path) -> None:
    """Every token's log-prob can be held against the engine's, in all rows of a folded episode."""
    weights = str(tmp_path / "shared")
    folding = ["rollout.history=fold", "rollout.max_tokens=110", "rollout.max_new_tokens=40"]
    more = ("buffer.max_staleness=0", "data.test=''", f"weights.directory={weights}")
    more += ("algorithm.ess_lr=true",)  # for which episodes without advantage are scored, too
    with Run(tmp_path, "total_steps=4", *folding, *more) as run:
        summary = run.completed(4)
        no_weights_are_left_outside_of(run, weights)
    assert max(row.get("rollout/rows/max", 0) for row in run.rows()) > 1, "no episode was folded"
    assert summary["lag_max"] == 0 and summary["trajectories_multi_version"] == 0
    assert summary["logprob_diff_max_same_version"] <= 1e-4
    assert summary["logprob_tokens_compared"] == summary["tokens_trained"] > 0
    assert summary["flow"]["trained"] == 4 * 16


def no_weights_are_left_outside_of(run: Run, directory: str) -> None:
    left = weights_directory(directory, run.path, "run", 0)
    assert left.parent.is_dir() and not left.exists()


@pytest.mark.slow
def test_stale_trajectories_are_dropped_and_partial_groups_trained_in_bfloat16(tmp_path: Path) -> None:
    partial = ["buffer.group_policy=partial", "buffer.group_deadline=0.3", "buffer.on_stale=drop"]
    means = ["algorithm=rloo", "algorithm.aggregation=seq_mean_token_mean"]
    more = ("data.test=''", "buffer.max_staleness=2", "weights.directory=shm", "model.dtype=bfloat16")
    with Run(tmp_path, "total_steps=4", *more, *partial, *means) as run:
        summary = run.completed(4)
        no_weights_are_left_outside_of(run, "shm")
    assert summary["lag_max"] <= 2
    assert summary["logprob_tokens_compared"] > 0 and summary["k3_same_version"] < 0.05
    # Both ends may use one kernel, which rounds alike: then gaps and floor are 0.
    assert summary["probe_logprob_diff_max"] <= max(0.5, 3 * summary["probe_noise_floor"]) < 6
    import torch
    from safetensors.torch import load_file

    (file,) = (run.path / "checkpoints" / "step-4" / "hf").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}


@pytest.mark.slow
def test_the_bound_holds_under_a_slow_worker(tmp_path: Path) -> None:
    """One call of 12 takes all of its time limit: the first tokens of such an episode are old when it lands.
    More than half of the steps take a token over the bound, so none of ten does once in 10,000 runs."""
    slow = ("rollout.tool_args.calculator={latency_mean: 2, latency_sigma: 3}", "rollout.tool_timeout=1.5")
    with Run(tmp_path, "total_steps=10", "buffer.max_staleness=1", "data.test=''", *slow) as run:
        summary = run.completed(10)
    rows = [row for row in run.rows() if "timing_s/step" in row]
    assert summary["lag_max"] <= 1
    taken = max(row["staleness/lag_taken/max"] for row in rows)
    assert taken > 1, "nothing was over the bound: this run proves nothing"
    assert summary["masked_token_frac"] > 0
