"""The dialects of the gateway, as clients of each speak and read them. A test of one is a test of all: it
takes a conversation in our words, and compares a `Said`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from asyncrl.gateway import completions, messages, responses
from asyncrl.gateway.exchange import AgentReply, Event, Exchange
from asyncrl.types import Generation, Message, StopReason, ToolCall, Turn, VersionSpan

LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}
FUNCTION = {"type": "function", "function": LOOK}  # as templates see it


class Said(NamedTuple):
    """A client's view of an answer.

    `end`: stop, length or tool_calls. `usage`: tokens read, tokens written.
    """

    reasoning: str
    content: str
    calls: list[ToolCall]
    end: str
    usage: tuple[int, int]


class Dialect(NamedTuple):
    """How a client of one API writes requests and reads answers.

    `body(messages, tools, schema=…, limit=…, **fields)` makes a request, whose messages have calls with the
    ids that clients got. `parse_answer` reads the body of an answer; `heard` reads the events of a stream, as
    a strict client does: its texts are those that were streamed.
    """

    path: str
    read: Callable[[bytes], Exchange]
    body: Callable[..., dict[str, Any]]
    parse_answer: Callable[[dict[str, Any]], Said]
    heard: Callable[[Sequence[Event]], Said]

    def exchange_of(self, messages: Sequence[Message], tools: Sequence[Any] = (), **options: Any) -> Exchange:
        return self.read(json.dumps(self.body(messages, tools, **options)).encode())


def reply(message: Message, stop: StopReason = StopReason.STOP, texts: Sequence[str] = "xy") -> AgentReply:
    """Return turn 3, of two tokens with these texts after five tokens."""
    turn = Turn(3, (7,), Generation((8, 9), (-0.5, -0.25), (VersionSpan(0, 2, 0, 0),), stop))
    return AgentReply(message, turn, 5, lambda ids: "".join(texts[token - 8] for token in ids))


def events_of(text: str) -> list[Event]:
    """The server-sent events of a body, without comments."""
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line.strip(":"))
        if lines and lines["data"] != "[DONE]":
            events.append((lines.get("event", ""), json.loads(lines["data"])))
    return events


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


# -- chat completions --------------------------------------------------------------------------------


def _chat_body(
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    schema: Any = None,
    limit: int | None = None,
    **fields: Any,
) -> dict[str, Any]:
    form = schema and {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    sent = [message.openai() | {"content": message.content or None} for message in messages]

    options = _without_none(
        tools=[{"type": "function", "function": tool} for tool in tools],
        response_format=form,
        max_completion_tokens=limit,
        stream_options=fields.get("stream") and {"include_usage": True},
    )
    return {"messages": sent, **options, **fields}


def _chat_calls(calls: Iterable[dict[str, Any]]) -> list[ToolCall]:
    return [ToolCall(call["function"]["name"], call["function"]["arguments"], call["id"]) for call in calls]


def _chat_usage(body: dict[str, Any]) -> tuple[int, int]:
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def _chat_whole(body: dict[str, Any]) -> Said:
    assert (body["object"], len(body["choices"])) == ("chat.completion", 1)
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["role"] == "assistant" and (message["content"] is not None or message["tool_calls"])
    calls = _chat_calls(message.get("tool_calls", ()))
    texts = message.get("reasoning_content", ""), message["content"] or ""
    return Said(*texts, calls, choice["finish_reason"], _chat_usage(body))


def _chat_heard(events: Sequence[Event]) -> Said:
    assert not any(kind for kind, _ in events)
    parts = [data for _, data in events]
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1 and parts[-1]["choices"] == []
    deltas = [part["choices"][0]["delta"] for part in parts[:-1]]
    assert list(deltas[0]) == ["role", "content"]

    reasoning, content = (
        "".join(delta.get(key, "") for delta in deltas) for key in ("reasoning_content", "content")
    )
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    finish = parts[-2]["choices"][0]["finish_reason"]
    return Said(reasoning, content, _chat_calls(calls), finish, _chat_usage(parts[-1]))


# -- responses ---------------------------------------------------------------------------------------


def _responses_body(
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    schema: Any = None,
    limit: int | None = None,
    **fields: Any,
) -> dict[str, Any]:
    options = _without_none(
        tools=[{"type": "function", **tool} for tool in tools],
        text=schema and {"format": {"type": "json_schema", "name": "it", "schema": schema}},
        max_output_tokens=limit,
    )
    return {"input": [item for message in messages for item in _items(message)], **options, **fields}


def _items(message: Message) -> Iterable[dict[str, Any]]:
    if message.role == "tool":
        yield {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}
        return

    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        yield {"type": "reasoning", "summary": [], "content": content}

    if message.content or not message.tool_calls:
        kind = "output_text" if message.role == "assistant" else "input_text"
        yield {"type": "message", "role": message.role, "content": [{"type": kind, "text": message.content}]}

    for call in message.tool_calls:
        yield {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }


def _responses_whole(body: dict[str, Any]) -> Said:
    output = body["output"]
    usage = body["usage"]
    assert len({item["id"] for item in output}) == len(output)
    texts = {item["type"]: item["content"][0]["text"] for item in output if "content" in item}
    function_calls = [item for item in output if item["type"] == "function_call"]
    calls = [ToolCall(item["name"], item["arguments"], item["call_id"]) for item in function_calls]
    cut = body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["status"] == ("incomplete" if cut else "completed")
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]

    end = "length" if cut else "tool_calls" if calls else "stop"
    parts = texts.get("reasoning", ""), texts.get("message", ""), calls, end
    return Said(*parts, (usage["input_tokens"], usage["output_tokens"]))


def _responses_heard(events: Sequence[Event]) -> Said:
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(kind == data["type"] for kind, data in events)

    final = events[-1][1]["response"]
    for kind in ("added", "done"):
        items = [data for name, data in events if name == f"response.output_item.{kind}"]
        assert [item["output_index"] for item in items] == list(range(len(final["output"])))
        assert [item["item"]["id"] for item in items] == [item["id"] for item in final["output"]]

    whole_answer = _responses_whole(final)

    def streamed(name: str) -> str:
        return "".join(data["delta"] for kind, data in events if kind == f"response.{name}.delta")

    heard = whole_answer._replace(reasoning=streamed("reasoning_text"), content=streamed("output_text"))
    assert streamed("function_call_arguments") == "".join(call.arguments for call in whole_answer.calls)

    if heard == whole_answer:
        done = [data["item"] for kind, data in events if kind == "response.output_item.done"]
        assert done == final["output"]

    return heard


# -- messages ----------------------------------------------------------------------------------------


def _messages_body(
    conversation: Sequence[Message],
    tools: Sequence[Any] = (),
    schema: Any = None,
    limit: int | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool = True,
    **fields: Any,
) -> dict[str, Any]:
    """Write a request in which replies to calls and the user's next text are one message, as Anthropic's
    clients do. This API has no schemas of answers."""
    sent: list[dict[str, Any]] = []
    for message in conversation:
        role = "user" if message.role == "tool" else message.role
        follows = bool(sent) and sent[-1]["role"] == role == "user"
        if not (follows and sent[-1]["content"][-1]["type"] == "tool_result"):
            sent.append({"role": role, "content": []})
        sent[-1]["content"] += _blocks(message)

    options = _without_none(
        tools=[{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools],
        max_tokens=limit,
        tool_choice=tool_choice and _selected(tool_choice, not parallel_tool_calls),
    )
    return {"messages": sent, **options, **fields}


def _selected(choice: Any, once: bool) -> dict[str, Any]:
    named = {"type": "tool", "name": choice["name"]} if isinstance(choice, dict) else {}
    kind = {"required": "any"}.get(choice, choice) if isinstance(choice, str) else ""
    return {**({"type": kind} | named), "disable_parallel_tool_use": once}


def _blocks(message: Message) -> Iterable[dict[str, Any]]:
    if message.role == "tool":
        content = [{"type": "text", "text": message.content}]
        yield {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": content}
        return

    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": messages.THOUGHT_SIGNATURE}
    if message.content or not message.tool_calls:
        yield {"type": "text", "text": message.content}
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


ENDS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def _messages_whole(body: dict[str, Any]) -> Said:
    assert (body["type"], body["role"]) == ("message", "assistant")
    kinds = [block["type"] for block in body["content"]]
    assert kinds == sorted(kinds, key=["thinking", "text", "tool_use"].index) and kinds
    blocks = {block["type"]: block for block in body["content"]}
    calls = [
        ToolCall(block["name"], json.dumps(block["input"]), block["id"])
        for block in body["content"]
        if block["type"] == "tool_use"
    ]

    texts = blocks.get("thinking", {}).get("thinking", ""), blocks.get("text", {}).get("text", "")
    usage = body["usage"]
    return Said(*texts, calls, ENDS[body["stop_reason"]], (usage["input_tokens"], usage["output_tokens"]))


def _messages_heard(events: Sequence[Event]) -> Said:
    assert all(kind == data["type"] for kind, data in events)
    events = [event for event in events if event[0] != "ping"]
    kinds = [kind for kind, _ in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])

    blocks: list[dict[str, Any]] = []
    open_at = None
    for kind, data in events[1:-2]:
        if kind == "content_block_start":
            assert open_at is None and data["index"] == len(blocks)
            open_at = data["index"]
            blocks.append({"texts": "", **data["content_block"]})
            continue

        assert data["index"] == open_at
        if kind == "content_block_stop":
            open_at = None
            continue

        delta = data["delta"]
        part = delta["type"].removesuffix("_delta").replace("input_json", "partial_json")
        blocks[-1]["texts"] += delta[part] if part != "signature" else ""

    assert open_at is None
    texts = {kind: "".join(b["texts"] for b in blocks if b["type"] == kind) for kind in ("thinking", "text")}
    calls = [ToolCall(b["name"], b["texts"], b["id"]) for b in blocks if b["type"] == "tool_use"]
    end = events[-2][1]["delta"]["stop_reason"]
    usage = events[-2][1]["usage"]
    tokens = usage["input_tokens"], usage["output_tokens"]
    assert events[0][1]["message"]["usage"]["input_tokens"] in (0, tokens[0])

    return Said(texts["thinking"], texts["text"], calls, ENDS[end], tokens)


DIALECTS = {
    "chat": Dialect("/chat/completions", completions.read, _chat_body, _chat_whole, _chat_heard),
    "responses": Dialect("/responses", responses.read, _responses_body, _responses_whole, _responses_heard),
    "messages": Dialect("/messages", messages.read, _messages_body, _messages_whole, _messages_heard),
}
