"""MCP over real server processes, through the toolbox that episodes use."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mcp.types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from asyncrl import ImageFile
from asyncrl.errors import ConfigError
from asyncrl.tools import Tool, Toolbox, ToolError, ToolSession, load_tools, mcp_pipes
from asyncrl.tools.mcp import result_content
from asyncrl.tools.mcp_client import MAX_UNANSWERED, close_servers
from asyncrl.tools.mcp_pipes import MAX_MESSAGE_BYTES
from asyncrl.types import IMAGE_MARK, Sample, ToolCall, ToolReply
from asyncrl.wire.addresses import reserve_port
from tests.fakes.chat import IMAGE_LAYOUT

FAKES = Path(__file__).parents[1] / "fakes"
SERVER = FAKES / "mcp_server.py"
COMMAND = f"{sys.executable} {SERVER}"
PLAIN = f"{sys.executable} -S {FAKES / 'mcp_plain.py'}"
SAMPLE = Sample(0, "", (), "")
DEADLINE = 20.0
run: Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that do not end when they are asked to are here on purpose."""
    monkeypatch.setattr("asyncrl.tools.mcp_pipes.END_SECONDS", 0.1)


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[asyncio.Runner]:
    """One event loop for all tests, as a worker has one: shared connections last as long as it does."""
    global run
    with asyncio.Runner() as runner:
        run = runner.run
        yield runner
        run(close_servers())


def tools_of(**options: Any) -> dict[str, Tool]:
    return load_tools(["mcp"], {"mcp": {"command": COMMAND} | options})


@pytest.fixture(scope="module")
def shared() -> dict[str, Tool]:
    """The tools of one server that all episodes share. They can be listed inside of an event loop, too."""

    async def main() -> dict[str, Tool]:
        return tools_of()

    return run(main())


def in_episode(
    tools: dict[str, Tool], play: Callable[[ToolSession], Awaitable[Any]], timeout: float = DEADLINE
) -> Any:
    async def main() -> Any:
        session = Toolbox(tools, timeout).session(SAMPLE)
        try:
            await session.open()
            return await play(session)
        finally:
            await session.close()

    return run(asyncio.wait_for(main(), 3 * DEADLINE))


def ask(tools: dict[str, Tool], name: str, arguments: str = "{}", timeout: float = DEADLINE) -> ToolReply:
    reply: ToolReply = in_episode(tools, lambda session: session.call(ToolCall(name, arguments)), timeout)
    return reply


def has_gone(pid: int, seconds: float = DEADLINE) -> bool:
    """True if a process ends in time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


def pid_after_loss(tools: dict[str, Tool]) -> int:
    """The server that answers after another's end. A call that came before the end was seen is lost."""
    reply = ask(tools, "pid")
    if reply.error is not None:
        assert "was lost during the call" in reply.error
        reply = ask(tools, "pid")
    return int(reply.content)


# -- what it has and what it says ------------------------------------------------------------------------


def test_the_servers_tools_with_its_own_schemas(shared: dict[str, Tool]) -> None:
    assert list(shared)[:3] == ["add", "pid", "words"]
    function = shared["add"].schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["b"]["minimum"] == 0


@pytest.mark.parametrize(
    ("name", "arguments", "content", "error"),
    [
        ("add", '{"a": 2, "b": 3}', "5", None),
        ("add", '{"a": 2}', "3", None),
        ("words", '{"line": "one two"}', "one\ntwo", None),
        ("drawing", "{}", "[image]", None),
        ("huge", '{"size": 100000}', "x" * 100, None),
        ("fail", '{"why": "out of ink"}', "error: Error executing tool fail: out of ink", "out of ink"),
        (
            "add",
            '{"a": "two"}',
            "error: bad arguments for add: ",
            "'two' is not of type 'integer' - at `$.a`",
        ),
        ("add", '{"a": 1, "b": -1}', "error: bad", "-1 is less than the minimum of 0 - at `$.b`"),
        ("add", "{}", "error: bad", "'a' is a required property"),
        ("add", "[1]", "error: bad", "Expected `object`"),
        ("add", "{", "error: bad", "it takes a: integer, b?: integer"),
    ],
)
def test_one_call(
    shared: dict[str, Tool], name: str, arguments: str, content: str, error: str | None
) -> None:
    reply = ask(shared, name, arguments)
    assert reply.content.startswith(content)
    if error is None:
        assert reply.error is None
    else:
        assert error in (reply.error or "")


def test_a_picture_of_a_server_is_an_image_of_the_reply(shared: dict[str, Tool]) -> None:
    async def draw(*arguments: str) -> list[ToolReply]:
        session = Toolbox(shared, DEADLINE, IMAGE_LAYOUT).session(SAMPLE)
        try:
            await session.open()
            return [await session.call(ToolCall("drawing", text)) for text in arguments]
        finally:
            await session.close()

    drawn, damaged = run(draw('{"damaged": false}', "{}"))
    assert drawn.content == f"red:\n{IMAGE_MARK}"
    assert [(image.width, image.height) for image in drawn.images] == [(64, 48)]
    assert (damaged.content, damaged.images) == (
        "error: the bytes are not an image file of a supported format (PNG, JPEG, WEBP, GIF, BMP, TIFF); "
        "write a PNG or JPEG file",
        (),
    )
    assert damaged.failed
    assert ask(shared, "drawing", '{"damaged": false}').content == "red:\n[image]"


def test_structured_content_beside_images_is_read() -> None:
    """Servers repeat structured content as text; a model reads the content that no text repeats."""
    image = ImageContent(type="image", data="iVBORw0K", mime_type="image/png")
    structured = {"width": 64}
    result = CallToolResult(content=[image], structured_content=structured)
    assert result_content(result) == [ImageFile("iVBORw0K"), "\n", '{"width":64}']

    text = TextContent(type="text", text='{"width": 64}')
    result = CallToolResult(content=[text, image], structured_content=structured)
    assert result_content(result) == ['{"width": 64}', "\n", ImageFile("iVBORw0K")]

    for content in ([], [TextContent(type="text", text="")]):
        assert (
            result_content(CallToolResult(content=content, structured_content=structured)) == '{"width":64}'
        )

    # The names of blocks that a model cannot read are no text of the server.
    sound = AudioContent(type="audio", data="UklGRg==", mime_type="audio/wav")
    link = ResourceLink(type="resource_link", name="map", uri="file:///map")
    result = CallToolResult(content=[sound, link], structured_content=structured)
    assert result_content(result) == '[audio]\n[file:///map]\n{"width":64}'

    text_resource = TextResourceContents(uri="file:///size", text='{"width": 64}')
    resource = EmbeddedResource(type="resource", resource=text_resource)
    result = CallToolResult(content=[resource, sound], structured_content=structured)
    assert result_content(result) == '{"width": 64}\n[audio]'


def test_two_servers_with_names_and_variables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TOKEN", "open sesame")
    monkeypatch.setenv("OTHER_TOKEN", "secret")
    options = {"command": PLAIN, "prefix": "b_", "allow": "variable, pid", "env": "FAKE_TOKEN"}
    tools = load_tools(
        ["mcp@one", "mcp@two"], {"mcp@one": {"command": PLAIN, "allow": "pid"}, "mcp@two": options}
    )
    assert list(tools) == ["pid", "b_variable", "b_pid"]
    assert ask(tools, "pid").content != ask(tools, "b_pid").content
    assert ask(tools, "b_variable", '{"name": "FAKE_TOKEN"}').content == "open sesame"
    assert ask(tools, "b_variable", '{"name": "OTHER_TOKEN"}').content == "unset"


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [("bad_result", "ValidationError"), ("huge", "that are not MCP messages of at most 8388608 bytes")],
)
def test_a_result_that_is_none_or_has_no_bounds_is_an_error(kind: str, complaint: str) -> None:
    assert complaint in (ask(tools_of(command=f"{PLAIN} {kind}"), "pid").error or "")


@pytest.mark.parametrize(
    ("kind", "content", "error"),
    [
        ("latin", "\ufffd", None),
        ("surrogate", "error: ", "the server's answer is not a JSON-RPC message"),
        ("cut", "error: ", "the server's answer is not a JSON-RPC message"),
    ],
)
def test_an_answer_that_cannot_be_read_costs_no_deadline(kind: str, content: str, error: str | None) -> None:
    reply = ask(tools_of(command=f"{PLAIN} {kind}"), "pid")
    assert reply.content.startswith(content)
    assert (error in (reply.error or "")) if error else reply.error is None
    assert reply.seconds < DEADLINE / 2


def test_a_server_that_is_silent_to_an_unknown_method_costs_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp.client.session.DISCOVER_TIMEOUT_SECONDS", 0.1)
    tools = tools_of(command=f"{PLAIN} silent")
    monkeypatch.setattr("mcp.client.session.DISCOVER_TIMEOUT_SECONDS", 1000.0)
    assert ask(tools, "pid").error is None


# -- many at once, late, lost ------------------------------------------------------------------------------


def test_episodes_share_a_server_and_do_not_wait_for_each_other(shared: dict[str, Tool]) -> None:
    async def main() -> list[ToolReply]:
        box = Toolbox(shared, DEADLINE)
        sessions = [box.session(SAMPLE) for _ in range(50)]
        calls = [ToolCall("add", f'{{"a": {i}, "b": {i}}}') for i in range(50)]
        slow = asyncio.create_task(sessions[0].call(ToolCall("pid", '{"delay": 100}')))
        for session in sessions:
            await session.open()
        replies = await asyncio.gather(*(s.call(c) for s, c in zip(sessions, calls, strict=True)))
        slow.cancel()
        return replies

    replies = run(asyncio.wait_for(main(), DEADLINE))
    assert [reply.content for reply in replies] == [str(2 * i) for i in range(50)]


def test_a_call_past_its_deadline_costs_only_itself(shared: dict[str, Tool]) -> None:
    reply = ask(shared, "pid", '{"delay": 100}', timeout=0.3)
    assert reply.error == "no reply within 0.3 s"
    assert reply.seconds < 5
    assert ask(shared, "add", '{"a": 1}').content == "2"


def test_a_server_killed_between_calls_is_started_again() -> None:
    tools = tools_of(command=PLAIN)
    first = int(ask(tools, "pid").content)
    os.kill(first, signal.SIGKILL)
    assert has_gone(first)
    assert pid_after_loss(tools) != first


def test_a_server_that_hangs_is_started_again() -> None:
    tools = tools_of(command=PLAIN)
    first = int(ask(tools, "pid").content)
    os.kill(first, signal.SIGSTOP)

    async def play(session: ToolSession) -> list[ToolReply]:
        return await asyncio.gather(*(session.call(ToolCall("pid", "{}")) for _ in range(MAX_UNANSWERED)))

    assert {reply.error for reply in in_episode(tools, play, timeout=0.2)} == {"no reply within 0.2 s"}
    assert pid_after_loss(tools) != first
    assert has_gone(first)


WORKER = """
import asyncio, signal, sys
from asyncrl.tools import Toolbox, load_tools
from asyncrl.types import Sample, ToolCall

async def main():
    session = Toolbox(load_tools(["mcp"], {"mcp": {"command": sys.argv[1]}})).session(Sample(0, "", (), ""))
    await session.open()
    for call in (ToolCall("pid", "{}"), ToolCall("variable", '{"name": "HELPER"}')):
        print((await session.call(call)).content, flush=True)
    signal.pause()

asyncio.run(main())
"""


def test_nothing_that_a_server_started_outlives_a_worker_that_is_killed() -> None:
    """Nor the server, which goes on without its worker, nor its child in a session of its own."""
    worker = subprocess.Popen([sys.executable, "-c", WORKER, f"{PLAIN} deaf"], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    server = int(worker.stdout.readline())
    child = int(worker.stdout.readline())
    assert not has_gone(server, 0.0) and not has_gone(child, 0.0)
    worker.kill()
    assert worker.wait(DEADLINE) == -signal.SIGKILL
    assert has_gone(server) and has_gone(child)


@pytest.mark.parametrize("closed", [True, False])
def test_servers_can_save_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    """When a worker closes its toolbox, and when its event loop ends without that."""
    monkeypatch.setattr("asyncrl.tools.mcp_pipes.END_SECONDS", DEADLINE)
    left = tmp_path / "left"
    tools = tools_of(command=f"{PLAIN} tidy {left}")
    left.unlink()  # of the connection that listed the tools

    async def main() -> None:
        box = Toolbox(tools, DEADLINE)
        session = box.session(SAMPLE)
        await session.open()
        assert (await session.call(ToolCall("pid", "{}"))).error is None
        if closed:
            await box.close()
            assert left.read_text() == "put away"

    asyncio.run(main())
    assert left.read_text() == "put away"


@pytest.mark.parametrize("closed", [True, False])
def test_a_server_that_never_stops_talking_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Nor does it keep a pipe, when its connection is closed, and when the event loop ends without that."""
    monkeypatch.setattr("asyncrl.tools.mcp_pipes.END_SECONDS", 0.3)  # it says more than a stream keeps
    tools = tools_of(command=f"{PLAIN} chatty")
    ends = list[bool]()

    async def main() -> None:
        box = Toolbox(tools, DEADLINE)
        before = len(os.listdir("/proc/self/fd"))
        session = box.session(SAMPLE)
        await session.open()
        assert (await session.call(ToolCall("pid", "{}"))).error is None
        if closed:
            await box.close()
            assert len(os.listdir("/proc/self/fd")) <= before

    def live() -> None:
        asyncio.run(main())
        ends.append(True)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    thread.join(DEADLINE / 4)
    assert ends


def test_a_task_that_does_not_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_pipes, "GONE_SECONDS", 0.2)

    async def main() -> None:
        release = asyncio.Event()
        pipe = asyncio.subprocess.PIPE

        async def stubborn() -> None:
            while not release.is_set():
                with suppress(asyncio.CancelledError):
                    await release.wait()

        process = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe, stderr=pipe)
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)  # it is under way
        try:
            await asyncio.wait_for(mcp_pipes._end_server(process, [task], bytearray()), DEADLINE / 4)
        finally:
            release.set()
            await task

    asyncio.run(main())


def test_closed_servers_are_gone_and_come_back_when_called() -> None:
    tools = tools_of(command=PLAIN)
    first = int(ask(tools, "pid").content)
    run(close_servers())
    assert has_gone(first, 0.0)
    assert int(ask(tools, "pid").content) != first


def test_a_lost_call_is_repeated_only_where_the_server_allows_it(tmp_path: Path) -> None:
    tools = tools_of(command=f"{PLAIN} dies {tmp_path / 'pid'}")
    assert (ask(tools, "pid").error or "").startswith(
        "the connection to the MCP server was lost during the call: "
    )
    assert ask(tools, "pid").error is None
    repeatable = tools_of(command=f"{PLAIN} dies {tmp_path / 'variable'}")
    reply = ask(repeatable, "variable", '{"name": "X"}')
    assert (reply.content, reply.error) == ("unset", None)


def test_a_server_that_only_makes_noise_is_gone_before_it_is_called_again(tmp_path: Path) -> None:
    tools = tools_of(command=f"{PLAIN} noisy {tmp_path / 'pid'}")
    assert "that are not MCP messages" in (ask(tools, "pid").error or "")
    assert has_gone(int((tmp_path / "pid").read_text()))


def test_the_package_alone_has_no_bound() -> None:
    """The reason for pipes of our own; should this fail, the package's `stdio_client` will do."""
    from mcp import StdioServerParameters, stdio_client

    text = f"'x' * {MAX_MESSAGE_BYTES + 1}"
    line = (
        f"""print('{{"jsonrpc": "2.0", "method": "a", "params": {{"b": "' + {text} + '"}}}}', flush=True)"""
    )

    async def main() -> int:
        server = StdioServerParameters(command=sys.executable, args=["-S", "-c", line])
        async with stdio_client(server) as (received, _):
            return len((await received.receive()).message.params["b"])

    assert run(asyncio.wait_for(main(), DEADLINE)) > MAX_MESSAGE_BYTES


# -- a server per episode ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own() -> dict[str, Tool]:
    return tools_of(command=PLAIN, per_episode=True)


def test_an_episode_has_its_own_server_until_it_ends(own: dict[str, Tool]) -> None:
    async def play(session: ToolSession) -> list[str]:
        return [(await session.call(ToolCall("pid", "{}"))).content for _ in range(2)]

    first = in_episode(own, play)
    second = in_episode(own, play)
    assert first[0] == first[1] != second[0] == second[1]
    assert has_gone(int(first[0])) and has_gone(int(second[0]))
    assert own["pid"].replay == "reapply"


def test_what_a_server_started_ends_with_it() -> None:
    """Though the server itself leaves when it is asked to."""
    tools = tools_of(command=f"{PLAIN} helped", per_episode=True)
    helper = int(ask(tools, "variable", '{"name": "HELPER"}').content)
    assert has_gone(helper)


def test_the_server_of_an_episode_is_lost_for_good(own: dict[str, Tool]) -> None:
    async def play(session: ToolSession) -> list[ToolReply]:
        pid = int((await session.call(ToolCall("pid", "{}"))).content)
        os.kill(pid, signal.SIGKILL)
        return [await session.call(ToolCall("pid", "{}")) for _ in range(2)]

    assert all(
        "the connection to the MCP server was lost" in (reply.error or "") for reply in in_episode(own, play)
    )


def test_an_episode_whose_server_does_not_start_cannot_be_opened(tmp_path: Path) -> None:
    script = tmp_path / "once.py"
    script.write_text((FAKES / "mcp_plain.py").read_text())
    tools = tools_of(command=f"{sys.executable} {script}", per_episode=True)
    script.write_text("raise SystemExit('no licence')")

    with pytest.raises(ToolError, match=r"no MCP server at .*no licence"):
        ask(tools, "pid")


# -- streamable HTTP -------------------------------------------------------------------------------------


@contextmanager
def serving(port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        assert any(b"running on" in line for line in process.stderr)
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE)


def test_over_http() -> None:
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with serving(port) as server:
            tools = load_tools(["mcp"], {"mcp": {"url": f"http://127.0.0.1:{port}/mcp"}})
            assert ask(tools, "add", '{"a": 2, "b": 3}').content == "5"
            assert "out of ink" in (ask(tools, "fail", '{"why": "out of ink"}').error or "")
            assert ask(tools, "pid", '{"delay": 100}', timeout=0.3).error == "no reply within 0.3 s"
            assert "lost during the call" in (ask(tools, "huge", '{"size": 30000000}').error or "")
            assert ask(tools, "pid").content == str(server.pid)
        down = ask(tools, "pid")
        assert "MCP server" in (down.error or "")
        with serving(port) as server:
            assert ask(tools, "pid").content == str(server.pid)


class Guarded(BaseHTTPRequestHandler):
    """A server with one tool, for requests with the right key; what it saw is kept."""

    key = "sesame"
    seen = set[tuple[str | None, ...]]()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.add((self.headers["X-Key"], self.headers["X-Team"]))
        if self.headers["X-Key"] != self.key:
            self.answer(401, {})
        elif "id" not in request:
            self.answer(202, {})
        else:
            self.answer(200, {"jsonrpc": "2.0", "id": request["id"], "result": self.result(request)})

    def result(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["method"] == "tools/list":
            return {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]}
        if request["method"] == "tools/call":
            return {"content": [{"type": "text", "text": "seen"}]}
        version = request.get("params", {}).get("protocolVersion", "2025-06-18")
        info = {"name": "guarded", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}

    def do_GET(self) -> None:
        self.answer(405, {})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def guarded() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp"
        server.shutdown()


def test_headers_reach_the_server_and_a_refusal_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEAM_KEY", "sesame")
    with guarded() as url:
        options = {"command": "", "url": url, "headers": "X-Key: $TEAM_KEY, X-Team: a b"}
        tools = tools_of(**options)
        assert ask(tools, "look").content == "seen"
        assert Guarded.seen == {("sesame", "a b")}
        monkeypatch.setattr(Guarded, "key", "another")
        assert "look: HTTP 401 Unauthorized; set headers or api_key_env" in (ask(tools, "look").error or "")
        with pytest.raises(ConfigError, match=r"no MCP server at http.*: HTTP 401 Unauthorized; set headers"):
            tools_of(**options)
    assert "sesame" not in caplog.text


# -- what is no server -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"command": ""}, "set either command, to start a server, or url"),
        ({"url": "http://127.0.0.1:1/mcp"}, "set either command"),
        ({"command": "", "url": "localhost"}, "must begin with http"),
        ({"command": PLAIN, "allow": "pid, nothing"}, "has no tool 'nothing'; available: pid, variable"),
        ({"command": PLAIN, "prefix": "with space "}, "is not a valid tool name"),
        (
            {"command": f"{PLAIN} bad_schema"},
            "the schema of 'variable' is not a valid JSON schema: 'nothing' is",
        ),
        ({"command": f"{PLAIN} endless"}, "the server has more than 256 tools"),
        ({"command": f"{PLAIN} bad_list"}, "cannot list the tools of .*: ValidationError"),
        ({"command": f"{PLAIN} no_tools"}, "cannot list the tools of .*: MCPError: no tools"),
        (
            {"command": f"{PLAIN} silent_list", "start_timeout": 1.0},
            "cannot list the tools of .*: TimeoutError",
        ),
        ({"command": "/no/such/server"}, "no MCP server at .*/no/such/server cannot be run: No such file"),
        (
            {"command": f"{sys.executable} -c 'raise SystemExit(\"no licence\")'"},
            r"the server wrote: no licence",
        ),
        (
            {"command": """yes '{"log": 1}'"""},
            r'{"log": 1} the server sent 26\d+ bytes that are not MCP messages',
        ),
        ({"command": "sleep 100", "start_timeout": 0.3}, "no handshake within 0.3 s"),
        ({"command": "", "url": "http://127.0.0.1:1/mcp"}, "ConnectError"),
        ({"comand": "x"}, "unknown option 'comand'"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is unset or empty"),
        ({"headers": "X-Key: $NO_SUCH_KEY"}, "NO_SUCH_KEY does not contain a valid header value; set it"),
        ({"headers": "Authorization: Bearer abc"}, "Authorization is a secret; use an environment variable"),
        ({"headers": "X Key: a"}, "'X Key' is not a valid header; write each header as Name: value"),
        ({"headers": "sesame"}, "'sesame' is not a valid header"),
    ],
)
def test_what_is_refused_before_the_run(options: dict[str, Any], complaint: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=complaint):
        tools_of(**options)
    assert time.monotonic() - started < 10
