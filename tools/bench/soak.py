"""Memory of each role over a long run: growth after the first minutes must be under 3%.

    python tools/bench/soak.py --minutes 30

Samples the resident memory of every process and compares the median of the minutes right after the warm-up
with the median of the last ones.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from pathlib import Path

import psutil
from common import ROOT, start, summary, table

from tests.fakes.processes import role_processes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "soak")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()

    name = f"soak-{int(time.time())}"
    endless = ["total_steps=1000000", "trainer.lr_schedule=constant", "buffer.filter_zero_variance=false"]
    process = start(name, options.run_dir, [*endless, *options.overrides])

    samples: dict[str, list[tuple[float, float]]] = {}
    begin = time.monotonic()
    while (minute := (time.monotonic() - begin) / 60) < options.minutes and process.poll() is None:
        everyone = {"launcher": psutil.Process(process.pid)} | role_processes(process.pid)
        for role, child in everyone.items():
            try:
                samples.setdefault(role, []).append((minute, child.memory_info().rss / 1e6))
            except psutil.NoSuchProcess:
                continue
        time.sleep(10)

    process.send_signal(signal.SIGINT)
    process.wait(60)
    (options.run_dir / f"{name}.json").write_text(json.dumps(samples))

    window = max(1.0, (options.minutes - options.warm_up) / 10)
    lines = []
    for role, role_samples in samples.items():
        early = [mb for at, mb in role_samples if options.warm_up <= at < options.warm_up + window]
        late_values = [mb for at, mb in role_samples if at >= options.minutes - window]
        if early and late_values:
            a = statistics.median(early)
            b = statistics.median(late_values)
            lines.append([role, f"{a:.1f}", f"{b:.1f}", f"{100 * (b / a - 1):+.2f}%"])

    print(table(["role", f"MB at minute {options.warm_up:g}", "MB at the end", "growth"], lines))
    result = summary(options.run_dir / name)
    print({key: result.get(key) for key in ("steps", "seconds", "conserved", "outcome")})


if __name__ == "__main__":
    main()
