"""The tools of an MCP server, which is started or reached at a URL, as tools of an episode."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from asyncrl.errors import ConfigError, one_line, users_code
from asyncrl.remote import check_url
from asyncrl.tools.base import Tool, ToolError, tools
from asyncrl.tools.checking import Checker, check_schema
from asyncrl.tools.mcp_client import (
    VARIABLE,
    McpConnection,
    McpError,
    McpServer,
    SharedConnection,
    close_servers,
)

NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, 5.6.2
SECRET = ("authorization", "proxy-authorization", "cookie")


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
    headers: str = "",
) -> Sequence[Tool]:
    """Make one tool for each tool of the server, which lists them now, over a connection for this purpose.

    `command`: the line that starts a server (no shell; `python` is this interpreter), or `url`: one that
    runs. `prefix` goes before the tools' names; `allow`: the server's names of those to take, with commas;
    empty: all. `timeout`: seconds of a call; 0: rollout.tool_timeout. `start_timeout`: seconds for the
    handshake. `env`: environment variables that a started server may see, with commas; `api_key_env`: the
    one with a URL's bearer token. `headers` of requests to a URL: `Name: value`, with commas or one a line;
    $NAME in a value is the environment variable, whose content stays out of every file and log.

    A worker shares one connection among its episodes; `per_episode` gives each its own, from the episode's
    start to its end. ConfigError for options that cannot be, and for a server that does not answer.
    """
    if bool(command) == bool(url):
        raise ConfigError("set command, to start a server, or url, to use one; and not both")
    if url:
        check_url(url)
    server = McpServer(command, url, tuple(_names(env)), api_key_env, start_timeout, _headers(headers))
    server.sent()
    listed = _allowed(_listed(server), _names(allow), server)
    for found in listed:
        check_schema(found.name, found.input_schema)
    checker = Checker({found.name: found.input_schema for found in listed})

    async def end() -> None:
        await asyncio.gather(checker.close(), close_servers())

    options: dict[str, Any] = {
        "timeout": timeout or None,
        "begin": checker.warm,
        "end": end,
        "decode": _decode,
    }
    if per_episode:
        options |= {"state": functools.partial(McpConnection, server), "replay": "reapply"}
    shared = None if per_episode else SharedConnection(server)
    made = []
    for found in listed:
        name = f"{prefix}{found.name}"
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a tool: letters, digits and _ . / - are, up to 128")
        body = {"name": name, "description": found.description or "", "parameters": found.input_schema}
        schema = {"type": "function", "function": body}
        check = functools.partial(checker.complaint, found.name)
        made.append(Tool(name, schema, _function(found, shared), check=check, **options))
    return made


def _function(found: Any, shared: SharedConnection | None) -> Callable[..., Awaitable[str]]:
    """Return what a call of the tool runs; without a shared connection it is given the episode's first."""

    async def of_episode(own: McpConnection, /, **arguments: Any) -> str:
        return text_of(await own.call(found.name, arguments))

    if shared is None:
        return of_episode
    hints = found.annotations
    tries = 2 if hints and (hints.read_only_hint or hints.idempotent_hint) else 1

    async def of_worker(**arguments: Any) -> str:
        return text_of(await shared.call(found.name, arguments, tries))

    return of_worker


def text_of(result: Any) -> str:
    """Return the texts of a CallToolResult; other parts by their type. ToolError: the tool's own answer."""
    text = "\n".join(map(_part, result.content))
    if not text and result.structured_content is not None:
        text = msgspec.json.encode(result.structured_content).decode()
    if result.is_error:
        raise ToolError(text or "the tool failed and gave no reason")
    return text


def _part(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return f"[{block.uri if block.type == 'resource_link' else block.type}]"


# -- what the server has ---------------------------------------------------------------------------------


def _listed(server: McpServer) -> list[Any]:
    """Its tools. In a thread, as the caller may run an event loop, which waits: nothing else runs yet."""
    try:
        import mcp as _  # noqa: F401  the package
    except ImportError:
        raise ConfigError("the package mcp is not installed; pip install 'asyncrl[mcp]'") from None
    try:
        with ThreadPoolExecutor(1) as thread, users_code():
            return thread.submit(asyncio.run, _list(server)).result()
    except McpError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # the boundary: of the package and whatever the server sent it
        raise ConfigError(f"{server} does not list its tools: {one_line(error)}") from error


async def _list(server: McpServer) -> list[Any]:
    connection = McpConnection(server)
    try:
        return await connection.tools()
    finally:
        await connection.close()


def _allowed(found: list[Any], allow: list[str], server: McpServer) -> list[Any]:
    known = {one.name: one for one in found}
    if missing := [name for name in allow if name not in known]:
        there = ", ".join(known) or "none"
        raise ConfigError(f"allow: {server} has no tool {missing[0]!r}; it has {there}")
    return [known[name] for name in allow] if allow else found


def _decode(text: str) -> dict[str, Any]:
    return msgspec.json.decode(text or "{}", type=dict[str, Any])


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    """ConfigError for what is no header, and for a secret that would be written into config.yaml."""
    found = []
    for line in filter(None, map(str.strip, re.split(r"[,\n]", text))):
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon or not HEADER.fullmatch(name) or not (value.isascii() and value.isprintable()):
            raise ConfigError(f"headers: {name!r} is no header; write Name: value, with commas between")
        if name.lower() in SECRET and not VARIABLE.search(value):
            raise ConfigError(f"headers: {name} is a secret; name a variable: {name}: Bearer $MY_TOKEN")
        found.append((name, value))
    return tuple(found)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
