"""Show the current state of a run from another terminal, or why the run ended."""

from __future__ import annotations

import fcntl
import platform
import sys
import time
from pathlib import Path

import msgspec

from asyncrl.commands import command_parser, find_run
from asyncrl.observe.alerts import Alert, unless_quoted
from asyncrl.observe.files import read_status, read_summary
from asyncrl.observe.metrics import OF_STEP, clock_text, duration_text, figures
from asyncrl.observe.summary import NOT_CONSERVED, account_line
from asyncrl.observe.wrapping import fit_terminal
from asyncrl.values import printable

NO_STEPS = "evaluation (no training steps),"
WATCH_INTERVAL = 2.0  # Seconds between two reports of --watch.
SILENT_SECONDS = 5.0  # Seconds after which a status is old; there are two per second.


def main(argv: list[str]) -> int:
    parser = command_parser("status", __doc__)
    parser.add_argument("run", nargs="?", default="", help="name or directory of a run (default: the newest)")
    parser.add_argument(
        "--watch", action="store_true", help=f"repeat every {WATCH_INTERVAL:g} s until the run ends"
    )
    options = parser.parse_intermixed_args(argv)
    run_dir = find_run(options.run_dir, options.run)
    while True:
        now = time.time()
        ending_text = describe_ending(run_dir)
        lines = describe_run(run_dir, ending_text, now)
        print(fit_terminal("\n".join(map(printable, lines)), sys.stdout), flush=True)
        if ending_text or not options.watch:
            return 1 if any(NOT_CONSERVED in line for line in lines) else 0
        time.sleep(WATCH_INTERVAL)


def describe_ending(run_dir: Path) -> str:
    """Return how a run ended, and why; '' while its launcher lives, or may live on another machine."""
    if not run_dir.exists():
        return "deleted"
    summary = read_summary(run_dir)
    status = read_status(run_dir)

    if error := summary.get("error") or status.get("error"):
        return f"{summary.get('outcome', 'failed')}: {error}"
    if "outcome" in summary or "code" in status:
        return str(summary.get("outcome", "ended"))

    if launcher_lives(run_dir):
        return ""
    return (
        "killed: the launcher exited without recording an outcome; resume=auto continues from the last "
        "checkpoint"
    )


def launcher_lives(run_dir: Path) -> bool:
    """Return whether the launcher that locked the run directory lives, as far as this machine can see: the
    kernel holds the launcher's lock as long as the launcher lives."""
    try:
        with (run_dir / "lock").open() as lock:
            if lock.read().partition(" on ")[2] != platform.node():
                return True
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def describe_run(run_dir: Path, ending_text: str, now: float) -> list[str]:
    """Return lines: phase and step, the last step, alerts, the account of episodes, and waits."""
    status = read_status(run_dir)
    if "phase" not in status:
        return [
            f"{run_dir}: {ending_text or 'starting: the coordinator has not reported yet'}; logs: "
            f"{run_dir / 'logs'}"
        ]

    status_age = now - status["time"]
    silent_text = (
        f", silent for {duration_text(status_age)}" if status_age > SILENT_SECONDS and not ending_text else ""
    )
    progress_text = f"step {status['step']} of {status['total_steps']}" if status["total_steps"] else NO_STEPS
    steps_line = f"{progress_text} after {clock_text(status['seconds'])}"

    gauges = status["gauges"]
    figures_label = "last step" if status["metrics"] else "so far"
    figures_line = (
        figures_text := ", ".join(figures(OF_STEP, gauges | status["metrics"]))
    ) and f"{figures_label}: {figures_text}"

    alerts = [] if ending_text else msgspec.convert(status.get("alerts", []), list[Alert])
    failed = unless_quoted(status["failed"], alerts)
    account_text = account_line(gauges) if status["total_steps"] else ""  # An evaluation issues no episodes.
    detail_lines = filter(None, (*(alert.line for alert in alerts), figures_line, account_text, failed))

    wait_lines = [] if ending_text else [f"  {wait}" for wait in status["waits"]]
    lines = [f"{run_dir}: {ending_text or status['phase'] + silent_text}", steps_line, *detail_lines]
    return [*lines, "waits:", *wait_lines] if wait_lines else lines
