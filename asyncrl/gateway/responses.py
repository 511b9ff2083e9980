"""Serves OpenAI's Responses API for agents that keep the history themselves, as openai-agents does by
default: the same turns as by chat completions, read from items and written as items.

    reasoning, message, function_call ... (one turn of the model) , function_call_output ... (its replies)

Nothing is stored: `previous_response_id`, conversations and references to items are refused. To the model all
tools are functions: names of tools in a namespace begin with the namespace, and a free-form tool has the text
as the only argument. Tools that OpenAI would run are left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.gateway.exchange import (
    MODEL,
    AgentReply,
    ApiDialect,
    ApiError,
    Body,
    ContentPart,
    Event,
    Exchange,
    Limit,
    ModelName,
    StreamedText,
    agent_request,
    calls_of,
    content_of,
    new_id,
    openai_error,
    read_body,
    tool_call,
)
from asyncrl.gateway.images import TEXT_ONLY, RequestImages
from asyncrl.types import Message, StopReason

TEXT_EVENTS = {"reasoning": "reasoning_text", "message": "output_text"}  # events of an item's text
FUNCTION_PARTS = ("description", "parameters", "strict")  # parts of a function, beside its name
TEXT_ARGUMENT = "input"  # the argument of a free-form tool
FREE_FORM_SCHEMA = {
    "type": "object",
    "properties": {TEXT_ARGUMENT: {"type": "string"}},
    "required": [TEXT_ARGUMENT],
}
# Fields that are null in every response.
NULL_FIELDS = (
    "error",
    "incomplete_details",
    "previous_response_id",
    "temperature",
    "top_p",
    "usage",
)

ItemText = str | list[ContentPart] | None


class Item(msgspec.Struct, frozen=True):
    """An item of the input."""

    type: str = "message"
    role: str = ""
    content: ItemText = None
    summary: list[ContentPart] | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = "{}"
    input: str = ""
    output: ItemText = None


class ResponsesRequest(msgspec.Struct, frozen=True):
    """The body of a request. Other fields have no effect."""

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


UNSUPPORTED_FIELDS = {
    "previous_response_id": "responses are not stored; send the complete input",
    "conversation": "conversations are not stored; send the complete input",
    "background": "wait for the answer",
    "prompt": "prompts are not stored; send the prompt as instructions",
}


def read(body: Body, images: RequestImages = TEXT_ONLY) -> ResponsesExchange:
    """Read a request. ApiError for an invalid request, or an unsupported option; ImageError for a bad
    image."""
    return ResponsesExchange(read_body(body, ResponsesRequest, UNSUPPORTED_FIELDS), images)


DIALECT = ApiDialect(read, openai_error)


def _messages(items: Sequence[Item], images: RequestImages) -> Iterator[Message]:
    """Yield the messages of items. Successive items of the model become one message."""
    model_message: Message | None = None  # the model's message so far
    for item in items:
        if item.type == "web_search_call":
            continue  # a tool that OpenAI runs: the results are in the texts

        begins_message = item.type == "reasoning" or (item.type == "message" and item.role == "assistant")
        is_call = item.type in ("function_call", "custom_tool_call")
        may_follow = (
            item.type == "message"
            and model_message
            and not model_message.content
            and not model_message.tool_calls
        )

        if model_message is not None and not (is_call or (begins_message and may_follow)):
            yield model_message
            model_message = None

        match item.type:
            case "reasoning":
                thoughts = content_of(item.content or item.summary, TEXT_ONLY)
                model_message = Message("assistant", reasoning=thoughts.text)
            case "message" if item.role == "assistant":
                answer = content_of(item.content, TEXT_ONLY)
                model_message = replace(model_message or Message("assistant"), content=answer.text)
            case "function_call" | "custom_tool_call":
                free_form = item.type == "custom_tool_call"
                arguments = json.dumps({TEXT_ARGUMENT: item.input}) if free_form else item.arguments
                call = tool_call(name_for_model(item.name, item.namespace or ""), arguments, item.call_id)
                model_message = model_message or Message("assistant")
                model_message = replace(model_message, tool_calls=(*model_message.tool_calls, call))
            case "function_call_output" | "custom_tool_call_output":
                output = content_of(item.output, images)
                yield Message("tool", output.text, tool_call_id=item.call_id, images=output.images)
            case "message" if item.role:
                content = content_of(item.content, images)
                yield Message(item.role, content.text, images=content.images)
            case _:
                raise ApiError(400, f"an item of type {item.type!r} is not supported or has no role")

    if model_message is not None:
        yield model_message


# -- tools -------------------------------------------------------------------------------------------


class WireTool(NamedTuple):
    """A tool as the client names it, and `function`, the schema for the model."""

    function: dict[str, Any]
    name: str
    namespace: str = ""
    free_form: bool = False

    def call(self, arguments: str) -> dict[str, Any]:
        """Return the parts of a call's item that depend on the tool."""
        name_fields = {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}
        if not self.free_form:
            return {"type": "function_call", **name_fields, "arguments": arguments}

        text = json.loads(arguments).get(TEXT_ARGUMENT)
        return {
            "type": "custom_tool_call",
            **name_fields,
            "input": text if isinstance(text, str) else arguments,
        }


def wire_tools(tool_list: Any, namespace: str = "") -> Iterator[WireTool]:
    """Read the tools of a request that the model can call. ApiError for invalid tools."""
    if not isinstance(tool_list, list) or not all(isinstance(tool, dict) for tool in tool_list):
        subject = f"the tools in namespace {namespace!r}" if namespace else "tools"
        raise ApiError(400, f"{subject} must be a list of objects")

    for tool in tool_list:
        name = str(tool.get("name", ""))
        function = {"name": name_for_model(name, namespace)}

        match tool.get("type"):
            case "function":
                function_parts = {key: tool[key] for key in FUNCTION_PARTS if key in tool}
                yield WireTool(function | function_parts, name, namespace)
            case "custom":
                text_format = tool.get("format")
                grammar_text = text_format.get("definition") if isinstance(text_format, dict) else None
                # The grammar is only shown: sampling is not constrained.
                grammar = f"\nThe text has this form:\n{grammar_text}" if grammar_text else ""
                description = f"{tool.get('description', '')}{grammar}".strip()
                free_form = {"description": description, "parameters": FREE_FORM_SCHEMA}
                yield WireTool(function | free_form, name, namespace, free_form=True)
            case "namespace":
                yield from wire_tools(tool.get("tools") or [], name)


def name_for_model(name: str, namespace: str) -> str:
    """Return the name of a tool for the model."""
    return f"{namespace}__{name}" if namespace else name


# -- answers -----------------------------------------------------------------------------------------


class ResponsesExchange(Exchange):
    """An `Exchange` of the Responses API with one answer. ApiError for an item or a tool that no template can
    write."""

    request: ResponsesRequest

    def __init__(self, request: ResponsesRequest, images: RequestImages) -> None:
        self.request = replace(request, input="")
        items = list[Item]()
        if request.instructions:
            items.append(Item(role="system", content=request.instructions))
        if isinstance(request.input, str):
            items.append(Item(role="user", content=request.input))
        else:
            items += request.input

        tools = list(wire_tools(request.tools or []))
        kinds = {str(tool.get("type")) for tool in request.tools or ()}
        hosted_kinds = kinds - {"function", "custom", "namespace"}
        self.ignored_parts = {f"a tool of type {kind!r}": "is left out" for kind in hosted_kinds}
        self._tools_by_name = {tool.function["name"]: tool for tool in tools}
        if same_names := [tool for tool in tools if self._tools_by_name[tool.function["name"]] != tool]:
            raise ApiError(
                400, f"two tools have the name {same_names[0].function['name']!r}; rename one of them"
            )

        self.agent_request = agent_request(
            _messages(items, images),
            [{"type": "function", "function": tool.function} for tool in tools],
            model=request.model,
            tool_choice=request.tool_choice,
            max_tokens=request.max_output_tokens,
        )

        self._response_id = new_id("resp")
        self._created_at = int(time.time())
        self._streamed_text = StreamedText(("reasoning", "message"))
        self._begun_kinds: list[str] = []  # the kinds of the items begun: reasoning, message
        self._event_count = 0

    def full_answer(self, replies: Sequence[AgentReply]) -> dict[str, Any]:
        [reply] = replies
        message = reply.message
        kinds = [*self._begun_kinds]  # streamed items have a position already
        if message.reasoning and "reasoning" not in kinds:
            kinds.append("reasoning")
        if "message" not in kinds and (message.content or not message.tool_calls):
            kinds.append("message")

        texts_of = {"reasoning": message.reasoning, "message": message.content}
        output = [self._text_item(kind, texts_of[kind]) for kind in kinds]
        for call_number, call in enumerate(calls_of(reply)):
            tool = self._tools_by_name.get(call.name) or WireTool({}, call.name)
            item_id = f"fc_{self._response_id}_{call_number}"
            call_item = {"id": item_id, "status": "completed", "call_id": call.id}
            output.append({**call_item, **tool.call(call.arguments)})

        is_cut = reply.turn.generation.stop is StopReason.LENGTH
        prompt_tokens = reply.prompt_tokens
        output_tokens = len(reply.turn.generation.ids)
        usage = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + output_tokens,
        }

        return {
            **self._response_object("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": usage,
        }

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        yield self._numbered_event("response.created", response=self._response_object("in_progress"))
        yield from self.ping()

    def ping(self) -> Iterator[Event]:
        """Show that the turn goes on: Codex waits for events, and ignores comments."""
        yield self._numbered_event("response.in_progress", response=self._response_object("in_progress"))

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[Event]:
        for kind, text in self._streamed_text.add_streamed(reasoning, content):
            yield from self._begin_item(kind)
            yield self._text_event(kind, "delta", delta=text)

    def end(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        """Stream the text not streamed yet, the ends of the items, one item per call, the end."""
        [reply] = replies
        yield from self.delta(0, *self._streamed_text.unstreamed_texts(reply.message))
        if not self._begun_kinds and not reply.message.tool_calls:
            yield from self._begin_item("message")

        response = self.full_answer(replies)
        yield from self._end_item()

        for output_index, item in enumerate(response["output"]):
            if "call_id" in item:
                yield from self._call_events(output_index, item)

        is_cut = response["status"] == "incomplete"
        yield self._numbered_event(
            "response.incomplete" if is_cut else "response.completed", response=response
        )

    def _begin_item(self, kind: str) -> Iterator[Event]:
        """End the previous item and begin an item of this kind, unless such an item has begun."""
        if kind in self._begun_kinds:
            return

        yield from self._end_item()
        self._begun_kinds.append(kind)
        item = {**self._text_item(kind, ""), "content": [], "status": "in_progress"}
        output_index = len(self._begun_kinds) - 1
        yield self._numbered_event("response.output_item.added", output_index=output_index, item=item)

        if kind == "message":
            yield self._numbered_event(
                "response.content_part.added", **self._text_position(kind), part=_output_text("")
            )

    def _end_item(self) -> Iterator[Event]:
        """End the newest item."""
        if not self._begun_kinds:
            return

        kind = self._begun_kinds[-1]
        output_index = len(self._begun_kinds) - 1
        text = self._streamed_text.reasoning if kind == "reasoning" else self._streamed_text.content
        yield self._text_event(kind, "done", text=text)

        if kind == "message":
            yield self._numbered_event(
                "response.content_part.done", **self._text_position(kind), part=_output_text(text)
            )

        yield self._numbered_event(
            "response.output_item.done", output_index=output_index, item=self._text_item(kind, text)
        )

    def _call_events(self, output_index: int, item: dict[str, Any]) -> Iterator[Event]:
        text_key = "arguments"
        event_kind = "function_call_arguments"

        if item["type"] == "custom_tool_call":
            text_key = "input"
            event_kind = "custom_tool_call_input"

        item_position = {"item_id": item["id"], "output_index": output_index}
        text = item[text_key]
        empty_item = {**item, text_key: "", "status": "in_progress"}
        yield self._numbered_event("response.output_item.added", output_index=output_index, item=empty_item)
        yield self._numbered_event(f"response.{event_kind}.delta", **item_position, delta=text)
        yield self._numbered_event(
            f"response.{event_kind}.done", **item_position, name=item["name"], **{text_key: text}
        )

        yield self._numbered_event("response.output_item.done", output_index=output_index, item=item)

    def _numbered_event(self, kind: str, **data: Any) -> Event:
        self._event_count += 1
        return kind, {"type": kind, "sequence_number": self._event_count - 1, **data}

    def _text_event(self, kind: str, event_step: str, **text: str) -> Event:
        extra_fields: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return self._numbered_event(
            f"response.{TEXT_EVENTS[kind]}.{event_step}", **self._text_position(kind), **text, **extra_fields
        )

    def _text_position(self, kind: str) -> dict[str, Any]:
        """Return the position of an item's text."""
        item = self._text_item(kind, "")
        return {"item_id": item["id"], "output_index": self._begun_kinds.index(kind), "content_index": 0}

    def _text_item(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}]
            return {"id": f"rs_{self._response_id}", "type": kind, "summary": [], "content": content}

        item_head = {
            "id": f"msg_{self._response_id}",
            "type": kind,
            "role": "assistant",
            "status": "completed",
        }

        return {**item_head, "content": [_output_text(text)]}

    def _response_object(self, status: str) -> dict[str, Any]:
        request = self.request
        return {
            **dict.fromkeys(NULL_FIELDS),
            "id": self._response_id,
            "object": "response",
            "created_at": self._created_at,
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
