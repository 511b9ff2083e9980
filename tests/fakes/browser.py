"""Headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.viewer.server import ViewServer
from asyncrl.viewer.views import Views

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE = 90.0  # seconds for whatever is waited for
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("ASYNCRL_REQUIRE_CHROMIUM"),
    reason="no Chromium: apt-get install chromium",
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--remote-debugging-port=0",
    "--window-size=1400,1000",
)


class Tab:
    """A page. `complaints`: errors on the console, and uncaught exceptions."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session = ""
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command. TimeoutError."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": parameters, **session})

        async with asyncio.timeout(DEADLINE):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return message["result"]
                self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(parameters["entry"]))

    async def open(self, url: str) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        evaluated = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in evaluated, evaluated
        return evaluated["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a condition holds. The page itself checks the condition each frame."""
        look = f"() => {{ let ok = false; try {{ ok = {condition} }} catch {{}} return ok }}"
        frame = "requestAnimationFrame(again)"
        await self.run(
            f"new Promise(r => {{ const look = {look}, again = () => look() ? r(1) : {frame}; again() }})"
        )

    async def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at a point and release it at another point. Equal points make a click."""
        for kind, (x, y) in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1
            )

    async def press(self, key: str) -> None:
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Tab]:
    """Killed at the end of the body."""
    assert CHROMIUM, "no Chromium: apt-get install chromium"
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *FLAGS, f"--user-data-dir={profile}", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None

    try:
        async with asyncio.timeout(DEADLINE):
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "Chromium ended"
        address = line.decode().split()[-1]
        async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
            yield Tab(socket)
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def served(views: Views) -> AsyncIterator[str]:
    """Serve runs and yield the address of their page."""
    server = ViewServer(views)
    await server.start()
    try:
        yield server.url
    finally:
        await server.close()


def look(profile: Path, at: Callable[[Tab], Awaitable[None]]) -> None:
    """Open a page in a browser, in which no error may be reported."""

    async def test() -> None:
        async with browser(profile) as tab:
            await at(tab)
            assert tab.complaints == []

    asyncio.run(asyncio.wait_for(test(), 280))
