"""Reads chat messages of a data set: verl's, OpenAI's and TRL's layouts, or plain text."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from asyncrl.errors import ConfigError, one_line
from asyncrl.types import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(where: str, value: Any, role: str = "user") -> tuple[Message, ...]:
    """Read a list of {role, content, …}, which may be JSON text, or plain text as one message of `role`.
    ConfigError begins with `where`."""
    if isinstance(value, str):
        value = _messages_in_json(value) or [{"role": role, "content": value}]

    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{where} must be text, a non-empty list of {{role, content}} objects, or the same list encoded "
            f"as JSON, not {'an empty list' if value == [] else type(value).__name__}"
        )

    try:
        messages = [_read_message(where, dict(item)) for item in value]
    except (TypeError, ValueError, RecursionError) as error:  # of dict(), json and msgspec
        raise ConfigError(f"{where} must contain messages {{role, content, …}} ({one_line(error)})") from None

    # Some templates write the tool's name with a reply: the answered call has the name.
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id}
    return tuple(
        msgspec.structs.replace(message, name=names[message.tool_call_id])
        if message.role == "tool" and not message.name and message.tool_call_id in names
        else message
        for message in messages
    )


def _messages_in_json(text: str) -> list[Any] | None:
    """Return the messages in JSON text; None for any other text, including other JSON."""
    try:
        messages = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None

    is_messages = isinstance(messages, list) and all(
        isinstance(item, dict) and "role" in item for item in messages
    )
    return messages if is_messages else None


def _read_message(where: str, fields: dict[str, Any]) -> Message:
    # A nested parquet column gives every message all keys of any message, None where absent.
    fields = {key: value for key, value in fields.items() if value is not None}
    if "role" not in fields:
        keys = ", ".join(map(str, fields))
        raise ConfigError(f"{where} has a message with the keys {keys}; a message needs role and content")

    role = fields["role"]
    if role not in ROLES:
        raise ConfigError(f"{where} has a message with the role {role!r}; use one of {', '.join(ROLES)}")

    content = fields.get("content", "")
    if isinstance(content, list):
        unsupported_parts = [
            part for part in content if not isinstance(part, dict) or part.get("type", "text") != "text"
        ]
        if unsupported_parts:
            part = unsupported_parts[0]
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ConfigError(f"{where} has content of type {kind}; only text is supported")

        content = "".join(str(part.get("text", "")) for part in content)

    fields |= {"role": "system" if role == "developer" else role, "content": content}
    fields["tool_calls"] = [_read_tool_call(where, call) for call in fields.get("tool_calls", [])]
    fields["tool_call_id"] = str(fields.get("tool_call_id", ""))
    fields.setdefault("reasoning", fields.pop("reasoning_content", ""))

    return msgspec.convert(fields, Message)


def _read_tool_call(where: str, call: Any) -> ToolCall:
    """Read a tool call in OpenAI's layout, or just the function's name and arguments."""
    call = call if isinstance(call, dict) else {}
    function: Any = call.get("function") or call
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    elif isinstance(arguments, dict):  # a nested parquet column adds empty keys: see `_read_message`
        arguments = {key: value for key, value in arguments.items() if value is not None}

    if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{where} has a tool call that does not have the form {{name, arguments}}, where arguments is an "
            "object"
        )

    return ToolCall(function["name"], json.dumps(arguments, ensure_ascii=False), str(call.get("id") or ""))
