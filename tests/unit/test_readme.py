"""README.md: short, and its example does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MAX_BYTES = 9000


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(README.encode()) <= MAX_BYTES, "move details to a page of docs/"


@pytest.mark.slow
def test_the_example_is_checked_as_it_says(tmp_path: Path) -> None:
    section = README.partition("## Your own task")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (printed,) = re.findall(r"```\n(sample .*?)```", section, re.DOTALL)
    (tmp_path / "task.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "task.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(printed.splitlines()) == 3 and set(printed.splitlines()) <= set(lines)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["task.py"], (
        "a dry run leaves nothing behind"
    )
