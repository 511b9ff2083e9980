"""The verdict of tests: what a report of pytest says about named tests, and whose reports are none."""

from __future__ import annotations

import base64
import glob
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from xml.parsers.expat import ExpatError

import pytest

from asyncrl.data.tasks import TaskTests
from asyncrl.isolation.sandbox.base import SandboxError
from asyncrl.isolation.sandbox.changes import DELETED, FILE, LINK, Entry, pack_entries, read_entries
from asyncrl.rewards import RewardError
from asyncrl.rewards.task_tests import (
    PROTECTED,
    entries_within,
    pack_directory,
    read_changes,
    read_report,
    report_name,
    script_verdict,
    verdict_by_names,
)

MODULE = """
import pytest

class TestGroup:
    class TestInner:
        odd = ["a b", "x::y", "[1]", "é\\n", "\\x00", "<&>\\"'", "a/b.py", "\\U0001f600", ""]

        @pytest.mark.parametrize("text", odd)
        def test_odd(self, text): pass

@pytest.fixture
def broken_setup(): raise ValueError

@pytest.fixture
def broken_end():
    yield
    raise ValueError

def test_passes(): pass
def test_fails(): assert 0
def test_setup(broken_setup): pass
def test_end(broken_end): pass
def test_skips(): pytest.skip("no")
@pytest.mark.xfail
def test_expected(): assert 0
@pytest.mark.xfail
def test_unexpected(): pass
"""
CONFTEST = """
def pytest_collection_modifyitems(items):
    with open("ids", "w") as file:
        file.write("\\0".join(item.nodeid for item in items))
"""


def test_ids_of_pytest_are_found_in_its_report_and_only_what_passed_counts(tmp_path: Path) -> None:
    inner = tmp_path / "in.ner" / "deep"
    inner.mkdir(parents=True)
    (inner / "test_it.py").write_text(MODULE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nxfail_strict = true\n")
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml=report.xml", "-p", "no:cacheprovider"]
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    ids = (tmp_path / "ids").read_text().split("\0")
    passed_tests = read_report((tmp_path / "report.xml").read_bytes())
    passed = [name for name in ids if passed_tests[report_name(name)]]
    assert len(ids) == 16 and passed == [*ids[:9], "in.ner/deep/test_it.py::test_passes"]
    judged = verdict_by_names(
        TaskTests("", turn_green=tuple(passed), stay_green=(ids[-1], passed[0])), passed_tests, True
    )
    assert (judged.score, judged.components) == (0.0, {"turn_green": 1.0, "stay_green": 0.5})
    assert judged.notes == f"1 broken: {ids[-1]}"


def case(name: str, inside: str = "") -> str:
    return f'<testcase classname="a" name="{name}">{inside}</testcase>'


def test_a_share_counts_only_where_nothing_broke() -> None:
    passed = {("a", "one"): True, ("a", "two"): False, ("a", "three"): True}
    tests = TaskTests("", turn_green=("a::one", "a::two", "a::gone"), stay_green=("a::three",))
    assert verdict_by_names(tests, passed, True).score == pytest.approx(1 / 3)
    assert verdict_by_names(tests, passed, False).score == 0.0
    assert verdict_by_names(TaskTests("", stay_green=("a::three",)), passed, False).score == 1.0


def test_a_test_that_is_there_twice_counts_as_its_worst() -> None:
    for pair in (case("x") + case("x", "<failure/>"), case("x", "<error/>") + case("x")):
        assert read_report(f"<testsuite>{pair}</testsuite>".encode()) == {("a", "x"): False}


BOMB = '<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;">]><a>&c;</a>'


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"passed",
        b"<testsuite><testcase",
        BOMB.encode(),
        b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>',
        b'<?xml version="1.0" encoding="utf-16"?>\xff\xfe<a/>',
    ],
)
def test_what_is_no_report_gives_no_verdict(report: bytes) -> None:
    with pytest.raises((ValueError, ExpatError)):
        read_report(report)


def reader(**files: bytes) -> Callable[[str], Awaitable[bytes]]:
    async def read(path: str) -> bytes:
        if (name := path.removeprefix("/logs/verifier/reward.")) not in files:
            raise SandboxError("there is none")
        return files[name]

    return read


@pytest.mark.parametrize(
    ("files", "score"),
    [
        ({"txt": b" 0.5\n"}, 0.5),
        ({"txt": b"1", "json": b'{"reward": 0.25, "style": 2}'}, 0.25),
        ({"json": b'{"accuracy": 0.75}'}, 0.75),
        ({"json": b"0.125"}, 0.125),
        ({}, None),
        ({"txt": b""}, None),
        ({"txt": b"nan"}, None),
        ({"json": b'{"reward": "1"}', "txt": b"1"}, None),
        ({"json": b'{"a": 1, "b": 2}'}, None),
        ({"json": b'{"reward": 1e999}'}, None),
        ({"json": b"[1]"}, None),
    ],
)
async def test_a_scripts_own_verdict_is_read_as_harbor_does(
    files: dict[str, bytes], score: float | None
) -> None:
    if score is not None:
        assert (await script_verdict(reader(**files))).score == score
        return
    with pytest.raises((ValueError, TypeError, SandboxError)):
        await script_verdict(reader(**files))


def test_what_is_protected_is_documented() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/tasks.md").read_text()
    section = guide.partition("### The `tests` reward")[2]
    assert [name for name in PROTECTED if f"`{name}`" not in section] == []


def test_changes_outside_of_the_workspace_are_left_out() -> None:
    entries = [Entry(FILE, path, 0o644, 0, b"x") for path in ("app/a.py", "app2/a.py", "usr/bin/python3")]
    entries += [Entry(DELETED, path) for path in ("app", "tests/test_a.py", "srv/in/b")]
    read = read_changes({"changes": base64.b64encode(pack_entries(entries)).decode()})
    assert read == entries
    kept_paths = [entry.path for entry in entries_within(("/app", "/srv/in/"), read, ())]
    assert kept_paths == ["app/a.py", "app", "srv/in/b"]


def test_no_link_leads_from_where_tests_will_be() -> None:
    entries = [Entry(LINK, path, 0o777, 0, b"x") for path in ("app/[a]", "app/[a]/b", "app/[a]b", "app/c")]
    keep = ("conftest.py", glob.escape("/app/[a]/b/test_c.py"))
    assert [entry.path for entry in entries_within(("/app",), entries, keep)] == ["app/[a]b", "app/c"]


@pytest.mark.parametrize("result", [None, 1.0, {}, {"score": 1}])
def test_an_episode_that_left_no_changes_has_no_verdict(result: object) -> None:
    with pytest.raises(RewardError, match="must work in the task's image"):
        read_changes(result)


def test_the_tests_of_a_task_are_packed_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "test.sh").write_text("true")
    (tmp_path / "data/a").write_text("a")
    (tmp_path / "data/a").chmod(0o600)
    (tmp_path / "link").symlink_to("data/a")
    archive = pack_entries(pack_directory(tmp_path, "tests/test.sh"))
    assert str(tmp_path).encode() not in archive
    packed_entries = {
        entry.path: (entry.kind, oct(entry.mode), entry.content) for entry in read_entries(archive)
    }
    assert packed_entries == {
        "tests": (b"o", "0o755", b""),
        "tests/data": (b"d", "0o755", b""),
        "tests/data/a": (b"f", "0o644", b"a"),
        "tests/link": (b"l", "0o755", b"data/a"),
        "tests/test.sh": (b"f", "0o755", b"true"),
    }
