"""Engines that lie, honest engines, and a reward that one answer games: what a run says of each, and when.

    python tools/lies.py > table.md                   # all: 70 minutes on two very busy cores
    python tools/lies.py --only top_p float32         # some of them

Each lie (tools/faults/lies.py: embedded engines; tools/faults/sglang_lies.py: SGLang servers) trains the
calculator demo with `weights.on_mismatch=stop`: the run must stop within `--steps` steps and name the engine.
Each honest run must complete without a mismatch, after at least HONEST_TOKENS sampled tokens of its engines
were tested. The gamed reward must raise an alert, and the honest reward must not. Prints the table of
docs/dev/faults.md, a line after each run; progress and problems go to standard error. Exits non-zero when
something does not hold.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from common import ROOT, SINGLE_THREAD, rows, summary, table, table_line

from asyncrl.observe.alerts import ALERT_RULES, find_alerts
from asyncrl.observe.metrics import Row
from tests.fakes.forked import asyncrl

RUN_SECONDS = 600.0  # deadline of a run
HONEST_TOKENS = 1024  # sampled tokens of an honest run's engines that are tested, at least

LORA = ("model.lora_rank=8", "trainer.lr=1e-3")
SGLANG = ("engine=sglang_cpu", "engine.servers=1", "rollout.slots=64", "launch.start_timeout=300")
LARGE_BATCHES = "buffer.groups_per_batch=24"  # the trainer still holds a version when its samples arrive
# The trainer waits for new episodes at each version: all samples are tested, and all trained tokens are of
# the trained version.
SYNCHRONOUS = "buffer.max_staleness=0"


class Case(NamedTuple):
    """A run of the demo: its name in the table, and its settings. `is_small`: a lie that ten steps need not
    show: the run may also complete."""

    description: str
    settings: tuple[str, ...] = ()
    is_small: bool = False


LIES = {
    "stale_weights": Case("confirms every version and keeps its first weights"),
    "one_version_behind": Case("loads the version before the one that it confirms"),
    "layer_not_loaded": Case("loads everything but the first layer"),
    "untied_head": Case(
        "has a copy of the tied output layer, which updates do not reach; synchronous", (SYNCHRONOUS,)
    ),
    "quantized": Case("rounds each matrix to 8 bits"),
    "longer_rope": Case("scales RoPE to a context twice as long"),
    "other_tokenizer": Case("reads and writes the ids of another tokenizer"),
    "prepended_bos": Case("puts a token in front of every prompt"),
    "old_kv": Case("keeps its KV caches over updates, and says that they are new"),
    "bfloat16_kv": Case("keeps its KV cache in bfloat16", is_small=True),
    "stale_labels": Case("says that version 0 sampled every token"),
    "late_labels": Case("says of all tokens of a turn that the version at its end sampled them"),
    "shifted_logprobs": Case("reports each log-prob one token late"),
    "reported_temperature": Case("reports log-probs at temperature 0.7"),
    "sampled_temperature": Case(
        "samples at temperature 0.8, and reports log-probs at 1; synchronous", (SYNCHRONOUS,)
    ),
    "top_p": Case("samples with top_p 0.9, and reports log-probs without; synchronous", (SYNCHRONOUS,)),
    "top_p_honest": Case("samples with top_p 0.9, and says so in its log-probs"),
    "top_k": Case(
        "samples with top_k 20, and reports log-probs without; synchronous", (SYNCHRONOUS,), is_small=True
    ),
    "speculation": Case(
        "accepts every draft with a probability over 0.2, and reports log-probs as if not; synchronous",
        (SYNCHRONOUS,),
    ),
    "stale_seed": Case("samples every request with the same seed; synchronous", (SYNCHRONOUS,)),
    "without_adapter": Case("LoRA: computes without the adapter", LORA),
    "sampled_without_adapter": Case("LoRA: scores with the adapter, and samples without", LORA),
    "old_adapter": Case("LoRA: loads the adapter before the one that it confirms", LORA),
    "swapped_adapters": Case("LoRA: swaps the adapters of gate_proj and up_proj", LORA),
    "adapter_scale": Case("LoRA: scales the adapter by alpha/√rank", LORA),
}
SGLANG_LIES = {
    "keep_weights": Case("SGLang: confirms every version and keeps its first weights"),
    "round_weights": Case("SGLang: rounds each matrix to 8 bits"),
    "sample_colder": Case("SGLang: samples at temperature 0.8, and reports log-probs at 1"),
    "ignore_salts": Case("SGLang: reuses prefixes over updates"),
}
HONEST = {
    "float32": Case("float32"),
    "float32, seed 1": Case("float32, seed 1", ("seed=1",)),
    "float32, seed 2": Case("float32, seed 2", ("seed=2",)),
    "bfloat16": Case("bfloat16", ("model.dtype=bfloat16",)),
    "bfloat16, seed 1": Case("bfloat16, seed 1", ("model.dtype=bfloat16", "seed=1")),
    "bfloat16, seed 2": Case("bfloat16, seed 2", ("model.dtype=bfloat16", "seed=2")),
    "synchronous": Case("synchronous", (SYNCHRONOUS,)),
    "synchronous, bfloat16": Case("synchronous, bfloat16", (SYNCHRONOUS, "model.dtype=bfloat16")),
    "staleness 16": Case(
        "staleness 16",
        ("buffer.max_staleness=16", "buffer.target_staleness=16", "rollout.slots=16"),
    ),
    "LoRA": Case("LoRA", LORA),
    "LoRA, bfloat16": Case("LoRA, bfloat16", (*LORA, "model.dtype=bfloat16")),
    "LoRA, merged": Case("LoRA, merged", (*LORA, "weights.adapters=false")),
    "temperature 0.7": Case("temperature 0.7", ("rollout.temperature=0.7",)),
    "fold": Case("fold", ("rollout.history=fold",)),
    "shifts": Case("engine and trainer taking turns", ("engine.colocated=1",)),
    "shifts, LoRA": Case("engine and trainer taking turns, LoRA", ("engine.colocated=1", *LORA)),
    "SGLang": Case("SGLang", SGLANG),
    "SGLang, bfloat16": Case("SGLang, bfloat16", (*SGLANG, "model.dtype=bfloat16", "seed=1")),
    "SGLang, LoRA": Case("SGLang, LoRA", (*SGLANG, *LORA, "weights.adapters=true")),
    "SGLang, synchronous": Case("SGLang, synchronous", (*SGLANG, SYNCHRONOUS)),
}

# The policy begins with a mixture of guesses and calls of the calculator, which alone solves the task.
GAMED_REWARD = "reward that pays for any guess that begins with a 5"
GAMED_ALERT = "held-out success fell"  # while the training reward rose
GAMED_SETTINGS = ("total_steps=48", "validation.samples=128", "validation.every=8")
REWARDS = {
    "lucky": Case(GAMED_REWARD, (*GAMED_SETTINGS, "rollout.reward=tools/faults/rewards.py:lucky")),
    "final_number": Case("the honest reward", GAMED_SETTINGS),
}


def cases() -> dict[str, Case]:
    """Return all runs."""
    return LIES | SGLANG_LIES | HONEST | REWARDS


def engine_settings(name: str) -> tuple[str, ...]:
    """Return the settings of a lie or of an honest run."""
    if name in LIES:
        engine = "one_version_behind" if name == "old_adapter" else name
        return (LARGE_BATCHES, f"engine.name=tools/faults/lies.py:{engine}", *LIES[name].settings)
    if name in SGLANG_LIES:
        server = ROOT / "tools/faults/sglang_lies.py"
        command = f"engine.server_command=[{ROOT}/.venv-sglang/bin/python,{server},{name}]"
        return (LARGE_BATCHES, *SGLANG, command, *SGLANG_LIES[name].settings)
    return (LARGE_BATCHES, *HONEST[name].settings)


def train(run_dir: Path, name: str, settings: tuple[str, ...]) -> dict[str, object]:
    """Train the demo in a forked process, which has its imports. Returns the summary, with `exit_code`; of a
    run that does not end within RUN_SECONDS, only an error and a code that is not 0."""
    run_dir.mkdir(exist_ok=True)
    arguments = ["train", "experiment=calculator", f"name={name}", f"run_dir={run_dir}"]
    process = asyncrl(
        [*arguments, "observe.console=plain", *settings],
        run_dir / f"{name}.out",
        ROOT,
        os.environ | SINGLE_THREAD,
    )
    try:
        exit_code = process.wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return {"exit_code": -1, "error": f"the run did not end within {RUN_SECONDS:g} s"}
    finally:
        process.kill()  # ends the launcher's processes, too
    return summary(run_dir / name) | {"exit_code": exit_code}


def train_with_engine(run_dir: Path, name: str, steps: int) -> tuple[str, list[str]]:
    """Train with one of the engines. Returns what does not hold, or '', and a line of the table."""
    run_name = "".join(letter if letter.isalnum() else "_" for letter in name)
    settings = (f"total_steps={steps}", "data.test=''", "weights.on_mismatch=stop", *engine_settings(name))
    result = train(run_dir, run_name, settings)
    step_rows = rows(run_dir / run_name)

    error = str(result.get("error") or "")
    failure = ""
    if result["exit_code"] != 0:
        failure = error or f"exit code {result['exit_code']}"
    is_named = "weights.on_mismatch" in failure

    def largest(metric: str) -> float:
        return max((row.get(metric, 0.0) for row in step_rows), default=0.0)

    sampled_tokens = largest("weights/sample_tokens")
    problem = ""
    if name in HONEST:
        problem = failure
        if not problem and sampled_tokens < HONEST_TOKENS:
            problem = f"only {sampled_tokens:.0f} sampled tokens were tested"
    elif not is_named:
        problem = failure or ("" if cases()[name].is_small else "not named")

    return problem, [
        moment_of(error) if is_named else "never",
        f"{largest('weights/probe_logprob_diff_median'):.1e}",
        f"{largest('rollout_corr/logprob_diff_mean'):.1e}",
        f"{largest('weights/sample_surprisal_z'):.1f} ({sampled_tokens:,.0f})",
        error.partition(";")[0] or "no mismatch",
    ]


def moment_of(error: str) -> str:
    """Return the version or the step that an error names last."""
    return re.findall(r"v\d+|step \d+", error)[-1]


def train_with_reward(run_dir: Path, name: str) -> tuple[str, list[str]]:
    """Train with one of the rewards. Returns what does not hold, or '', and a line of the table."""
    result = train(run_dir, name, REWARDS[name].settings)
    alert_step = first_gamed_step(rows(run_dir / name))

    if result["exit_code"] != 0:
        problem = str(result.get("error"))
    elif name == "lucky":
        problem = "" if alert_step is not None else "not named"
    else:
        problem = "" if alert_step is None else f"alert at step {alert_step}"

    if alert_step is None:
        return problem, ["never", "", "", "", "no such alert"]
    return problem, [f"step {alert_step}", "", "", "", f"{GAMED_ALERT}, while the training reward rose"]


def first_gamed_step(step_rows: list[Row]) -> int | None:
    """Return the step after which an alert first says that the reward may be gamed; None if none does."""
    if GAMED_ALERT not in ALERT_RULES:
        raise KeyError(f"no alert is called {GAMED_ALERT!r}")
    for count in range(1, len(step_rows) + 1):
        for alert in find_alerts(step_rows[:count], {}, {}):
            if alert.name == GAMED_ALERT and "while the training reward rose" in alert.what:
                return alert.step
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=cases(), help="these runs only")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    header = ["engine", "named at", "probe gap", "token gap", "surprisal z (tokens)", "what the run says"]
    print(table(header, []), flush=True)

    failures: list[str] = []
    with TemporaryDirectory() as directory:
        for name in args.only or cases():
            started_at = time.monotonic()
            if name in REWARDS:
                problem, measured = train_with_reward(Path(directory), name)
            else:
                problem, measured = train_with_engine(Path(directory), name, args.steps)

            description = cases()[name].description
            print(
                table_line([f"honest: {description}" if name in HONEST else description, *measured]),
                flush=True,
            )
            print(f"{name}: {time.monotonic() - started_at:.0f} s {problem}", file=sys.stderr, flush=True)
            if problem:
                failures.append(f"{name}: {problem}")

    if failures:
        print("not as expected:", *failures, sep="\n  ", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
