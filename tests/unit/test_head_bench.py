"""The benchmark of the output layer compares two ways to the same numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_both_ways_run_and_are_tabulated() -> None:
    command = [sys.executable, "tools/bench/head.py", "--tokens", "32", "--vocab", "64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    sums = dict(re.findall(r"^\| (naive|chunked) .*\| (-[\d.]+) \|$", done.stdout, re.M))
    assert sums.keys() == {"naive", "chunked"} and sums["naive"] == sums["chunked"], done.stdout
