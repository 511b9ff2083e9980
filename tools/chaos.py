"""Kill -9 at random moments: the run must complete with the flow identity exact.

    python tools/chaos.py --kills 6 --steps 40 --victims rollout trainer coordinator

Each kill waits until the run has committed a step since the last one. Exits non-zero when the run does not
complete, the identity does not hold, or a process is left behind.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import psutil
from common import ROOT, roles, rows, start, summary


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--victims", nargs="+", default=["rollout", "trainer", "coordinator"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=900.0)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "chaos")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    name = f"chaos-{int(time.time())}"
    overrides = [
        *(f"total_steps={options.steps}", "checkpoint.every=5", "launch.restarts=20"),
        *("launch.lease=5", "data.test=''", "observe.plot=false", *options.overrides),
    ]
    process = start(name, options.run_dir, overrides)
    run, killed = options.run_dir / name, []
    deadline, at_step = time.monotonic() + options.deadline, 0
    seen: set[psutil.Process] = set()
    while process.poll() is None and time.monotonic() < deadline:
        alive = roles(process.pid)
        seen |= set(alive.values())
        step = max((int(row["training/step"]) for row in rows(run)), default=0)
        victims = [role for role in alive if role.rsplit("-", 1)[0] in options.victims]
        if len(killed) < options.kills and step > at_step and victims:
            time.sleep(dice.uniform(0.0, 2.0))  # anywhere in a step
            victim = dice.choice(victims)
            try:
                alive[victim].kill()
            except psutil.NoSuchProcess:
                continue
            killed.append((step, victim))
            print(f"step {step}: killed {victim}", flush=True)
            at_step = step
        time.sleep(0.2)
    if process.poll() is None:
        process.kill()
        print("FAILED: not done by the deadline")
        return 1
    result = summary(run)
    left = [p.pid for p in seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    good = (
        process.returncode == 0
        and bool(result.get("conserved"))
        and not left
        and len(killed) == options.kills
    )
    print(f"killed: {killed}")
    print(f"exit {process.returncode}, steps {result.get('steps')}, flow {result.get('flow')}, "
          f"conserved {result.get('conserved')}, left behind {left}")  # fmt: skip
    print("OK" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
