"""Requests that no client sends and a program in a sandbox can, each with its key; an agent of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from asyncrl.gateway import Endpoint
from asyncrl.types import Sample
from tests.fakes.agents import ask

KEYS = "ASYNCRL_TEST_KEYS"  # variable with the file in which the agent notes its keys


def request(key: str, line: str = "POST /v1/messages HTTP/1.1", body: str = "", **headers: str) -> bytes:
    """Write a request with this key; `_` in the names of headers is a hyphen."""
    fields = {"Host": "x", "Authorization": f"Bearer {key}", "Content_Length": str(len(body)), **headers}
    lines = [line, *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items() if value)]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode("latin-1")


HOSTILE: dict[str, Callable[[str], bytes]] = {
    "no request line": lambda key: f"{key}\r\n\r\n".encode(),
    "broken request line": lambda key: f"GARBAGE {key}\r\n\r\n".encode(),
    "long request line": lambda key: request(key, f"GET /v1/{key * 1000} HTTP/1.1"),
    "unknown method": lambda key: request(key, f"{key} /v1/models HTTP/1.1"),
    "key in the path": lambda key: request(key, f"GET /v1/{key} HTTP/1.1"),
    "key in the query": lambda key: request(key, f"GET /v1/models?key={key}#{key} HTTP/1.1"),
    "broken escapes in the path": lambda key: request(key, f"GET /v1/models/%ff%zz%00%{key} HTTP/1.1"),
    "an absolute path": lambda key: request(key, f"GET http://{key}:99999/v1/models HTTP/1.1"),
    "broken header": lambda key: request(key, X="\0" + key),
    "header without a name": lambda key: request(key)[:-2] + f": {key}\r\n\r\n".encode(),
    "header without a colon": lambda key: request(key)[:-2] + f"{key}\r\n\r\n".encode(),
    "folded header": lambda key: request(key)[:-2] + f" {key}\r\n\r\n".encode(),
    "long header": lambda key: request(key, X=key * 1000),
    "many headers": lambda key: request(key)[:-2] + f"a: {key}\r\n".encode() * 2000 + b"\r\n",
    "bytes that are no text": lambda key: request(key, X=f"\xff\xfe{key}"),
    "broken host": lambda key: request(key, Host=f"[{key}"),
    "broken length": lambda key: request(key, Content_Length=key),
    "negative length": lambda key: request(key, Content_Length="-1"),
    "two lengths": lambda key: request(key)[:-2] + b"Content-Length: 7\r\n\r\n" + key.encode(),
    "length and chunks": lambda key: request(key, body=key, Transfer_Encoding="chunked"),
    "broken chunk": lambda key: (
        request(key, Content_Length="", Transfer_Encoding="chunked") + key.encode() + b"\r\n"
    ),
    "broken chunk later": lambda key: (
        request(key, Content_Length="", Transfer_Encoding="chunked") + b"1\r\na\r\n" + key.encode() + b"\r\n"
    ),
    "endless chunk extension": lambda key: (
        request(key, Content_Length="", Transfer_Encoding="chunked") + b"1;" + key.encode() * 1000
    ),
    "unknown transfer encoding": lambda key: request(key, Content_Length="", Transfer_Encoding=key),
    "compressed transfer": lambda key: request(key, Content_Length="", Transfer_Encoding="gzip, chunked"),
    "broken compression": lambda key: request(key, body=key, Content_Encoding="gzip"),
    "unknown compression": lambda key: request(key, body=key, Content_Encoding=key),
    "body breaks off": lambda key: request(key, body=key, Content_Length="1000"),
    "body is no JSON": lambda key: request(key, body=f'{{"{key}'),
    "body has another form": lambda key: request(key, body=json.dumps({"messages": key, key: key})),
    "parameter with the name of the key": lambda key: request(
        key, body=json.dumps({"messages": [{"role": "user", "content": "q"}], "max_tokens": 1, key: 1})
    ),
    "key as the model": lambda key: request(
        key, body=json.dumps({"messages": [{"role": "user", "content": "q"}], "max_tokens": 1, "model": key})
    ),
    "preface of HTTP/2": lambda key: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + key.encode(),
    "upgrade to HTTP/2": lambda key: (
        request(key, Connection="Upgrade, HTTP2-Settings", Upgrade="h2c") + key.encode()
    ),
    "upgrade to a websocket, and more": lambda key: (
        request(key, "GET /v1/models HTTP/1.1", Connection="Upgrade", Upgrade="websocket")
        + key.encode() * 5000
    ),
    "hello of TLS": lambda key: bytes.fromhex("1603010200010001fc0303") + key.encode() + bytes(300),
    "garbage behind a request": lambda key: (
        request(key, "GET /v1/models HTTP/1.1") + f"{key}\0\r\n".encode() * 50
    ),
    "expectation": lambda key: request(key, Content_Length="1000", Expect="100-continue"),
    "unknown expectation": lambda key: request(key, Expect=key),
    "old HTTP": lambda key: request(key, "GET /v1/models HTTP/0.9"),
    "unknown HTTP": lambda key: request(key, f"GET /v1/models HTTP/{key}"),
    "CONNECT": lambda key: request(key, f"CONNECT {key}:443 HTTP/1.1") + key.encode(),
    "TRACE": lambda key: request(key, "TRACE /v1/models HTTP/1.1"),
    "a wrong key": lambda key: request(f"{key}x{key}", body=key),
    "cookies": lambda key: request(key, Cookie=f"{key}=\x7f{key};;="),
}


def base_address(endpoint: Endpoint) -> tuple[str, str]:
    host, _, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    return host, port


async def send(endpoint: Endpoint, sent: bytes, waits: bool) -> None:
    """Send bytes, and wait until the server has closed the connection, or leave at once."""
    reader, writer = await asyncio.open_connection(*base_address(endpoint))
    writer.write(sent)
    if waits:
        with suppress(ConnectionError):
            writer.write_eof()
            await reader.read()
    writer.transport.abort()


async def agent(sample: Sample, endpoint: Endpoint) -> None:
    """Send all requests, then request a turn of the model."""
    with Path(os.environ[KEYS]).open("a") as file:  # noqa: ASYNC230
        file.write(endpoint.api_key + "\n")
    for write, waits in itertools.product(HOSTILE.values(), (False, True)):
        await send(endpoint, write(endpoint.api_key), waits)
    status, _ = await ask(endpoint, sample.prompt[0].content)
    assert status == 200
