"""Classes whose public methods are tools: what is a tool, what `reset` gets, what an object leaves."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.tools import Tool, Toolbox, ToolError, load_tool, load_tools, signature_of, tool
from asyncrl.tools.toolbox import ToolSession
from asyncrl.types import Message, Sample, ToolCall

WAREHOUSE = '''
from asyncrl.tools import tool

class Warehouse:
    """Not shown to the model."""

    def reset(self, sample):
        self.stock = dict(sample.extra_info["stock"])

    def find(self, item: str) -> str:
        """Return the shelf of an item.

        Args:
            item: its name, in English
        """
        return self.stock.get(item, "none")

    async def move(self, item: str, shelf: str = "A") -> str:
        """Move an item to a shelf."""
        self.stock[item] = shelf
        return "moved"

@tool(timeout=7, blocking=True)
class Slow(Warehouse):
    def audit(self) -> int:
        return len(self.stock)

def plain(count: int) -> None:
    """Count."""

def unnamed(*counts: int) -> int: ...
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "warehouse.py").write_text(WAREHOUSE)
    return path


def sample(prompt: str = "q", **extra: Any) -> Sample:
    return Sample(3, "shop", (Message("user", prompt),), '"42"', extra_info_json=json.dumps(extra))


def open_session(tools: Mapping[str, Tool], for_sample: Sample) -> ToolSession:
    return Toolbox(tools, 60.0).session(for_sample)


async def replies(session: ToolSession, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    return [(await session.call(ToolCall(name, json.dumps(keywords)))).content for name, keywords in calls]


async def opening_text(subject: type, for_sample: Sample) -> str:
    """Open an object of the class for a sample, and return the text for the prompt."""
    session = open_session({member.name: member for member in tool(subject)}, for_sample)
    try:
        await session.open()
        return session.opening_text
    finally:
        await session.close()


async def result_of(subject: type) -> dict[str, Any] | None:
    session = open_session({member.name: member for member in tool(subject)}, sample())
    try:
        await session.open()
        return await session.result()
    finally:
        await session.close()


# -- from a class to tools -----------------------------------------------------------------------------


def test_a_plain_class_gives_its_public_methods(file: Path) -> None:
    tools = load_tools([f"{file}:Warehouse"])
    assert list(tools) == ["find", "move"]
    assert {(member.replay, member.timeout) for member in tools.values()} == {("reapply", None)}
    assert tools["find"].schema["function"] == {
        "name": "find",
        "description": "Return the shelf of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string", "description": "its name, in English"}},
            "required": ["item"],
        },
    }
    assert tools["move"].schema["function"]["description"] == "Move an item to a shelf."


async def test_methods_share_an_object_of_their_episode(file: Path) -> None:
    tools = load_tools([f"{file}:Warehouse"])
    stored = sample(stock={"tea": "B"})
    session = open_session(tools, stored)
    await session.open()
    moves = [("find", {"item": "tea"}), ("move", {"item": "tea", "shelf": "C"}), ("find", {"item": "tea"})]
    assert await replies(session, *moves) == ["B", "moved", "C"]
    assert (await replies(session, ("find", {"shelf": 1})))[0].startswith("error: bad arguments for find")
    other_session = open_session(tools, stored)
    await other_session.open()
    assert await replies(other_session, ("find", {"item": "tea"})) == ["B"]
    await session.close()
    await other_session.close()


async def test_a_decorated_class_gives_options_to_all_its_methods_and_those_of_its_bases(file: Path) -> None:
    tools = load_tools([str(file)])  # only what is decorated
    assert list(tools) == list(load_tools([f"{file}:Slow"])) == ["find", "move", "audit"]
    assert {member.timeout for member in tools.values()} == {7}
    assert [member.blocking for member in tools.values()] == [True] * 3
    session = open_session(tools, sample(stock={"tea": "B"}))
    await session.open()
    assert await replies(session, ("move", {"item": "oats"}), ("audit", {})) == ["moved", "2"]
    await session.close()


class Shelf:
    failures = 1

    def __init__(self) -> None:
        self.items: list[str] = []

    async def put(self, item: str) -> str:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise OSError("the shelf shakes")
        self.items.append(item)
        return "put"

    def show(self) -> str:
        return " ".join(self.items)


@pytest.mark.parametrize("options", [{"concurrency": 1}, {"rate": 100.0}, {}])
async def test_calls_of_one_object_keep_their_order(options: dict[str, Any]) -> None:
    session = open_session({member.name: member for member in tool(retries=1, **options)(Shelf)}, sample())
    await session.open()
    calls = [("put", {"item": "a"}), ("show", {}), ("put", {"item": "b"}), ("show", {})]
    turn = await asyncio.gather(
        *(session.call(ToolCall(name, json.dumps(keywords))) for name, keywords in calls)
    )
    assert [reply.content for reply in turn] == ["put", "a", "put", "a b"]
    await session.close()


def test_a_plain_function_with_annotations_is_a_tool(file: Path) -> None:
    assert load_tool(f"{file}:plain").schema["function"]["parameters"]["required"] == ["count"]
    with pytest.raises(ConfigError, match=r"warehouse.py:unnamed.*'counts' cannot be passed by name"):
        load_tools([f"{file}:unnamed"])
    with pytest.raises(ConfigError, match="takes no arguments; remove size"):
        load_tools([f"{file}:Warehouse"], {f"{file}:Warehouse": {"size": 3}})
    with pytest.raises(ConfigError, match="both define a tool 'find'"):
        load_tools([f"{file}:Warehouse", f"{file}:Slow"])


class Base:
    limit = 3

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def first(self) -> int:
        return self.size

    def replaced(self) -> str:
        return "base"

    def removed(self) -> str:
        return "base"


class Derived(Base):
    removed = None  # type: ignore[assignment]
    snapshots = 0

    def second(self) -> int:
        return 2

    def replaced(self) -> str:
        """Say who replies."""
        return "derived"

    @staticmethod
    def static() -> int:
        return 1

    @classmethod
    def of_class(cls) -> int:
        return 1

    Shelf = list[str]

    class Nested:
        """Is data."""

    @property
    def size_twice(self) -> int:
        return 2 * self.size

    @functools.cached_property
    def size_thrice(self) -> int:
        return 3 * self.size

    def _private(self) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    def reset(self) -> None: ...
    def close(self) -> None: ...
    def result(self) -> None: ...
    async def snapshot(self) -> bytes: ...  # type: ignore[empty-body]
    async def restore(self, archive: bytes) -> None: ...


async def test_what_is_no_tool() -> None:
    tools = {member.name: member for member in tool(functools.partial(Derived, size=5))}
    assert list(tools) == ["first", "replaced", "second"]
    session = open_session(tools, sample())
    await session.open()
    assert await replies(session, ("first", {}), ("replaced", {})) == ["5", "derived"]
    await session.close()


class Empty:
    def close(self) -> None: ...


class Needy(Base):
    def __init__(self, size: int) -> None: ...


class RewardMethod(Base):
    def reward(self) -> float: ...  # type: ignore[empty-body]


class TwoOpenings(Base):
    def open(self, sample: Sample) -> None: ...
    def reset(self) -> None: ...


class Positional(Base):
    def reset(self, stock: int, /) -> None: ...


class Cached(Base):
    @functools.lru_cache  # noqa: B019
    def look(self) -> int:
        return 1


class Partial(Base):
    def _add(self, number: int) -> int:
        return number

    add_one = functools.partialmethod(_add, 1)


class Untyped:
    def find(self, item) -> str: ...  # type: ignore[no-untyped-def, empty-body]


class DecoratedMethod(Base):
    @tool
    def third(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("subject", "complaint"),
    [
        (Empty, "class Empty has neither a `call` method nor a public method"),
        (Needy, r"class Needy: the constructor must work without arguments \(missing .*'size'\)"),
        (RewardMethod, "class RewardMethod: `reward` is a method"),
        (TwoOpenings, "class TwoOpenings has both `open` and `reset`"),
        (Positional, "class Positional: parameter 'stock' of `reset` cannot be passed by name"),
        (Cached, "class Cached: 'look' is a _lru_cache_wrapper, not a method that can be a tool"),
        (Partial, "class Partial: 'add_one' is a partialmethod, not a method that can be a tool"),
        (Untyped, "tool 'find': parameter 'item' needs a type annotation"),
        (DecoratedMethod, "class DecoratedMethod: 'third' has @tool; decorate the class"),
    ],
)
def test_classes_that_cannot_be_tools_are_refused(subject: type, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tool(subject)


def test_a_name_is_for_one_tool() -> None:
    with pytest.raises(ConfigError, match="class Derived defines a tool for each public method; rename"):
        tool(name="notes")(Derived)


def test_a_schema_of_a_function() -> None:
    def weather(city: str) -> str:
        """Return the weather."""
        return city

    schema, decode = signature_of(weather)
    assert (schema["function"]["name"], schema["function"]["description"]) == (
        "weather",
        "Return the weather.",
    )
    assert decode('{"city": "Oslo"}') == {"city": "Oslo"}


# -- reset ----------------------------------------------------------------------------------------------


class Resettable:
    def find(self, item: str) -> str: ...  # type: ignore[empty-body]


class OfSample(Resettable):
    async def reset(self, sample: Sample) -> str:
        return sample.extra_info["stock"]


class OfColumns(Resettable):
    def reset(self, stock: str, prompt: list[dict[str, Any]], shelf: int = 7) -> str:
        return f"{stock} {shelf} {prompt[-1]['content']}"


class OfAll(Resettable):
    def reset(self, **kwargs: Any) -> str:
        return json.dumps(kwargs)


class OfNothing(Resettable):
    def reset(self) -> None: ...


class OfMixed(Resettable):
    def reset(self, sample: Sample, *, ground_truth: str, **columns: Any) -> str:
        return f"{sample.row} {ground_truth} {sorted(columns)}"


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        (OfSample, "tea"),
        (OfColumns, "tea 7 q"),
        (
            OfAll,
            '{"stock": "tea", "data_source": "shop", "ground_truth": "42", '
            '"prompt": [{"role": "user", "content": "q"}]}',
        ),
        (OfNothing, ""),
        (OfMixed, "3 42 ['data_source', 'prompt', 'stock']"),
    ],
)
async def test_reset_gets_the_columns_it_names(subject: type, text: str) -> None:
    assert await opening_text(subject, sample(stock="tea")) == text


class OfNumber(Resettable):
    def reset(self) -> int:
        return 3


class Raising(Resettable):
    def reset(self) -> None:
        raise KeyError("stock")


class Hanging(Resettable):
    async def reset(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("subject", "complaint"),
    [
        (
            OfColumns,
            r"reset \(test_tool_classes.py:\d+\) needs 'stock'; the columns are data_source, ground_t",
        ),
        (OfNumber, "reset returned a value of type int; expected text or images for the prompt, or None"),
        (Raising, r"KeyError: 'stock' \(test_tool_classes.py:\d+\)"),
        (tool(timeout=0.01)(Hanging), "'find' could not be opened: .*0.01 s"),
    ],
)
async def test_errors_of_reset_fail_the_episode(subject: Any, complaint: str) -> None:
    members = subject if isinstance(subject, tuple) else tool(subject)
    session = open_session({member.name: member for member in members}, sample())
    with pytest.raises(ToolError, match=complaint):
        await session.open()
    await session.close()


async def test_texts_of_two_objects_follow_the_order_of_the_tools() -> None:
    class Other(Resettable):
        async def reset(self) -> str:
            return " second"

        def look(self) -> str: ...  # type: ignore[empty-body]

    (find,) = tool(OfSample)
    look = next(member for member in tool(Other) if member.name == "look")
    session = open_session({"find": find, "look": look}, sample(stock="first"))
    await session.open()
    assert session.opening_text == "first second"
    await session.close()


class BlockingParts:
    """Notes the members that run in the thread of the event loop."""

    def __init__(self) -> None:
        self.inline_members: list[str] = []
        self._note("constructor")

    def _note(self, member_name: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self.inline_members.append(member_name)

    def reset(self) -> None:
        self._note("reset")

    async def look(self) -> str:
        self._note("look")
        return "seen"

    @property
    def reward(self) -> float:
        self._note("reward")
        return 1.0

    def close(self) -> None:
        self._note("close")


@pytest.mark.parametrize(
    ("options", "inline_members"),
    [({}, ["constructor", "reset", "look", "reward", "close"]), ({"blocking": True}, ["look"])],
)
async def test_blocking_is_for_all_sync_members(options: dict[str, Any], inline_members: list[str]) -> None:
    made_objects: list[BlockingParts] = []

    class Noted(BlockingParts):
        def __init__(self) -> None:
            super().__init__()
            made_objects.append(self)

    (look,) = tool(**options)(Noted)
    session = open_session({"look": look}, sample())
    await session.open()
    assert await replies(session, ("look", {})) == ["seen"]
    assert await session.result() == {"reward": 1.0}
    await session.close()
    assert made_objects[0].inline_members == inline_members


# -- what the object leaves for the reward ----------------------------------------------------------------


class Rewarding(Resettable):
    def __init__(self) -> None:
        self.reward = True


class Property(Resettable):
    @property
    def reward(self) -> float:
        return 0.5


class Undecided(Resettable):
    reward = None


class WithResult(Rewarding):
    def result(self) -> dict[str, int]:
        return {"moves": 3}


class WithAttributes(Rewarding):
    """The reserved names are data here, which nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.open = self.close = self.reset = True
        self.result = "won"


class Texted(Resettable):
    reward = "much"


class Failing(Resettable):
    @property
    def reward(self) -> float:
        return 1 / 0


@pytest.mark.parametrize(
    ("subject", "result"),
    [
        (Rewarding, {"reward": 1.0}),
        (Property, {"reward": 0.5}),
        (Undecided, {"reward": None}),
        (WithResult, {"moves": 3}),
        (WithAttributes, {"reward": 1.0}),
        (OfNothing, None),
    ],
)
async def test_the_reward_of_an_object_is_its_result(subject: type, result: dict[str, Any] | None) -> None:
    assert await result_of(subject) == result


async def test_a_class_with_call_is_opened_and_has_a_result_as_ever() -> None:
    @tool
    class Lookup(TwoOpenings, Positional, RewardMethod):
        opened = False

        def open(self, sample: Sample) -> None:
            self.opened = True

        def call(self) -> bool:
            """Look it up."""
            return self.opened

    @tool
    class Unopened(OfNumber):
        reward = "much"

        def call(self) -> str:
            """Look it up."""
            return "seen"

    session = open_session({"lookup": Lookup, "unopened": Unopened}, sample())
    await session.open()
    assert await replies(session, ("lookup", {}), ("unopened", {})) == ["true", "seen"]
    assert (session.opening_text, await session.result()) == ("", None)
    await session.close()


@pytest.mark.parametrize(
    ("subject", "complaint"),
    [(Texted, "Texted.reward: .*'much', which is not a number"), (Failing, "Failing.rew.*Zero")],
)
async def test_a_reward_that_is_no_number_fails_the_episode(subject: type, complaint: str) -> None:
    with pytest.raises(ToolError, match=complaint):
        await result_of(subject)
