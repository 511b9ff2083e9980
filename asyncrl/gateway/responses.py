"""OpenAI's Responses API, as far as agents use it that keep their history themselves (openai-agents does, by
default): the same turns as by chat completions, read from items and written as items.

    reasoning, message, function_call ... (one turn of the model) , function_call_output ... (its replies)

Nothing is stored: `previous_response_id`, conversations and references to items are refused. To the model all
tools are functions: those of a namespace have its name in front of theirs, and a free-form tool has its text
as the one argument. Tools that OpenAI would run are left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.conversation.requests import AgentRequest
from asyncrl.gateway.exchange import (
    MODEL,
    AgentReply,
    ApiDialect,
    ApiError,
    ContentPart,
    Event,
    Limit,
    ModelName,
    StreamedText,
    agent_request,
    calls_of,
    new_id,
    openai_error,
    read_body,
    text_of,
    tool_call,
)
from asyncrl.types import Message, StopReason, ToolCall

TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}  # events of an item's text
FUNCTION = ("description", "parameters", "strict")  # parts of a function, beside its name
TEXT = "input"  # the argument of a free-form tool
FREE_FORM = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT]}
NOTHING = ("error", "incomplete_details", "previous_response_id", "temperature", "top_p", "usage")  # to say

Text = str | list[ContentPart] | None


class Item(msgspec.Struct, frozen=True):
    """Holds an item of the input."""

    type: str = "message"
    role: str = ""
    content: Text = None
    summary: list[ContentPart] | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = "{}"
    input: str = ""
    output: Text = None


class ResponsesRequest(msgspec.Struct, frozen=True):
    """The body of a request. Fields that are not here have no effect."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    model: ModelName | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Limit | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None


REFUSED = {
    "previous_response_id": "responses are not kept; send the whole input",
    "conversation": "none is kept; send the whole input",
    "background": "wait for the answer",
    "prompt": "none is kept; send instructions",
}


def read(body: bytes) -> ResponsesExchange:
    """ApiError for an invalid request, or an unsupported option."""
    return ResponsesExchange(read_body(body, ResponsesRequest, REFUSED))


DIALECT = ApiDialect(read, openai_error)


def _messages(items: Sequence[Item]) -> Iterator[Message]:
    """Items of the model that follow each other are one message, in the order of `Exchange`'s items."""
    own: Message | None = None  # the model's message so far
    for item in items:
        if item.type == "web_search_call":
            continue  # of a tool that is not ours: what it found is in the texts
        begins = item.type == "reasoning" or (item.type == "message" and item.role == "assistant")
        called = item.type in ("function_call", "custom_tool_call")
        follows = item.type == "message" and own and not own.content and not own.tool_calls
        if own is not None and not (called or (begins and follows)):
            yield own
            own = None
        match item.type:
            case "reasoning":
                own = Message("assistant", reasoning=text_of(item.content) or text_of(item.summary))
            case "message" if item.role == "assistant":
                own = replace(own or Message("assistant"), content=text_of(item.content))
            case "function_call" | "custom_tool_call":
                free_form = item.type == "custom_tool_call"
                arguments = json.dumps({TEXT: item.input}) if free_form else item.arguments
                call = tool_call(known_as(item.name, item.namespace or ""), arguments, item.call_id)
                own = own or Message("assistant")
                own = replace(own, tool_calls=(*own.tool_calls, call))
            case "function_call_output" | "custom_tool_call_output":
                yield Message("tool", text_of(item.output), tool_call_id=item.call_id)
            case "message" if item.role:
                yield Message(item.role, text_of(item.content))
            case _:
                raise ApiError(400, f"an item of type {item.type!r} is not supported, or has no role")
    if own is not None:
        yield own


# -- tools -------------------------------------------------------------------------------------------


class WireTool(NamedTuple):
    """Holds a tool as the client knows it, and `function`, its schema for the model."""

    function: dict[str, Any]
    name: str
    namespace: str = ""
    free_form: bool = False

    def call(self, arguments: str) -> dict[str, Any]:
        """Return the parts of a call's item that depend on the tool."""
        named = {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}
        if not self.free_form:
            return {"type": "function_call", **named, "arguments": arguments}
        text = json.loads(arguments).get(TEXT)
        return {"type": "custom_tool_call", **named, "input": text if isinstance(text, str) else arguments}


def wire_tools(given: Any, namespace: str = "") -> Iterator[WireTool]:
    """Read the tools of a request that the model can call. ApiError for what is no tool."""
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise ApiError(400, f"the tools of the namespace {namespace!r} are no list of objects")
    for tool in given:
        name = str(tool.get("name", ""))
        function = {"name": known_as(name, namespace)}
        match tool.get("type"):
            case "function":
                kept = {key: tool[key] for key in FUNCTION if key in tool}
                yield WireTool(function | kept, name, namespace)
            case "custom":
                form = tool.get("format")
                rules = form.get("definition") if isinstance(form, dict) else None
                grammar = f"\nThe text has this form:\n{rules}" if rules else ""  # sampled freely, not by it
                said = f"{tool.get('description', '')}{grammar}".strip()
                free_form = {"description": said, "parameters": FREE_FORM}
                yield WireTool(function | free_form, name, namespace, free_form=True)
            case "namespace":
                yield from wire_tools(tool.get("tools") or [], name)


def known_as(name: str, namespace: str) -> str:
    """Return the name of a tool as the model sees it."""
    return f"{namespace}__{name}" if namespace else name


# -- answers -----------------------------------------------------------------------------------------


@dataclass
class ResponsesExchange:
    """See `Exchange`. There is one answer. ApiError for an item or a tool that no template can write."""

    request: ResponsesRequest
    ask: AgentRequest = field(init=False)
    count: int = 1

    def __post_init__(self) -> None:
        sent = self.request
        items = [Item(role="user", content=sent.input)] if isinstance(sent.input, str) else sent.input
        first = [Item(role="system", content=sent.instructions)] if sent.instructions else []
        tools = list(wire_tools(sent.tools or []))
        kinds = {str(tool.get("type")) for tool in sent.tools or ()} - {"function", "custom", "namespace"}
        self.left_out = {f"a tool of type {kind!r}": "is left out" for kind in kinds}
        self._tools = {tool.function["name"]: tool for tool in tools}
        if twice := [tool for tool in tools if self._tools[tool.function["name"]] != tool]:
            raise ApiError(400, f"two tools are {twice[0].function['name']!r} to the model; rename one")
        self.ask = agent_request(
            _messages((*first, *items)),
            [{"type": "function", "function": tool.function} for tool in tools],
            model=sent.model,
            choice=sent.tool_choice,
            most=sent.max_output_tokens,
        )
        self._id = new_id("resp")
        self._created = int(time.time())
        self._streamed = StreamedText(("reasoning", "message"))
        self._open: list[str] = []  # the kinds of the items begun: reasoning, message
        self._events = 0

    def whole(self, replies: Sequence[AgentReply]) -> dict[str, Any]:
        [reply] = replies
        message = reply.message
        kinds = [*self._open]  # what was streamed has its place already
        if message.reasoning and "reasoning" not in kinds:
            kinds.append("reasoning")
        if "message" not in kinds and (message.content or not message.tool_calls):
            kinds.append("message")
        texts_of = {"reasoning": message.reasoning, "message": message.content}
        output = [self._item(kind, texts_of[kind]) for kind in kinds]
        output += [self._call(number, call) for number, call in enumerate(calls_of(reply))]
        cut = reply.turn.stop is StopReason.LENGTH
        read = reply.prompt_tokens
        written = len(reply.turn.ids)
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        return {
            **self._response("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": usage,
        }

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield from self.ping()

    def ping(self) -> Iterator[Event]:
        """Say again that it goes on: Codex waits for events, and takes no comment for one."""
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[Event]:
        for kind, text in self._streamed.add(reasoning, content):
            yield from self._begun(kind)
            yield self._text(kind, "delta", delta=text)

    def end(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        """Stream what was not streamed yet, the ends of the items, one item per call, the end."""
        [reply] = replies
        yield from self.delta(0, *self._streamed.rest(reply.message))
        if not self._open and not reply.message.tool_calls:
            yield from self._begun("message")
        response = self.whole(replies)
        yield from self._closed()
        for at, item in enumerate(response["output"]):
            if "call_id" in item:
                yield from self._called(at, item)
        cut = response["status"] == "incomplete"
        yield self._event("response.incomplete" if cut else "response.completed", response=response)

    def _begun(self, kind: str) -> Iterator[Event]:
        """The item's beginning, if it is new; the end of the one before it."""
        if kind in self._open:
            return
        yield from self._closed()
        self._open.append(kind)
        item = {**self._item(kind, ""), "content": [], "status": "in_progress"}
        at = len(self._open) - 1
        yield self._event("response.output_item.added", output_index=at, item=item)
        if kind == "message":
            yield self._event("response.content_part.added", **self._part(kind), part=_output_text(""))

    def _closed(self) -> Iterator[Event]:
        """The end of the newest item."""
        if not self._open:
            return
        kind = self._open[-1]
        at = len(self._open) - 1
        text = self._streamed.reasoning if kind == "reasoning" else self._streamed.content
        yield self._text(kind, "done", text=text)
        if kind == "message":
            yield self._event("response.content_part.done", **self._part(kind), part=_output_text(text))
        yield self._event("response.output_item.done", output_index=at, item=self._item(kind, text))

    def _called(self, at: int, item: dict[str, Any]) -> Iterator[Event]:
        part = "arguments"
        kind = "function_call_arguments"
        if item["type"] == "custom_tool_call":
            part = "input"
            kind = "custom_tool_call_input"
        where = {"item_id": item["id"], "output_index": at}
        text = item[part]
        begun = {**item, part: "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=at, item=begun)
        yield self._event(f"response.{kind}.delta", **where, delta=text)
        yield self._event(f"response.{kind}.done", **where, name=item["name"], **{part: text})
        yield self._event("response.output_item.done", output_index=at, item=item)

    def _event(self, kind: str, **data: Any) -> Event:
        self._events += 1
        return kind, {"type": kind, "sequence_number": self._events - 1, **data}

    def _text(self, kind: str, step: str, **text: str) -> Event:
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return self._event(f"response.{TEXTS[kind]}.{step}", **self._part(kind), **text, **more)

    def _part(self, kind: str) -> dict[str, Any]:
        """Return the place of an item's text."""
        item = self._item(kind, "")
        return {"item_id": item["id"], "output_index": self._open.index(kind), "content_index": 0}

    def _item(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}]
            return {"id": f"rs_{self._id}", "type": kind, "summary": [], "content": content}
        found = {"id": f"msg_{self._id}", "type": kind, "role": "assistant", "status": "completed"}
        return {**found, "content": [_output_text(text)]}

    def _call(self, number: int, call: ToolCall) -> dict[str, Any]:
        tool = self._tools.get(call.name) or WireTool({}, call.name)
        item_id = f"fc_{self._id}_{number}"
        return {"id": item_id, "status": "completed", "call_id": call.id, **tool.call(call.arguments)}

    def _response(self, status: str) -> dict[str, Any]:
        request = self.request
        return {
            **dict.fromkeys(NOTHING),
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": MODEL,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "store": False,
            "text": {"format": {"type": "text"}} | (request.text or {}),
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",
        }


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
