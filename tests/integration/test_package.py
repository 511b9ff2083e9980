"""The wheel holds what an installation without the checkout needs: the demo runs from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

import asyncrl

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("asyncrl", "configs", "examples/multiturn/calculator")
SHARE = f"asyncrl-{asyncrl.__version__}.data/data/share/asyncrl/"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def call(*command: str | Path, cwd: Path, seconds: float = 120.0, **environment: str) -> str:
    """Standard output of a program that must end well."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: what setuptools leaves in build/ would get into the next wheel."""
    copy = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    call(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", ".", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(ZipFile(wheel).namelist())


def test_the_whole_package_is_in_the_wheel_and_nothing_else_is(names: set[str]) -> None:
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "asyncrl").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("asyncrl/")} == {
        name for name in source if "__pycache__" not in name
    }
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"asyncrl"}


def test_what_the_configurations_of_the_wheel_name_is_in_it(wheel: Path, names: set[str]) -> None:
    configs = [name for name in names if name.startswith(f"{SHARE}configs/")]
    assert f"{SHARE}configs/experiment/calculator.yaml" in configs
    text = "\n".join(ZipFile(wheel).read(name).decode() for name in configs)
    named = re.findall(r"\$\{asyncrl_root:\}/([\w./-]+)", text)
    assert named
    for path in named:
        assert any(f"{name}/".startswith(f"{SHARE}{path}/") for name in names), path
    demo = ROOT / "examples/multiturn/calculator/model"
    for file in demo.iterdir():
        inside = ZipFile(wheel).read(f"{SHARE}{file.relative_to(ROOT)}")
        assert inside == file.read_bytes(), file


def test_version_and_licence_are_those_of_the_source(wheel: Path) -> None:
    info = f"asyncrl-{asyncrl.__version__}.dist-info"
    metadata = message_from_string(ZipFile(wheel).read(f"{info}/METADATA").decode())
    assert (metadata["Version"], metadata["License-Expression"]) == (asyncrl.__version__, "Apache-2.0")
    assert ZipFile(wheel).read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_an_installation_finds_its_own_configuration(wheel: Path, tmp_path: Path) -> None:
    """Under a prefix of its own, with the other packages of this environment."""
    call(*PIP, "install", "--no-deps", "--no-index", "--no-compile", "--target", "there", wheel, cwd=tmp_path)
    code = (
        "import json; from asyncrl.config import composition as co;c = co.compose(['experiment=calculator']);"
        "print(json.dumps([str(co.config_root()), c.model.path, c.data.train, c.data.test]))"
    )
    root, *paths = json.loads(call(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH="there"))
    assert Path(root) == tmp_path / "there/share/asyncrl"
    assert all(Path(path).is_relative_to(root) and Path(path).exists() for path in paths)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_demo_runs_in_an_environment_that_was_empty(wheel: Path, tmp_path: Path) -> None:
    """Installs all dependencies, torch included, from where pip is configured to fetch them."""
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv/bin"
    outside = {"PYTHONPATH": ""}
    constraints: Sequence[str | Path] = ("--constraint", ROOT / "constraints.txt")
    call(programs / "pip", "install", "--quiet", *constraints, wheel, cwd=tmp_path, seconds=3000, **outside)
    command = (programs / "asyncrl", "train", "experiment=calculator", "total_steps=2", "name=first")
    call(*command, "observe.console=plain", cwd=tmp_path, seconds=300, OMP_NUM_THREADS="1", **outside)
    summary = json.loads((tmp_path / "runs/first/summary.json").read_text())
    assert summary["outcome"] == "completed" and summary["steps"] == 2 and summary["conserved"]
