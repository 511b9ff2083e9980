"""An MCP server with good and bad tools: python mcp_server.py [port]; without a port, over its pipes."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from typing import Annotated, Any

import PIL.Image
from mcp.server.mcpserver import Image, MCPServer
from pydantic import Field

server = MCPServer("fake")


@server.tool()
def add(a: int, b: Annotated[int, Field(ge=0)] = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool(structured_output=False)
async def pid(delay: float = 0.0) -> str:
    """Its process."""
    await asyncio.sleep(delay)
    return str(os.getpid())


@server.tool(structured_output=False)
def words(line: str) -> list[str]:
    """The words of a line."""
    return line.split()


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@server.tool(structured_output=False)
def huge(size: int) -> str:
    """Give that many letters."""
    return "x" * size


@server.tool(structured_output=False)
def drawing(damaged: bool = True) -> Any:
    """Give a picture."""
    if damaged:
        return Image(data=b"no picture", format="png")

    buffer = io.BytesIO()
    PIL.Image.new("RGB", (64, 48), "red").save(buffer, format="PNG")
    return ["red:", Image(data=buffer.getvalue(), format="png")]


def main(port: str = "") -> None:
    options: dict[str, Any] = (
        {"transport": "streamable-http", "port": int(port)} if port else {"transport": "stdio"}
    )
    server.run(**options)


if __name__ == "__main__":
    main(*sys.argv[1:])
