"""From names to tools: registry, entry points, files, folders, factories."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.tools import call_tool, load_tool, load_tools, tools
from asyncrl.tools.base import Options
from asyncrl.types import Sample, ToolCall

HEAD = (
    "from __future__ import annotations\nfrom collections.abc import Sequence\nfrom asyncrl.tools import *\n"
)
ONE = HEAD + "@tool\ndef one(x: int) -> int: return x\n"
MANY = (
    HEAD + "def many(*, first: str = 'a', count: int = 2) -> Sequence[Tool]:\n"
    "    def f(x: int) -> int: return x\n"
    "    return [tool(name=f'{first}{n}')(f) for n in range(count)]\n"
    "def bad() -> Tool: return 3\n"
    "def breaks() -> Tool: return 1 / 0\n"
    "def loose(count: int = 2) -> Tool: ...\n"
    "def plain(x: int): return x\n"
    "@tool(replay='no')\n"
    "def ready(x: int) -> int: return x + 1\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.py").write_text(ONE)
    (tmp_path / "a.py").write_text(
        HEAD + "@tool\ndef zwei() -> int: return 2\n@tool\ndef deux() -> int: return 2\n"
    )
    (tmp_path / "many.txt").write_text(MANY)
    return tmp_path


def many(folder: Path) -> Path:
    return (folder / "many.txt").rename(folder / "many.py")


def test_a_folder_gives_every_tool_in_its_files(folder: Path) -> None:
    assert list(load_tools([str(folder), "calculator"])) == ["deux", "zwei", "one", "calculator"]


def test_a_factory_may_give_several_and_be_used_twice(folder: Path) -> None:
    spec = f"{many(folder)}:many"
    tool_args: dict[str, Any] = {
        f"{spec}@left": {"first": "l"},
        f"{spec}@right": {"first": "r", "count": "1"},
    }
    assert list(load_tools(list(tool_args), tool_args)) == ["l0", "l1", "r0"]
    single_tool = load_tool(spec, first="one", count=1)
    assert asyncio.run(call_tool(single_tool, ToolCall("one0", '{"x": 3}'))).content == "3"
    assert load_tool(f"{folder}/many.py:ready").replay == "no"


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("many", {"cuont": 3}, "unknown option 'cuont'; options: first, count"),
        ("many", {"count": "x"}, "Expected `int`"),
        ("bad", {}, "returned int, not a Tool"),
        ("breaks", {}, "ZeroDivisionError"),
        ("loose", {}, r"'count' of the factory must come after a `\*`"),
        ("plain", {}, "is not a tool; decorate it"),
        ("ready", {"by": 1}, "takes no arguments"),
        ("raedy", {}, "did you mean ready"),
    ],
)
def test_errors_of_factories_name_the_cause(
    folder: Path, name: str, options: dict[str, Any], complaint: str
) -> None:
    spec = f"{many(folder)}:{name}"
    with pytest.raises(ConfigError, match=complaint):
        load_tools([spec], {spec: options})


def test_two_tools_of_one_name_are_both_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"'{folder}' and '{folder}/b.py:one' both define a tool 'one'"):
        load_tools([str(folder), f"{folder}/b.py:one"])


def test_folders_without_tools_and_arguments_for_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="contains no tools"):
        load_tools([str(empty)])
    with pytest.raises(ConfigError, match="takes no arguments"):
        load_tools([str(folder)], {str(folder): {"a": 1}})
    with pytest.raises(ConfigError, match=r"rollout.tools does not list other"):
        load_tools([str(folder)], {"other": {"a": 1}})


def test_installed_packages_bring_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools_of_a_user.py").write_text(ONE)
    info = tmp_path / "tools_of_a_user-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tools-of-a-user\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[asyncrl.tool]\nuno = tools_of_a_user:one\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "uno" in tools.all_names() and "search" in tools.all_names()
    assert list(load_tools(["uno"])) == ["one"]


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean search"):
        load_tools(["serch"])


# -- docs/guides/tools.md ------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[3] / "docs/guides/tools.md"


def test_the_example_loads_and_answers(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0])
    loaded_tools = load_tools([str(tmp_path)])
    assert sorted(loaded_tools) == ["notes", "weather"]
    reply = asyncio.run(call_tool(loaded_tools["notes"], ToolCall("notes", '{"line": "a"}')))
    assert (reply.content, reply.reward) == ("noted", 0.1)


def test_the_class_of_the_example_finds_and_counts(tmp_path: Path) -> None:
    (file := tmp_path / "warehouse.py").write_text(
        re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1]
    )
    tools_of_class = load_tools([f"{file}:Warehouse"])
    assert sorted(tools_of_class) == ["count", "find", "move", "take"]
    sample = Sample(0, "", (), "null", extra_info_json='{"shelf_of": {"1": 3, "2": 3}, "goal": {"1": 2}}')
    call = ToolCall("count", '{"shelf": 3}')
    assert asyncio.run(call_tool(tools_of_class["count"], call, sample=sample)).content == "2"


def test_the_tools_of_the_class_change_what_it_scores() -> None:
    namespace: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1], namespace)
    warehouse = namespace["Warehouse"]()
    warehouse.reset(
        Sample(0, "", (), "null", extra_info_json='{"shelf_of": {"1": 3, "2": 3}, "goal": {"1": 2}}')
    )
    assert (warehouse.find(1), warehouse.reward) == (3, 0.0)
    warehouse.move(1, 2)
    warehouse.take(2)
    assert (warehouse.count(2), warehouse.reward) == (1, 1.0)


def test_every_option_is_documented() -> None:
    rows = "\n".join(line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    assert not [name for name in Options.__annotations__ if f"`{name}`" not in rows]
