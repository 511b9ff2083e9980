from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from asyncrl.viewer import server as server_module
from asyncrl.viewer.server import ViewServer
from asyncrl.viewer.views import Query, Views
from tests.fakes.browser import served
from tests.fakes.planted import ended, save_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "a")


def asked(views: Views, test: Callable[[aiohttp.ClientSession, str], Awaitable[None]]) -> None:
    async def run() -> None:
        async with served(views) as url, aiohttp.ClientSession() as client:
            await test(client, url)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_page_and_its_answers(run_dir: Path) -> None:
    async def test(client: aiohttp.ClientSession, url: str) -> None:
        page = await client.get(url)
        assert page.status == 200 and "view/main.js" in await page.text()
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert page.headers["Referrer-Policy"] == "no-referrer"  # the address has the token
        trained_episodes = await (
            await client.get(f'{url}api/episodes?where=[["state","=","trained"]]')
        ).json()
        assert trained_episodes["total"] == 4
        assert (await (await client.get(f"{url}api/rows")).json())["step"][-1] == 12

        for address, status, why in (
            ("api/episodes?order=x", 400, "unknown column 'x'"),
            ("api/lanes?from=-1e308&to=1e308", 400, "seconds since the start"),
            ("api/lanes?from=-1e308", 400, "seconds since the start"),
            ("api/lanes?to=nan", 400, "to=nan: expected a number"),
            ("api/nothing", 404, "unknown view 'nothing'"),
            ("nothing/at/all", 404, "unknown view 'nothing/at/all'"),
            ("runs", 404, "unknown view 'runs'"),
        ):
            answer = await client.get(url + address)
            assert answer.status == status and why in (await answer.json())["error"]

    asked(Views([run_dir], ended), test)


def test_who_may_ask(run_dir: Path) -> None:
    async def test(client: aiohttp.ClientSession, url: str) -> None:
        parts = urlsplit(url)
        host = parts.netloc
        token = parts.path.strip("/")
        assert parts.hostname == "127.0.0.1" and len(token) >= 40
        for path in ("/", "//", f"/{token[:-1]}/", f"/{token}x/", "/%C3%A9/", "/api/runs", "/x/api/runs"):
            assert (await client.get(f"http://{host}{path}")).status == 403, path
        for name in ("evil.example", f"evil.example:{parts.port}", "127.0.0.1", ""):
            answer = await client.get(f"{url}api/runs", headers={"Host": name})
            assert answer.status in (400, 403) and "runs" not in await answer.text(), name

        assert (await client.get(f"{url}api/runs", headers={"Host": f"localhost:{parts.port}"})).status == 200
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert (await client.request(method, f"{url}api/runs")).status == 405, method

    asked(Views([run_dir], ended), test)


def test_a_token_is_of_one_server(run_dir: Path) -> None:
    async def test(client: aiohttp.ClientSession, url: str) -> None:
        assert ViewServer(views)._token not in url

    asked(views := Views([run_dir], ended), test)


def test_lists_are_read_one_at_a_time_also_behind_one_that_is_late(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread reads on when nobody waits for it any more."""
    go = threading.Event()
    reading = threading.Semaphore(1)
    found_alone = list[bool]()

    class Slow(Views):
        def answer(self, name: str, query: Query) -> Any:
            if name != "episodes":
                return super().answer(name, query)
            found_alone.append(alone := reading.acquire(blocking=False))
            go.wait(30)
            if alone:
                reading.release()
            return super().answer(name, query)

    async def test(client: aiohttp.ClientSession, url: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(server_module, "ANSWER_DEADLINE", 0.1)
            for _ in range(2):
                assert (await client.get(f"{url}api/episodes")).status == 504

        assert (await client.get(f"{url}api/runs")).status == 200
        go.set()
        assert (await client.get(f"{url}api/episodes")).status == 200
        assert all(found_alone)

    asked(Slow([run_dir], ended), test)


def test_the_end_waits_for_no_answer(run_dir: Path) -> None:
    """The thread that reads does not keep the process alive either."""
    began = threading.Event()
    go = threading.Event()

    class Slow(Views):
        def answer(self, name: str, query: Query) -> Any:
            began.set()
            go.wait(30)
            return super().answer(name, query)

    async def run() -> float:
        async with aiohttp.ClientSession() as client:
            async with served(Slow([run_dir], ended)) as url:
                answer = asyncio.create_task(client.get(f"{url}api/episodes"))
                await asyncio.to_thread(began.wait, 30)
                left = time.monotonic()
            took = time.monotonic() - left
            with pytest.raises(aiohttp.ClientError):
                await answer

        return took

    assert asyncio.run(run()) < 1.0
    (reading,) = (thread for thread in threading.enumerate() if thread.name == "episodes")
    assert reading.daemon
    go.set()
    reading.join(30)
    assert not reading.is_alive()
