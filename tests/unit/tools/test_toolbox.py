"""Sessions: what is opened, called, redone and closed, and what a bad tool cannot do to the others."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.tools import Tool, Toolbox, ToolError, check_sample_tools, load_tool, tool
from asyncrl.tools.base import MAX_REPLY_BYTES
from asyncrl.tools.sample_tools import MAX_PROBLEMS, SampleTools
from asyncrl.tools.toolbox import CLOSE_SECONDS
from asyncrl.types import Sample, ToolCall, ToolReply
from tests.fakes.raised import BASE_EXCEPTIONS


def sample(**extra: Any) -> Sample:
    return Sample(3, "", (), "", extra_info_json=json.dumps(extra))


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


BOUNDS = {"timeout": 0, "retries": -1, "concurrency": 0, "rate": -1.0}


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


class Notes:
    """A notepad that remembers everything that happened to it."""

    log: list[str] = []

    async def open(self, sample: Sample, title: str = "untitled") -> None:
        self.lines = [title]
        Notes.log.append(f"open {sample.row}")

    async def call(self, line: str) -> list[str]:
        self.lines.append(line)
        await asyncio.sleep(0)
        return self.lines

    def close(self) -> None:
        Notes.log.append("close")


@pytest.fixture
def log() -> list[str]:
    Notes.log = []
    return Notes.log


async def one_call(box: Toolbox, sample: Sample, *calls: ToolCall) -> list[ToolReply]:
    session = box.session(sample)
    try:
        await session.open()
        return await asyncio.gather(*map(session.call, calls))
    finally:
        await session.close()


def play(tools: list[Tool], sample: Sample, *calls: ToolCall) -> list[ToolReply]:
    return asyncio.run(one_call(Toolbox({tool.name: tool for tool in tools}, 60.0), sample, *calls))


def test_a_class_keeps_state_within_its_episode(log: list[str]) -> None:
    notes = tool(Notes)
    assert notes.name == "notes" and notes.replay == "reapply"
    assert notes.schema["function"]["parameters"]["required"] == ["line"]
    replies = play([notes], sample(), call("notes", line="a"), call("notes", line="b"))
    assert [reply.content for reply in replies] == ['["untitled", "a"]', '["untitled", "a", "b"]']
    assert play([notes], sample(), call("notes", line="c"))[0].content == '["untitled", "c"]'
    assert log == ["open 3", "close"] * 2


def test_samples_bring_constructor_arguments(log: list[str]) -> None:
    requesting_sample = sample(tools_kwargs={"notes": {"create_kwargs": {"title": "poem"}}, "echo": None})
    assert play([tool(Notes)], requesting_sample, call("notes", line="a"))[0].content == '["poem", "a"]'


def test_samples_choose_their_tools() -> None:
    notes = tool(Notes)
    reply = play([notes, echo], sample(tools=["echo"]), call("notes", line="a"))[0]
    assert reply.error == "unknown tool 'notes'; available: echo"
    with pytest.raises(ToolError, match="unknown names: ekko; available: echo"):
        play([echo], sample(tools=["ekko"]))


async def test_what_has_to_be_repeated_is_repeated(log: list[str]) -> None:
    box = Toolbox({"notes": tool(Notes), "echo": echo})
    session = box.session(sample())
    await session.open()
    recorded = [ToolReply(call("notes", line="a"), '["untit'), ToolReply(call("echo", text="x"), "pure")]
    await session.redo(recorded, lambda text, images: text[:7])
    assert "a" in (await session.call(call("notes", line="b"))).content
    with pytest.raises(ProtocolError, match="a different reply"):
        await session.redo(recorded)
    await session.close()


# -- bad tools -----------------------------------------------------------------------------------------


def test_calls_that_could_not_be_made_are_distinguished_from_those_that_failed() -> None:
    @tool
    async def bomb() -> str:
        raise OSError

    replies = play([bomb, echo], sample(), call("ekko"), call("echo"), call("bomb"), call("echo", text="x"))
    assert [reply.refused for reply in replies] == [True, True, False, False]


def test_a_tool_that_ignores_cancellation_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the end of the event loop."""
    monkeypatch.setattr("asyncrl.isolation.calls.GRACE_SECONDS", 0.01)

    @tool(timeout=0.05)
    async def stubborn() -> str:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    began = time.monotonic()
    replies = play([stubborn, echo], sample(), call("stubborn"), call("echo", text="x"))
    assert [reply.error for reply in replies] == ["no reply within 0.05 s", None]
    assert time.monotonic() - began < CLOSE_SECONDS / 2


def test_a_tool_with_too_many_calls_left_behind_is_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.tools.process.MAX_ABANDONED_CALLS", 2)
    release = threading.Event()
    call_may_end = threading.Semaphore(0)

    @tool(timeout=0.02, blocking=True)
    def stuck() -> str:
        release.wait(30)
        call_may_end.release()
        return "late"

    async def main() -> list[str | None]:
        box = Toolbox({"stuck": stuck})
        errors = [(await one_call(box, sample(), call("stuck")))[0].error for _ in range(3)]
        release.set()
        assert all(call_may_end.acquire(timeout=10) for _ in range(2))
        while box.call_limits["stuck"].live_calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return [*errors, (await one_call(box, sample(), call("stuck")))[0].error]

    late_text = "no reply within 0.02 s"
    assert asyncio.run(main()) == [
        late_text,
        late_text,
        "the tool is not available: 2 earlier calls are still running",
        None,
    ]


@pytest.mark.parametrize(
    ("options", "failure", "expected_text"),
    [
        *(({}, kind("its text"), f"error: {kind.__name__}: its text$") for kind in BASE_EXCEPTIONS),
        ({}, RuntimeError("x" * 10**7), "error: RuntimeError: x"),
        ({}, ToolError("no such city"), "error: no such city$"),
        ({"retries": 1000, "timeout": 0.05}, ConnectionError(), "error: no reply within 0.05 s$"),
    ],
)
def test_no_exception_gets_out(options: dict[str, Any], failure: BaseException, expected_text: str) -> None:
    @tool(**options)
    async def bomb() -> str:
        raise failure

    reply = play([bomb], sample(), call("bomb"))[0]
    assert reply.error and re.match(expected_text, reply.content) and len(reply.content) < 400


def test_the_first_failure_of_a_tool_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    async def weather(city: str) -> str:
        return {"Oslo": "rain"}[city]

    play([weather], sample(), call("weather", city="Rome"), call("weather", city="Bonn"))
    assert len(caplog.messages) == 1 and "tool weather failed" in caplog.text
    assert "KeyError" in caplog.text and "(test_toolbox.py:" in caplog.text


@pytest.mark.parametrize("value", ["x" * 10**7, ["x" * 100] * 10**5, {"a": ["é" * 10**7]}])
def test_large_replies_are_cut(value: Any) -> None:
    @tool
    async def large() -> Any:
        return value

    reply = play([large], sample(), call("large"))[0]
    assert len(reply.content.encode()) <= MAX_REPLY_BYTES + 10 and "[...]" in reply.content


# -- options -------------------------------------------------------------------------------------------


def test_calls_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.tools.toolbox.RETRY_PAUSES", (0.0,))
    tries: list[int] = []

    @tool(retries=2)
    async def flaky(until: int) -> str:
        tries.append(1)
        if len(tries) < until:
            raise ConnectionError("no route")
        return "there"

    assert play([flaky], sample(), call("flaky", until=3))[0].content == "there"
    tries.clear()
    assert play([flaky], sample(), call("flaky", until=4))[0].content == "error: ConnectionError: no route"
    assert len(tries) == 3
    tries.clear()
    play([flaky], sample(), ToolCall("flaky", "{}"))
    assert not tries  # bad arguments stay bad


async def test_concurrency_holds_over_all_episodes() -> None:
    inside: list[int] = []
    gate = asyncio.Event()

    @tool(concurrency=2)
    async def narrow() -> int:
        inside.append(1)
        if len(inside) == 2:
            asyncio.get_running_loop().call_later(0.01, gate.set)
        await gate.wait()
        now = len(inside)
        inside.pop()
        return now

    box = Toolbox({"narrow": narrow})
    replies = await asyncio.gather(*(one_call(box, sample(), call("narrow")) for _ in range(8)))
    assert max(int(reply[0].content) for reply in replies) == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        *(({key: value}, f"tool 'f': {key} must be above") for key, value in BOUNDS.items()),
        *(({key: True}, "is async") for key in ("blocking", "process")),
    ],
)
def test_options_have_bounds_and_async_tools_need_no_thread(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        tool(name="f", **options)(echo.function)


# -- opening and closing -------------------------------------------------------------------------------


def stateful(open: Callable[[], Any], close: Callable[[], Any], **options: Any) -> Tool:
    class Thing:
        def open(self, sample: Sample) -> Any:
            return open()

        def call(self) -> str:
            return "called"

        def close(self) -> Any:
            return close()

    return tool(name="thing", **options)(Thing)


def fail() -> None:
    raise OSError("no such display")


@pytest.mark.parametrize("blocking", [False, True])
def test_what_could_not_be_opened_is_closed(blocking: bool) -> None:
    closed: list[int] = []
    thing = stateful(fail, lambda: closed.append(1), blocking=blocking)
    with pytest.raises(ToolError, match="'thing' could not be opened: OSError: no such display"):
        play([thing], sample())
    assert closed == [1]


def test_opening_has_a_deadline() -> None:
    thing = stateful(lambda: asyncio.Event().wait(), lambda: None, timeout=0.01)
    with pytest.raises(ToolError, match=r"could not be opened: no reply within 0.01 s"):
        play([thing], sample())


def test_closing_has_a_deadline_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.tools.toolbox.CLOSE_SECONDS", 0.02)
    assert play([stateful(lambda: None, fail)], sample(), call("thing"))[0].content == "called"
    hangs = stateful(lambda: None, lambda: asyncio.Event().wait())
    assert play([hangs], sample(), call("thing"))[0].content == "called"


def test_what_tools_share_is_ended_once_and_never_raises() -> None:
    ends: list[str] = []

    async def good() -> None:
        ends.append("good")

    async def bad() -> None:
        ends.append("bad")
        raise OSError

    tools = {str(n): replace(echo, end=end) for n, end in enumerate((good, bad, None))}
    tools["mine"] = tool(end=good)(echo.function)
    asyncio.run(Toolbox(tools).close())
    assert sorted(ends) == ["bad", "good"]


def test_tools_of_one_state_share_an_object() -> None:
    objects: list[list[str]] = []

    def state() -> list[str]:
        objects.append([])
        return objects[-1]

    def say(texts: list[str], text: str) -> str:
        texts.append(text)
        return " ".join(texts)

    first, second = (replace(echo, name=name, function=say, state=state) for name in ("first", "second"))
    replies = play([first, second], sample(), call("first", text="a"), call("second", text="b"))
    assert [reply.content for reply in replies] == ["a", "a b"]
    assert len(objects) == 1


class Shared:
    """The object of two tools."""

    def open(self, sample: Sample, title: str = "", owner: str = "") -> None:
        self.text = f"{title} of {owner}"


SHARED: dict[str, Tool] = {
    name: Tool(name, echo.schema, lambda shared, text: shared.text, echo.decode, Shared)
    for name in ("first", "second")
}


@pytest.mark.parametrize(
    ("first", "second"),
    [({"title": "poem", "owner": "Rome"}, None), ({"title": "poem"}, {"title": "poem", "owner": "Rome"})],
)
def test_what_is_shared_is_opened_with_all_arguments(first: Any, second: Any) -> None:
    requesting_sample = sample(
        tools_kwargs={"first": {"create_kwargs": first}, "second": {"create_kwargs": second}}
    )
    assert play([*SHARED.values()], requesting_sample, call("first", text=""))[0].content == "poem of Rome"


def test_arguments_that_contradict_each_other_are_refused() -> None:
    requesting_sample = sample(tools_kwargs={"first": {"title": "a"}, "second": {"title": "b"}})
    with pytest.raises(
        ToolError, match="'title' to different values for first, second, which share this argument"
    ):
        play([*SHARED.values()], requesting_sample)
    assert not play([SHARED["first"]], requesting_sample, call("first", text=""))[0].error


# -- what samples ask for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra_info", "complaint"),
    [
        ({"tools": "echo"}, "sample 3: cannot read extra_info, tools or tools_kwargs .*Expected `array"),
        ({"tools_kwargs": {"echo": 3}}, "tools_kwargs.echo must be an object"),
        (
            {"tools_kwargs": {"echo": {"create_kwargs": 3}}},
            "tools_kwargs.echo.create_kwargs must be an object",
        ),
    ],
)
def test_extra_info_that_cannot_be_read_fails(extra_info: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ToolError, match=complaint):
        play([echo], sample(**extra_info))


def test_arguments_of_tools_that_are_not_here_are_ignored() -> None:
    """As in verl's GSM8K data."""
    requesting_sample = sample(
        tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}, "other": 3}
    )
    assert play([echo], requesting_sample, call("echo", text="x"))[0].content == "x"


def test_arguments_that_nothing_takes_are_reported_before_the_run() -> None:
    calculator = load_tool("calculator", latency_sigma=0.0)
    loaded_tools = {"calculator": calculator, "notes": tool(name="notes")(Notes)}
    kwargs = {
        "calculator": {"create_kwargs": {"latency_mean": 0.0, "ground_truth": "4"}},
        "notes": {"create_kwargs": {"title": "a", "pages": 3, "gone": None}, "execute_kwargs": {"a": 1}},
        "absent": None,  # parquet gives every sample the keys of all
    }
    problems, ignored = check_sample_tools(loaded_tools, [json.dumps({"tools_kwargs": kwargs})] * 3)
    assert not problems
    assert ignored == [
        "sample 0: tools_kwargs.calculator contains 'ground_truth', but the tool has no such parameter",
        "sample 0: tools_kwargs.notes contains 'pages', but the tool has no such parameter",
        "sample 0: tools_kwargs.notes contains execute_kwargs, but only create_kwargs are used",
    ]


@pytest.mark.parametrize(
    ("tool_kwargs", "arguments"),
    [
        ({"execute_kwargs": {"title": "no"}}, {}),
        ({"calc_reward_kwargs": None, "release_kwargs": {}, "create_kwargs": None}, {}),
        ({"execute_kwargs": {}, "title": "poem"}, {"title": "poem"}),
        ({"execute_kwargs": {}, "create_kwargs": {"title": "poem", "owner": None}}, {"title": "poem"}),
    ],
)
def test_constructor_arguments_of_a_sample(tool_kwargs: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert SampleTools(tools_kwargs={"open": tool_kwargs}).tool_arguments("open") == arguments


def test_a_data_set_is_checked_before_the_run() -> None:
    data = [
        "",
        '{"tools": null, "tools_kwargs": {"calc_gsm8k_reward": {}}}',
        '{"tools": ["echo"]}',
        '{"tools": ["ekko", "echo"]}',
        '{"tools": ["ekko"]}',
        '{"tools": "echo"}',
    ]
    unused = "sample 1: tools_kwargs contains 'calc_gsm8k_reward', which is not in rollout.tools"
    assert check_sample_tools({"echo": echo}, data[:3]) == ([], [unused])
    assert check_sample_tools({"echo": echo}, data)[0] == [
        "sample 3: extra_info.tools contains unknown names: ekko; available: echo",
        "sample 5: cannot read extra_info, tools or tools_kwargs "
        "(ValidationError: Expected `array | null`, got `str` - at `$.tools`)",
    ]
    garbage = (json.dumps({"tools": [str(row)]}) for row in itertools.count())
    assert len(check_sample_tools({"echo": echo}, garbage)[0]) == MAX_PROBLEMS


def test_samples_reach_the_factory_of_a_tool() -> None:
    slow = load_tool("calculator", latency_sigma=0.0)
    reply = play(
        [slow],
        sample(tools_kwargs={"calculator": {"create_kwargs": {"latency_mean": 0.02, "ground_truth": "4"}}}),
        call("calculator", a=1, op="plus", b=2),
    )[0]
    assert reply.content == "3" and reply.seconds >= 0.02
    with pytest.raises(ToolError, match=r"'calculator' rejects its tools_kwargs .*must not be negative"):
        play([slow], sample(tools_kwargs={"calculator": {"latency_mean": -1}}))


class Leaves:
    """Leaves something for the reward; how, says the sample."""

    def open(self, sample: Sample, way: str = "") -> None:
        self.way = way
        self.calls = 0

    def call(self) -> str:
        self.calls += 1
        return "done"

    async def result(self) -> object:
        if self.way == "raises":
            raise ValueError("no way")
        if self.way == "hangs":
            await asyncio.Event().wait()
        return {"calls": self.calls} if self.way == "dict" else None if self.way == "" else self.way


async def left(way: str) -> object:
    leaves = tool(Leaves, name="leaves", timeout=0.2)
    session = Toolbox({"leaves": leaves, "notes": tool(Notes, name="notes")}).session(
        sample(tools_kwargs={"leaves": {"create_kwargs": {"way": way}}})
    )
    try:
        await session.open()
        await session.call(call("leaves"))
        return await session.result()
    finally:
        await session.close()


def test_objects_leave_a_result_for_the_reward() -> None:
    assert asyncio.run(left("dict")) == {"calls": 1}
    assert asyncio.run(left("")) is None


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("raises", "ValueError: no way"),
        ("hangs", "no reply within 0.2 s"),
        ("text", "the method returned a value of type str"),
    ],
)
def test_a_result_that_fails_or_hangs_is_a_tool_error(way: str, why: str) -> None:
    with pytest.raises(ToolError, match=f"Leaves.result: .*{why}"):
        asyncio.run(left(way))


def test_two_tools_do_not_leave_the_same() -> None:
    async def play() -> None:
        class Others(Leaves):
            pass

        twins = {"one": tool(Leaves, name="one"), "two": tool(Others, name="two")}
        tool_kwargs = {name: {"create_kwargs": {"way": "dict"}} for name in twins}
        session = Toolbox(twins).session(sample(tools_kwargs=tool_kwargs))
        await session.open()
        await session.result()

    with pytest.raises(ToolError, match="two tools return 'calls' as their result; use only one"):
        asyncio.run(play())
