"""JSON over HTTP to a server that may be busy: one deadline over all tries, bounded answers, one error.

429, 5xx, connection refused or cut     tried again after a pause that doubles, or what Retry-After says
every other refusal                     RemoteError at once
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.errors import AsyncrlError, ConfigError, one_line

if TYPE_CHECKING:
    import aiohttp  # imported when first used: it takes 0.1 s, and reward processes import this file

MAX_BYTES = 4 << 20  # of one answer
PAUSE = 0.5  # seconds before the first repetition
AGAIN = frozenset({408, 409, 429})

_Sessions = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, "aiohttp.ClientSession"]
_sessions: _Sessions = weakref.WeakKeyDictionary()


class RemoteError(AsyncrlError):
    """A remote model refused, failed for good, or did not answer in time."""


class _Busy(Exception):
    """Worth another try, after `pause` seconds if the server asks for that."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause


def check_url(url: str) -> None:
    """ConfigError unless it is of HTTP."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the URL {url!r} must begin with http:// or https://")


async def post(
    url: str, body: Any, *, seconds: float, retries: int = 2, headers: Mapping[str, str] | None = None
) -> bytes:
    """The answer to `body`, sent as JSON, at most MAX_BYTES. `seconds` bound all of it, tries and pauses
    included. Raises RemoteError, which begins with the URL."""
    data, trouble = msgspec.json.encode(body), "no answer"
    headers = {"Content-Type": "application/json", **(headers or {})}
    try:
        async with asyncio.timeout(seconds):
            for attempt in range(retries + 1):
                try:
                    return await _once(url, data, headers)
                except _Busy as busy:
                    trouble = str(busy)
                    if attempt < retries:
                        await asyncio.sleep(max(busy.pause, PAUSE * 2**attempt * random.uniform(0.5, 1.0)))
    except TimeoutError:
        raise RemoteError(f"{url}: no answer within {seconds:g} s (last: {trouble})") from None
    raise RemoteError(f"{url}: {trouble}, after {retries + 1} tries")


async def close_sessions() -> None:
    """Close the connections of this event loop; they are opened again when needed."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


async def _once(url: str, data: bytes, headers: Mapping[str, str]) -> bytes:
    import aiohttp

    try:
        async with _session().post(url, data=data, headers=headers, allow_redirects=False) as response:
            answer = await _bounded(url, response)
            if response.status in AGAIN or response.status >= 500:
                raise _Busy(_describe(response.status, answer), _pause(response))
            if response.status != 200:
                raise RemoteError(f"{url}: {_describe(response.status, answer)}")
            return answer
    except aiohttp.ClientError as error:
        raise _Busy(one_line(error)) from None


async def _bounded(url: str, response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            response.close()
            raise RemoteError(f"{url}: the answer is larger than {MAX_BYTES} bytes")
    return b"".join(parts)


def _session() -> aiohttp.ClientSession:
    """One per event loop: a session cannot change loops."""
    import aiohttp

    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        session = _sessions[loop] = aiohttp.ClientSession(
            # Callers limit their own requests; waiting for one of aiohttp's 100 places would use `seconds`.
            connector=aiohttp.TCPConnector(limit=0),
            # The deadline is `post`'s; aiohttp's own of five minutes would cut a longer one short.
            timeout=aiohttp.ClientTimeout(total=None),
        )
    return session


def _describe(status: int, answer: bytes) -> str:
    text = " ".join(answer[:1000].decode("utf-8", "replace").split())[:200]
    return f"status {status} ({text})" if text else f"status {status}"


def _pause(response: aiohttp.ClientResponse) -> float:
    """Seconds of Retry-After; its other form, a date, is ignored."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        return 0.0
