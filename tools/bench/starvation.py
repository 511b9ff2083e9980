"""Whether the trained tokens are like the issued ones, under a heavy tail: by mode, at a learning rate of 0.

    python tools/bench/starvation.py --steps 60       # 10 minutes on two cores

The policy stays the same, so the same episodes are issued in all modes. Two sets of tokens are compared, of
the groups issued at one step (a cohort), once all of them are over. Wanted: the tokens that would have a
coefficient in the loss if all members of a group were compared at once and nothing was too old. Had: those
that had one (their advantage is not 0, their lag is within the bound). An episode counts with its model
tokens; what is compared is the logarithm of its length in tokens, and of its seconds. Effect size: difference
of the means (had - wanted), divided by the standard deviation of what is wanted; below 0: long episodes are
missing. The 95% intervals are bootstrapped over the cohorts. The last quarter of the steps is left out: its
episodes are dropped at the end of the run.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from common import ROOT, table, train

from asyncrl.buffer.payloads import decode_turn
from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State
from asyncrl.buffer.staleness import token_lags
from asyncrl.config import parse
from asyncrl.store.reader import RunReader

LATENCY = "rollout.tool_args.calculator={latency_mean: 0.3, latency_sigma: 1.5}"
COMMON = [
    *(LATENCY, "trainer.lr=1e-30", "trainer.lr_schedule=constant", "validation.samples=0", "data.test=''"),
    "checkpoint.every=0",
]
MODES = {
    "sync": ["buffer.max_staleness=0"],
    "complete": ["buffer.group_policy=complete"],
    "complete, hold": ["buffer.group_policy=complete", "buffer.on_stale=hold"],
    "complete, drop": ["buffer.group_policy=complete", "buffer.on_stale=drop"],
    "partial": ["buffer.group_policy=partial"],
}
RESAMPLES = 2000
EQUAL = 1e-9
HEADER = ["mode", "s/step", "lag", "cohorts", "tokens trained", "log length", "log seconds"]

Rows = np.ndarray  # of a cohort: log length, log seconds, tokens that should count, tokens that did


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "bench-starvation")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    lines = []
    for mode in args.pause_modes:
        name = mode.replace(", ", "-")
        given = [f"total_steps={args.steps}", *COMMON, *MODES[mode], *args.overrides]
        result = train(name, args.run_dir, given)
        found = cohorts(args.run_dir / name, args.steps * 3 // 4)
        trained, wanted = (sum(rows[:, column].sum() for rows in found) for column in (3, 2))
        speed = [f"{result['seconds'] / result['steps']:.2f}", f"{result['lag_mean']:.2f}"]
        effects = [shown(found, column) for column in (0, 1)]
        lines.append([mode, *speed, str(len(found)), f"{trained / wanted:.1%}", *effects])
        print(lines[-1], flush=True)
    print(table(HEADER, lines))


def cohorts(run_dir: Path, steps: int) -> list[Rows]:
    """Those issued before step `steps`."""
    reader = RunReader.open(run_dir)
    bound = parse(msgspec.yaml.decode((run_dir / "config.yaml").read_bytes())).buffer.max_staleness
    rows = defaultdict(list)
    for group in reader.groups():
        if group.issued_step < steps:
            members = reader.members(group.id)
            found = [row(reader, episode, members, group, bound) for episode in members]
            rows[group.issued_step] += found
    reader.close()
    return [np.array(found) for found in rows.values()]


def row(
    reader: RunReader, own: EpisodeRecord, members: list[EpisodeRecord], group: GroupRecord, bound: int
) -> tuple[float, float, int, int]:
    """Of a member: log length, log seconds, tokens that should have a coefficient, tokens that had one."""
    length = own.result.tokens
    reward = own.result.reward
    others = [member.result.reward for member in members if member is not own]
    wanted = length * bool(abs(reward - np.mean(others)) > EQUAL)
    had = 0
    if own.state is State.TRAINED:
        siblings = group.baseline if own.member in group.baseline else group.late_siblings
        compared = [m.result.reward for m in members if m.member in siblings and m is not own]
        if compared and abs(reward - np.mean(compared)) > EQUAL:
            turns = map(decode_turn, list(reader.frames(own.uid, own.turns))[::2])
            lags = [lag for turn in turns for lag in token_lags(turn.spans, own.step)]
            had = sum(lag <= bound for lag in lags)
    return float(np.log(max(1, length))), float(np.log(max(1e-3, own.stats.seconds))), wanted, had


def shown(found: Sequence[Rows], column: int) -> str:
    draws = np.random.default_rng(0).integers(len(found), size=(RESAMPLES, len(found)))
    low, high = np.quantile([effect([found[i] for i in draw], column) for draw in draws], (0.025, 0.975))
    return f"{effect(found, column):+.3f} [{low:+.3f}, {high:+.3f}]"


def effect(found: Sequence[Rows], column: int) -> float:
    rows = np.concatenate(found)
    value = rows[:, column]
    wanted = rows[:, 2]
    had = rows[:, 3]
    mean = np.average(value, weights=wanted)
    spread = np.sqrt(np.average((value - mean) ** 2, weights=wanted))
    return float((np.average(value, weights=had) - mean) / spread)


if __name__ == "__main__":
    main()
