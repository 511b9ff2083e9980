"""Changes of files: which paths globs name, and what is counted."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from asyncrl.isolation.sandbox import changes
from asyncrl.isolation.sandbox.changes import OPEN_DIRECTORY_FLAGS, ChangesError, match_globs

GLOBS = ("conftest.py", "*.pyc", "/app/tests", "/usr/*/[[]x]")


@pytest.mark.parametrize(
    ("path", "named", "below"),
    [
        ("conftest.py", True, True),
        ("a/b/conftest.py", True, True),
        ("a/conftest.py/b", False, True),
        ("a/conftest.pyc", True, True),
        ("a/Conftest.py", False, False),
        ("app/tests", True, True),
        ("app/tests/a/b", False, True),
        ("app/testsuite", False, False),
        ("x/app/tests", False, False),
        ("usr/a/[x]", True, True),
        ("line\nof/conftest.py", True, True),
    ],
)
def test_globs_name_files_or_whole_paths_or_what_is_below(path: str, named: bool, below: bool) -> None:
    assert (match_globs(GLOBS)(path), match_globs(GLOBS, include_contents=True)(path)) == (named, below)
    assert not match_globs(())(path)


def test_files_that_are_left_out_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_ENTRIES", 10)
    for number in range(11):
        (tmp_path / f"{number}.pyc").touch()
    top = os.open(tmp_path, OPEN_DIRECTORY_FLAGS)
    try:
        with pytest.raises(ChangesError, match="more than 10 files"):
            changes._Collector(str(tmp_path), top, io.BytesIO(), 1 << 20, ["*.pyc"]).collect_below("")
    finally:
        os.close(top)
