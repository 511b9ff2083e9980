"""Logs and timelines of other machines come into the run directory, once and whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.launch.written_files import PIECE, FetchedFiles, WrittenFiles, claim
from asyncrl.weights.disk import weights_directory


def test_files_of_another_machine_are_appended_once(tmp_path: Path) -> None:
    there, here = WrittenFiles(tmp_path / "elsewhere/there", "run"), FetchedFiles(tmp_path / "here")
    for name in ("elsewhere/there/run/logs", "elsewhere/there/run/timeline", "here/logs"):
        (tmp_path / name).mkdir(parents=True)
    long = b"x" * (PIECE + 5)
    (tmp_path / "here/logs/rollout-1.log").write_bytes(b"of an earlier launch\n")
    (tmp_path / "elsewhere/there/run/logs/rollout-1.log").write_bytes(long)
    (tmp_path / "elsewhere/there/run/timeline/rollout-1.jsonl").write_bytes(b"{}\n")
    (tmp_path / "elsewhere/there/run/run.db").write_bytes(b"not fetched")
    while any((found := there.after(here.read)).values()):
        here.add(found)
    with (tmp_path / "elsewhere/there/run/logs/rollout-1.log").open("ab") as file:
        file.write(b"more")
    here.add(there.after(here.read))
    assert not any(there.after(here.read).values())
    cache = weights_directory("shm", tmp_path / "elsewhere/there/run", "run", needed_bytes=0) / "cache-0"
    cache.mkdir(parents=True)
    there.remove()
    assert not cache.exists()
    assert (tmp_path / "here/logs/rollout-1.log").read_bytes() == b"of an earlier launch\n" + long + b"more"
    assert (tmp_path / "here/timeline/rollout-1.jsonl").read_bytes() == b"{}\n"
    assert not (tmp_path / "here/run.db").exists() and not (tmp_path / "elsewhere/there").exists()


def test_files_that_were_deleted_there_are_kept_here_and_counted_no_more(tmp_path: Path) -> None:
    there, here = WrittenFiles(tmp_path / "there", "run"), FetchedFiles(tmp_path / "here")
    (tmp_path / "there/run/ratios").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    for step in (1, 2, 3):
        (tmp_path / f"there/run/ratios/step-{step}-1-0.jsonl").write_bytes(b"{}\n")
        (tmp_path / f"there/run/ratios/step-{step - 1}-1-0.jsonl").unlink(missing_ok=True)
        here.add(there.after(here.read))
    assert here.read == {"ratios/step-3-1-0.jsonl": 3}
    assert {path.read_bytes() for path in (tmp_path / "here/ratios").iterdir()} == {b"{}\n"}
    assert len([*(tmp_path / "here/ratios").iterdir()]) == 3


def test_what_a_killed_launch_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    cache = weights_directory("shm", tmp_path / "killed/run", "run", needed_bytes=0)
    (tmp_path / "killed/run").mkdir(parents=True)
    cache.mkdir(parents=True)
    claim(tmp_path / "alive", "run")
    assert not (tmp_path / "killed").exists() and not cache.exists()
    claim(tmp_path / "other", "run")
    assert {path.name for path in tmp_path.iterdir()} == {"alive", "other"}


@pytest.mark.parametrize(
    "name", ["../logs/a.log", "/logs/a.log", "run.db", "logs/../../a.log", "logs/a/b.log"]
)
def test_names_that_are_no_files_of_processes_are_left_out(name: str, tmp_path: Path) -> None:
    here = FetchedFiles(tmp_path / "run")
    here.add({name: b"x"})
    assert here.read == {} and not [path for path in tmp_path.rglob("*") if path.is_file()]
