"""Snapshots on disk: found by what is recorded, stored by content, bounded, removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.isolation.sandbox.changes import DELETED, END, FILE, Entry
from asyncrl.tools import snapshots
from asyncrl.tools.snapshots import SnapshotError, Snapshots, hash_history
from asyncrl.types import Generation, StopReason, ToolCall, ToolReply, Turn

LARGE = bytes(range(256)) * 4096


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(snapshots, "PARENT", tmp_path / "asyncrl")
    return tmp_path / "asyncrl"


def archive(*contents: bytes) -> bytes:
    files = [Entry(FILE, f"f{at}\udc80", 0o644, -7, content) for at, content in enumerate(contents)]
    return b"".join(entry.frame() for entry in (*files, Entry(DELETED, "x"), Entry(END, "")))


def files(parent: Path) -> list[int]:
    return sorted(path.stat().st_size for path in parent.rglob("*") if path.is_file())


def turn(index: int, reply: str) -> Turn:
    call = ToolCall("shell", '{"command": "ls"}')
    return Turn(
        index, (), Generation((1, 2), (-0.5, -0.5), (), StopReason.STOP), replies=(ToolReply(call, reply),)
    )


def test_the_newest_snapshot_of_recorded_turns_is_found_by_another_worker(parent: Path) -> None:
    first = Snapshots("run", 1 << 30).tool_snapshots("e/0", "shell")
    first.save_snapshot(0, "a", archive(b"small", LARGE))
    first.save_snapshot(2, "c", archive(b"other", LARGE))
    assert [size for size in files(parent) if size > 1000] == [len(LARGE)]  # once
    assert Snapshots("run", 1 << 30).tool_snapshots("e/0", "python").find_snapshot(["a", "b", "c"]) is None
    assert Snapshots("other", 1 << 30).tool_snapshots("e/0", "shell").find_snapshot(["a", "b", "c"]) is None
    again = Snapshots("run", 1 << 30)
    assert again.tool_snapshots("e/0", "shell").find_snapshot(["a", "b"]) == (0, archive(b"small", LARGE))
    assert again.tool_snapshots("e/0", "shell").find_snapshot(["a", "b", "c"]) == (
        0,
        archive(b"small", LARGE),
    )  # the only one
    assert again.tool_snapshots("e/0", "shell").find_snapshot(["other"]) is None
    assert files(parent) == []


def test_the_last_two_are_kept(parent: Path) -> None:
    tool_snapshots = Snapshots("run", 1 << 30).tool_snapshots("e", "shell")
    for number in range(5):
        tool_snapshots.save_snapshot(number, "h", archive(LARGE[number:]))
    assert len(files(parent)) == 4
    assert Snapshots("run", 1 << 30).tool_snapshots("e", "shell").find_snapshot(["h"] * 4) == (
        3,
        archive(LARGE[3:]),
    )


def test_a_damaged_snapshot_gives_way_to_the_one_before(parent: Path) -> None:
    for damage in ("1-h", "content"):
        tool_snapshots = Snapshots("run", 1 << 30).tool_snapshots("e", "shell")
        tool_snapshots.save_snapshot(0, "h", archive(b"small"))
        tool_snapshots.save_snapshot(1, "h", archive(LARGE))
        [damaged] = [
            path
            for path in parent.rglob("*")
            if path.is_file()
            and (path.name == damage or (damage == "content" and path.stat().st_size == len(LARGE)))
        ]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        assert Snapshots("run", 1 << 30).tool_snapshots("e", "shell").find_snapshot(["h", "h"]) == (
            0,
            archive(b"small"),
        )


def test_snapshots_are_bounded_and_removed_with_their_episode(parent: Path) -> None:
    owner = Snapshots("run", 4 << 20)
    first = owner.tool_snapshots("a", "shell")
    second = owner.tool_snapshots("b", "shell")
    first.save_snapshot(0, "h", archive(LARGE))
    second.save_snapshot(0, "h", archive(LARGE, LARGE[1:-1]))
    with pytest.raises(SnapshotError, match=r"more than 4194304 bytes; raise store\.keep_bytes"):
        first.save_snapshot(1, "h", archive(LARGE[2:]))
    assert first.find_snapshot(["h", "h"]) == (0, archive(LARGE))
    owner.forget_episode("b")
    first.save_snapshot(1, "h", archive(LARGE[2:]))
    owner.forget_episode("a")
    assert files(parent) == []


def test_what_a_killed_run_left_is_removed_a_day_later(parent: Path) -> None:
    Snapshots("old", 1 << 30).tool_snapshots("a", "shell").save_snapshot(0, "h", archive(LARGE))
    Snapshots("new", 1 << 30).tool_snapshots("b", "shell").save_snapshot(0, "h", archive(LARGE))
    for path in (parent / "snapshots").glob("*/a/**"):
        os.utime(path, (0, 0))
    Snapshots("third", 1 << 30)
    assert len(files(parent)) == 2
    assert Snapshots("new", 1 << 30).tool_snapshots("b", "shell").find_snapshot(["h"]) is not None


def test_a_directory_that_is_open_to_others_is_refused(parent: Path) -> None:
    parent.mkdir(0o755)
    parent.chmod(0o755)
    with pytest.raises(PermissionError, match="is open to other users; remove it"):
        Snapshots("run", 1 << 30).tool_snapshots("a", "shell").save_snapshot(0, "h", archive(b"x"))


def test_a_history_is_of_all_turns_and_replies() -> None:
    names = {
        hash_history(hash_history("", turn(0, first)), turn(1, second)) for first in "ab" for second in "ab"
    }
    assert len(names) == 4
    assert hash_history("", turn(0, "a")) == hash_history("", turn(0, "a"))
