"""What the supervisor does with the output of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.launch.process import log_path
from asyncrl.observe import files

PRINTS = "print('begun'); [print('x' * 99) for _ in range(1100)]; print('so far')"


def test_a_log_of_what_prints_without_end_keeps_its_ends_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LOG_BYTES", 100_000)
    monkeypatch.setattr(files, "LOG_EDGE_BYTES", 1000)
    path = log_path(tmp_path, "rollout-0")
    path.parent.mkdir()
    files.bound_log(path)  # there is none yet
    with path.open("ab") as log:
        subprocess.run([sys.executable, "-c", PRINTS], stdout=log, timeout=60, check=True)
    whole = path.read_bytes()
    files.bound_log(path)
    cut = path.read_bytes()
    note = b"\n[asyncrl: %d bytes were cut here]\n" % (len(whole) - 2000)
    assert cut == whole[:1000] + note + whole[-1000:] and cut.startswith(b"begun") and b"so far" in cut
    files.bound_log(path)
    assert path.read_bytes() == cut, "it is short enough"


def test_a_process_writes_on_at_the_new_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(files, "LOG_EDGE_BYTES", 10)
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as log:  # as a child's output is opened
        log.write(b"a" * 2000)
        files.bound_log(path)
        log.write(b"later")
    text = path.read_bytes()
    assert text.endswith(b"aaaaaaaaaalater") and b"\0" not in text and len(text) < 100
