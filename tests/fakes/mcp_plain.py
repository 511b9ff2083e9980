"""An MCP server of an older protocol without the package: python mcp_plain.py [what is wrong with it]."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

BROKEN = (sys.argv[1:] or [""])[0]
NO_METHOD = {"code": -32601, "message": "no such method"}


def tool(name: str) -> dict[str, Any]:
    kind = "nothing" if BROKEN == "bad_schema" else "string"
    properties = {} if name == "pid" else {"name": {"type": kind}}
    return {"name": name, "inputSchema": {"type": "object", "properties": properties}}


def listed() -> Any:
    if BROKEN == "bad_list":
        return {"tools": [{"name": 7}]}
    tools = {"tools": [tool("pid"), tool("variable")]}
    return tools | {"nextCursor": "more"} if BROKEN == "endless" else tools


def called(name: str, arguments: dict[str, str]) -> Any:
    text = str(os.getpid()) if name == "pid" else os.environ.get(arguments["name"], "unset")
    return {"content": 7 if BROKEN == "bad_result" else [{"type": "text", "text": text}]}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        info = {"serverInfo": {"name": "plain", "version": "1"}, "capabilities": {"tools": {}}}
        return {"result": {"protocolVersion": "2025-06-18"} | info}
    if method == "tools/list" and BROKEN == "no_tools":
        return {"error": {"code": -32601, "message": "no tools"}}
    if method == "tools/list":
        return {"result": listed()}
    if method == "tools/call":
        return {"result": called(params["name"], params.get("arguments") or {})}
    return {"error": NO_METHOD}


if BROKEN == "helped":
    quiet = subprocess.DEVNULL
    helper = subprocess.Popen(["sleep", "100"], stdin=quiet, stdout=quiet, stderr=quiet)
    os.environ["HELPER"] = str(helper.pid)
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request and not (BROKEN == "silent_list" and request["method"] == "tools/list"):
        print(
            json.dumps(
                {"jsonrpc": "2.0", "id": request["id"]} | answer(request["method"], request.get("params", {}))
            )
        )
        sys.stdout.flush()
if BROKEN == "deaf":  # nobody is there any more, and it does not care
    signal.pause()
if BROKEN == "tidy":
    with open(sys.argv[2], "w") as file:
        file.write("put away")
