"""Does the calculator demo learn on this device, and go on after kill -9 of its trainer?

`asyncrl train experiment=calculator` with fewer steps: a coordinator, a rollout worker with the embedded
engine, and a trainer, all on one GPU. After some steps the trainer is killed; the launcher starts another,
which goes on from the newest checkpoint.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from parts.common import Context, Finding
from parts.runs import account, ends_of_logs, step_rows, summary

SECONDS = 180
SMALL_SECONDS = 300
GOAL = "≥ 90% sampled success, conserved, kill -9 of the trainer survived"

EVERY = 8  # steps between checkpoints


def run(context: Context) -> Iterator[Finding]:
    began, console, run_dir = time.monotonic(), context.work / "console.txt", context.work / "runs" / "demo"
    with console.open("wb") as output:
        process = subprocess.Popen(command(context), cwd=context.work, stdout=output, stderr=output)
    try:
        yield from killed(context, process, run_dir, began)
        code = process.wait(max(1.0, context.left() - 5))
    except TimeoutError as error:
        yield Finding("the run", str(error), ok=False, note=ends_of_logs(run_dir, console))
        return
    except subprocess.TimeoutExpired:
        steps = len(step_rows(run_dir))
        yield Finding(
            "the run", f"not over in time: {steps} steps", ok=False, note=ends_of_logs(run_dir, console)
        )
        return
    if code:
        yield Finding("the run", f"exit code {code}", "0", False, ends_of_logs(run_dir, console))
    yield from results(run_dir)
    print(console.read_text(errors="replace"))


def command(context: Context) -> list[str]:
    data = context.kit / "examples/multiturn/calculator/data"
    steps, samples = (40, 64) if context.small else (60, 256)
    return [
        *(sys.executable, "-m", "asyncrl.cli", "train", "experiment=calculator", "name=demo"),
        *(f"data.train={data / 'train.jsonl'}", f"data.test={data / 'test.jsonl'}"),
        *(f"total_steps={steps}", f"validation.samples={samples}", f"checkpoint.every={EVERY}"),
        f"model.device={context.device.type}",
    ]


def killed(
    context: Context, process: subprocess.Popen[bytes], run_dir: Path, began: float
) -> Iterator[Finding]:
    """Kill the trainer once a checkpoint is well behind it; wait until another one has made steps."""
    wait_for(context, process, lambda: len(step_rows(run_dir)) >= 1, "the first step")
    yield Finding("first step after", f"{time.monotonic() - began:.1f} s")
    wait_for(context, process, lambda: len(step_rows(run_dir)) >= EVERY + 2, "steps before the kill")
    victim = trainer(process.pid)
    victim.kill()
    at, reached = time.monotonic(), newest(run_dir)
    wait_for(context, process, lambda: newest(run_dir) > reached, "steps after the kill")
    again = trainer(process.pid).pid
    yield Finding(
        "kill -9 of the trainer",
        f"at step {reached:.0f}; {time.monotonic() - at:.1f} s later another one was past it",
        "goes on by itself",
        again != victim.pid,
    )


def wait_for(context: Context, process: subprocess.Popen[bytes], there: Any, what: str) -> None:
    while not there():
        if process.poll() is not None:
            raise TimeoutError(f"it ended with exit code {process.returncode} before {what}")
        if context.left() < 5:
            raise TimeoutError(f"no time left before {what}")
        time.sleep(0.1)


def trainer(launcher: int) -> psutil.Process:
    for child in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error):
            words = child.cmdline()
            if "asyncrl.launch.role" in words and "trainer" in words:
                return child
    raise TimeoutError("no process of a trainer was found")


def results(run_dir: Path) -> Iterator[Finding]:
    found = summary(run_dir)
    before, after = found["success_before"], found["success_after"]
    yield Finding("sampled success", f"{before:.1%} → {after:.1%}", "≥ 90%", after >= 0.90)
    yield Finding("conserved", account(found["flow"]), "✓", found["conserved"])
    gap, floor = found["logprob_diff_max_same_version"], found["probe_noise_floor"]
    yield Finding(
        "log-probs, trainer against engine",
        f"largest difference {gap:.1e} over {found['logprob_tokens_compared']} tokens",
        "≤ 1e-3",
        gap <= 1e-3,
        f"float32; by the shape of the batch alone {floor:.1e}",
    )
    yield Finding(
        "speed",
        f"{found['steps']} steps in {found['seconds']:.0f} s, start and recovery included; "
        f"{found['tokens_per_s']:.0f} tokens/s; trainer idle {found['trainer_idle_frac']:.0%}",
    )


def newest(run_dir: Path) -> float:
    """The newest step; 0 before the first one."""
    step: float = max((row["training/step"] for row in step_rows(run_dir)[-1:]), default=0.0)
    return step
