"""The driver of the GPU kit with parts that fail in every way, and what each part of the kit must have."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

KIT = Path(__file__).parents[2] / "tools" / "gpu_kit"
REPLACING = [file for file in (KIT / "parts").glob("*.py") if "mock.patch" in file.read_text()]
# The other modules there are shared by several parts.
PARTS = sorted(file.stem for file in (KIT / "parts").glob("*.py") if "\ndef run(" in file.read_text())

HEAD = """'Does it?'
import os, signal, subprocess, sys, threading
from parts.common import Finding
GOAL = "1"
SMALL_SECONDS = 20
"""
FOREVER = "threading.Event().wait()"
# The child of `hangs` has a session of its own, as the processes of a run have.
CHILD = "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, start_new_session=True)"
FAKES = {
    "fine": "def run(context): yield Finding('one', '1', '1', True)",
    "misses": "def run(context): yield Finding('one', '2', '1', False)",
    "hangs": f"SMALL_SECONDS = 4.2\ndef run(context): yield Finding('pid', str({CHILD}.pid)); {FOREVER}",
    "crashes": "def run(context): yield Finding('one', 1 / 0)",
    "dies": "def run(context): yield Finding('a|b', '1'); os.kill(os.getpid(), signal.SIGKILL)",
    "exits": "def run(context): yield Finding('one', '1'); os._exit(3)",
    "broken": "this is no Python",
    "ended": f"def run(context): yield Finding('one', '1'); os.kill(os.getppid(), signal.SIGTERM); {FOREVER}",
}


def check(tmp_path: Path, *names: str, minutes: float = 1.0) -> tuple[int, dict[str, Any], str]:
    """Exit code of the driver over these fakes, and both reports."""
    (tmp_path / "parts").mkdir()
    for name in ("check.py", "parts/__init__.py", "parts/common.py"):
        shutil.copy(KIT / name, tmp_path / name)
    for name in names:
        (tmp_path / "parts" / f"{name}.py").write_text(HEAD + FAKES[name])
    out = tmp_path / "out"
    command = [sys.executable, str(tmp_path / "check.py"), "--out", str(out), "--device", "cpu"]
    command += ["--minutes", str(minutes), "--only", *names]
    code = subprocess.run(command, timeout=30, capture_output=True).returncode
    assert {file.name for file in out.iterdir()} <= {"report.json", "report.md", "parts.log"}
    return code, json.loads((out / "report.json").read_text()), (out / "report.md").read_text()


def test_no_part_ends_the_others_and_what_it_found_is_kept(tmp_path: Path) -> None:
    names = ["hangs", "crashes", "dies", "exits", "broken", "misses", "fine"]
    code, report, page = check(tmp_path, *names)
    parts = {part["name"]: part for part in report["parts"]}
    assert code == 1 and list(parts) == names
    states = {name: part["state"] for name, part in parts.items()}
    failed = dict.fromkeys(["crashes", "dies", "exits", "broken"], "failed")
    assert states == {"hangs": "killed", "misses": "done", "fine": "done"} | failed
    assert {name: part["ok"] for name, part in parts.items()} == dict.fromkeys(names, False) | {"fine": True}
    assert (
        "after 4 s" in parts["hangs"]["why"]
        and "SIGKILL" in parts["dies"]["why"]
        and "3" in parts["exits"]["why"]
    )
    assert parts["dies"]["findings"][0]["name"] == "a|b" and "| a\\|b | 1 |" in page
    assert "ZeroDivisionError" in parts["crashes"]["findings"][0]["value"]
    left = int(parts["hangs"]["findings"][0]["value"])
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


def test_a_signal_ends_the_part_and_leaves_a_whole_report(tmp_path: Path) -> None:
    code, report, page = check(tmp_path, "fine", "ended", "misses")
    assert code == 1 and report["stopped"] == "SIGTERM" and "Ended early by SIGTERM" in page
    assert [part["state"] for part in report["parts"]] == ["done", "killed", "waiting"]
    assert report["parts"][1]["findings"][0]["name"] == "one"


def test_without_time_a_part_is_not_run(tmp_path: Path) -> None:
    code, report, _ = check(tmp_path, "fine", minutes=0.0)
    assert code == 1 and report["parts"][0]["state"] == "not run"


@pytest.mark.full
def test_the_part_images_meets_its_goals_in_small_sizes(tmp_path: Path) -> None:
    """As `make gpu-check` runs it, on a CPU."""
    kit = tmp_path / "kit"
    build = [sys.executable, str(KIT / "build.py"), "--no-site", "--out", str(kit)]
    subprocess.run(build, check=True, timeout=60, capture_output=True)
    command = [sys.executable, str(kit / "check.py"), "--device", "cpu", "--only", "images"]
    code = subprocess.run([*command, "--out", str(tmp_path / "out")], timeout=200).returncode

    (part,) = json.loads((tmp_path / "out" / "report.json").read_text())["parts"]
    findings = {finding["name"]: finding for finding in part["findings"]}
    assert (code, part["state"], part["ok"]) == (0, "done", True), part
    for stage in ("decoding", "engine, float32", "engine, bfloat16", "trainer, float32", "trainer, bfloat16"):
        assert any(name.startswith(stage) for name in findings), stage
    assert {name for name, finding in findings.items() if finding["ok"]} == {
        "engine, float32: log-probs",
        "engine, float32: encoded",
        "engine, bfloat16: log-probs",
        "engine, bfloat16: encoded",
        "trainer, float32: packed",
        "trainer, float32: tree",
        "trainer.packing=tree in a run",
        "trainer, bfloat16: a step of pictures",
        "trainer, bfloat16: a step of text alone",
    }


@pytest.mark.parametrize("name", PARTS)
def test_a_part_says_what_it_asks_and_how_long_it_may_take(name: str) -> None:
    tree = ast.parse((KIT / "parts" / f"{name}.py").read_text())
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {"SECONDS", "GOAL"} <= constants and "run" in functions and ast.get_docstring(tree)
    assert not {f"parts.{other}" for other in PARTS} & imported


@pytest.mark.parametrize("file", REPLACING, ids=lambda file: file.stem)
def test_what_a_part_replaces_in_the_package_is_there(file: Path) -> None:
    tree = ast.parse(file.read_text())
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                ast.Attribute(ast.Name("mock"), "patch"), [ast.Constant(str(path)), ast.Name(replacement)]
            ):
                replaced = signature(pkgutil.resolve_name(path)).parameters
                assert len(functions[replacement].args) == len(replaced), path
            case ast.Call(ast.Attribute(ast.Name("mock"), "patch"), [ast.Constant(str(path)), *_]):
                assert pkgutil.resolve_name(path)
            case ast.Call(
                ast.Attribute(ast.Attribute(ast.Name("mock"), "patch"), "object"),
                [ast.Name(owner), ast.Constant(str(attribute)), *_],
            ):
                assert pkgutil.resolve_name(f"{modules[owner]}.{attribute}")


def test_the_order_has_every_part() -> None:
    tree = ast.parse((KIT / "check.py").read_text())
    order = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORDER"
    )
    assert sorted(order) == PARTS
