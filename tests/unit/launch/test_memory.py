"""What memory there is where a cgroup, as of a container, allows less than the machine has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.runtime import process
from asyncrl.runtime.process import main_memory

MACHINE = SimpleNamespace(total=64_000, available=50_000)


def lay(root: Path, name: str, text: object) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}\n")


def test_the_least_that_the_groups_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that can be dropped is no use of it. A group without a limit, or with a wider one, is none."""
    monkeypatch.setattr(process.psutil, "virtual_memory", lambda: MACHINE)
    assert main_memory(tmp_path) == (64_000, 50_000), "there are no cgroups"
    lay(tmp_path, "proc/self/cgroup", "0::/job/step")
    for group, limit in (("job", 8_000), ("job/step", "max")):
        lay(tmp_path, f"sys/fs/cgroup/{group}/memory.max", limit)
        lay(tmp_path, f"sys/fs/cgroup/{group}/memory.current", 6_000)
        lay(tmp_path, f"sys/fs/cgroup/{group}/memory.stat", "anon 4500\ninactive_file 1500")
    assert main_memory(tmp_path) == (8_000, 3_500)
    lay(tmp_path, "sys/fs/cgroup/job/memory.max", 10**15)
    assert main_memory(tmp_path) == (64_000, 50_000)


def test_of_the_first_version_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is that outside of the container."""
    monkeypatch.setattr(process.psutil, "virtual_memory", lambda: MACHINE)
    lay(tmp_path, "proc/self/cgroup", "4:memory:/docker/a0b1\n3:cpuset:/")
    for name, text in (
        ("limit_in_bytes", 9_000),
        ("usage_in_bytes", 9_500),
        ("stat", "total_inactive_file 100"),
    ):
        lay(tmp_path, f"sys/fs/cgroup/memory/memory.{name}", text)
    assert main_memory(tmp_path) == (9_000, 0)
