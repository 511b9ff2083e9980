"""The tutorials do what they say: their files are written and their commands run in an empty directory.

A block that begins with `# NAME` and a suffix is a file; Hydra wants `# @package` above that. A block of
commands after `<!-- test -->` is run, one after `<!-- test: long -->` in `make long` only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.composition import compose

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = [page for page in sorted((ROOT / "docs/start").glob("*.md")) if "<!-- test" in page.read_text()]
BLOCK = re.compile(r"(?:^<!-- (?P<mark>test(?:: long)?) -->\n)?^```\w*\n(?P<text>.*?)^```", re.M | re.S)
FILE = re.compile(r"(?:# @package _global_\n)?# (?P<name>[\w/]+\.\w+)\n")


def follow(page: Path, here: Path, long: bool) -> int:
    """Write the files and run the commands of a tutorial. Returns how many blocks were run."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = 0
    for block in BLOCK.finditer(page.read_text()):
        text = block["text"]
        if named := FILE.match(text):
            (here / named["name"]).parent.mkdir(parents=True, exist_ok=True)
            (here / named["name"]).write_text(text)
        elif block["mark"] == "test" or (long and block["mark"]):
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=here,
                env=variables,
                capture_output=True,
                text=True,
                timeout=900 if long else 60,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            run += 1
    return run


@pytest.mark.full
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_quick_commands_work_and_runs_are_configurations(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert follow(page, tmp_path, long=False)
    monkeypatch.chdir(tmp_path)
    runs = re.findall(r"^asyncrl train (experiment=.*)$", page.read_text().replace("\\\n", " "), re.M)
    assert runs
    for run in runs:
        assert compose([word for word in shlex.split(run) if word != "--dry-run"])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_all_commands_work(page: Path, tmp_path: Path) -> None:
    assert follow(page, tmp_path, long=True) > 1
