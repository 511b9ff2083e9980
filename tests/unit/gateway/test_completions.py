"""Requests and answers in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.conversation.branches import AgentRequest
from asyncrl.gateway import completions, openai
from asyncrl.gateway.completions import ChatExchange
from asyncrl.gateway.openai import AgentReply, ApiError
from asyncrl.types import Message, StopReason, ToolCall, Turn, VersionSpan

USER = {"role": "user", "content": "q"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def exchange(**body: Any) -> ChatExchange:
    return completions.read(json.dumps({"messages": [USER], **body}).encode())


def ask(**body: Any) -> AgentRequest:
    return exchange(**body).ask


def reply(message: Message, stop: StopReason = StopReason.STOP) -> AgentReply:
    turn = Turn(3, (7,), (8, 9), (-0.5, -0.25), (VersionSpan(0, 2, 0, 0),), stop)
    return AgentReply(message, turn, 5)


def test_messages_are_ours() -> None:
    call = {"id": "call_0-t2", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    found = ask(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "call_0-t2", "content": "7"},
        ],
        tools=[TOOL],
        max_tokens=9,
        max_completion_tokens=7,
    )
    assert found.messages == (
        Message("system", "be brief"),
        Message("user", "ab"),
        Message("assistant", "", (ToolCall("look", '{"a": 1}', "call_0"),), reasoning="hm"),
        Message("tool", "7", tool_call_id="call_0", name="look"),
    )
    assert [json.loads(tool) for tool in found.tools] == [TOOL]
    assert found.max_new_tokens == 7


def test_without_a_choice_there_are_no_tools() -> None:
    assert ask(tools=[TOOL], tool_choice="none").tools == ()
    assert len(ask(tools=[TOOL], tool_choice="auto").tools) == 1


def test_what_a_client_sends_as_a_matter_of_course_is_fine() -> None:
    common = {"temperature": 0.7, "top_p": 1, "n": 1, "stop": None, "seed": 3, "user": "me", "metadata": {}}
    assert ask(**common, response_format={"type": "text"}).max_new_tokens is None
    assert openai.unheeded(exchange(**common)).keys() == {"temperature", "top_p", "seed"}


def test_a_form_that_is_asked_for_is_a_hint() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object"}}}
    body = {"tools": [TOOL], "parallel_tool_calls": False, "response_format": form}
    for choice in ("required", named):
        asked = exchange(tool_choice=choice, **body)
        assert openai.unheeded(asked).keys() == {"tool_choice", "parallel_tool_calls", "response_format"}
        assert set(openai.unheeded(asked).values()) == {openai.HINT}
        assert (asked.ask.form.calls, asked.ask.form.once) == (("look",), True)
        assert json.loads(asked.ask.form.schema) == {"type": "object"}
    assert ask(tools=[TOOL], tool_choice="auto", response_format={"type": "text"}) == ask(tools=[TOOL])


def test_texts_to_stop_at() -> None:
    assert [ask(stop=stop).stops for stop in ("a", ["a", "b"], [], None)] == [("a",), ("a", "b"), (), ()]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "length >= 1"),
    "no role": ({"messages": [{"content": "q"}]}, "role"),
    "content of a wrong type": ({"messages": [{"role": "user", "content": 3}]}, "content"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    "arguments that are no JSON": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
        "no JSON object",
    ),
    "arguments that are a list": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]}]},
        "no JSON object",
    ),
    "a tool that is none": ({"tools": [{"name": "look"}]}, "a tool is"),
    "no answer": ({"n": 0}, "n`"),
    "more answers than anyone reads": ({"n": 129}, "n`"),
    "an empty text to stop at": ({"stop": [""]}, "stop"),
    "too many texts to stop at": ({"stop": ["a"] * 33}, "stop"),
    "an unknown format": ({"response_format": {"type": "yaml"}}, "'yaml'"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "schema"),
    "no name of a function": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": "look"}},
        "tool_choice",
    ),
    "a choice that is not there": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "see"}}},
        "'see' is not one of the tools",
    ),
    "an unknown choice": ({"tools": [TOOL], "tool_choice": "must"}, "'must'"),
    "alternatives": ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    "functions": ({"functions": [{}]}, "use tools"),
    "no room for an answer": ({"max_tokens": 0}, "max_tokens"),
}


@pytest.mark.parametrize(("body", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_told(body: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        ask(**body)
    assert caught.value.status == 400
    assert caught.value.body["error"]["type"] == "invalid_request_error"


DEEP = b'{"messages": [{"role": "user"}], "stop": ' + b"[" * 100_000


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", DEEP], ids=["empty", "open", "list", "bytes", "deep"]
)
def test_what_is_no_request_is_told(body: bytes) -> None:
    with pytest.raises(ApiError, match="cannot be read"):
        completions.read(body)


def completion(message: Message, stop: StopReason = StopReason.STOP, **body: Any) -> dict[str, Any]:
    return exchange(**body).whole([reply(message, stop)], [["x", "é"]])


def test_an_answer() -> None:
    found = completion(Message("assistant", "42", reasoning="hm"))
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "42",
        "reasoning_content": "hm",
        "refusal": None,
    }
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def test_calls_have_ids_that_no_other_turn_gives() -> None:
    found = completion(Message("assistant", "", (ToolCall("look", "{}", "call_0"),)))
    message = found["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["id"] == "call_0-t3"
    assert found["choices"][0]["finish_reason"] == "tool_calls"


def test_a_cut_turn_and_log_probs() -> None:
    found = completion(Message("assistant", "4"), StopReason.LENGTH, logprobs=True)
    assert found["choices"][0]["finish_reason"] == "length"
    second = found["choices"][0]["logprobs"]["content"][1]
    assert second == {"token": "é", "logprob": -0.25, "bytes": [0xC3, 0xA9], "top_logprobs": []}


CALLS = (ToolCall("look", "{}", "call_0"), ToolCall("see", '{"a": 1}', "call_1"))


@pytest.mark.parametrize("told", [[], [("h", ""), ("m", "let"), ("", " m")]], ids=["at once", "bit by bit"])
def test_a_stream_adds_up_to_the_answer(told: list[tuple[str, str]]) -> None:
    said = reply(Message("assistant", "let me", CALLS, reasoning="hm"))
    asked = exchange(stream=True, stream_options={"include_usage": True})
    events = [*asked.begin(), *(event for new in told for event in asked.delta(0, *new))]
    parts = [data for _, data in (*events, *asked.end([said], [[]]))]
    deltas = [part["choices"][0]["delta"] for part in parts[:-1]]
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1
    assert list(deltas[0]) == ["role", "content"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "let me"
    assert [delta["tool_calls"][0]["index"] for delta in deltas if "tool_calls" in delta] == [0, 1]
    assert parts[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert (parts[-1]["choices"], parts[-1]["usage"]["total_tokens"]) == ([], 7)


def test_several_answers_have_their_numbers() -> None:
    asked, said = exchange(n=2, stream=True), [reply(Message("assistant", text)) for text in ("a", "b")]
    whole = asked.whole(said, [[], []])
    assert [(one["index"], one["message"]["content"]) for one in whole["choices"]] == [(0, "a"), (1, "b")]
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    events = [*asked.begin(), *asked.delta(1, "", "b"), *asked.end(said, [[], []])]
    choices = [data["choices"][0] for _, data in events]
    texts = [
        "".join(one["delta"].get("content", "") for one in choices if one["index"] == number)
        for number in (0, 1)
    ]
    assert texts == ["a", "b"]


def test_calls_that_turn_out_malformed_are_told_to_the_end() -> None:
    """The message then quotes the whole turn."""
    asked = exchange(stream=True)
    list(asked.delta(0, "", "let me"))
    said = reply(Message("assistant", " let me <tool_call>{"))
    deltas = [data["choices"][0]["delta"] for _, data in asked.end([said], [[]])]
    assert "".join(delta.get("content", "") for delta in deltas) == " <tool_call>{"


def test_a_thought_without_a_beginning_was_told_as_content_and_the_content_follows() -> None:
    asked = exchange(stream=True)
    list(asked.delta(0, "", "let me see"))
    said = reply(Message("assistant", "42", reasoning="let me see"))
    deltas = [data["choices"][0]["delta"] for _, data in asked.end([said], [[]])]
    assert "".join(delta.get("content", "") for delta in deltas) == "42"
