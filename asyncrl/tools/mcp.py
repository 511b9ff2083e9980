"""The tools of an MCP server as tools of an episode; the server is started, or reached at a URL."""

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
    VARIABLE_REFERENCE,
    McpConnection,
    McpError,
    McpServer,
    SharedConnection,
    close_servers,
)
from asyncrl.vision.content import ImageFile, has_image_parts, read_content

ResultContent = str | list[str | ImageFile]

TOOL_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, 5.6.2
SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie")


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
    """Make a tool for each tool of a server, which lists its tools now over a temporary connection.

    `command`: the line that starts a server (no shell; `python` is this interpreter), or `url`: a running
    server. `prefix` goes before the tools' names; `allow`: the server's names of the allowed tools, separated
    by commas; empty: all. `timeout`: seconds of a call; 0: rollout.tool_timeout. `start_timeout`: seconds for
    the handshake. `env`: environment variables that a started server may see, separated by commas;
    `api_key_env`: the variable with a URL's bearer token. `headers` of requests to a URL: `Name: value`,
    separated by commas or lines; $NAME in a value is the environment variable, whose content stays out of
    every file and log.

    A worker shares one connection among its episodes; `per_episode` makes a connection for each episode, from
    start to end. ConfigError: an option is invalid, or the server does not answer.
    """
    if bool(command) == bool(url):
        raise ConfigError("set either command, to start a server, or url, to use a running server")
    if url:
        check_url(url)

    server = McpServer(
        command, url, tuple(_split_names(env)), api_key_env, start_timeout, _parse_headers(headers)
    )
    server.request_headers()
    listed_tools = _list_in_thread(server)

    if allowed_names := _split_names(allow):
        tools_by_name = {listed_tool.name: listed_tool for listed_tool in listed_tools}
        if missing_names := [name for name in allowed_names if name not in tools_by_name]:
            present_names = ", ".join(tools_by_name) or "none"
            raise ConfigError(f"allow: {server} has no tool {missing_names[0]!r}; available: {present_names}")
        listed_tools = [tools_by_name[name] for name in allowed_names]

    for listed_tool in listed_tools:
        check_schema(listed_tool.name, listed_tool.input_schema)

    checker = Checker({listed_tool.name: listed_tool.input_schema for listed_tool in listed_tools})

    async def close_shared() -> None:
        await asyncio.gather(checker.close(), close_servers())

    tool_options: dict[str, Any] = {
        "timeout": timeout or None,
        "begin": checker.warm,
        "end": close_shared,
        "decode": lambda text: msgspec.json.decode(text or "{}", type=dict[str, Any]),
    }

    if per_episode:
        tool_options |= {"state": functools.partial(McpConnection, server), "replay": "reapply"}

    shared_connection = None if per_episode else SharedConnection(server)
    return [
        _make_tool(f"{prefix}{listed_tool.name}", listed_tool, shared_connection, checker, tool_options)
        for listed_tool in listed_tools
    ]


def _make_tool(
    tool_name: str,
    listed_tool: Any,
    shared_connection: SharedConnection | None,
    checker: Checker,
    tool_options: dict[str, Any],
) -> Tool:
    """Make a tool that calls a tool of the server, over the shared connection or the episode's connection.
    ConfigError: the name is no name of a tool."""
    if not TOOL_NAME.fullmatch(tool_name):
        raise ConfigError(
            f"{tool_name!r} is not a valid tool name; use up to 128 letters, digits and _ . / -"
        )

    annotations = listed_tool.annotations
    max_attempts = 2 if annotations and (annotations.read_only_hint or annotations.idempotent_hint) else 1
    call_function: Callable[..., Awaitable[ResultContent]]

    if shared_connection is None:

        async def call_function(connection: McpConnection, /, **arguments: Any) -> ResultContent:
            return result_content(await connection.call(listed_tool.name, arguments))
    else:

        async def call_function(**arguments: Any) -> ResultContent:
            return result_content(await shared_connection.call(listed_tool.name, arguments, max_attempts))

    function_schema = {
        "name": tool_name,
        "description": listed_tool.description or "",
        "parameters": listed_tool.input_schema,
    }

    return Tool(
        tool_name,
        {"type": "function", "function": function_schema},
        call_function,
        check=functools.partial(checker.complaint, listed_tool.name),
        **tool_options,
    )


def result_content(result: Any) -> ResultContent:
    """Return the texts and images of a CallToolResult, each on new lines, and the types of other blocks; the
    structured content if there is no text, because servers repeat it as text. ToolError: the tool reports an
    error."""
    blocks: list[str | ImageFile] = []
    has_text = False
    for block in result.content:
        if block.type == "text":
            blocks.append(str(block.text))
            has_text |= bool(block.text)
        elif block.type == "image":
            blocks.append(ImageFile(str(block.data)))
        elif block.type == "resource" and hasattr(block.resource, "text"):
            blocks.append(str(block.resource.text))
            has_text |= bool(block.resource.text)
        else:
            blocks.append(f"[{block.uri if block.type == 'resource_link' else block.type}]")

    if result.structured_content is not None and not has_text:
        structured_text = msgspec.json.encode(result.structured_content).decode()
        blocks = [*(block for block in blocks if block), structured_text]

    parts: list[str | ImageFile] = []
    for block in blocks:
        parts += ("\n", block) if parts else (block,)

    if result.is_error:
        error_text = read_content(parts, layout=None).text
        raise ToolError(error_text or "the tool failed and gave no reason")
    return parts if has_image_parts(parts) else "".join(map(str, parts))


# -- the server's tools ----------------------------------------------------------------------------------


def _list_in_thread(server: McpServer) -> list[Any]:
    """List the server's tools in a thread, as the caller may run an event loop, which waits meanwhile."""
    try:
        import mcp as _  # noqa: F401  the package
    except ImportError:
        raise ConfigError("the package mcp is not installed; pip install 'asyncrl[mcp]'") from None

    async def list_tools() -> list[Any]:
        connection = McpConnection(server)
        try:
            return await connection.tools()
        finally:
            await connection.close()

    try:
        with ThreadPoolExecutor(1) as thread, users_code():
            return thread.submit(asyncio.run, list_tools()).result()
    except McpError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # the boundary to the package, which may pass on whatever the server sent
        raise ConfigError(f"cannot list the tools of {server}: {one_line(error)}") from error


def _parse_headers(text: str) -> tuple[tuple[str, str], ...]:
    """Read headers. ConfigError: a header is malformed, or a secret would be written into config.yaml."""
    header_pairs = []
    for line in filter(None, map(str.strip, re.split(r"[,\n]", text))):
        name, colon, value = (part.strip() for part in line.partition(":"))

        if not colon or not HEADER_NAME.fullmatch(name) or not (value.isascii() and value.isprintable()):
            raise ConfigError(
                f"headers: {name!r} is not a valid header; write each header as Name: value, separated by "
                "commas"
            )
        if name.lower() in SECRET_HEADERS and not VARIABLE_REFERENCE.search(value):
            raise ConfigError(
                f"headers: {name} is a secret; use an environment variable, as in '{name}: Bearer $MY_TOKEN'"
            )

        header_pairs.append((name, value))

    return tuple(header_pairs)


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
