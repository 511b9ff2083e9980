"""Serves the page: on 127.0.0.1, read-only, for everybody who knows the token in the address.

GET /TOKEN/ ──► the page        GET /TOKEN/api/NAME?… ──► an answer of `Views`, as JSON
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial

import msgspec
from aiohttp import web

from asyncrl.errors import AsyncrlError
from asyncrl.isolation.calls import OwnThread
from asyncrl.viewer.page import CONTENT_POLICY, build_page
from asyncrl.viewer.views import Views

LOOPBACK_HOST = "127.0.0.1"
ANSWER_DEADLINE = 60.0  # seconds for an answer
STOP_SECONDS = 0.2  # wait for unfinished answers, and then again for the threads
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


class ViewServer:
    """Serves the page after `start`; `url` is then the address."""

    def __init__(self, views: Views, port: int = 0) -> None:
        self._views = views
        self._port = port
        self._token = secrets.token_urlsafe(32)
        # A thread for each view, so that a long read delays only this view; more threads need more memory.
        self._view_threads = {name: OwnThread(name) for name in views.names}
        self._hosts: frozenset[str] = frozenset()
        self.url = ""
        self._runner = web.ServerRunner(
            web.Server(self._answer, access_log=None), shutdown_timeout=STOP_SECONDS
        )

    async def start(self) -> None:
        """Listen. OSError where the port is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK_HOST, self._port).start()
        port = self._runner.addresses[0][1]
        self._hosts = frozenset({f"{LOOPBACK_HOST}:{port}", f"localhost:{port}"})
        self.url = f"http://{LOOPBACK_HOST}:{port}/{self._token}/"

    async def close(self) -> None:
        await self._runner.cleanup()
        with suppress(TimeoutError):  # a thread that still reads ends with the process
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*(thread.end_thread(bool) for thread in self._view_threads.values()))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer only GET; only under the server's own name, or a page of another site could ask by a name
        that points here; only with the token."""
        token, _, view_path = request.path.removeprefix("/").partition("/")
        if request.method != "GET":
            return _error(405, "only GET requests are allowed")
        if request.headers.get("Host", "") not in self._hosts:
            return _error(403, "unknown Host")
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return _error(403, "open the address that `asyncrl view` printed")
        if request.path == f"/{token}/":
            return web.Response(text=build_page(), content_type="text/html", headers=HEADERS)

        view_name = view_path.removeprefix("api/")
        if view_name == view_path or view_name not in self._view_threads:
            return _error(404, f"unknown view {view_name!r}")

        try:
            answer_call = partial(self._views.answer, view_name, dict(request.query))
            async with asyncio.timeout(ANSWER_DEADLINE):
                view_answer = await self._view_threads[view_name].run(answer_call)
        except AsyncrlError as error:
            return _error(400, str(error))
        except TimeoutError:
            return _error(504, f"reading the run took longer than {ANSWER_DEADLINE:g} s")

        return web.Response(
            body=msgspec.json.encode(view_answer), content_type="application/json", headers=HEADERS
        )


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=HEADERS)
