"""Where a memory cgroup can be made: the places that the kernel's descriptions name."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import IO, Any

import pytest

from asyncrl.isolation.sandbox import cgroup

MOUNT = "30 23 0:28 {root} {place} rw,relatime shared:9 - {kind} cgroup rw,{options}\n"


class Machine:
    """Files of a machine below `top`, in place of this one's."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        monkeypatch.setattr(cgroup, "open", self.open, raising=False)

    def open(self, path: str, *arguments: Any) -> IO[Any]:
        return builtins.open(f"{self.top}{path}", *arguments)

    def write(self, path: str, text: str) -> None:
        file = Path(f"{self.top}{path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_version_1_takes_a_child_of_its_own_group(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "5:cpu,cpuacct:/a\n4:hugetlb,memory:/job/7\n0::/\n")
    others = MOUNT.format(root="/", place="/sys/cpu", kind="cgroup", options="cpu,cpuacct")
    memory = MOUNT.format(root="/job", place="/sys/memory", kind="cgroup", options="hugetlb,memory")
    machine.write("/proc/self/mountinfo", others + memory)
    assert next(cgroup._possible_parents()) == ("/sys/memory/7", "cgroup")


@pytest.mark.parametrize(
    ("own_children", "own_limit", "expected"),
    [
        ("cpu memory\n", "max\n", [("/sys/user/app/run", "cgroup2")]),
        ("\n", "max\n", [("/sys/user/app", "cgroup2")]),
        ("\n", "8589934592\n", []),  # its siblings would not be under its limit
    ],
)
def test_version_2_takes_a_child_or_a_sibling(
    machine: Machine, own_children: str, own_limit: str, expected: list[tuple[str, str]]
) -> None:
    machine.write("/proc/self/cgroup", "0::/user/app/run\n")
    machine.write("/proc/self/mountinfo", MOUNT.format(root="/", place="/sys", kind="cgroup2", options=""))
    machine.write("/sys/user/app/cgroup.subtree_control", "cpu memory pids\n")
    machine.write("/sys/user/app/run/cgroup.subtree_control", own_children)
    machine.write("/sys/user/app/run/memory.max", own_limit)
    machine.write("/sys/user/app/run/cpu.max", "max 100000\n")
    assert list(cgroup._possible_parents()) == expected


def test_a_container_at_the_root_of_its_groups_makes_none(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "0::/\n")
    machine.write("/proc/self/mountinfo", MOUNT.format(root="/", place="/sys", kind="cgroup2", options=""))
    machine.write("/sys/cgroup.subtree_control", "\n")
    machine.write("/sys/memory.max", "max\n")
    assert cgroup.make_group(1 << 30) is None
