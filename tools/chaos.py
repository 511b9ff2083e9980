"""Faults of every kind, at random moments of a run: it must complete, and nothing may be lost or done twice.

    python tools/chaos.py --faults 20 --kinds kill pause cut
    python tools/chaos.py --disk --each-once --lease 2                        # a minute
    python tools/chaos.py --experiment smollm2 --faults 30 --every 10
    python tools/chaos.py --kinds kill pause --faults 10 engine=sglang_cpu    # of servers, too
    python tools/chaos.py --kinds kill pause --lease 2 engine.colocated=1     # never both sides at once

Each fault waits until the run has committed `--every` steps since the one before has passed. After the last
one, or at Ctrl-C, the run is interrupted, or goes on to its `--steps`. After each fault, and at the end:
conservation, each trajectory once, the bound on staleness; at the end also learning, and that no process,
file in shared memory or listening socket is left. Prints a table by kind, which
docs/dev/faults.md takes. Exits non-zero when something does not hold. Faults of the disk need a
run directory and a /dev/shm in small tmpfs: `--disk`, which the tool mounts in a namespace of its own
(`unshare`).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from common import ROOT, rows, summary, table
from faults.kinds import FAULTS, SERVED
from faults.target import Target

from asyncrl.launch.process import INTERRUPTED
from asyncrl.weights.disk import SHARED_MEMORY
from tests.fakes.audit import reward, running, troubles, troubles_at_end

Together = list[tuple[str, str]]  # kinds and victims, at once
DISK = ("full-disk", "full-memory", "read-only")
DISK_MB = 512
UNDER_WAY = 0.5  # seconds in which a commit that was sent before a fault is written
ONLY_DEMO = ("hang",)
ENDLESS = 100_000  # steps
EACH_ONCE: list[Together] = [
    [("pause", "rollout"), ("pause", "trainer"), ("pause", "coordinator"), ("locked-store", "")],
    [("held", ""), ("hang", "")],
    [("full-disk", ""), ("slow", "")],
    [("full-memory", ""), ("duplicated", ""), ("read-only", "")],
    [("corrupted", ""), ("kill", "rollout"), ("segment-damaged", "coordinator")],
    [("weights-gone", ""), ("cut", ""), ("segment-cut", ""), ("second-launcher", "")],
    [("weights-damaged", "rollout"), ("checkpoint-damaged", "trainer")],
    [("launcher", "")],
]


@dataclass
class Happened:
    """A fault, or some faults at once: begin, end, and when the next step was committed.

    `steps`: the last step before the fault, and that next step.
    """

    name: str
    at: float
    steps: tuple[int, int] = (0, 0)
    healed: float = 0.0
    recovered: float = 0.0
    cut_turns: int = 0  # durable turns of episodes in flight that are sampled again
    in_flight: int = 0


def schedule(kinds: list[str], faults: int, servers: bool, dice: random.Random) -> list[Together]:
    """Return kinds and victims in turn, each round in another order."""
    every = [(kind, victim) for kind in kinds for victim in FAULTS[kind].victims]
    every = [fault for fault in every if servers or fault[1] not in SERVED]
    drawn: list[tuple[str, str]] = []
    while len(drawn) < faults:
        drawn += dice.sample(every, len(every))
    return [[fault] for fault in drawn[:faults]]


def do(target: Target, together: Together) -> Happened:
    """Do a fault, or some faults at once, and wait until the run has committed another step."""
    name = " + ".join(f"{kind} {victim}".strip() for kind, victim in together)
    print(f"step {target.step}: {name}", flush=True)
    before = running(target.run)
    first = target.step

    with ExitStack() as stack:
        for kind, victim in together:
            stack.enter_context(FAULTS[kind].happen(target, victim))
        happened = Happened(name, time.monotonic(), in_flight=len(before))
        time.sleep(UNDER_WAY)
        step = target.step
        time.sleep(max(0.0, max(FAULTS[kind].leases for kind, _ in together) * target.lease - UNDER_WAY))

    happened.healed = time.monotonic()
    target.until(lambda: target.step > step, f"step after {name}")
    happened.recovered = time.monotonic()
    happened.steps = (first, target.step)
    after = running(target.run)
    happened.cut_turns = sum(max(0, turns - after[uid]) for uid, turns in before.items() if uid in after)

    return happened


def effective(commits: dict[int, float], touched: set[int]) -> float:
    """Share of the time since the first commit that went into training: the seconds of steps that no fault
    touched, and for each of the others the median of these. Checkpoints are in it. `commits`: seconds since
    the beginning, by step."""
    took = {step: at - commits[step - 1] for step, at in commits.items() if step - 1 in commits}
    quiet = [seconds for step, seconds in took.items() if step not in touched]
    quiet_seconds = statistics.median(quiet) * (len(took) - len(quiet)) if quiet else 0.0
    return (sum(quiet) + quiet_seconds) / sum(took.values()) if took else 0.0


def report(done: list[Happened], step_s: float) -> str:
    """By kind: how often, how long the fault lasted and how long until the next step, in seconds."""
    by_kind: dict[str, list[Happened]] = defaultdict(list)
    for outcome in done:
        by_kind[outcome.name].append(outcome)

    lines = []
    for name, outcomes in sorted(by_kind.items()):
        lasted = [outcome.healed - outcome.at for outcome in outcomes]
        took = [outcome.recovered - outcome.at for outcome in outcomes]
        flying = sum(outcome.in_flight for outcome in outcomes)
        numbers = (statistics.median(lasted), statistics.median(took), max(took))
        again = sum(outcome.cut_turns for outcome in outcomes)
        lines.append([name, str(len(outcomes)), *(f"{n:.1f}" for n in numbers), f"{again} of {flying}"])

    head = ["fault", "times", "lasted, s (median)", "next step after, s (median)", "max"]
    head.append("durable turns sampled again, of episodes in flight")
    return table(head, lines) + f"\n\nA step: {step_s:.2f} s (median of all)."


def left_behind(target: Target, shared: set[str]) -> list[str]:
    """Name the processes, files in shared memory and listening sockets that are left of an ended run."""
    remains = [f"process {process.pid}" for process in target.left(10)]
    remains += [
        f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared if target.run.name in name
    ]

    for proxy in target.proxies:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", proxy.target)) == 0:
                remains.append(f"port {proxy.target}")

    return remains


def play(target: Target, plan: list[Together], every: int, steps: int, done: list[Happened]) -> None:
    """The faults of a schedule, one after another, until Ctrl-C at the latest, in a run that then goes on to
    its `steps`, or is interrupted. AssertionError when something does not hold afterwards."""
    target.launch()
    with suppress(KeyboardInterrupt):
        for together in plan:
            due_step = target.step + every
            target.until(lambda due=due_step: target.step >= due, f"step {due_step}")
            time.sleep(target.dice.uniform(0.0, 1.0))  # anywhere in a step
            done.append(do(target, together))
            if run_troubles := troubles(target.run):
                raise AssertionError(f"after {done[-1].name}: {run_troubles}")

    if not steps:
        target.launcher.send_signal(signal.SIGINT)
    code = target.launcher.wait(target.deadline)
    assert code == (0 if steps else INTERRUPTED), f"exited with {code}:\n{target.text()[-3000:]}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of the run (default: as many as the faults need)"
    )
    parser.add_argument(
        "--each-once",
        action="store_true",
        help="inject each kind once, some at the same time (takes a minute)",
    )
    parser.add_argument("--every", type=int, default=1, help="number of steps between two faults")
    parser.add_argument("--kinds", nargs="+", choices=sorted(FAULTS), default=sorted(FAULTS))
    parser.add_argument("--experiment", default="calculator")
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "chaos")
    parser.add_argument(
        "--disk",
        action="store_true",
        help="put the run directory and /dev/shm on small file systems that can fill up",
    )
    parser.add_argument(
        "--deadline", type=float, default=240.0, help="maximum number of seconds until the next step"
    )
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if options.disk and subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        print("cannot create a namespace on this machine; disk faults are left out")
        options.disk = False

    if options.disk and not os.environ.get("CHAOS_NAMESPACE"):
        os.environ["CHAOS_NAMESPACE"] = "1"
        os.execvp("unshare", ["unshare", "-rm", sys.executable, *sys.argv])

    if options.disk:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        for mount_point in (options.run_dir, SHARED_MEMORY):
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", str(mount_point)]
            subprocess.run(mount, check=True)

    kinds = [kind for kind in options.kinds if options.disk or kind not in DISK]
    kinds = [kind for kind in kinds if options.experiment == "calculator" or kind not in ONLY_DEMO]
    dice = random.Random(options.seed)
    run = options.run_dir / f"chaos-{int(time.time())}"
    servers = any(override.startswith("engine=sglang") for override in options.overrides)
    plan = schedule(kinds, options.faults, servers, dice)
    if options.each_once:
        plan = [[fault for fault in together if fault[0] in kinds] for together in EACH_ONCE]

    overrides = [
        f"total_steps={options.steps or ENDLESS}",
        "checkpoint.every=5",
        "data.test=''",
        *options.overrides,
    ]

    shared = set(os.listdir("/dev/shm"))
    target = Target(
        run,
        *overrides,
        experiment=options.experiment,
        lease=options.lease,
        deadline=options.deadline,
        seed=options.seed,
    )

    problems: list[str] = []
    began = time.monotonic()

    done: list[Happened] = []
    with target:
        try:
            play(target, plan, options.every, options.steps, done)
        except AssertionError as error:
            problems.append(str(error))
        else:
            problems += troubles(run) + troubles_at_end(run) + left_behind(target, shared)

    wall = time.monotonic() - began
    committed = [row for row in rows(run) if "timing_s/step" in row]
    steps = [row["timing_s/step"] for row in committed]
    commits = {int(row["training/step"]): row["time_s"] for row in committed}
    touched = {step for outcome in done for step in range(outcome.steps[0] + 1, outcome.steps[1] + 1)}
    step_s = statistics.median(steps) if steps else 0.0
    before = reward(run, first=True)
    after = reward(run, first=False)
    if len(steps) >= 40 and after <= before:
        problems.append(
            f"nothing was learned: the reward was {before:.3f} at first and {after:.3f} at the end"
        )

    print(report(done, step_s))
    print(f"{len(done)} faults in {wall:.0f} s; reward {before:.3f} -> {after:.3f}; effective training time "
          f"{effective(commits, touched):.0%}; flow {summary(run).get('flow')}")  # fmt: skip
    for log in sorted((run / "logs").glob("*.log")) if problems else []:
        print(f"== {log.name}", log.read_text()[-3000:], sep="\n")
    print(*problems, "FAILED" if problems else "OK", sep="\n")

    if options.disk:
        shutil.rmtree(run, ignore_errors=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
