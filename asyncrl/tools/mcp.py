"""The tools of an MCP server, over a pipe or a URL, as tools of an episode."""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asyncrl.errors import ConfigError, one_line
from asyncrl.tools.base import Replay, Tool, tools
from asyncrl.tools.mcp_servers import (
    CLOSE,
    Connection,
    Link,
    ServerError,
    close_servers,
    submit,
    there,
)
from asyncrl.tools.mcp_transports import Server
from asyncrl.tools.schema import Decode
from asyncrl.types import Sample

MAX_TOOLS = 256  # that one server may have
NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")


@tools.register("mcp")
def mcp(
    *,
    command: str = "",
    url: str = "",
    prefix: str = "",
    allow: str = "",
    per_episode: bool = False,
    timeout: float = 0.0,
    start_timeout: float = 60.0,
    env: str = "",
    api_key_env: str = "",
) -> Sequence[Tool]:
    """One tool for each of the server's, which is asked for them now, over a connection of a moment.

    `command`: the line that starts a server (no shell; `python` is this interpreter), or `url`: one that
    runs. `prefix` goes before the tools' names; `allow`: the server's names of those to take, with commas;
    empty: all. `timeout`: seconds of a call; 0: rollout.tool_timeout. `start_timeout`: seconds for the
    handshake. `env`: environment variables that a started server may see, with commas; `api_key_env`: the
    one with a URL's bearer token.

    A worker shares one connection among its episodes; `per_episode` gives each its own, from the episode's
    start to its end. ConfigError for options that cannot be, and for a server that does not answer.
    """
    if bool(command) == bool(url):
        raise ConfigError("mcp: set command, to start a server, or url, to use one; and not both")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"mcp: url {url!r} must begin with http:// or https://")
    if api_key_env and not os.environ.get(api_key_env):
        raise ConfigError(f"mcp: the environment variable {api_key_env} holds no key; set it")
    server = Server(command, url, tuple(_names(env)), api_key_env, start_timeout)
    options: dict[str, Any] = {"timeout": timeout or None, "end": close_servers}
    make = _of_episode(server) if per_episode else _of_worker(server)
    return [
        make(found.name, _schema(found, prefix), _decoder(found), _repeatable(found), options)
        for found in _allowed(_listed(server), _names(allow), server)
    ]


Make = Callable[[str, dict[str, Any], Decode, bool, dict[str, Any]], Tool]


def _of_worker(server: Server) -> Make:
    link: list[Link] = []  # made in the thread of the connections, by the first call

    async def call(name: str, arguments: dict[str, Any], again: bool) -> Any:
        if not link:
            link.append(Link(server))
        return await link[0].call(name, arguments, again)

    def make(name: str, schema: dict[str, Any], decode: Decode, again: bool, options: dict[str, Any]) -> Tool:
        async def function(**arguments: Any) -> str:
            return text_of(await there(call(name, arguments, again)))

        return Tool(schema["function"]["name"], schema, function, decode, **options)

    return make


class EpisodeServer:
    """A connection from the start of an episode to its end. It is not made again when it is lost: what the
    server knew of the episode is lost with it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: Connection | None = None
        self._closed = False

    async def open(self, sample: Sample) -> None:
        """Raises ServerError."""
        await there(self._open())

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        assert self._connection is not None
        return text_of(await there(self._connection.call(name, arguments)))

    async def close(self) -> None:
        await there(self._close())

    async def _open(self) -> None:
        if not self._closed:
            self._connection = Connection(self._server)
            await self._connection.client()

    async def _close(self) -> None:
        self._closed = True  # an `open` that was given up may not have begun yet
        if self._connection is not None:
            await self._connection.close()


def _of_episode(server: Server) -> Make:
    state = functools.partial(EpisodeServer, server)  # one object: the tools of an episode share it

    def make(name: str, schema: dict[str, Any], decode: Decode, again: bool, options: dict[str, Any]) -> Tool:
        async def function(given: EpisodeServer, /, **arguments: Any) -> str:
            return await given.call(name, arguments)

        replay: Replay = "reapply"
        return Tool(schema["function"]["name"], schema, function, decode, state, replay=replay, **options)

    return make


def text_of(result: Any) -> str:
    """The texts of a CallToolResult, and a word on what is no text. ServerError: the tool failed."""
    text = "\n".join(_part(block) for block in result.content)
    if not text and result.structured_content is not None:
        text = msgspec.json.encode(result.structured_content).decode()
    if result.is_error:
        raise ServerError(text or "the tool failed and gave no reason")
    return text


def _part(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    if block.type == "resource_link":
        return f"[{block.uri}]"
    return f"[{block.type}]"


# -- what the server has ---------------------------------------------------------------------------------


def _listed(server: Server) -> list[Any]:
    """Its tools. The caller's event loop, if there is one, waits: this is done before anything starts."""
    try:
        import mcp as _  # noqa: F401  the package
    except ImportError:
        raise ConfigError("the tool mcp needs the package mcp: pip install 'asyncrl[mcp]'") from None
    try:
        return submit(_list(server)).result(2 * server.start_timeout + 2 * CLOSE)
    except ServerError as error:
        raise ConfigError(f"mcp: {error}") from error


async def _list(server: Server) -> list[Any]:
    connection = Connection(server)
    try:
        client = await connection.client()
        async with asyncio.timeout(server.start_timeout):
            return await _pages(client)
    except ServerError:
        raise
    except Exception as error:  # the boundary: of the package and whatever the server sent it
        raise ServerError(f"{server} does not list its tools: {one_line(error)}") from error
    finally:
        await connection.close()


async def _pages(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    while len(found) <= MAX_TOOLS:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ValueError(f"there are more than {MAX_TOOLS}")


def _allowed(found: list[Any], allow: list[str], server: Server) -> list[Any]:
    known = {one.name: one for one in found}
    if missing := [name for name in allow if name not in known]:
        raise ConfigError(
            f"mcp: allow: {server} has no tool {missing[0]!r}; it has {', '.join(known) or 'none'}"
        )
    return [known[name] for name in allow] if allow else found


def _schema(found: Any, prefix: str) -> dict[str, Any]:
    name = f"{prefix}{found.name}"
    if not NAME.fullmatch(name):
        raise ConfigError(f"mcp: {name!r} is no name of a tool: letters, digits and _ . / - are, up to 128")
    body = {"name": name, "description": found.description or "", "parameters": found.input_schema}
    return {"type": "function", "function": body}


def _decoder(found: Any) -> Decode:
    """A check of arguments by the server's own schema, which may not refer to other documents."""
    import jsonschema
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    kind = validator_for(found.input_schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(found.input_schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"mcp: the schema of {found.name!r} is no JSON schema: {error.message}") from None
    validator = kind(found.input_schema, registry=REGISTRY)

    def decode(text: str) -> dict[str, Any]:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
        error = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
        if error is not None:
            raise ValueError(f"{one_line(ValueError(error.message))} - at `{error.json_path}`")
        return arguments

    return decode


def _repeatable(found: Any) -> bool:
    """Whether the server says that a repeated call does no more than one."""
    hints = found.annotations
    return bool(hints and (hints.read_only_hint or hints.idempotent_hint))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
