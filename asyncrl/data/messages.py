"""Reads chat messages of a data set: verl's, OpenAI's and TRL's layouts, or plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.data.images import RowImages, image_in_part
from asyncrl.errors import ConfigError, one_line
from asyncrl.types import IMAGE_MARK, ImageRef, Message, ToolCall
from asyncrl.vision.files import data_url

ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGE_TEXT = "<image>"  # stands for the next image of the row's column
IMAGE_TYPES = ("image", "image_url")
NO_IMAGE = "\ufffd"  # replaces an IMAGE_MARK in the text of the data, which stands for no image


def read_messages(where: str, value: Any, images: RowImages, role: str = "user") -> tuple[Message, ...]:
    """Read a list of {role, content, …}, which may be JSON text, or plain text as one message of `role`.
    `images`: of the row. ConfigError begins with `where`."""
    if isinstance(value, str):
        value = _messages_in_json(value) or [{"role": role, "content": value}]

    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{where} must be text, a non-empty list of {{role, content}} objects, or the same list encoded "
            f"as JSON, not {'an empty list' if value == [] else type(value).__name__}"
        )

    try:
        messages = [_read_message(where, dict(item), images) for item in value]
    except (TypeError, ValueError, RecursionError) as error:  # of dict(), json and msgspec
        raise ConfigError(f"{where} must contain messages {{role, content, …}} ({one_line(error)})") from None

    if any(message.images for message in messages):
        messages = [
            message
            if message.images
            else msgspec.structs.replace(message, content=message.content.replace(IMAGE_MARK, NO_IMAGE))
            for message in messages
        ]

    # Some templates write the tool's name with a reply: the answered call has the name.
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id}
    return tuple(
        msgspec.structs.replace(message, name=names[message.tool_call_id])
        if message.role == "tool" and not message.name and message.tool_call_id in names
        else message
        for message in messages
    )


def marked_json(message: Message) -> dict[str, Any]:
    """Return a message as OpenAI's JSON with IMAGE_TEXT in the place of each image: `read_messages` reads
    the same message if the row has these images in its column."""
    message_json = message.openai()
    if message.images:
        message_json["content"] = message.content.replace(IMAGE_MARK, IMAGE_TEXT)
    return message_json


def complete_json(message: Message, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return a message as OpenAI's JSON with each image as a data: URL: `read_messages` reads the same
    message in a row without a column of images. `files`: of the images, by digest."""
    message_json = message.openai()
    if message.images:
        message_json["content"] = [
            {"type": "image_url", "image_url": {"url": data_url(files[part["image"]])}}
            if part["type"] == "image"
            else part
            for part in message.content_parts()
        ]
    return message_json


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


def _read_message(where: str, fields: dict[str, Any], images: RowImages) -> Message:
    fields = _without_nulls(fields)
    if "role" not in fields:
        keys = ", ".join(map(str, fields))
        raise ConfigError(f"{where} has a message with the keys {keys}; a message needs role and content")

    role = fields["role"]
    if role not in ROLES:
        raise ConfigError(f"{where} has a message with the role {role!r}; use one of {', '.join(ROLES)}")

    content = fields.get("content", "")
    message_images: list[ImageRef] = []
    if isinstance(content, str | list):
        content, message_images = _read_content(where, content, images)

    fields |= {"role": "system" if role == "developer" else role, "content": content}
    fields["images"] = message_images
    fields["tool_calls"] = [_read_tool_call(where, call) for call in fields.get("tool_calls", [])]
    fields["tool_call_id"] = str(fields.get("tool_call_id", ""))
    fields.setdefault("reasoning", fields.pop("reasoning_content", ""))

    return msgspec.convert(fields, Message)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys without a value: a nested parquet column gives every message, and every part, all keys
    of any."""
    return {key: value for key, value in fields.items() if value is not None}


def _read_content(where: str, content: str | list[Any], images: RowImages) -> tuple[str, list[ImageRef]]:
    """Return the text of content, with an IMAGE_MARK in the place of each image, and the images."""
    texts = [""]  # around the images: one more than images
    content_images: list[ImageRef] = []
    for part in [content] if isinstance(content, str) else content:
        fields = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = fields.get("type", "text") if isinstance(fields, dict) else type(part).__name__

        if isinstance(fields, dict) and kind in IMAGE_TYPES:
            image = image_in_part(_without_nulls(fields))
            if image is None and not images.has_column:
                raise ConfigError(
                    f"{where} has a part of type image without an image, and the row has no images column; "
                    "add the image to the part, or the column to the row"
                )
            content_images.append(images.take_next() if image is None else images.add(where, image))
            texts.append("")
        elif isinstance(fields, dict) and kind == "text":
            text = str(fields.get("text", ""))
            first_text, *following_texts = text.split(IMAGE_TEXT) if images.has_column else [text]
            texts[-1] += first_text
            texts += following_texts
            content_images += [images.take_next() for _ in following_texts]
        else:
            raise ConfigError(f"{where} has content of type {kind}; only text and images are supported")

    if content_images:
        texts = [text.replace(IMAGE_MARK, NO_IMAGE) for text in texts]
    return IMAGE_MARK.join(texts), content_images


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
