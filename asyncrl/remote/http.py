"""Models behind an OpenAI-compatible URL, and JSON over HTTP to a server that may be busy: a deadline over
all tries, bounded answers, a single error type.

429, 5xx, connection refused or cut     tried again after a pause that doubles, or after Retry-After seconds
every other refusal                     RemoteError at once
"""

from __future__ import annotations

import asyncio
import os
import random
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any
from urllib import request
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from asyncrl.errors import UNDECODABLE, AsyncrlError, ConfigError, one_line, waits_for
from asyncrl.types import Message

if TYPE_CHECKING:
    import aiohttp  # imported when first used: the import takes 0.1 s, and reward processes import this file

MAX_BYTES = 4 << 20  # maximum size of an answer
FIRST_PAUSE = 0.5  # seconds before the first repetition
SCORER_PREFIX = "scorer:"  # beginning of a URL that names a scorer of the run
RETRIED_STATUSES = frozenset({408, 409, 429})

_Sessions = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, "aiohttp.ClientSession"]
_sessions: _Sessions = weakref.WeakKeyDictionary()


class RemoteError(AsyncrlError):
    """A remote model refused, failed for good, or did not answer in time."""


class RemoteLost(RemoteError):
    """A remote model does not answer, or has no room: another try, elsewhere or later, may succeed."""


class _Busy(Exception):
    """A failure worth another try, after `pause` seconds if the server asks for a pause."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


def check_url(url: str, *, direct: bool = False) -> None:
    """Raise ConfigError for a URL that is neither of HTTP nor of a scorer and, unless `direct`, for a URL
    whose proxy cannot be used."""
    if not url.startswith(("http://", "https://", SCORER_PREFIX)):
        raise ConfigError(
            f"the URL {url!r} must begin with http:// or https://, or have the form {SCORER_PREFIX}NAME"
        )
    with ConfigError.instead_of(
        ValueError, text=f"the URL {url!r} is invalid", advice="correct the host or the port"
    ):
        _ = urlsplit(url).port
    if not direct and not url.startswith(SCORER_PREFIX):
        proxy_of(url)


scorer_url: ContextVar[Callable[[str], Awaitable[str]]] = ContextVar("scorer_url")
"""Set in workers: waits for a server of the scorer with this name, and returns the server's address."""


async def post_json(
    url: str,
    body: Any,
    *,
    seconds: float,
    retries: int = 2,
    headers: Mapping[str, str] | None = None,
    direct: bool = False,
) -> bytes:
    """Return the answer to `body`, sent as JSON, at most MAX_BYTES. `seconds` is the deadline over all tries
    and pauses. `direct`: use no proxy. Raises RemoteError, which begins with the URL."""
    encoded_body = msgspec.json.encode(body)
    headers = {"Content-Type": "application/json", **(headers or {})}
    proxy = None if direct else proxy_of(url)
    via_proxy = f" through the proxy {_without_password(proxy)}" if proxy else ""
    last_problem = "no answer"

    try:
        async with asyncio.timeout(seconds):
            for attempt in range(retries + 1):
                try:
                    with waits_for(f"{url}{via_proxy}: {last_problem}"):
                        return await _post_once(url, encoded_body, headers, proxy)
                except _Busy as busy:
                    last_problem = str(busy)
                    pause_seconds = max(busy.pause, FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1.0))

                if attempt < retries:
                    with waits_for(f"{url}{via_proxy}: {last_problem}"):
                        await asyncio.sleep(pause_seconds)
    except TimeoutError:
        raise RemoteLost(
            f"{url}: no answer within {seconds:g} s{via_proxy} (last problem: {last_problem})"
        ) from None

    attempts_text = f"{retries + 1} attempts" if retries else "1 attempt"
    raise RemoteLost(f"{url}: {last_problem}{via_proxy}, after {attempts_text}")


async def close_sessions() -> None:
    """Close the connections of this event loop; new connections are opened when needed."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


async def _post_once(url: str, encoded_body: bytes, headers: Mapping[str, str], proxy: str | None) -> bytes:
    import aiohttp

    try:
        response_context = _session().post(
            url, data=encoded_body, headers=headers, allow_redirects=False, proxy=proxy
        )
        async with response_context as response:
            content = await _read_bounded(url, response)
            if response.status in RETRIED_STATUSES or response.status >= 500:
                raise _Busy(_describe_response(response.status, content), _retry_after(response))
            if response.status != 200:
                raise RemoteError(f"{url}: {_describe_response(response.status, content)}")
            return content
    except aiohttp.ClientError as error:
        raise _Busy(one_line(error)) from None


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a URL (`http_proxy`, `https_proxy`, `all_proxy`); None
    for hosts and networks of `no_proxy` and for this machine. ws:// and wss:// are as http:// and https://."""
    url_parts = urlsplit(url)
    host = url_parts.hostname or ""
    proxies = request.getproxies_environment()
    if _is_bypassed(host, url_parts.port, proxies.get("no", "")):
        return None

    scheme = {"ws": "http", "wss": "https"}.get(url_parts.scheme, url_parts.scheme)
    proxy = proxies.get(scheme) or proxies.get("all")
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    if proxy and not proxy.startswith(("http://", "https://")):
        proxy_scheme = proxy.partition("://")[0]
        raise ConfigError(
            f"{scheme if proxies.get(scheme) else 'all'}_proxy: {proxy_scheme}:// proxies are not supported; "
            f"set an http:// or https:// proxy, or add {host} to no_proxy"
        )

    return proxy or None


def _without_password(proxy: str) -> str:
    proxy_parts = urlsplit(proxy)
    return f"{proxy_parts.scheme}://{proxy_parts.netloc.rpartition('@')[2]}"


def _is_bypassed(host: str, port: int | None, no_proxy: str) -> bool:
    """Return True for this machine, and for entries of `no_proxy`: names with or without a port, and
    networks."""
    if host == "localhost" or host.endswith(".localhost"):
        return True

    proxy_bypass = request.proxy_bypass_environment  # type: ignore[attr-defined]  # missing in typeshed
    if proxy_bypass(f"{host}:{port}" if port else host):
        return True

    try:
        address = ip_address(host)
    except ValueError:  # a name
        return False

    if address.is_loopback:
        return True

    for entry in no_proxy.split(","):
        with suppress(ValueError):  # a name; networks are such as 10.0.0.0/8
            if address in ip_network(entry.strip(), strict=False):
                return True
    return False


async def _read_bounded(url: str, response: aiohttp.ClientResponse) -> bytes:
    chunks = []
    total_bytes = 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        total_bytes += len(chunk)
        if total_bytes > MAX_BYTES:
            response.close()
            raise RemoteError(f"{url}: the answer is larger than {MAX_BYTES} bytes")

    return b"".join(chunks)


def _session() -> aiohttp.ClientSession:
    """Return the session of this event loop: a session cannot change loops."""
    import aiohttp

    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        session = aiohttp.ClientSession(
            # Callers limit requests themselves; waiting for aiohttp's limit of 100 would use up `seconds`.
            connector=aiohttp.TCPConnector(limit=0),
            # `post` has a deadline; aiohttp's default of five minutes would cut a longer deadline short.
            timeout=aiohttp.ClientTimeout(total=None),
        )
        _sessions[loop] = session

    return session


def _describe_response(status: int, content: bytes) -> str:
    text = " ".join(content[:1000].decode("utf-8", "replace").split())[:200]
    return f"status {status} ({text})" if text else f"status {status}"


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Return seconds of Retry-After; a date in this header is ignored."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        return 0.0


# -- a chat model: messages in, text out -------------------------------------------------------------------


class _Content(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Content


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]


_decode_completion = msgspec.json.Decoder(_Completion).decode


@dataclass(frozen=True)
class RemoteModel:
    """A chat model; `url` is the base URL as OpenAI clients expect, ending with `/v1`.

    `api_key_env` names the environment variable that holds the key; empty: no key is sent. `timeout` is in
    seconds, for a `chat` with all repetitions. A `temperature` below 0 and `max_tokens` of 0 are not sent, as
    some models refuse these settings. Instances hold no connection: connections are shared within an event
    loop and closed by `close_sessions`. ConfigError: a bad URL, or no such key.
    """

    url: str
    model: str
    api_key_env: str = ""
    timeout: float = 60.0
    retries: int = 2
    temperature: float = 0.0
    max_tokens: int = 1024
    direct: bool = False
    """Bypass the proxy, because the server belongs to the run."""

    def __post_init__(self) -> None:
        check_url(self.url, direct=self.direct)
        bearer_header(self.api_key_env)

    async def chat(self, messages: Sequence[Message]) -> str:
        """Return the model's next message, which may be ''. Raises RemoteError."""
        url = f"{self.url.rstrip('/')}/chat/completions"
        body = {
            "model": self.model,
            "messages": [replace(message, reasoning="").openai() for message in messages],
            **({"temperature": self.temperature} if self.temperature >= 0 else {}),
            **({"max_tokens": self.max_tokens} if self.max_tokens > 0 else {}),
        }
        answer = await post_json(
            url,
            body,
            seconds=self.timeout,
            retries=self.retries,
            headers=bearer_header(self.api_key_env),
            direct=self.direct,
        )
        try:
            return _decode_completion(answer).choices[0].message.content or ""
        except (*UNDECODABLE, IndexError) as error:
            raise RemoteError(f"{url}: the answer is not a chat completion ({one_line(error)})") from error


def bearer_header(api_key_env: str) -> dict[str, str]:
    """Return the header with the key of an environment variable; none without a name. ConfigError: the
    variable is empty."""
    if not api_key_env:
        return {}
    api_key = os.environ.get(api_key_env)
    if not api_key:
        raise ConfigError(f"the environment variable {api_key_env} is unset or empty; set it to the API key")
    return {"Authorization": f"Bearer {api_key}"}
