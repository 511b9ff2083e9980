"""The clients of gateway.py, in a process of their own: conversations, and connections that say nothing.

python tools/bench/gateway_client.py '["converse", ...]' | '["idle", ...]'
"""

from __future__ import annotations

import json
import random
import re
import resource
import sys
from http.client import HTTPConnection
from typing import Any

SAID = "I look at the file first, and then I go on."  # by the model, which then calls
STOP = "Observation:"
REPLY = 60  # words of a tool's reply
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages", "text": "completions"}
WORDS = ["the", "file", "has", "a", "test", "that", "reads", "every", "line", "once", "and", "returns", "its"]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"name": "bash", "description": "Run a command.", "parameters": SCHEMA}


def words(count: int, draw: random.Random) -> str:
    """Return a text of so many words, each word a token."""
    return " ".join(draw.choices(WORDS, k=count))


def assistant(dialect: str, text: str, call: str) -> list[dict[str, Any]]:
    """Return the model's message as a client sends the message back."""
    match dialect:
        case "chat":
            calls = [{"id": call, "type": "function", "function": {"name": "bash", "arguments": "{}"}}]
            return [{"role": "assistant", "content": text, "tool_calls": calls}]
        case "responses":
            function_call = {"type": "function_call", "call_id": call, "name": "bash", "arguments": "{}"}
            return [{"role": "assistant", "content": text}, function_call]

    used = {"type": "tool_use", "id": call, "name": "bash", "input": {}}
    return [{"role": "assistant", "content": [{"type": "text", "text": text}, used]}]


def reply(dialect: str, text: str, call: str) -> dict[str, Any]:
    """The reply of a tool."""
    match dialect:
        case "chat":
            return {"role": "tool", "tool_call_id": call, "content": text}
        case "responses":
            return {"type": "function_call_output", "call_id": call, "output": text}
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": text}]}


def body(dialect: str, messages: list[dict[str, Any]], text: str) -> dict[str, Any]:
    match dialect:
        case "chat":
            return {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}
        case "responses":
            return {"input": messages, "tools": [{"type": "function", **TOOL}]}
        case "messages":
            return {
                "messages": messages,
                "tools": [{"name": "bash", "input_schema": SCHEMA}],
                "max_tokens": 1000,
            }
    return {"prompt": text, "stop": STOP}


def converse(
    url: str, key: str, dialect: str, messages: int, size: int, turns: int, seed: int, stream: bool
) -> None:
    """Hold a conversation of so many turns that begins with `messages` messages of `size` words together."""
    draw = random.Random(seed)
    message_size = size // messages
    text = words(size, draw)

    history: list[dict[str, Any]] = [{"role": "user", "content": words(message_size, draw)}]
    for number in range(messages // 2 - 1):
        history += assistant(dialect, words(message_size, draw), f"c{number}")
        history.append(reply(dialect, words(message_size, draw), f"c{number}"))

    connection = HTTPConnection(url.split("/")[2])
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for _ in range(turns):
        request = body(dialect, history, text) | ({"stream": True} if stream else {})
        connection.request("POST", f"/v1/{PATHS[dialect]}", json.dumps(request), headers)
        answer = connection.getresponse()
        heard = answer.read().decode()
        new = words(REPLY, draw)
        if answer.status != 200:
            raise SystemExit(heard)
        text += f"{SAID} {STOP} {new}"

        if dialect != "text":
            (call, *_) = re.findall(r"call_\d+-t\d+", heard)
            history += [*assistant(dialect, SAID, call), reply(dialect, new, call)]


def idle(url: str, key: str, count: int) -> None:
    """Open connections, each with a request if there is a key, and hold them until the input ends."""
    file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit, file_limit))

    connections = [HTTPConnection(url.split("/")[2]) for _ in range(count)]
    for connection in connections:
        connection.connect()
        if key:
            connection.request("GET", "/v1/models", headers={"x-api-key": key})
            connection.getresponse().read()

    print("open", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    work, *arguments = json.loads(sys.argv[1])
    converse(*arguments) if work == "converse" else idle(*arguments)
