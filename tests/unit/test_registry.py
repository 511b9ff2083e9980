"""Names to objects: unknown ones tell the nearest, foreign ones are imported."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

import asyncrl
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import PlannedProcess
from asyncrl.launch.process import LocalSpawner, ProcessSpec
from asyncrl.registry import IMPORTED_PACKAGES, Registry, bind_options, load_object, search_working_directory
from asyncrl.wire.sockets import Endpoints

LAZY: Registry[object] = Registry("lazy gadget", modules={"saw": "slow_saw"})


@pytest.fixture
def registry() -> Registry[object]:
    registry: Registry[object] = Registry("gadget")
    for name in ("hammer", "hamster", "saw"):
        registry.register(name)(name.upper())
    return registry


def test_registered_names_are_found_and_listed(registry: Registry[object]) -> None:
    assert registry.get("saw") == registry.load("saw") == "SAW"
    assert list(registry) == ["hammer", "hamster", "saw"] and "saw" in registry


def test_an_unknown_name_tells_the_nearest(registry: Registry[object]) -> None:
    with pytest.raises(ConfigError, match="unknown gadget 'hamer'; did you mean hammer, hamster"):
        registry.get("hamer")
    with pytest.raises(ConfigError, match="available: hammer, hamster, saw"):
        registry.get("xyz")
    with pytest.raises(ConfigError, match="available: none"):
        Registry("widget").get("a")


def test_a_name_is_taken_once(registry: Registry[object]) -> None:
    with pytest.raises(ConfigError, match="already registered"):
        registry.register("saw")(object())


def test_modules_and_files_are_loaded(registry: Registry[object], tmp_path: Path) -> None:
    assert registry.load("pathlib:Path") is Path
    (tmp_path / "mine.py").write_text("thing = object()")
    spec = f"{tmp_path / 'mine.py'}:thing"
    assert registry.load(spec) is registry.load(spec)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files that have names of Python's modules."""
    for name in ("random", "types", "json", "token", "queue"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong file')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return tmp_path


def test_a_file_of_the_working_directory_hides_no_module_of_python(work: Path) -> None:
    (work / "mine_of_a_user.py").write_text("thing = 1\n")
    search_working_directory()
    for name in ("random", "types", "json", "token", "queue"):
        spec = PathFinder.find_spec(name)
        assert spec is not None and not str(spec.origin).startswith(str(work))
    assert load_object("mine_of_a_user:thing", "gadget") == 1
    del sys.modules["mine_of_a_user"]
    with pytest.raises(ConfigError, match=r"token has no 'score'; .* hides your module; write token.py:NAME"):
        load_object("token:score", "gadget")
    (work / "token.py").write_text("score = 1\n")
    with pytest.raises(ConfigError, match=r"token.py has no 'scoer'; did you mean score\?$"):
        load_object("token.py:scoer", "gadget")


@pytest.mark.parametrize("name", ["yaml", "pydantic", "urllib3", "typing_extensions"])
@pytest.mark.parametrize("environment", ["elsewhere", ".venv/lib/site-packages"])
def test_a_file_that_hides_a_needed_package_is_named(
    work: Path, monkeypatch: pytest.MonkeyPatch, name: str, environment: str
) -> None:
    if environment != "elsewhere":
        installed = work / environment / name
        installed.mkdir(parents=True)
        (installed / "__init__.py").write_text("")
        monkeypatch.setattr(sys, "path", [str(work / environment)])
    (work / f"{name}.py").write_text("")
    with pytest.raises(ConfigError, match=rf"^{work}/{name}.py hides the installed package {name}"):
        search_working_directory()


def test_a_package_in_the_working_directory_hides_none(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory may be a checkout of that package, or be searched under another name."""
    (work / "yaml.py").write_text("")
    links = work / "build"
    links.mkdir()
    (links / "yaml.py").symlink_to(work / "yaml.py")
    (work / "same").symlink_to(work)
    monkeypatch.setattr(sys, "path", [str(work / "same"), str(links)])
    search_working_directory()
    assert sys.path == [str(work), str(links)]


def test_all_packages_that_are_imported_are_known_to_be_needed() -> None:
    imported = set[str]()
    for path in (Path(asyncrl.__file__).parent).rglob("*.py"):
        lines = re.findall(r"^ *(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        imported |= {name for name in lines if importlib.util.find_spec(name)}
    assert imported - sys.stdlib_module_names - {"asyncrl"} <= IMPORTED_PACKAGES


def test_a_role_starts_beside_files_with_names_of_pythons_modules(work: Path) -> None:
    spawner = LocalSpawner(work, Endpoints("", ""))
    order = ProcessSpec(PlannedProcess("rollout", 0, 1, ""), "1")
    command = [*spawner._role_command(order), "--help"]
    done = subprocess.run(
        command, env=spawner._role_environment(order), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_slow_module_is_imported_when_its_name_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_saw.py").write_text(
        "from tests.unit.test_registry import LAZY\nLAZY.register('saw')('SAW')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "saw" in LAZY and LAZY.names() == ["saw"]
    with pytest.raises(ConfigError, match="did you mean saw"):
        LAZY.load("sew")
    assert "slow_saw" not in sys.modules
    assert LAZY.load("saw") == "SAW"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("thing = 1", "has no 'thign'; did you mean thing"),
        ("import nothing_of_that_name", "cannot import .*ModuleNotFoundError"),
        ("raise RuntimeError('own reason')", "own reason"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    registry: Registry[object], tmp_path: Path, source: str, complaint: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=complaint):
        registry.load(f"{tmp_path / 'mine.py'}:thign")


def test_a_missing_file_is_named(registry: Registry[object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        registry.load(f"{tmp_path / 'none.py'}:thing")


def test_what_is_loaded_must_be_of_the_kind(tmp_path: Path) -> None:
    """A function without its decorator, or a part of another kind, is no entry."""
    (tmp_path / "parts.py").write_text("def plain(): pass\nready = 7\n")
    numbers: Registry[int] = Registry("number", int)
    assert numbers.load(f"{tmp_path / 'parts.py'}:ready") == 7
    with pytest.raises(
        ConfigError, match=r"number '.*parts.py:plain' is of type function; decorate .* with @number"
    ):
        numbers.load(f"{tmp_path / 'parts.py'}:plain")


# -- options from signatures ------------------------------------------------------------------------


def scaled(
    value: float, *, factor: Annotated[float, Meta(gt=0)], shift: float = 0.0, name: Literal["a", "b"] = "a"
) -> Any:
    return value * factor + shift, name


def test_options_are_set_and_converted() -> None:
    """A string from a command line becomes a number; what is not given keeps its default."""
    assert bind_options(scaled, {"factor": "2"}, "x")(3.0) == (6.0, "a")
    assert bind_options(scaled, {"factor": 2, "shift": 1, "name": "b"}, "x")(3.0) == (7.0, "b")


def test_a_bound_function_takes_no_second_value_by_accident() -> None:
    assert bind_options(lambda value: value, {}, "x")(1) == 1
    with pytest.raises(TypeError):
        bind_options(scaled, {"factor": 1}, "x")(1.0, 2.0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"fcator": 1.0}, r"x: unknown option 'fcator'; options: factor, shift, name"),
        ({"value": 1.0, "factor": 1.0}, "unknown option 'value'"),
        ({}, r"x: option 'factor' is missing; set x\.factor"),
        ({"factor": 0.0}, r"x\.factor: Expected `float` > 0.0, not 0.0"),
        ({"factor": "much"}, r"x\.factor: Expected `float`, got `str`, not 'much'"),
        ({"factor": 1.0, "name": "c"}, r"x\.name: Invalid enum value 'c'; choose from a, b"),
    ],
)
def test_wrong_options_name_the_key(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        bind_options(scaled, options, "x")


def test_what_takes_no_options_says_so() -> None:
    with pytest.raises(ConfigError, match="unknown option 'a'; options: none"):
        bind_options(lambda value: value, {"a": 1}, "x")


# -- entry points ------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on sys.path with an installed distribution that adds a gadget."""
    (tmp_path / "toolbox_of_a_user.py").write_text("drill = ['drill']\n")
    info = tmp_path / "toolbox_of_a_user-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toolbox-of-a-user\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[asyncrl.gadget]\ndrill = toolbox_of_a_user:drill\nsaw = toolbox_of_a_user:drill\n"
        "lost = toolbox_of_a_user:lost\n[asyncrl.other]\nsecret = toolbox_of_a_user:drill\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_installed_packages_add_names(registry: Registry[object]) -> None:
    assert registry.load("drill") == ["drill"]
    assert registry.load("saw") == "SAW", "a registered name comes first"
    with pytest.raises(ConfigError, match="unknown gadget 'dril'; did you mean drill"):
        registry.load("dril")


@pytest.mark.usefixtures("installed")
def test_entry_points_of_another_kind_are_not_seen(registry: Registry[object]) -> None:
    with pytest.raises(ConfigError, match="unknown gadget 'secret'"):
        registry.load("secret")


@pytest.mark.usefixtures("installed")
def test_an_entry_point_to_nothing_says_which(registry: Registry[object]) -> None:
    with pytest.raises(ConfigError, match=r"gadget 'toolbox_of_a_user:lost': .* has no 'lost'"):
        registry.load("lost")
