"""The calculator demo here and in TRL's GRPOTrainer, on the same cores: wall and CPU seconds per step.

    python tools/bench/trl.py              # about 10 minutes, and one to train the demo
    python tools/bench/trl.py --start      # with the model that the demo starts with: shorter episodes

Same model (the one that the demo ends with), data, tool, prompts and limits of length, batches of 8 groups of
8; both with a learning rate of 1e-30, so that both sample the same model to the end. TRL (installed beside
the runs, over the packages that are here) trains as fast as it can on a CPU: float32, the whole batch in one
forward and backward, no KL, no checkpoints, transformers' batched `generate` with a KV cache, its own loop of
tool calls; with one thread, with two, and with two and one generation for two steps, the second of which
trains at a lag of 1, as asyncrl does. That loop waits for the calls of one episode after the other: with a
slow tool its delays add up. (transformers' continuous batching took over four times the CPU seconds.)

The two take turns; medians and ranges are of the turns, CPU seconds of all processes. The first steps are
left out, of asyncrl the last ones, too (async_ratio.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from async_ratio import BATCH, MODES, WORKLOADS, Figures, Plan, spread
from common import ROOT, summary, table, train

VERSION = "1.16.0"
STEPS = {"zero": (14, 2), "tail": (2, 1)}  # of TRL, and those of them that are left out
WAYS = {"1 thread": (1, 1), "2 threads": (2, 1), "2 threads, 2 steps a generation": (2, 2)}
HEADER = ["", "wall s/step", "CPU s/step", "slept in tools, s/step", "tokens/step", "wall by ours",
          "CPU by ours"]  # fmt: skip
MODEL = ROOT / "examples" / "multiturn" / "calculator" / "model"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=STEPS, default=[*STEPS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="of TRL, with `zero`")
    parser.add_argument("--start", action="store_true", help="the model that the demo starts with")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "trl")
    parser.add_argument("overrides", nargs="*", help="of asyncrl")
    options = parser.parse_args()
    folder = options.run_dir.resolve()
    packages = installed(folder / f"trl-{VERSION}")
    model = MODEL if options.start else trained(folder)
    plan = [f"model.path={model}", *options.overrides]
    ways = options.ways
    for name in options.workloads:
        found: dict[str, list[Figures]] = defaultdict(list)
        for turn in range(options.repeats):
            found["asyncrl"].append(Plan(folder, plan, 0, turn).mode(name, "async", MODES["async"]))
            print(name, found["asyncrl"][-1], flush=True)
            for way in ways:
                found[way].append(job(folder, packages, model, name, way, turn))
                print(name, way, found[way][-1], flush=True)
        report(name, found)
        each = [way for way in ways if WAYS[way][1] == 1]  # the slow tool: only the fastest of these
        ways = [min(each, key=lambda way: _median(found[way], "T"))]


def installed(folder: Path) -> Path:
    """TRL, and what it needs that is not here, without the packages that are."""
    if not (folder / "trl").exists():
        missing = [
            name for name in ("accelerate", "datasets", "pandas") if not importlib.util.find_spec(name)
        ]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"trl=={VERSION}", *missing], check=True)
    return folder


def trained(folder: Path) -> Path:
    """The model that the demo ends with; it is trained once."""
    if not summary(folder / "demo"):
        train("demo", folder, ["validation.samples=0", "data.test=''", "observe.plot=false"])
    return folder / "demo" / "checkpoints" / f"step-{summary(folder / 'demo')['steps']}" / "hf"


def job(folder: Path, packages: Path, model: Path, name: str, way: str, seed: int) -> Figures:
    """One run of trl_job.py; SystemExit when it fails."""
    steps, warm = STEPS[name]
    threads, together = WAYS[way]
    script = ROOT / "tools" / "bench" / "trl_job.py"
    command = [sys.executable, "-P", str(script), f"--steps={steps}", f"--warm={warm}", f"--seed={seed}"]
    command += [f"--model={model}", f"--threads={threads}", f"--out={folder / 'trl-out'}"]
    command += [f"--generate-for={together}"]
    if delay := WORKLOADS[name].delay:
        command += ["--delay", *(part.partition(": ")[2] for part in delay.split(", "))]
    own = {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": str(threads)}
    own |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, timeout=1200)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return figures(json.loads(done.stdout.splitlines()[-1]), warm)


def figures(run: dict[str, list[dict[str, float]]], warm: int) -> Figures:
    """Per step, without the first `warm` ones."""
    first, last, steps = run["rows"][warm - 1], run["rows"][-1], len(run["rows"]) - warm
    names = {"T": "time", "cpu": "cpu", "slept": "slept"}
    lengths = [row["completions/mean_length"] for row in run["logs"] if row["step"] > warm]
    per_step = {key: (last[name] - first[name]) / steps for key, name in names.items()}
    return per_step | {"tokens": statistics.mean(lengths) * BATCH}


def report(name: str, found: dict[str, list[Figures]]) -> None:
    """The table; the last two columns are ratios within each turn."""
    print(f"\n{name}: {WORKLOADS[name].meaning}\n")
    ours, *_ = found.values()
    lines = []
    for label, turns in found.items():
        keys = {"T": ".2f", "cpu": ".2f", "slept": ".1f", "tokens": ".0f"}
        line = [spread([one.get(key, 0.0) for one in turns], form) for key, form in keys.items()]
        for key in ("T", "cpu"):
            line.append(spread([other[key] / own[key] for other, own in zip(turns, ours, strict=True)]))
        lines.append([label if turns is ours else f"TRL, {label}", *line])
    print(table(HEADER, lines), flush=True)


def _median(turns: list[Figures], key: str) -> float:
    return statistics.median(one[key] for one in turns)


if __name__ == "__main__":
    main()
