"""Serves Anthropic's Messages API for agents that keep the history themselves, as Claude Code does: the same
turns as by chat completions, read from blocks and written as blocks.

    thinking, text, tool_use ... (one turn of the model) , tool_result ... , text (its replies)

A tool without a schema would be run by Anthropic, and is left out. Fields about features that asyncrl lacks
(caches, betas, budgets of thoughts) have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.gateway.completions import MAX_STOPS, Stop
from asyncrl.gateway.exchange import (
    MODEL,
    AgentReply,
    ApiDialect,
    ApiError,
    Body,
    Event,
    Exchange,
    Limit,
    ModelName,
    StreamedText,
    agent_request,
    calls_of,
    new_id,
    read_body,
    tool_call,
)
from asyncrl.gateway.images import TEXT_ONLY, RequestContent, RequestImages
from asyncrl.types import EpisodeEnd, Message, StopReason

# Depends on the prompt: with this header, no two tasks share a prefix.
BILLING_HEADER = "x-anthropic-billing-header:"
BILLING_EFFECT = "is left out because the header differs between tasks"
THOUGHT_SIGNATURE = "asyncrl"  # signs thoughts: clients send the signature back, nobody checks it
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    410: "invalid_request_error",
    413: "request_too_large",
}
DOCUMENT_NOTE = "[a document was here; this model does not read documents]"


class ContentBlock(msgspec.Struct, frozen=True):
    """One block of a message, of any type. `source` belongs to a document or a `search_result`, `title` to a
    `search_result`, `tool_name` to a `tool_reference`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: Content = None
    is_error: bool | None = None
    source: Any = None
    title: str | None = None
    tool_name: str = ""


# A dict is a result of a tool that Anthropic runs.
Content = str | list[ContentBlock] | dict[str, Any] | None


class SentMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock] | None = None


class OfferedTool(msgspec.Struct, frozen=True):
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class MessagesRequest(msgspec.Struct, frozen=True):
    """The body of a request. Other fields have no effect."""

    messages: Annotated[list[SentMessage], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    model: ModelName | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: Limit | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    thread: Any = None


def read(body: Body, images: RequestImages = TEXT_ONLY) -> MessagesExchange:
    """Read a request. ImageError for a bad image. ApiError for an invalid request, and for a request that
    continues a stored conversation: Anthropic's clients know that code, and send all messages again."""
    request = read_body(body, MessagesRequest, {})
    if request.thread is not None:
        text = (
            "thread is not supported: conversations are not stored; send all messages "
            "(set thread=False in tool runners)"
        )
        raise ApiError(400, text, "thread_unsupported_request")
    return MessagesExchange(request, images)


def write_error(error: ApiError) -> dict[str, Any]:
    """Write an error in Anthropic's form. A full row is refused in Anthropic's words: on these words Claude
    Code shortens the history and goes on."""
    kind = ERROR_TYPES.get(error.status, "api_error")
    message = str(error)
    if error.refusal is not None and error.refusal.end is EpisodeEnd.LENGTH:
        message = f"prompt is too long: {error.refusal.tokens} tokens > {error.refusal.max_tokens} maximum"
    details = {"details": {"error_code": error.code}} if error.code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


DIALECT = ApiDialect(read, write_error, done=b"")


# -- requests ----------------------------------------------------------------------------------------


def _blocks(content: Content) -> list[ContentBlock]:
    if isinstance(content, str):
        return [ContentBlock("text", content)]
    return content if isinstance(content, list) else []


def _blocks_content(blocks: Sequence[ContentBlock], images: RequestImages) -> RequestContent:
    """Return the texts and images of blocks, each on new lines. ApiError for other blocks."""
    return RequestContent.join("\n", (_block_content(block, images) for block in blocks))


def _block_content(block: ContentBlock, images: RequestImages) -> RequestContent:
    match block.type:
        case "text":
            return images.read_text(block.text or "")
        case "image":
            return _image_content(block.source, images)
        case "document":
            return _document_content(block.source, images)
        case "tool_reference":
            return images.read_text(block.tool_name)
        case "search_result":
            head = images.read_text(f"{block.title or ''}\n{block.source or ''}")
            return RequestContent.join("\n", (head, _blocks_content(_blocks(block.content), images)))
    raise ApiError(400, f"a block of type {block.type!r} is not supported here; send text or images")


def _image_content(source: Any, images: RequestImages) -> RequestContent:
    """Read the source of an image block. ImageError for a source other than base64."""
    match source:
        case {"type": "base64", "data": str(encoded_file)}:
            return images.read_base64(encoded_file)
    return images.read_url(source.get("url") if isinstance(source, dict) else None)


def _document_content(source: Any, images: RequestImages) -> RequestContent:
    """Return the texts and images of a document; a note for a document in another form."""
    match source:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return images.read_text(text)
        case {"type": "content", "content": list(blocks)}:
            contents: list[RequestContent] = []
            for block in blocks:
                match block:
                    case {"text": str(text)}:
                        contents.append(images.read_text(text))
                    case {"type": "image", "source": image_source}:
                        contents.append(_image_content(image_source, images))
                    case _:
                        contents.append(RequestContent(DOCUMENT_NOTE))
            return RequestContent.join("\n", contents)
    return RequestContent(DOCUMENT_NOTE)


def _conversation_messages(sent_messages: Sequence[SentMessage], images: RequestImages) -> Iterator[Message]:
    for message in sent_messages:
        blocks = _blocks(message.content)
        if message.role == "assistant":
            calls = [block for block in blocks if block.type == "tool_use"]
            yield Message(
                "assistant",
                "".join(block.text or "" for block in blocks if block.type == "text"),
                tuple(tool_call(call.name, json.dumps(call.input or {}), call.id) for call in calls),
                reasoning="".join(block.thinking or "" for block in blocks if block.type == "thinking"),
            )
            continue

        for block in blocks:
            if block.type == "tool_result":
                content = _blocks_content(_blocks(block.content), images)
                text = content.text
                text = f"Error: {text}" if block.is_error and not text.startswith("Error") else text
                yield Message("tool", text, tool_call_id=block.tool_use_id, images=content.images)

        if spoken_blocks := [block for block in blocks if block.type != "tool_result"]:
            content = _blocks_content(spoken_blocks, images)
            yield Message(message.role, content.text, images=content.images)


class MessagesExchange(Exchange):
    """An `Exchange` of the Messages API with one answer. ApiError for a block or a tool that no template can
    write."""

    request: MessagesRequest

    def __init__(self, request: MessagesRequest, images: RequestImages) -> None:
        self.request = replace(request, messages=[])
        self.ignored_parts = {}
        system_lines = _blocks_content(_blocks(request.system), TEXT_ONLY).text.split("\n")
        unbilled_lines = [line for line in system_lines if not line.startswith(BILLING_HEADER)]
        system_text = "\n".join(unbilled_lines)
        system_messages = [Message("system", system_text)] if system_text else []

        functions = []  # the tools as chat completions write them
        for tool in request.tools or ():
            if tool.input_schema is None:
                self.ignored_parts[f"the tool {tool.type or tool.name!r}"] = "has no schema and is left out"
                continue
            description = {"description": tool.description} if tool.description else {}
            function = {"name": tool.name, **description, "parameters": tool.input_schema}
            functions.append({"type": "function", "function": function})

        if len(unbilled_lines) < len(system_lines):
            self.ignored_parts["a billing header"] = BILLING_EFFECT

        self.agent_request = agent_request(
            [*system_messages, *_conversation_messages(request.messages, images)],
            functions,
            model=request.model,
            tool_choice=request.tool_choice,
            max_tokens=request.max_tokens,
            stops=request.stop_sequences or (),
        )

        self._message_id = new_id("msg")
        self._streamed_text = StreamedText(("thinking", "text"))
        self._open_kind = ""  # the kind of the newest block: thinking, text
        self._block_index = -1  # the number of the newest block

    def full_answer(self, replies: Sequence[AgentReply]) -> dict[str, Any]:
        [reply] = replies
        message = reply.message
        content = list[dict[str, Any]]()

        if message.reasoning:
            content.append(
                {"type": "thinking", "thinking": message.reasoning, "signature": THOUGHT_SIGNATURE}
            )

        if message.content or not message.tool_calls:
            content.append({"type": "text", "text": message.content})

        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in calls_of(reply)
        ]

        return {
            **self._message_head(reply.prompt_tokens),
            "content": content,
            **_stop_fields(reply),
            **_usage_fields(reply),
        }

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        yield _event("message_start", message=self._message_head(prompt_tokens))

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[Event]:
        for kind, text in self._streamed_text.add_streamed(reasoning, content):
            yield from self._begin_block(kind)
            yield self._delta_event(f"{kind}_delta", **{kind: text})

    def ping(self) -> Iterator[Event]:
        yield _event("ping")

    def end(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        """Stream the text not streamed yet, one block per call, the end."""
        [reply] = replies
        yield from self.delta(0, *self._streamed_text.unstreamed_texts(reply.message))
        if self._block_index < 0 and not reply.message.tool_calls:
            yield from self._begin_block("text")

        yield from self._end_block()
        for call in calls_of(reply):
            self._block_index += 1
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield _event("content_block_start", index=self._block_index, content_block=block)
            yield self._delta_event("input_json_delta", partial_json=call.arguments)
            yield _event("content_block_stop", index=self._block_index)

        yield _event("message_delta", delta=_stop_fields(reply), **_usage_fields(reply))
        yield _event("message_stop")

    def _begin_block(self, kind: str) -> Iterator[Event]:
        """End the previous block and begin a block of this kind, unless such a block is open."""
        if kind == self._open_kind:
            return

        yield from self._end_block()
        self._open_kind = kind
        self._block_index += 1
        extra_fields = {"signature": ""} if kind == "thinking" else {}
        yield _event(
            "content_block_start",
            index=self._block_index,
            content_block={"type": kind, kind: "", **extra_fields},
        )

    def _end_block(self) -> Iterator[Event]:
        """End the newest block."""
        if not self._open_kind:
            return
        if self._open_kind == "thinking":
            yield self._delta_event("signature_delta", signature=THOUGHT_SIGNATURE)
        yield _event("content_block_stop", index=self._block_index)

    def _delta_event(self, kind: str, **text_fields: str) -> Event:
        return _event("content_block_delta", index=self._block_index, delta={"type": kind, **text_fields})

    def _message_head(self, prompt_tokens: int) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model or MODEL,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


def _stop_fields(reply: AgentReply) -> dict[str, Any]:
    match reply.turn.generation.stop:
        case StopReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        case StopReason.TEXT:
            return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_at}
    return {"stop_reason": "tool_use" if reply.message.tool_calls else "end_turn", "stop_sequence": None}


def _usage_fields(reply: AgentReply) -> dict[str, Any]:
    return {"usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.turn.generation.ids)}}
