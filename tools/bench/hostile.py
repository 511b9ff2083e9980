"""Measures how long other episodes wait for the gateway while a program floods it, and what the worker logs.

    python tools/bench/hostile.py [--seconds 5] [KIND ...]

The program has a listener of its own, as in a sandbox, and is a process of its own; so is the client of the
other episode, which asks for one turn after the other, each on a new connection. The engine answers at once.
For each kind of flood: the median and the longest of that client's turns, in ms, and the bytes of the log.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import logging
import os
import socket
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from common import table

from asyncrl.conversation.requests import AgentRequest, Refusal
from asyncrl.gateway import Endpoint, Gateway
from asyncrl.gateway.exchange import AgentReply, Listener
from asyncrl.gateway.images import TEXT_ONLY
from asyncrl.types import Generation, Message, StopReason, Turn, VersionSpan

Payload = Callable[[str], bytes]
FIRST_SECONDS = 1.0  # a flood lasts so long before the other client begins


class Host:
    """An episode whose engine answers at once."""

    images = TEXT_ONLY

    async def answer(
        self, ask: AgentRequest, count: int, listener: Listener | None, attempt: int = 0
    ) -> Sequence[AgentReply] | Refusal:
        turn = Turn(0, (1,), Generation((65, 66), (-0.5, -1.5), (VersionSpan(0, 2, 0, 0),), StopReason.STOP))
        return [AgentReply(Message("assistant", "42"), turn, 1, lambda ids: "".join(map(chr, ids)))] * count

    async def count(self, ask: AgentRequest) -> int:
        return 1

    def lose(self, reply: AgentReply) -> None:
        pass


def posted(body: bytes, *fields: str) -> Payload:
    lines = fields or (f"Content-Length: {len(body)}",)
    return lambda key: headed("POST /v1/chat/completions", key, *lines) + body


def headed(line: str, key: str, *fields: str) -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *fields]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def repeated(line: str) -> Payload:
    return lambda key: headed(line, key) * 200


def chunked(body: bytes) -> Payload:
    return posted(body, "Transfer-Encoding: chunked")


def messages(count: int) -> bytes:
    return b'{"messages":[' + b",".join([b'{"role":"user","content":"q"}'] * count) + b"]}"


def zeros_compressed() -> bytes:
    packer = zlib.compressobj(wbits=31)
    block = bytes(1 << 20)
    return b"".join(packer.compress(block) for _ in range(1000)) + packer.flush()


def compressed(key: str) -> bytes:
    body = zeros_compressed()
    return posted(body, f"Content-Length: {len(body)}", "Content-Encoding: gzip")(key)


def websocket(key: str) -> bytes:
    return headed("GET /v1/models", key, "Connection: Upgrade", "Upgrade: websocket") + bytes(1 << 20)


def broken(key: str) -> bytes:
    return headed("POST /v1/messages", key, "Content-Length: x")


FLOODS: dict[str, tuple[int, Payload]] = {  # connections, and what each sends again and again
    "400,000 messages": (4, posted(messages(400_000))),
    "95,000 messages": (4, posted(messages(95_000))),
    "300,000 tools": (4, posted(b'{"messages":[],"tools":[' + b",".join([b"{}"] * 300_000) + b"]}")),
    "1 GB in gzip": (4, compressed),
    "chunks of one byte": (50, chunked(b"1\r\na\r\n" * 100_000)),
    "endless chunk extensions": (50, chunked(b"1;" + b"a" * (1 << 20))),
    "a body of 10 GB": (50, posted(bytes(1 << 20), f"Content-Length: {10 << 30}")),
    "upgrades to a websocket": (50, websocket),
    "broken lengths": (50, broken),
    "GET /x": (250, repeated("GET /x")),
    "PUT /v1/messages": (250, repeated("PUT /v1/messages")),
    "HEAD /": (250, repeated("HEAD /")),
    "GET /v1/models": (250, repeated("GET /v1/models")),
}


async def flood(host: str, port: int, kind: str, payload: bytes) -> None:
    """Send on all connections without end, and open closed connections again."""

    async def send() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                answers = asyncio.ensure_future(_drop(reader))
                try:
                    while not answers.done():
                        writer.write(payload)
                        await writer.drain()
                        await asyncio.sleep(0)
                finally:
                    answers.cancel()
                    writer.transport.abort()

    await asyncio.gather(*(send() for _ in range(FLOODS[kind][0])))


async def _drop(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass


def ask_repeatedly(host: str, port: int, key: str, seconds: float) -> list[float]:
    """Return the seconds of each turn."""
    body = json.dumps({"messages": [{"role": "user", "content": "q"}]})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    waits = list[float]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.monotonic()
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        assert response.status == 200, response.status
        waits.append(time.monotonic() - started)

    return waits


async def measured(kind: str, seconds: float, log: int) -> list[str]:
    """Return the row of one kind of flood. `log`: the descriptor of the log."""
    gateway = Gateway()
    await gateway.start()
    size_before = os.fstat(log).st_size

    async with gateway.admit_episode(Host()) as hostile, gateway.admit_episode(Host()) as fair_session:
        inner = await hostile.serve_on(socket.create_server(("127.0.0.1", 0)))
        flooding = await _child("flood", inner, hostile.api_key, kind, seconds)
        assert flooding.stdout is not None
        await flooding.stdout.readline()  # the flood's requests are ready
        await asyncio.sleep(FIRST_SECONDS)

        asking = await _child("ask", fair_session, fair_session.api_key, kind, seconds)
        answers, _ = await asking.communicate()
        flooding.terminate()
        await flooding.wait()

    await gateway.close()
    waits = json.loads(answers)
    times = [f"{1000 * seconds:.3g}" for seconds in (statistics.median(waits), max(waits))]
    return [kind, str(FLOODS[kind][0]), *times, str(os.fstat(log).st_size - size_before)]


async def _child(
    role: str, endpoint: Endpoint, key: str, kind: str, seconds: float
) -> asyncio.subprocess.Process:
    address = urlsplit(endpoint.base_url)
    words = [__file__, kind, "--role", role, "--host", str(address.hostname), "--port", str(address.port)]
    return await asyncio.create_subprocess_exec(
        sys.executable, *words, f"--key={key}", "--seconds", str(seconds), stdout=asyncio.subprocess.PIPE
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(FLOODS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each flood")
    parser.add_argument("--role", choices=("flood", "ask"), help=argparse.SUPPRESS)

    for name, kind in (("host", str), ("port", int), ("key", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()

    if unknown := set(options.kinds) - FLOODS.keys():
        sys.exit(f"there is no flood {sorted(unknown)[0]!r}; known: {', '.join(FLOODS)}")
    if options.role == "flood":
        payload = FLOODS[options.kinds[0]][1](options.key)
        print("ready", flush=True)
        asyncio.run(flood(options.host, options.port, options.kinds[0], payload))
    elif options.role == "ask":
        print(json.dumps(ask_repeatedly(options.host, options.port, options.key, options.seconds)))
    else:
        with tempfile.NamedTemporaryFile() as log:
            logging.basicConfig(filename=log.name, level=logging.INFO)
            rows = [
                asyncio.run(measured(kind, options.seconds, log.fileno())) for kind in options.kinds or FLOODS
            ]
        print(table(["what it sends", "connections", "median, ms", "worst, ms", "log, bytes"], rows))


if __name__ == "__main__":
    main()
