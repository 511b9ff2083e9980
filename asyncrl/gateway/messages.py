"""Anthropic's Messages API, as far as agents use it that keep their history themselves (Claude Code does):
the same turns as by chat completions, read from blocks and written as blocks.

    thinking, text, tool_use ... (one turn of the model) , tool_result ... , text (its replies)

A tool without a schema is one that Anthropic would run: it is left out. Fields that ask for what there is not
(caches, betas, budgets of thoughts) have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.conversation.requests import AgentRequest
from asyncrl.gateway.completions import MAX_STOPS, Stop
from asyncrl.gateway.exchange import (
    MODEL,
    PICTURE,
    AgentReply,
    ApiDialect,
    ApiError,
    Event,
    Limit,
    ModelName,
    StreamedText,
    agent_request,
    calls_of,
    new_id,
    read_body,
    tool_call,
)
from asyncrl.types import EpisodeEnd, Message, StopReason

BILLING = "x-anthropic-billing-header:"  # a function of the prompt: with it, no two tasks share a prefix
BILLED = "is left out: prompts of other tasks differ in it"
SIGNATURE = "asyncrl"  # of thoughts: clients send it back, nobody checks it
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    410: "invalid_request_error",
    413: "request_too_large",
}
PICTURES = ("image", "document")  # types of blocks that a model of text cannot read


class ContentBlock(msgspec.Struct, frozen=True):
    """One block of a message, of any type. `source`: of a document, or of a `search_result`, as `title` is;
    `tool_name`: of a `tool_reference`."""

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


Content = str | list[ContentBlock] | dict[str, Any] | None  # an object: a result of a tool that is not ours


class Said(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock] | None = None


class OfferedTool(msgspec.Struct, frozen=True):
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class MessagesRequest(msgspec.Struct, frozen=True):
    """The body of a request. Fields that are not here have no effect."""

    messages: Annotated[list[Said], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    model: ModelName | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: Limit | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    thread: Any = None


def read(body: bytes) -> MessagesExchange:
    """Read a request. ApiError for an invalid one, and for one of a conversation that we should have kept:
    Anthropic's clients know that code, and send all messages again."""
    request = read_body(body, MessagesRequest, {})
    if request.thread is not None:
        text = "'thread': no conversation is kept here; send all messages (tool runners: thread=False)"
        raise ApiError(400, text, "thread_unsupported_request")
    return MessagesExchange(request)


def write_error(error: ApiError) -> dict[str, Any]:
    """Write an error in Anthropic's form. A full row is refused in Anthropic's words, on which Claude Code
    makes its history shorter and goes on."""
    kind = ERRORS.get(error.status, "api_error")
    message = str(error)
    if error.refusal is not None and error.refusal.end is EpisodeEnd.LENGTH:
        message = f"prompt is too long: {error.refusal.tokens} tokens > {error.refusal.most} maximum"
    details = {"details": {"error_code": error.code}} if error.code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


DIALECT = ApiDialect(read, write_error, done=b"")


# -- requests ----------------------------------------------------------------------------------------


def _blocks(content: Content) -> list[ContentBlock]:
    if isinstance(content, str):
        return [ContentBlock("text", content)]
    return content if isinstance(content, list) else []


def _text(blocks: Sequence[ContentBlock]) -> str:
    """The text of blocks, a line or more each; a note where there is a picture. ApiError for other blocks."""
    texts = []
    for block in blocks:
        if block.type in PICTURES:
            texts.append(_document(block.source))
        elif block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_reference":
            texts.append(block.tool_name)
        elif block.type == "search_result":
            found = block.title or "", str(block.source or ""), _text(_blocks(block.content))
            texts.append("\n".join(found))
        else:
            raise ApiError(400, f"a block of type {block.type!r} is not supported here; send text")
    return "\n".join(texts)


def _document(source: Any) -> str:
    """The text of a document that is a text; else the note."""
    match source:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return text
        case {"type": "content", "content": list(blocks)}:
            texts = [block.get("text") if isinstance(block, dict) else None for block in blocks]
            return "\n".join(text if isinstance(text, str) else PICTURE for text in texts)
    return PICTURE


def _turns(said: Sequence[Said]) -> Iterator[Message]:
    for one in said:
        blocks = _blocks(one.content)
        if one.role == "assistant":
            calls = [block for block in blocks if block.type == "tool_use"]
            yield Message(
                "assistant",
                "".join(block.text or "" for block in blocks if block.type == "text"),
                tuple(tool_call(one.name, json.dumps(one.input or {}), one.id) for one in calls),
                reasoning="".join(block.thinking or "" for block in blocks if block.type == "thinking"),
            )
            continue
        for block in blocks:
            if block.type == "tool_result":
                text = _text(_blocks(block.content))
                text = f"Error: {text}" if block.is_error and not text.startswith("Error") else text
                yield Message("tool", text, tool_call_id=block.tool_use_id)
        if rest := [block for block in blocks if block.type != "tool_result"]:
            yield Message(one.role, _text(rest))


@dataclass
class MessagesExchange:
    """See `Exchange`. There is one answer. ApiError for a block or a tool that no template can write."""

    request: MessagesRequest
    ask: AgentRequest = field(init=False)
    count: int = 1

    def __post_init__(self) -> None:
        sent = self.request
        given = _text(_blocks(sent.system)).split("\n")
        lines = [line for line in given if not line.startswith(BILLING)]
        text = "\n".join(lines)
        billed = len(lines) < len(given)
        system = [Message("system", text)] if text else []
        own = [tool for tool in sent.tools or () if tool.input_schema is not None]
        others = [tool.type or tool.name for tool in sent.tools or () if tool.input_schema is None]
        self.left_out = {f"a tool {name!r}": "has no schema and is left out" for name in others}
        if billed:
            self.left_out["a billing header"] = BILLED
        self.ask = agent_request(
            [*system, *_turns(sent.messages)],
            [_tool(tool) for tool in own],
            model=sent.model,
            choice=sent.tool_choice,
            most=sent.max_tokens,
            stops=sent.stop_sequences or (),
        )
        self._id = new_id("msg")
        self._streamed = StreamedText(("thinking", "text"))
        self._open = ""  # the kind of the newest block: thinking, text
        self._at = -1  # the number of the newest block

    def whole(self, replies: Sequence[AgentReply]) -> dict[str, Any]:
        [reply] = replies
        message = reply.message
        content = list[dict[str, Any]]()
        if message.reasoning:
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
        if message.content or not message.tool_calls:
            content.append({"type": "text", "text": message.content})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in calls_of(reply)
        ]
        return {**self._message(reply.prompt_tokens), "content": content, **_end(reply), **_usage(reply)}

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        yield _event("message_start", message=self._message(prompt_tokens))

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[Event]:
        for kind, text in self._streamed.add(reasoning, content):
            yield from self._begun(kind)
            yield self._delta(f"{kind}_delta", **{kind: text})

    def ping(self) -> Iterator[Event]:
        yield _event("ping")

    def end(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        """Stream what was not streamed yet, one block per call, the end."""
        [reply] = replies
        yield from self.delta(0, *self._streamed.rest(reply.message))
        if self._at < 0 and not reply.message.tool_calls:
            yield from self._begun("text")
        yield from self._closed()
        for call in calls_of(reply):
            self._at += 1
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield _event("content_block_start", index=self._at, content_block=block)
            yield self._delta("input_json_delta", partial_json=call.arguments)
            yield _event("content_block_stop", index=self._at)
        yield _event("message_delta", delta=_end(reply), **_usage(reply))
        yield _event("message_stop")

    def _begun(self, kind: str) -> Iterator[Event]:
        """The block's beginning, if it is new; the end of the one before it."""
        if kind == self._open:
            return
        yield from self._closed()
        self._open = kind
        self._at += 1
        more = {"signature": ""} if kind == "thinking" else {}
        yield _event("content_block_start", index=self._at, content_block={"type": kind, kind: "", **more})

    def _closed(self) -> Iterator[Event]:
        """The end of the newest block."""
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=SIGNATURE)
        yield _event("content_block_stop", index=self._at)

    def _delta(self, kind: str, **what: str) -> Event:
        return _event("content_block_delta", index=self._at, delta={"type": kind, **what})

    def _message(self, prompt_tokens: int) -> dict[str, Any]:
        return {
            "id": self._id,
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


def _tool(tool: OfferedTool) -> dict[str, Any]:
    """Write a tool as chat completions do."""
    said = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **said, "parameters": tool.input_schema}}


def _end(reply: AgentReply) -> dict[str, Any]:
    match reply.turn.stop:
        case StopReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        case StopReason.TEXT:
            return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_at}
    return {"stop_reason": "tool_use" if reply.message.tool_calls else "end_turn", "stop_sequence": None}


def _usage(reply: AgentReply) -> dict[str, Any]:
    return {"usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.turn.ids)}}
