"""Chat messages of a data set: verl's, OpenAI's and TRL's layouts, or plain text."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from asyncrl.errors import ConfigError, one_line
from asyncrl.types import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(where: str, value: Any, role: str = "user") -> tuple[Message, ...]:
    """A list of {role, content, …}, the same as JSON text, or plain text: one message of `role`. ConfigError
    begins with `where`."""
    if isinstance(value, str):
        value = _listed(value) or [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{where} must be text, or a non-empty list of {{role, content}}, or that as JSON, not "
            f"{'an empty list' if value == [] else type(value).__name__}"
        )
    try:
        return _named([_message(where, dict(item)) for item in value])
    except (TypeError, ValueError, RecursionError) as error:  # of dict(), json and msgspec
        raise ConfigError(f"{where} must hold messages {{role, content, …}} ({one_line(error)})") from None


def _listed(text: str) -> list[Any] | None:
    """The messages that JSON text holds; None for any other text, be it JSON."""
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None
    is_messages = isinstance(found, list) and all(isinstance(item, dict) and "role" in item for item in found)
    return found if is_messages else None


def _message(where: str, given: dict[str, Any]) -> Message:
    # A nested parquet column gives every message all keys of any message, None where absent.
    given = {key: value for key, value in given.items() if value is not None}
    if "role" not in given:
        keys = ", ".join(map(str, given))
        raise ConfigError(f"{where} has a message with the keys {keys}; a message has role and content")
    role = given["role"]
    if role not in ROLES:
        raise ConfigError(f"{where} has a message of the role {role!r}; roles are {', '.join(ROLES)}")
    content = given.get("content", "")
    if isinstance(content, list):
        other = [part for part in content if not isinstance(part, dict) or part.get("type", "text") != "text"]
        if other:
            kind = other[0].get("type") if isinstance(other[0], dict) else type(other[0]).__name__
            raise ConfigError(f"{where} has content of type {kind}; only text can be trained here")
        content = "".join(str(part.get("text", "")) for part in content)
    given |= {"role": "system" if role == "developer" else role, "content": content}
    given["tool_calls"] = [_call(where, call) for call in given.get("tool_calls", [])]
    given["tool_call_id"] = str(given.get("tool_call_id", ""))
    given.setdefault("reasoning", given.pop("reasoning_content", ""))
    return msgspec.convert(given, Message)


def _call(where: str, given: Any) -> ToolCall:
    """OpenAI's layout, or the function's name and arguments by themselves."""
    given = given if isinstance(given, dict) else {}
    body: Any = given.get("function") or given
    body = body if isinstance(body, dict) else {}
    arguments = body.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    elif isinstance(arguments, dict):  # of a nested parquet column: see `_message`
        arguments = {key: value for key, value in arguments.items() if value is not None}
    if not isinstance(arguments, dict) or not isinstance(body.get("name"), str):
        raise ConfigError(f"{where} has a tool call that is not {{name, arguments: an object}}")
    return ToolCall(body["name"], json.dumps(arguments, ensure_ascii=False), str(given.get("id") or ""))


def _named(messages: list[Message]) -> tuple[Message, ...]:
    """Replies of tools with the tool's name, which some templates write, from the call that they answer."""
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id}
    return tuple(
        msgspec.structs.replace(message, name=names[message.tool_call_id])
        if message.role == "tool" and not message.name and message.tool_call_id in names
        else message
        for message in messages
    )
