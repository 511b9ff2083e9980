"""Names, options and what is no environment: all found before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.environments import ScriptedUser, environments, load_environment
from asyncrl.errors import ConfigError

WORLDS = """
import functools
from asyncrl.environments import Environment, text_observation

class Echo(Environment):
    def __init__(self, *, times: int = 1) -> None:
        if times < 0:
            raise ValueError("times must not be negative")
    async def reset(self, sample):
        return text_observation("hello")
    async def step(self, message):
        return text_observation(message.content)

class HalfDone(Environment):
    async def reset(self, sample):
        return text_observation("hello")

class Stranger:
    pass

class Hasty(Echo):
    timeout = 0

def echo(*, times: int = 1):
    return Echo(times=times)

class Sync(Echo):
    def step(self, message):
        return text_observation(message.content)

class CutsShort(Echo):
    def cut_short(self, unanswered):
        return 0.0

class Forgot(Echo):
    async def reset(self):
        return text_observation("hello")

class Greedy(Echo):
    async def step(self, message, state):
        return text_observation(message.content)

class Yields(Echo):
    async def step(self, message):
        yield text_observation(message.content)

class Closes(Echo):
    def close(self):
        pass

class Never(Echo):
    replay = "never"

def logged(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call

class Wrapped(Echo):
    step = logged(Echo.step)

    async def cut_short(self, unanswered, *more, factor=2.0):
        return 0.0

number = 3
"""


@pytest.fixture
def worlds(tmp_path: Path) -> Path:
    path = tmp_path / "worlds.py"
    path.write_text(WORLDS)
    return path


def test_an_environment_is_a_class_or_a_function_with_options(worlds: Path) -> None:
    for name in ("Echo", "echo"):
        make = load_environment({f"{worlds}:{name}": {"times": 2}})
        assert make() is not make()
        assert (make().tools, make().replay, make().timeout) == ((), "reapply", None)
    assert isinstance(load_environment("scripted_user")(), ScriptedUser)
    load_environment(f"{worlds}:Wrapped")  # awaited all the same


@pytest.mark.parametrize(
    ("plugin", "complaint"),
    [
        ({"{}:Echo": {"time": 2}}, "unknown option 'time'; options: times"),
        ({"{}:Echo": {"times": "x"}}, "times"),
        ({"{}:Echo": {"times": -1}}, "times must not be negative"),
        ("{}:HalfDone", "abstract method '?step"),
        (
            "{}:Stranger",
            "Stranger is not an environment, because it lacks reset, step, cut_short, close, tools, replay",
        ),
        ("{}:Hasty", "timeout must be a number of seconds greater than 0, not 0"),
        ("{}:Sync", r"Sync: step \(worlds.py:\d+\) is not async; write async def step\(self, message\)"),
        ("{}:CutsShort", r"cut_short \(worlds.py:\d+\) is not async; write .*cut_short\(self, unanswered\)"),
        ("{}:Closes", r"close \(worlds.py:\d+\) is not async; write async def close\(self\)"),
        (
            "{}:Forgot",
            r"reset \(worlds.py:\d+\) cannot be called .* \(too many positional.*\(self, sample\)",
        ),
        (
            "{}:Greedy",
            r"step \(worlds.py:\d+\) cannot be called with the expected arguments \(missing .* 'state'\)",
        ),
        ("{}:Yields", r"step \(worlds.py:\d+\) yields instead of returning"),
        ("{}:Never", "replay must be 'reapply' or 'no', not 'never'"),
        ("{}:number", "is not a function; write a class, or a function that returns"),
        ("{}:missing", "has no 'missing'"),
        ("scripted", "did you mean scripted_user"),
        ({"scripted_user": {}, "gymnasium": {}}, "expected one name"),
        ({}, "not 0"),
    ],
)
def test_what_is_wrong_is_said_with_the_key(
    worlds: Path, plugin: str | dict[str, dict[str, object]], complaint: str
) -> None:
    named = (
        plugin.format(worlds)
        if isinstance(plugin, str)
        else {key.format(worlds): options for key, options in plugin.items()}
    )
    with pytest.raises(ConfigError, match=complaint) as error:
        load_environment(named)  # type: ignore[arg-type]
    assert str(error.value).startswith("rollout.environment")


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("simulated_user", {"url": "http://127.0.0.1:9/v1", "model": "m", "timeout": 90}, 91.0),
        ("openenv", {"url": "http://127.0.0.1:9", "timeout": 60}, 121.0),
    ],
)
def test_what_asks_others_has_the_time_of_its_options(
    name: str, options: dict[str, str | int | float | bool], limit: float
) -> None:
    assert load_environment({name: options})().timeout == limit


def test_all_of_them_are_registered() -> None:
    assert {"gymnasium", "scripted_user", "simulated_user"} <= set(environments.names())


@pytest.mark.parametrize(
    ("module", "plugin", "extra"),
    [
        ("gymnasium", {"gymnasium": {"id": "FrozenLake-v1"}}, "gymnasium"),
        ("verifiers.v1", {"verifiers": {"taskset": "anything"}}, "verifiers"),
    ],
)
def test_without_its_package_the_run_does_not_begin(
    module: str, plugin: dict[str, dict[str, str]], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'asyncrl\[{extra}\]'"):
        load_environment(plugin)  # type: ignore[arg-type]


def test_the_packages_are_imported_only_where_they_are_used() -> None:
    """Importing the environments costs none of the packages that they adapt."""
    heavy = ["gymnasium", "verifiers", "openenv", "reasoning_gym", "mcp"]
    code = f"import sys, asyncrl.environments; print([name for name in {heavy} if name in sys.modules])"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout.strip() == "[]"
