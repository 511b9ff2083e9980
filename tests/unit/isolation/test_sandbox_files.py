"""Directories of any shape are emptied, and what they point at is not touched."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.isolation.sandbox import emptying

NAMES = st.sampled_from(["a", "b", "\udcff", "x" * 200])
TREES = st.recursive(
    st.sampled_from(["file", "link", "pipe"]), lambda tree: st.dictionaries(NAMES, tree), max_leaves=20
)


def plant(path: str, tree: object, outside: str) -> None:
    if isinstance(tree, dict):
        os.makedirs(path, exist_ok=True)
        for name, below in tree.items():
            plant(f"{path}/{name}", below, outside)
        os.chmod(path, 0)
    elif tree == "link":
        os.symlink(outside, path)
    elif tree == "pipe":
        os.mkfifo(path)
    else:
        open(path, "w").close()


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(NAMES, TREES))
def test_nothing_is_left_and_nothing_else_is_touched(tmp_path_factory, tree) -> None:  # type: ignore[no-untyped-def]
    base = tmp_path_factory.mktemp("tree")
    outside = base / "outside"
    home = base / "home"
    outside.mkdir()
    (outside / "kept").write_text("")
    plant(str(home), tree, str(outside))
    emptying.empty_directory(str(home))
    assert os.listdir(home) == [] and os.listdir(outside) == ["kept"]


def test_a_tree_deeper_than_any_path_or_stack() -> None:
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a slow disk takes seconds
    dig = (
        "import os, sys\nos.chdir(sys.argv[1])\nfor _ in range(1100): os.mkdir('d' * 50); os.chdir('d' * 50)"
    )
    with tempfile.TemporaryDirectory(dir=in_memory) as home:
        subprocess.run(["python3", "-c", dig, home], check=True)
        emptying.empty_directory(home)
        assert os.listdir(home) == []


def test_a_tree_that_is_moved_meanwhile_leads_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    other = tmp_path / "other"
    (home / "a" / "b").mkdir(parents=True)
    (other / "b").mkdir(parents=True)
    delete_files = emptying._delete_files

    def move(here: int) -> list[str]:
        deleted = delete_files(here)
        if deleted == ["b"]:
            os.rename("b", other / "c", src_dir_fd=here)
        return deleted

    monkeypatch.setattr(emptying, "_delete_files", move)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        emptying.empty_directory(str(home))
    assert sorted(os.listdir(other)) == ["b", "c"]
    assert len(os.listdir("/proc/self/fd")) == len(open_before)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    """Another user, who sees its name in the list of processes, can make one in /tmp."""
    other = tmp_path / "other"
    home = tmp_path / "home"
    other.mkdir(0o755)
    (other / "kept").touch()
    home.symlink_to(other)
    emptying.remove_directory(str(home))
    assert os.listdir(other) == ["kept"] and other.stat().st_mode & 0o777 == 0o755


def test_remove_raises_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").touch()
    for _ in range(2):  # the second finds nothing
        emptying.remove_directory(str(home))
        assert not home.exists()
