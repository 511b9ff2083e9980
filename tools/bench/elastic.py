"""2 → 8 → 2 rollout workers in one run: six join with tokens, later they are told to leave by SIGTERM.

    python tools/bench/elastic.py [--seconds 60]

The demo's model in engines whose steps take 0.3 s, mostly asleep, so that eight fit on two cores; the
learning rate is next to 0, so that answers stay as long as they are; a batch is as many episodes as eight
workers have slots. Prints for each phase the episodes a second that came back, how many were at work, and
after how many group lives (`async/group_life_s`) since the last worker had joined or left the rate was within
20% of that of the phase's later half. Ends with 1 unless every episode is accounted for, none has failed and
all left with 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, SINGLE_THREAD, start, summary, table

from asyncrl.observe.files import read_status

START_SECONDS = 300.0
KEYS = [
    *(
        f"engine.name={Path(__file__).with_name('paced.py')}:asleep",
        "rollout.workers=2",
        "rollout.slots=8",
        "total_steps=100000",
    ),
    *("buffer.groups_per_batch=16", "buffer.episodes_per_group=4", "trainer.lr=1e-12", "data.test=''"),
    *("checkpoint.every=100000", "observe.plot=false", "launch.lease=30"),
]


class Sample(NamedTuple):
    """Of the run's status: when it was written, episodes that came back so far, those at work, seconds of a
    group, steps."""

    at: float
    back: int
    running: int
    life: float
    step: int


def sample(run_dir: Path) -> Sample | None:
    status = read_status(run_dir)
    gauges = status.get("gauges", {})
    if "flow/issued" not in gauges:
        return None
    back = int(gauges["flow/issued"] - gauges["flow/in_flight"])
    life = gauges.get("async/group_life_s", 0.0)
    return Sample(status["time"], back, int(gauges["async/running"]), life, status["step"])


def watch(run_dir: Path, until: Any) -> list[Sample]:
    """What is seen four times a second until a condition holds; TimeoutError after START_SECONDS."""
    found: list[Sample] = []
    deadline = time.monotonic() + START_SECONDS
    while not until(found):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run_dir}: nothing more happens, see its logs")
        time.sleep(0.25)
        if (now := sample(run_dir)) and (not found or now.at > found[-1].at):
            found.append(now)
    return found


def rate(samples: Sequence[Sample]) -> float:
    first, last = samples[0], samples[-1]
    return (last.back - first.back) / max(1e-9, last.at - first.at)


class Phase(NamedTuple):
    workers: int
    rate: float  # episodes a second, in its later half
    running: float
    life: float  # seconds of a group
    followed: float  # seconds until the rate was near that


def phase(workers: int, samples: Sequence[Sample]) -> Phase:
    half = samples[len(samples) // 2 :]
    final, running = rate(half), statistics.mean(one.running for one in half)
    life = statistics.median(one.life for one in half)
    followed = samples[-1].at - samples[0].at
    for begin in samples:  # windows of a group life
        window = [one for one in samples if begin.at <= one.at <= begin.at + life]
        if len(window) > 2 and abs(rate(window) / final - 1) < 0.2:
            followed = begin.at - samples[0].at
            break
    return Phase(workers, final, running, life, followed)


def join(run_dir: Path, folder: Path, number: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "asyncrl.cli"]
    token = subprocess.run(
        [*command, "invite", str(run_dir)], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with (folder / f"joined-{number}.out").open("wb") as out:
        process = subprocess.Popen(
            [*command, "worker", "--join", "-", "--run-dir", str(folder / f"joined-{number}")],
            cwd=ROOT, env=os.environ | SINGLE_THREAD, stdin=subprocess.PIPE, stdout=out, stderr=out,
        )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(token)
    process.stdin.close()
    return process


def workers_are(run_dir: Path, count: int) -> Any:
    return lambda _: int(read_status(run_dir).get("gauges", {}).get("async/workers", 0)) == count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of a phase")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    launcher, run_dir = start("run", folder, KEYS), folder / "run"
    joined: list[subprocess.Popen[bytes]] = []

    def steady(workers: int) -> Phase:
        watch(run_dir, workers_are(run_dir, workers))
        began = time.time()
        return phase(workers, watch(run_dir, lambda _: time.time() - began > options.seconds))

    try:
        watch(run_dir, lambda seen: bool(seen) and seen[-1].step >= 3)
        phases = [steady(2)]
        joined = [join(run_dir, folder, number) for number in range(6)]
        phases.append(steady(8))
        for process in joined:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in joined]
        phases.append(steady(2))
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(120)
    finally:
        for process in (launcher, *joined):
            process.kill()
            process.wait(60)
    lines = [
        [
            str(one.workers),
            f"{one.rate:.2f}",
            f"{one.running:.0f}",
            f"{one.life:.1f}",
            f"{one.followed / one.life:.1f}",
        ]
        for one in phases
    ]
    print(table(["workers", "episodes/s", "at work", "group life, s", "followed after, lives"], lines))
    found = summary(run_dir)
    flow = found["flow"]
    print(
        f"left with {codes}; {flow}; conserved: {found['conserved']}; failed: {found.get('failed', 'none')}"
    )
    sys.exit(0 if found["conserved"] and not any(codes) and not flow["failed"] else 1)


if __name__ == "__main__":
    main()
