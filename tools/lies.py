"""Engines that lie, and honest ones: which the run names as a mismatch, at which step, and what it says.

    python tools/lies.py                              # all lies and all honest runs of the demo: half an hour
    python tools/lies.py --only top_p float32         # some of them

Each lie (tools/faults/lies.py) trains the calculator demo with `weights.on_mismatch=stop`: the run must stop
within `--steps` steps and name the engine. Each honest run must complete without a mismatch. Prints a table,
which docs/background/reliability.md takes. Exits non-zero when something does not hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from common import rows, table, train

LIES = {
    "stale_weights": "confirms every version and keeps its first weights",
    "one_version_behind": "loads the version before the one that it confirms",
    "layer_not_loaded": "loads everything but the first layer",
    "quantized": "rounds each matrix to 8 bits",
    "other_tokenizer": "reads and writes the ids of another tokenizer",
    "shifted_logprobs": "reports each log-prob one token late",
    "reported_temperature": "reports log-probs at temperature 0.7",
    "sampled_temperature": "samples at temperature 0.8, and reports log-probs at 1",
    "top_p": "samples with top_p 0.9, and reports log-probs without",
    "top_p_honest": "samples with top_p 0.9, and says so in its log-probs",
}
HONEST: dict[str, list[str]] = {
    "float32": [],
    "bfloat16": ["model.dtype=bfloat16"],
    "synchronous": ["buffer.max_staleness=0"],
    "old tokens": ["buffer.max_staleness=16", "buffer.target_staleness=16"],
    "LoRA": ["model.lora_rank=8", "trainer.lr=1e-3"],
    "temperature 0.7": ["rollout.temperature=0.7"],
    "fold": ["rollout.history=fold"],
    "engine and trainer take turns": ["engine.colocated=1"],
}


def train_demo(run_dir: Path, name: str, steps: int, overrides: list[str]) -> tuple[bool, list[str]]:
    """Train the demo. Returns whether an engine was named as a mismatch, and a line of the table."""
    overrides = [f"total_steps={steps}", "data.test=''", "weights.on_mismatch=stop", *overrides]
    result = train(name.replace(" ", "_"), run_dir, overrides)
    step_rows = rows(run_dir / name.replace(" ", "_"))

    error = str(result.get("error") or "")
    is_named = result["exit_code"] != 0 and "weights.on_mismatch" in error

    def largest(metric: str) -> float:
        return max((row.get(metric, 0.0) for row in step_rows), default=0.0)

    measured = [
        f"{largest('training/step'):.0f}",
        f"{largest('weights/probe_logprob_diff_median'):.1e}",
        f"{largest('rollout_corr/logprob_diff_mean'):.1e}",
        f"{largest('weights/sample_surprisal_z'):.1f} ({largest('weights/sample_tokens'):,.0f})",
    ]
    return is_named, [*measured, error.partition(";")[0] or "no mismatch"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*LIES, *HONEST], help="these runs only")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    lines: list[list[str]] = []
    failures: list[str] = []
    with TemporaryDirectory() as directory:
        for name in args.only or [*LIES, *HONEST]:
            is_lie = name in LIES
            overrides = [f"engine.name=tools/faults/lies.py:{name}"] if is_lie else HONEST[name]
            is_named, measured = train_demo(Path(directory), name, args.steps, overrides)
            lines.append([LIES.get(name, f"honest: {name}"), *measured])
            print(lines[-1], flush=True)
            if is_named != is_lie:
                failures.append(name)

    header = ["engine", "steps", "probe gap", "token gap", "surprisal z (tokens)", "what the run says"]
    print(table(header, lines))
    if failures:
        print(f"not as expected: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
