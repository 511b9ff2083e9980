"""HTTP to one SGLang server: keys, deadlines, event streams; every kind of error becomes a typed one."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import msgspec

from asyncrl.engines.base import EngineBusy, EngineRefused
from asyncrl.errors import UNDECODABLE, AsyncrlError, ConfigError, EngineError, one_line

CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 4.0  # the server drops idle connections after 5: never reuse a dropped connection
# Each command has its own connection: commands are rare, and the server drops connections after an error 500.
_CLOSE_CONNECTION = {"Connection": "close"}
_DONE_PAYLOAD = b"[DONE]"
_DATA_PREFIX = b"data:"
_EVENT_END = b"\n\n"
FILE_STEP = 3 << 18  # bytes that become base64 text at a time, as encoding holds Python's lock


class ServerGone(EngineError):
    """The server does not answer: the server is down or hangs, or the connection was cut."""


class KeyRejected(ConfigError, EngineError):
    """The server wants another API key or admin key."""


class HttpTransport:
    """Connections to the server at `url`; connections of streams are pooled. Used within one event loop."""

    def __init__(self, url: str, api_key: str = "", admin_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._api_headers = _bearer_headers(api_key)
        self._admin_headers = _bearer_headers(admin_key or api_key)
        self._http_session: aiohttp.ClientSession | None = None
        self._open_streams: dict[aiohttp.ClientResponse, float] = {}  # with the longest silence, in seconds
        self._server_asleep = False

    def set_asleep(self, asleep: bool) -> None:
        """Note whether the server sleeps: a sleeping server's streams may be silent for ever."""
        self._server_asleep = asleep
        for response, silence in self._open_streams.items():
            connection = response.connection
            if connection is not None and connection.protocol is not None:  # the stream is not over
                connection.protocol.read_timeout = None if asleep else silence
                connection.protocol.start_timeout()

    async def call(
        self,
        method: str,
        path: str,
        seconds: float,
        body: Any = None,
        admin: bool = False,
        failure: type[AsyncrlError] = EngineError,
    ) -> bytes:
        """Send a request and return the body of a successful answer; a refusal raises `failure`."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        headers = _CLOSE_CONNECTION | (self._admin_headers if admin else self._api_headers)
        payload = None if body is None else await _json_payload(body)

        with self._as_server_gone(f"{method} {path}", f"{seconds:g} s"):
            async with self._open_session().request(
                method, self.url + path, data=payload, headers=headers, timeout=timeout
            ) as response:
                content = await response.read()

        if response.status != 200:
            raise self._error_for(path, response.status, content, failure)

        return content

    async def status(self, path: str, seconds: float) -> int:
        """Return the HTTP status of the answer to a request that needs no key."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        with self._as_server_gone(f"GET {path}", f"{seconds:g} s"):
            async with self._open_session().get(
                self.url + path, headers=_CLOSE_CONNECTION, timeout=timeout
            ) as response:
                return response.status

    @asynccontextmanager
    async def stream(self, path: str, body: Any, silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Post a body and open the event stream of the answer. Leaving the context before the stream's end
        cuts the connection. Raises ServerGone, also from the iterator, if the stream is cut or silent for
        `silence` seconds."""
        read_timeout = None if self._server_asleep else silence
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=read_timeout)
        payload = await _json_payload(body)

        with self._as_server_gone(f"POST {path}", f"{silence:g} s"):
            response = await self._open_session().post(
                self.url + path, data=payload, headers=self._api_headers, timeout=timeout
            )

        try:
            self._open_streams[response] = silence
            if response.status != 200:
                with self._as_server_gone(f"POST {path}", f"{silence:g} s"):
                    content = await response.read()
                raise self._error_for(path, response.status, content, EngineError)

            yield self._stream_payloads(path, response, silence)
        finally:
            del self._open_streams[response]
            response.close()

    async def close(self) -> None:
        session = self._http_session
        self._http_session = None
        if session is not None:
            await session.close()

    async def _stream_payloads(
        self, path: str, response: aiohttp.ClientResponse, silence: float
    ) -> AsyncIterator[bytes]:
        """Yield the payloads before `[DONE]`. Raises ServerGone for a stream that ends without this mark."""
        events = EventSplitter()
        with self._as_server_gone(f"the stream from {path}", f"{silence:g} s"):
            async for chunk in response.content.iter_any():
                for payload in events.feed(chunk):
                    if payload == _DONE_PAYLOAD:
                        return
                    yield payload

        raise ServerGone(f"server {self.url}: the stream from {path} ended prematurely")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._http_session is None:
            # No limit here: the client limits its streams, and an abort must not queue behind streams.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._http_session = aiohttp.ClientSession(connector=connector)
        return self._http_session

    @contextmanager
    def _as_server_gone(self, request_name: str, deadline: str) -> Iterator[None]:
        """Turn failures of the connection into ServerGone."""
        try:
            yield
        except TimeoutError as error:  # before ClientError: aiohttp's timeouts are both
            raise ServerGone(
                f"server {self.url}: {request_name} received no response within {deadline}"
            ) from error
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"server {self.url!r}: not a URL; expected http://host:port") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"server {self.url}: {request_name} failed ({one_line(error)})") from error

    def _error_for(self, path: str, status: int, content: bytes, failure: type[AsyncrlError]) -> AsyncrlError:
        text = error_text(content) or f"HTTP {status}"
        description = f"server {self.url}: {path} returned {status}: {text}"
        if status in (401, 403):
            return KeyRejected(f"{description}; check the API key and the admin key")
        if status == 503:
            return EngineBusy(description)
        if status == 400 and failure is EngineError:
            return EngineRefused(description)

        return failure(description)


class EventSplitter:
    """Splits a byte stream into the payloads of server-sent events; chunks may end anywhere."""

    def __init__(self) -> None:
        self._pending_bytes = bytearray()
        self._searched_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        self._pending_bytes += chunk
        while (end := self._pending_bytes.find(_EVENT_END, self._searched_bytes)) >= 0:
            event = bytes(self._pending_bytes[:end])
            del self._pending_bytes[: end + len(_EVENT_END)]
            self._searched_bytes = 0
            if event.startswith(_DATA_PREFIX):
                yield event[len(_DATA_PREFIX) :].strip()

        self._searched_bytes = max(0, len(self._pending_bytes) - len(_EVENT_END) + 1)


def error_text(content: bytes) -> str:
    """Return the server's own error message, on one line: of `{"error": {"message"}}`, `{"error": text}`,
    `{"message"}`, `{"detail"}`, `{"error_message"}` or plain text."""
    try:
        answer = msgspec.json.decode(content)
    except UNDECODABLE:
        return " ".join(content.decode(errors="replace").split())[:300]

    for key in ("error", "message", "detail", "error_message"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]

    return " ".join(str(answer).split())[:300]


async def _json_payload(body: Any) -> aiohttp.BytesIOPayload:
    """Return a body as JSON. The files of images in `image_data` become base64 text, in a thread."""
    if isinstance(body, dict) and body.get("image_data"):
        content = await asyncio.to_thread(_json_with_files, body)
    else:
        content = io.BytesIO(msgspec.json.encode(body))
    return aiohttp.BytesIOPayload(content, content_type="application/json")


def _json_with_files(body: dict[str, Any]) -> io.BytesIO:
    """Return a body with `image_data` and other fields as JSON. A JSON encoder would hold Python's lock, and
    so stop the event loop, until the base64 text of all files is written."""
    other_fields = {name: value for name, value in body.items() if name != "image_data"}
    content = io.BytesIO()
    content.write(msgspec.json.encode(other_fields).removesuffix(b"}"))
    content.write(b',"image_data":[')
    for index, file in enumerate(body["image_data"]):
        content.write(b',"' if index else b'"')
        for start in range(0, len(file), FILE_STEP):
            content.write(base64.b64encode(file[start : start + FILE_STEP]))
        content.write(b'"')

    content.write(b"]}")
    content.seek(0)
    return content


def _bearer_headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
