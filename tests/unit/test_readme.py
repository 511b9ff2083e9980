"""README.md: short, and its example does what it says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.api.requests import KEY_OF_ARGUMENT
from asyncrl.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MAX_BYTES = 10_000


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


def test_the_call_beside_trls_is_one() -> None:
    """Its right half is Python, and its keywords are arguments or keys."""
    section = README.partition("**TRL**")[2].partition("**verl**")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    column = code.index("# asyncrl")
    halves = [(line[:column].rstrip(), line[column:]) for line in code.splitlines()]
    tree = ast.parse("\n".join(right for _, right in halves))
    (call,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ast.parse("\n".join(left for left, _ in halves))
    assert ast.unparse(call.func) == "asyncrl.train"
    assert {keyword.arg for keyword in call.keywords} <= {*KEY_OF_ARGUMENT, *RunConfig.__struct_fields__}
