"""Wheel and source distribution hold what an installation without the checkout needs: the demo runs from the
wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Sequence
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

import asyncrl

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
FOLDERS = ("asyncrl", "configs", "examples/multiturn/calculator")
SHARE = f"asyncrl-{asyncrl.__version__}.data/data/share/asyncrl/"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, 'build_' + sys.argv[1])('dist')"
OUTSIDE = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}  # environment variables: nothing of the checkout
DEMO = ("train", "experiment=calculator", "name=demo", "observe.console=plain", "total_steps=2")


def call(*command: str | Path, cwd: Path, seconds: float = 120.0, **environment: str) -> str:
    """Standard output of a program that must end well."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what packages are built from: what setuptools leaves in build/ would get into the next wheel. The
    copy also has a test and a tool, which belong into no package."""
    copy = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, "tests/test_layering.py", "tools/chaos.py"):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def source_distribution(checkout_copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution and return the directory that it unpacks to."""
    call(sys.executable, "-c", BUILD, "sdist", cwd=checkout_copy)
    (archive,) = (checkout_copy / "dist").glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    return unpacked / f"asyncrl-{asyncrl.__version__}"


@pytest.fixture(scope="module")
def wheel(checkout_copy: Path) -> Path:
    call(sys.executable, "-c", BUILD, "wheel", cwd=checkout_copy)
    (built,) = (checkout_copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare_programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment of its own, which then sees the dependencies in this environment,
    but not the checkout that is installed here; return the directory of programs."""
    bare = tmp_path_factory.mktemp("bare")
    venv.create(bare, with_pip=False)
    install = (*PIP, "--python", bare / "bin/python", "install", "--no-deps", "--no-index", "--no-compile")
    call(*install, wheel, cwd=bare, **OUTSIDE)
    (site_packages,) = bare.glob("lib/python3*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return bare / "bin"


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


def test_the_source_distribution_holds_what_building_needs_and_nothing_else(
    source_distribution: Path,
) -> None:
    files = {str(path.relative_to(source_distribution)) for path in source_distribution.rglob("*")}
    assert {*FILES} - {"MANIFEST.in"} <= files
    assert not [name for name in files if re.match(r"tests|tools|docs|build|dist|runs|.*__pycache__", name)]


def test_the_wheel_of_the_source_distribution_is_that_of_the_checkout(
    source_distribution: Path, wheel: Path
) -> None:
    call(sys.executable, "-c", BUILD, "wheel", cwd=source_distribution)
    contents = []
    for path in (wheel, source_distribution / "dist" / wheel.name):
        with ZipFile(path) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    assert contents[0].keys() == contents[1].keys()
    assert [name for name, data in contents[0].items() if data != contents[1][name]] == []


def test_the_package_of_a_bare_environment_is_the_installed_one(bare_programs: Path, tmp_path: Path) -> None:
    code = "from asyncrl.config import composition as c; print(c.__file__, c.config_root())"
    output = call(bare_programs / "python", "-c", code, cwd=tmp_path, **OUTSIDE)
    assert all(Path(path).is_relative_to(bare_programs.parent) for path in output.split())
    version = call(bare_programs / "asyncrl", "--version", cwd=tmp_path, **OUTSIDE)
    assert version == f"asyncrl {asyncrl.__version__}\n"


@pytest.mark.full
def test_the_demo_runs_from_the_wheel(bare_programs: Path, tmp_path: Path) -> None:
    """By the command and by a script, in an empty directory."""
    call(bare_programs / "asyncrl", *DEMO, "validation.samples=8", cwd=tmp_path, **OUTSIDE)
    check_demo(tmp_path, steps=2)

    script = """import asyncrl

if __name__ == "__main__":
    asyncrl.train("experiment=calculator", name="demo", resume="never", run_dir="script", total_steps=1,
        validation={"samples": 8})
"""
    (tmp_path / "script.py").write_text(script)
    call(bare_programs / "python", "script.py", cwd=tmp_path, **OUTSIDE)
    check_demo(tmp_path, "script", steps=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_demo_runs_in_an_environment_that_was_empty(wheel: Path, tmp_path: Path) -> None:
    """Installs all dependencies, torch included, from where pip is configured to fetch them."""
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv/bin"
    constraints: Sequence[str | Path] = ("--constraint", ROOT / "constraints.txt")
    call(programs / "pip", "install", "--quiet", *constraints, wheel, cwd=tmp_path, seconds=3000, **OUTSIDE)
    call(programs / "asyncrl", *DEMO, cwd=tmp_path, seconds=300, **OUTSIDE)
    check_demo(tmp_path, steps=2)


def check_demo(directory: Path, runs: str = "runs", *, steps: int) -> None:
    summary = json.loads((directory / runs / "demo/summary.json").read_text())
    assert summary["outcome"] == "completed" and summary["steps"] == steps and summary["conserved"]
