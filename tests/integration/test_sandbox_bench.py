"""The benchmark of the sandbox runs, and its table has every step."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_step_is_measured() -> None:
    command = [sys.executable, "tools/bench/sandbox.py", "--times", "1", "--together", "1", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (\S.*?) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \|$", done.stdout, re.M)
    assert [row[0] for row in rows][::6] == ["open", "close"]
    assert all(0 < float(row[1]) < 20_000 for row in rows)
    assert re.search(r"^CPU: \d+ ms; memory: [\d.]+ MiB$", done.stdout, re.M)
