"""Do engines and the trainer share one GPU: by shifts, in the calculator demo, and with an SGLang server,
where a pretrained model learns to call a tool?

First, each side by itself: what a rank at rest and the embedded engine asleep free, as the driver counts it.
The demo runs one side at a time, and its trainer is killed (kill -9).

The folder `smollm2` is unpacked, and the model's log-probs are compared with those of the machine that packed
it. Then `asyncrl train experiment=smollm2` runs three times: asynchronously, with held-out questions before
and after; synchronously (`buffer.max_staleness=0`); and one side at a time (`engine.colocated=1`). Without
SGLang only the first one runs, with the embedded engine. Tokens per second of the engines are those that were
generated, of the trainer those of its batches, with prompts. Idle: shares of the time, by shifts of the time
in which a side has the GPU. Memory: what torch allocated at most, and what the dry run had estimated."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config.run import read_config
from asyncrl.observe.timeline import timeline_files
from asyncrl.trainer.footprint import footprint
from parts.bundle import has_saver, server_command
from parts.common import GB, Context, Finding, exact_float32, release
from parts.runs import STOP_S, Way, ends_of_logs, judged, mean_of, step_rows, stop_run, summary
from parts.shifts import demo, sides_alone

SECONDS = 500
SMALL_SECONDS = 1000.0
GOAL = "95% freed by each side; the demo learns; 60% sampled after 12 steps with SGLang; accounts exact"

DEMO_S = 180.0  # for the demo, at most
SPARE_S = 8.0  # for the report of a run
LEAST_S = 75.0  # that a run needs
NOT_THERE = (
    "not run: the folder smollm2 is not there (make gpu-kit-smollm2; copy it into this one, or beside it)"
)
# `asyncrl eval MODEL experiment=smollm2 samples=256` on two cores; of what is unpacked each byte is the same.
ON_A_CPU = "original 13.3% sampled, 21.9% greedy; unpacked 14.5% and 22.7%"
TEXT = "The capital of France is Paris. 37 * 58 = 2146; the calculator says so."
# of the ids of TEXT but the first, in float32
MEAN_LOGPROB = -3.1941
TOLERANCE = 1e-3
LARGE = ("checkpoints", "weights", "export")  # folders of a run that are not kept


ASYNCHRONOUS = Way("asynchronous", 12, 128)
SYNCHRONOUS = Way("synchronous", 6, 0, ("buffer.max_staleness=0",))
SHIFTS = Way("shifts", 6, 0, ("engine.colocated=1",))
# A CPU takes minutes for a step of 32 episodes.
SMALL = (
    "buffer.groups_per_batch=1",
    "buffer.episodes_per_group=2",
    "buffer.filter_zero_variance=false",
    "rollout.slots=4",
    "rollout.max_turns=2",
    "rollout.max_new_tokens=12",
    "trainer.micro_batch_tokens=320",
    "model.dtype=float32",
    "model.device=cpu",
    "launch.start_timeout=300",
    "launch.lease=60",
)
ON_A_GPU = ("trainer.activation_checkpointing=auto", "launch.start_timeout=300")


def run(context: Context) -> Iterator[Finding]:
    yield from sides_alone(context)
    yield from demo(replace(context, deadline=min(context.deadline, time.monotonic() + DEMO_S)))
    for way in (ASYNCHRONOUS, SYNCHRONOUS, SHIFTS):
        yield from trained(context, way)
        if not model_folder(context).exists():
            return


def visit_asynchronous(context: Context) -> Iterator[Finding]:
    yield from visited(context, ASYNCHRONOUS)


def visit_synchronous(context: Context) -> Iterator[Finding]:
    yield from visited(context, SYNCHRONOUS)


def visit_shifts(context: Context) -> Iterator[Finding]:
    yield from visited(context, SHIFTS)


def visited(context: Context, way: Way) -> Iterator[Finding]:
    """The run by itself. On a visit everything is brought along, so a 'not run' is a failure."""
    for finding in trained(context, way):
        yield replace(finding, ok=False) if finding.value.startswith("not run") else finding


# -- the model ---------------------------------------------------------------------------------------------


def model_folder(context: Context) -> Path:
    """The model, once it is unpacked for all runs."""
    return context.work.parent / "smollm2-model"


def unpacked(context: Context, model: Path) -> Iterator[Finding]:
    """Unpack the model, once for all runs, and compare its log-probs."""
    if model.exists():
        return
    candidate_folders = (context.kit / "smollm2", context.kit.parent / "smollm2")
    folder = next(
        (
            candidate_folder
            for candidate_folder in candidate_folders
            if (candidate_folder / "index.json").exists()
        ),
        None,
    )
    if folder is None:
        yield Finding("folder", NOT_THERE)
        return
    began = time.perf_counter()
    specification = importlib.util.spec_from_file_location("four_bits", folder / "four_bits.py")
    assert specification and specification.loader
    four_bits = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(four_bits)
    half = model.with_name(f"{model.name}.{os.getpid()}")
    index = four_bits.unpack(folder, half)
    half.rename(model)
    value = f"{time.perf_counter() - began:.1f} s; {index['wrong']} weights differ"
    yield Finding("unpacked", value, "the original's, bit for bit", index["wrong"] == 0)
    yield mean_logprob(context, model)
    yield Finding("before training, on a CPU", ON_A_CPU, note="of 256 held-out questions")


def mean_logprob(context: Context, model: Path) -> Finding:
    """Of a text, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"]], device=context.device)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(context.device)
    with torch.no_grad(), exact_float32():
        logits = policy(ids).logits[0, :-1].log_softmax(-1)
    mean = float(logits.gather(-1, ids[0, 1:, None]).mean())
    del policy, logits
    release(context)
    goal = f"{MEAN_LOGPROB:.4f}, as on the CPU that packed it; ±{TOLERANCE:g}"
    return Finding("mean log-prob of a text", f"{mean:.4f}", goal, abs(mean - MEAN_LOGPROB) <= TOLERANCE)


# -- a run -------------------------------------------------------------------------------------------------


def trained(context: Context, way: Way) -> Iterator[Finding]:
    """Run it, and say how it went; nothing where the model is not there."""
    model = model_folder(context)
    yield from unpacked(context, model)
    if not model.exists():
        return
    command = server_command(context)
    if command is None and way is not ASYNCHRONOUS:
        yield Finding(way.name, "not run: there is no SGLang")
        return
    if way is SHIFTS and command is not None and not has_saver(context, command):
        yield Finding(way.name, "not run: SGLang's environment has no torch_memory_saver")
        return
    if context.left() < LEAST_S:
        yield Finding(way.name, "not run: no time left")
        return
    chosen = way.small if context.small else way
    began = time.monotonic()
    code = asyncrl(context, chosen, model, command)
    seconds = time.monotonic() - began
    run_dir = context.work / way.name
    keep(context, run_dir)
    written = summary(run_dir)
    if code or not written:
        why = written.get("error", "no summary")
        note = f"{ends_of_logs(run_dir)}\n{step_rows(run_dir)[-1:]}"
        yield Finding(f"{way.name}: run", f"ended with {code}: {why}", "0", False, note)
    if written:
        yield from judged(context, chosen, written)
    if rows := step_rows(run_dir):
        yield from run_metrics(chosen, run_dir, rows, written, seconds)


def asyncrl(context: Context, way: Way, model: Path, command: list[str] | None) -> int:
    """Train; the output is the part's. Return its exit code. A run that does not end in time is told to
    stop."""
    overrides = [
        f"name={way.name}",
        f"run_dir={context.work}",
        "observe.console=plain",
        f"model.path={model}",
    ]
    overrides += [f"data.{split}={model / split}.jsonl" for split in ("train", "test")]
    overrides += [f"total_steps={way.steps}", f"validation.samples={way.samples}", "checkpoint.every=0"]
    if command is not None:
        overrides += ["engine=sglang", f"engine.server_command={json.dumps(command)}"]
        if not context.small:  # the trainer is on the same GPU
            overrides += ["engine.server_args={mem-fraction-static: 0.3}"]
    overrides += [*(SMALL if context.small else ON_A_GPU), *way.overrides]
    line = [sys.executable, "-m", "asyncrl.cli", "train", "experiment=smollm2", *overrides]
    own_variables = {"OMP_NUM_THREADS": "1" if context.small else "4", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(line, cwd=context.work, env=os.environ | own_variables)
    try:
        return process.wait(max(1.0, context.left() - STOP_S - SPARE_S))
    except subprocess.TimeoutExpired:
        return stop_run(process)


def keep(context: Context, run_dir: Path) -> None:
    """Copy the run to where a visit takes it from, without weights: `asyncrl view` shows it at home."""
    if run_dir.is_dir():
        ignored = shutil.ignore_patterns(*LARGE, "*.safetensors", "*.sock")
        shutil.copytree(run_dir, context.work / "keep", ignore=ignored, dirs_exist_ok=True)


def run_metrics(
    way: Way, run_dir: Path, rows: list[dict[str, Any]], written: dict[str, Any], seconds: float
) -> Iterator[Finding]:
    """Speeds, idle shares, pushes, changes of shifts and memory: numbers without a goal. `rows`: of the steps
    that were made, one at least; `written`: the summary, empty without one."""
    steady = rows[1:] or rows  # the first step compiles
    engines, trainer = (mean_of(steady, name) for name in ("rollout/tokens_per_s", "perf/throughput"))
    value = f"engines {number(engines)} tokens/s, idle {share(written.get('rollout_idle_frac'))}; trainer "
    value += f"{number(trainer)} tokens/s, idle {share(written.get('trainer_idle_frac'))}"
    run_s = f"{seconds:.0f} s in all, the first step after {rows[0]['time_s']:.0f} s"
    step_s = f"{number(mean_of(steady, 'timing_s/step'))} s a step, without the first one; {run_s}"
    yield Finding(f"{way.name}: speed", value, note=step_s)
    lines = [
        line for file in timeline_files(run_dir) for line in file.read_added() if line.name == "load_weights"
    ]
    loads = [line.end - line.start for line in lines]
    loaded = f"{max(loads):.2f} s to load it, at most of {len(loads)}" if loads else "no load is recorded"
    pushed, stalled = (mean_of(rows, name) for name in ("weights/push_s", "weights/stall_s"))
    value = f"{number(pushed)} s to write a version, {loaded}; the trainer waited {number(stalled)} s"
    yield Finding(f"{way.name}: push of weights", value)
    if any("shift/sleep_s" in row for row in rows):
        asleep, awake, resting = (
            mean_of(rows, name) for name in ("shift/sleep_s", "shift/wake_s", "timing_s/rest")
        )
        value = f"{number(asleep)} s until engines slept, {number(awake)} s until one was awake"
        yield Finding(f"{way.name}: changes", f"{value}; the trainer's rest {number(resting)} s")
    allocated = max(row.get("perf/max_memory_allocated_gb", 0.0) for row in rows)
    estimated = footprint(read_config(run_dir)).total / GB
    recomputed = share(rows[-1].get("perf/recomputed_layers"))
    value = f"{allocated:.3g} GB allocated at most, {recomputed} of the layers recomputed"
    note = f"estimated: {estimated:.3g} GB with full micro-batches (no batch fills one), no recomputation"
    yield Finding(f"{way.name}: memory", value, note=note)


def number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"
