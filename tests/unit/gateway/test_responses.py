"""The Responses API: items in, items out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.gateway import openai, responses
from asyncrl.gateway.openai import AgentReply, ApiError
from asyncrl.gateway.responses import ResponsesExchange
from asyncrl.types import Message, StopReason, ToolCall, Turn, VersionSpan

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "call_0-t3", "name": "look", "arguments": '{"a": 1}'}


def exchange(**body: Any) -> ResponsesExchange:
    return responses.read(json.dumps({"input": "q", **body}).encode())


def reply(message: Message, stop: StopReason = StopReason.STOP) -> AgentReply:
    turn = Turn(3, (7,), (8, 9), (-0.5, -0.25), (VersionSpan(0, 2, 0, 0),), stop)
    return AgentReply(message, turn, 5)


def test_a_text_and_instructions() -> None:
    asked = exchange(instructions="be brief", max_output_tokens=9, tools=[TOOL], temperature=1)
    assert asked.ask.messages == (Message("system", "be brief"), Message("user", "q"))
    assert asked.ask.max_new_tokens == 9
    assert [json.loads(tool) for tool in asked.ask.tools] == [
        {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}
    ]
    assert openai.unheeded(asked).keys() == {"temperature"}
    assert exchange(tools=[TOOL], tool_choice="none").ask.tools == ()


def test_items_of_one_turn_are_one_message() -> None:
    said = [{"type": "output_text", "text": "let me", "annotations": []}]
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": said, "status": "completed"},
        CALL,
        {**CALL, "call_id": "call_1-t3"},
        {"type": "function_call_output", "call_id": "call_0-t3", "output": "7"},
        {
            "type": "function_call_output",
            "call_id": "call_1-t3",
            "output": [{"type": "input_text", "text": "8"}],
        },
        {"role": "assistant", "content": "7"},
        {"role": "assistant", "content": "8"},
        CALL,
    ]
    first, second = (ToolCall("look", '{"a": 1}', f"call_{number}") for number in (0, 1))
    assert exchange(input=items).ask.messages == (
        Message("system", "be brief"),
        Message("user", "q"),
        Message("assistant", "let me", (first, second), reasoning="hm"),
        Message("tool", "7", tool_call_id="call_0", name="look"),
        Message("tool", "8", tool_call_id="call_1", name="look"),
        Message("assistant", "7"),
        Message("assistant", "8", (first,)),
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"input": []}, "length >= 1"),
    "what was not kept": ({"previous_response_id": "resp-1"}, "send the whole input"),
    "a conversation": ({"conversation": "c"}, "send the whole input"),
    "a reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    "no role": ({"input": [{"content": "q"}]}, "no role"),
    "a tool of OpenAI's": ({"tools": [{"type": "web_search"}]}, "'web_search'"),
    "arguments that are no JSON": ({"input": [{**CALL, "arguments": "{"}]}, "no JSON object"),
}


@pytest.mark.parametrize(("body", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_told(body: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        exchange(**body)
    assert caught.value.status == 400


def test_an_answer() -> None:
    found = exchange().whole([reply(Message("assistant", "42", reasoning="hm"))], [[]])
    assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
    assert found["output"][1]["content"][0]["text"] == "42"
    assert (found["status"], found["usage"]["total_tokens"]) == ("completed", 7)
    cut = exchange().whole([reply(Message("assistant", ""), StopReason.LENGTH)], [[]])
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["type"] for item in cut["output"]] == ["message"]


@pytest.mark.parametrize("told", [[], [("h", ""), ("m", "let"), ("", " m")]], ids=["at once", "bit by bit"])
def test_a_stream_adds_up_to_the_answer(told: list[tuple[str, str]]) -> None:
    said = reply(Message("assistant", "let me", (ToolCall("look", "{}", "call_0"),), reasoning="hm"))
    asked = exchange(stream=True)
    events = [*asked.begin(), *(event for new in told for event in asked.delta(0, *new))]
    events += asked.end([said], [[]])
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(kind == data["type"] for kind, data in events)
    final = events[-1][1]["response"]
    assert final["output"] == asked.whole([said], [[]])["output"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    for kind in ("added", "done"):
        items = [data for name, data in events if name == f"response.output_item.{kind}"]
        assert [item["output_index"] for item in items] == [0, 1, 2]
        assert [item["item"]["id"] for item in items] == [item["id"] for item in final["output"]]
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == final["output"]
    for name, whole in (
        ("reasoning_text", "hm"),
        ("output_text", "let me"),
        ("function_call_arguments", "{}"),
    ):
        deltas = [data["delta"] for kind, data in events if kind == f"response.{name}.delta"]
        assert "".join(deltas) == whole
