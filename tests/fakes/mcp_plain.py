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
    hints = {"annotations": {"readOnlyHint": True}} if name == "variable" else {}
    return {"name": name, "inputSchema": {"type": "object", "properties": properties}} | hints


def listed() -> Any:
    if BROKEN == "bad_list":
        return {"tools": [{"name": 7}]}
    tools = {"tools": [tool("pid"), tool("variable")]}
    return tools | {"nextCursor": "more"} if BROKEN == "endless" else tools


def called(name: str, arguments: dict[str, str]) -> Any:
    if BROKEN == "dies" and not os.path.exists(sys.argv[2]):  # in the first call
        open(sys.argv[2], "w").close()
        os._exit(3)

    if BROKEN == "noisy":
        with open(sys.argv[2], "w") as file:
            file.write(str(os.getpid()))
        while True:
            print("x" * 1000)

    text = str(os.getpid()) if name == "pid" else os.environ.get(arguments["name"], "unset")
    text = "x" * 30_000_000 if BROKEN == "huge" else text
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


if BROKEN in ("helped", "deaf"):
    quiet = subprocess.DEVNULL
    helper = subprocess.Popen(
        ["sleep", "100"], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    os.environ["HELPER"] = str(helper.pid)
for line in sys.stdin:
    request = json.loads(line)
    silent = BROKEN == "silent_list" and request["method"] == "tools/list"
    silent |= BROKEN == "silent" and request["method"] == "server/discover"
    if "id" in request and not silent:
        message = {"jsonrpc": "2.0", "id": request["id"]} | answer(
            request["method"], request.get("params", {})
        )
        written = json.dumps(message).encode()
        if request["method"] == "tools/call":
            written = written.replace(b'"text": "', b'"text": "\xff') if BROKEN == "latin" else written
            written = written.replace(b'"text": "', b'"text": "\\ud800') if BROKEN == "surrogate" else written
            written = written[:-3] if BROKEN == "cut" else written
        sys.stdout.buffer.write(written + b"\n")
        sys.stdout.flush()
while BROKEN == "chatty":
    message = {"level": "info", "data": "x" * 1_000_000}
    print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": message}))
if BROKEN == "deaf":  # nobody is there any more, and it does not care
    signal.pause()
if BROKEN == "tidy":
    with open(sys.argv[2], "w") as file:
        file.write("put away")
