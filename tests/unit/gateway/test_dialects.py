"""Requests and answers in the dialects of the gateway: a property of one is a property of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.gateway import exchange, messages, text_completions
from asyncrl.gateway.exchange import ApiError
from asyncrl.types import Message, StopReason, ToolCall
from asyncrl.vision.content import IMAGE_NOTE
from tests.fakes.dialects import DIALECTS, FUNCTION, LOOK, Dialect, Said, reply

CHAT = DIALECTS["chat"]
RESPONSES = DIALECTS["responses"]
MESSAGES = DIALECTS["messages"]
USER = Message("user", "q")
CALLS = (ToolCall("look", "{}", "call_0"), ToolCall("see", '{"a": 1}', "call_1"))
BOTH = (*CALLS[:1], replace(CALLS[1], name="look"))

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


def sent_back(messages: Sequence[Message]) -> list[Message]:
    """The same with the ids that the clients of turn 3 got, and without the names of tools."""
    ids = {f"call_{number}": f"call_{number}-t3" for number in range(9)}
    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=ids[call.id]) for call in message.tool_calls),
            tool_call_id=ids.get(message.tool_call_id, ""),
            name="",
        )
        for message in messages
    ]


# -- requests ----------------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Turns of the model between messages of others, with calls in parallel and replies to them."""
    texts = st.sampled_from(["", "a", " b\n", "größe", "<tool_call>{"])
    messages = [Message("system", draw(texts))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(Message("user", draw(texts)))
        calls = BOTH[: draw(st.integers(0, 2))]
        messages.append(Message("assistant", draw(texts), calls, reasoning=draw(texts)))
        messages += [Message("tool", draw(texts), tool_call_id=call.id, name=call.name) for call in calls]
    return (*messages, Message("user", draw(texts)))


@given(conversations())
def test_a_conversation_is_ours_in_every_dialect(messages: tuple[Message, ...]) -> None:
    for dialect in DIALECTS.values():
        agent_exchange = dialect.exchange_of(sent_back(messages), [LOOK], limit=7)
        assert agent_exchange.agent_request.messages == messages
        assert [json.loads(tool) for tool in agent_exchange.agent_request.tools] == [FUNCTION]
        assert (agent_exchange.agent_request.max_new_tokens, agent_exchange.count) == (7, 1)


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
BRIEF = {"role": "developer", "content": "be brief"}


def test_other_spellings_of_messages() -> None:
    body = {"messages": [BRIEF, {"role": "user", "content": PARTS}]}
    agent_request = CHAT.read(
        json.dumps({**body, "max_tokens": 9, "max_completion_tokens": 7}).encode()
    ).agent_request
    assert agent_request.messages == (Message("system", "be brief"), Message("user", "ab"))
    assert agent_request.max_new_tokens == 7
    call = {"type": "function_call", "call_id": "call_0-t3", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_0-t3", "output": PARTS}
    answers = [{"role": "assistant", "content": text} for text in "78"]
    items = [BRIEF, call, output, *answers, call, output]
    agent_request = RESPONSES.read(
        json.dumps({"input": items, "instructions": "be kind"}).encode()
    ).agent_request
    assert agent_request.messages == (
        *(Message("system", "be kind"), Message("system", "be brief")),
        Message("assistant", "", CALLS[:1]),
        Message("tool", "ab", tool_call_id="call_0", name="look"),
        *(Message("assistant", "7"), Message("assistant", "8", CALLS[:1])),
        Message("tool", "ab", tool_call_id="call_0", name="look"),
    )
    assert RESPONSES.read(b'{"input": "q"}').agent_request.messages == (USER,)


@every_dialect
def test_what_a_client_sends_as_a_matter_of_course_is_fine(dialect: Dialect) -> None:
    common = {"temperature": 0.7, "top_p": 1, "n": 1, "stop": None, "user": "me", "metadata": {}}
    agent_exchange = dialect.exchange_of([USER], **common)
    assert agent_exchange.agent_request == dialect.exchange_of([USER]).agent_request
    assert dialect.exchange_of([USER], [LOOK], tool_choice="none").agent_request.tools == ()
    assert (
        dialect.exchange_of([USER], [LOOK], tool_choice="auto").agent_request
        == dialect.exchange_of([USER], [LOOK]).agent_request
    )


@every_dialect
def test_fields_that_do_nothing_are_named(dialect: Dialect) -> None:
    request = dialect.exchange_of([USER]).request
    body = b'{"model": "a", "stream": null, "seed": 1, "user": "me", "top_p": null, "tool_choice": "auto"}'
    ignored_fields = exchange.ignored_fields(body, type(request))
    assert ignored_fields == {"seed": exchange.SAMPLING_EFFECT, "user": "has no effect"}
    many_fields = json.dumps({f"{number}": 1 for number in range(1000)}).encode()
    assert len(exchange.ignored_fields(many_fields, type(request))) == exchange.MAX_LOGGED_FIELDS


@every_dialect
def test_a_form_that_is_asked_for_is_a_hint(dialect: Dialect) -> None:
    form = {"schema": {"type": "object"}, "tool_choice": "required", "parallel_tool_calls": False}
    agent_exchange = dialect.exchange_of([USER], [LOOK], **form)
    sent_fields = dialect.body([USER], [LOOK], **form)
    assert agent_exchange.agent_request == dialect.exchange_of([USER], [LOOK]).agent_request
    hint_fields = sent_fields.keys() & set(exchange.FORM_FIELDS)
    body = json.dumps(sent_fields).encode()
    ignored_fields = exchange.ignored_fields(body, type(agent_exchange.request))
    assert ignored_fields == dict.fromkeys(hint_fields, exchange.HINT_EFFECT)


def test_texts_to_stop_at() -> None:
    for stop, texts in (("a", ("a",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())):
        assert CHAT.exchange_of([USER], stop=stop).agent_request.stops == texts


def content(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind}]}]


def called(arguments: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}]


OWN_CALL = {"type": "function_call", "name": "look", "arguments": "{"}
TWINS = [
    {"type": "function", "name": "mail__look"},
    {"type": "namespace", "name": "mail", "tools": [FUNCTION | LOOK]},
]
REFUSED: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    ("chat", "no messages"): ({"messages": []}, "length >= 1"),
    ("chat", "no role"): ({"messages": [{"content": "q"}]}, "role"),
    ("chat", "content of a wrong type"): ({"messages": [{"role": "user", "content": 3}]}, "content"),
    ("chat", "a sound"): ({"messages": content("input_audio")}, "input_audio"),
    ("chat", "arguments that are no JSON"): ({"messages": called("{")}, "not a JSON object"),
    ("chat", "arguments that are a list"): ({"messages": called("[]")}, "not a JSON object"),
    ("chat", "a tool that is none"): ({"tools": [{"name": "look"}]}, "a tool must have the form"),
    ("chat", "no answer"): ({"n": 0}, "n`"),
    ("chat", "more answers than anyone reads"): ({"n": 129}, "n`"),
    ("chat", "an empty text to stop at"): ({"stop": [""]}, "stop"),
    ("chat", "too many texts to stop at"): ({"stop": ["a"] * 33}, "stop"),
    ("chat", "alternatives"): ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    ("chat", "functions"): ({"functions": [{}]}, "use tools"),
    ("chat", "no room for an answer"): ({"max_tokens": 0}, "max_tokens"),
    ("messages", "an empty text to stop at"): ({"stop_sequences": [""]}, "stop_sequences"),
    ("messages", "too many texts to stop at"): ({"stop_sequences": ["a"] * 33}, "stop_sequences"),
    ("responses", "a namespace of no tools"): (
        {"tools": [{"type": "namespace", "tools": [1]}]},
        "must be a list of objects",
    ),
    ("responses", "two tools of one name"): ({"tools": TWINS}, "two tools have the name 'mail__look'"),
    ("responses", "nothing"): ({"input": []}, "length >= 1"),
    ("responses", "what was not kept"): ({"previous_response_id": "resp-1"}, "send the complete input"),
    ("responses", "a conversation"): ({"conversation": "c"}, "send the complete input"),
    ("responses", "a reference"): ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
    ("responses", "a file"): ({"input": content("input_file")}, "input_file"),
    ("responses", "no role"): ({"input": [{"content": "q"}]}, "no role"),
    ("responses", "arguments that are no JSON"): ({"input": [OWN_CALL]}, "not a JSON object"),
}


@pytest.mark.parametrize(("dialect", "name"), REFUSED)
def test_what_cannot_be_is_reported(dialect: str, name: str) -> None:
    body, why = REFUSED[dialect, name]
    tested_dialect = DIALECTS[dialect]
    data = json.dumps(tested_dialect.body([USER]) | body).encode()
    with pytest.raises(ApiError, match=why) as caught:
        tested_dialect.read(data)
    assert caught.value.status == 400
    assert caught.value.kind == "invalid_request_error"


@every_dialect
def test_a_text_that_the_model_began_is_refused(dialect: Dialect) -> None:
    """No API of the gateway continues one, as a prompt of the data is."""
    data = json.dumps(dialect.body([USER, Message("assistant", "It is")])).encode()
    with pytest.raises(ApiError, match="is from the assistant and cannot be continued") as caught:
        dialect.read(data)
    assert caught.value.status == 400


def test_a_thread_is_refused_so_that_anthropics_clients_send_all_messages() -> None:
    """Their tool runners send new messages only, until they read this code."""
    body = MESSAGES.body([USER]) | {"thread": {"type": "create"}}
    with pytest.raises(ApiError, match="send all messages") as caught:
        MESSAGES.read(json.dumps(body).encode())
    error = messages.write_error(caught.value)["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}


DEEP = b'{"messages": [{"role": "user"}], "input": ' + b"[" * 100_000


@every_dialect
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", DEEP], ids=str)
def test_what_is_no_request_is_reported(dialect: Dialect, body: bytes) -> None:
    with pytest.raises(ApiError, match="cannot be read"):
        dialect.read(body)


# -- answers -----------------------------------------------------------------------------------------

ANSWERS: dict[str, tuple[Message, StopReason, str]] = {
    "text": (Message("assistant", "42", reasoning="hm"), StopReason.STOP, "stop"),
    "nothing": (Message("assistant", ""), StopReason.STOP, "stop"),
    "cut": (Message("assistant", "4"), StopReason.LENGTH, "length"),
    "cut at once": (Message("assistant", ""), StopReason.LENGTH, "length"),
    "calls": (Message("assistant", "let me", CALLS, reasoning="hm"), StopReason.STOP, "tool_calls"),
    "a call alone": (Message("assistant", "", CALLS[:1]), StopReason.STOP, "tool_calls"),
}


@every_dialect
@pytest.mark.parametrize(("message", "stop", "end"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_the_turn_whole_or_in_a_stream(
    dialect: Dialect, message: Message, stop: StopReason, end: str
) -> None:
    """Its calls have ids that no other turn gives."""
    calls = [replace(call, id=f"{call.id}-t3") for call in message.tool_calls]
    expected_answer = Said(message.reasoning, message.content, calls, end, (5, 2))
    answer = reply(message, stop)
    agent_exchange = dialect.exchange_of([USER])
    assert dialect.parse_answer(agent_exchange.full_answer([answer])) == expected_answer
    for bit_by_bit in (False, True):
        agent_exchange = dialect.exchange_of([USER], stream=True)
        events = [*agent_exchange.begin(5)]
        for letter in message.reasoning if bit_by_bit else "":
            events += agent_exchange.delta(0, letter, "")
        for letter in message.content if bit_by_bit else "":
            events += agent_exchange.delta(0, "", letter)
        assert dialect.heard([*events, *agent_exchange.end([answer])]) == expected_answer


@every_dialect
@pytest.mark.parametrize(
    ("streamed", "message", "heard"),
    [
        ("let me", Message("assistant", " let me <tool_call>{"), "let me <tool_call>{"),
        ("let me see", Message("assistant", "42", reasoning="let me see"), "let me see42"),
    ],
    ids=["calls that turn out malformed", "a thought without a beginning"],
)
def test_what_was_streamed_otherwise_than_it_turned_out_goes_on(
    dialect: Dialect, streamed: str, message: Message, heard: str
) -> None:
    agent_exchange = dialect.exchange_of([USER], stream=True)
    events = [
        *agent_exchange.begin(5),
        *agent_exchange.delta(0, "", streamed),
        *agent_exchange.end([reply(message)]),
    ]
    streamed_answer = dialect.heard(events)
    assert (streamed_answer.content, streamed_answer.reasoning) == (heard, message.reasoning)


def test_log_probs_are_of_all_tokens() -> None:
    agent_exchange = CHAT.exchange_of([USER], logprobs=True)
    (choice,) = agent_exchange.full_answer([reply(Message("assistant", "4"), texts="xé")])["choices"]
    second = choice["logprobs"]["content"][1]
    assert second == {"token": "é", "logprob": -0.25, "bytes": [0xC3, 0xA9], "top_logprobs": []}
    (choice,) = CHAT.exchange_of([USER]).full_answer([reply(Message("assistant", "4"))])["choices"]
    assert choice["logprobs"] is None


def test_several_answers_have_their_numbers() -> None:
    agent_exchange = CHAT.exchange_of([USER], n=2, stream=True)
    answers = [reply(Message("assistant", text)) for text in ("a", "b")]
    full_answer = agent_exchange.full_answer(answers)
    assert [(choice["index"], choice["message"]["content"]) for choice in full_answer["choices"]] == [
        (0, "a"),
        (1, "b"),
    ]
    assert full_answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    events = [*agent_exchange.begin(5), *agent_exchange.delta(1, "", "b"), *agent_exchange.end(answers)]
    choices = [data["choices"][0] for _, data in events if data["choices"]]
    heard = [(choice["index"], text) for choice in choices if (text := choice["delta"].get("content"))]
    assert sorted(heard) == [(0, "a"), (1, "b")]


# -- what one dialect has alone -------------------------------------------------------------------------


def test_tools_of_responses_that_are_no_functions() -> None:
    """Those of a namespace and free-form ones are functions to the model; others are left out, and told."""
    patch = {"type": "custom", "name": "patch", "description": "Edit.", "format": {"definition": "start: x"}}
    space = {"type": "namespace", "name": "mail", "tools": [{"type": "function", **LOOK}, patch]}
    tools = [space, patch, {"type": "web_search"}]
    agent_exchange = RESPONSES.read(json.dumps({"input": "q", "tools": tools}).encode())
    names = [json.loads(tool)["function"]["name"] for tool in agent_exchange.agent_request.tools]
    assert (
        names == ["mail__look", "mail__patch", "patch"]
        and "start: x" in agent_exchange.agent_request.tools[2]
    )
    assert agent_exchange.ignored_parts == {"a tool of type 'web_search'": "is left out"}
    text = '{"input": "a\\nb"}'
    names = [*(("mail__look", "{}"), ("patch", text)), ("mail__patch", text)]
    tool_calls = tuple(ToolCall(*named, f"call_{number}") for number, named in enumerate(names))
    answer = reply(Message("assistant", "", tool_calls))
    output = agent_exchange.full_answer([answer])["output"]
    wanted = {"type": "function_call", "name": "look", "namespace": "mail", "arguments": "{}"}
    assert output[0].items() >= wanted.items()
    wanted = {"type": "custom_tool_call", "name": "patch", "input": "a\nb"}
    assert output[1].items() >= wanted.items() and "namespace" not in output[1]
    assert output[2].items() >= (wanted | {"namespace": "mail"}).items()
    streamed = [*agent_exchange.begin(5), *agent_exchange.end([answer])]
    done = [data["item"] for kind, data in streamed if kind == "response.output_item.done"]
    assert [item["call_id"] for item in done] == [item["call_id"] for item in output]
    replies = [
        {"type": "function_call_output", "call_id": "call_0-t3", "output": "7"},
        {"type": "custom_tool_call_output", "call_id": "call_1-t3", "output": "8"},
    ]
    items = [{"role": "user", "content": "q"}, *output, *replies]
    again = RESPONSES.read(json.dumps({"input": items, "tools": tools}).encode())
    assert again.agent_request.messages[1] == Message("assistant", "", tool_calls)
    assert [(message.name, message.tool_call_id) for message in again.agent_request.messages[2:]] == [
        ("mail__look", "call_0"),
        ("patch", "call_1"),
    ]


def test_what_anthropics_clients_send_beside_texts() -> None:
    """Pictures leave a note, tools without a schema and the header of the bill are left out; each is told."""
    blocks = [{"type": "text", "text": "see"}, {"type": "image", "source": {}}]
    failed = {"type": "tool_result", "tool_use_id": "call_0-t3", "content": "no", "is_error": True}
    used = {"type": "tool_use", "id": "call_0-t3", "name": "look", "input": {}}
    bill = {"type": "text", "text": f"{messages.BILLING_HEADER} cc=1"}
    body = {
        "system": [bill, {"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": blocks},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [failed, {"type": "text", "text": "so?"}]},
            {"role": "system", "content": "hurry"},
        ],
        "tools": [{"type": "web_search_20250305"}, {"name": "look", "input_schema": {}}],
        "context_management": {},
    }
    agent_exchange = MESSAGES.read(json.dumps(body).encode())
    assert agent_exchange.agent_request.messages == (
        Message("system", "be brief"),
        Message("user", f"see\n{IMAGE_NOTE}"),
        Message("assistant", "", CALLS[:1]),
        Message("tool", "Error: no", tool_call_id="call_0", name="look"),
        Message("user", "so?"),
        Message("system", "hurry"),
    )
    assert len(agent_exchange.agent_request.tools) == 1
    assert agent_exchange.ignored_parts.keys() == {"a billing header", "the tool 'web_search_20250305'"}


def test_what_clients_leave_open_may_be_null() -> None:
    """The openai package writes its items with nulls (`model_dump`), others every option."""
    used = {"type": "tool_use", "id": "call_0-t3", "name": "look", "input": None, "caller": None}
    result = {"type": "tool_result", "tool_use_id": "call_0-t3", "content": None, "is_error": None}
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q", "citations": None}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": None}, used]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": None},
            {"role": "user", "content": "so?"},
        ],
        "tools": [{"name": "look", "description": None, "input_schema": {}, "type": None}],
    }
    options = dict.fromkeys(("system", "tool_choice", "stop_sequences", "max_tokens", "stream", "metadata"))
    sent = [MESSAGES.read(json.dumps(body | more).encode()).agent_request for more in ({}, options)]
    assert sent[0] == sent[1]
    assert [message.content for message in sent[0].messages] == ["q", "", "", "", "so?"]
    assert sent[0].messages[1].tool_calls == (ToolCall("look", "{}", "call_0"),)
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "namespace": None}
    items = [{"role": "user", "content": "q"}, {"type": "reasoning", "summary": None}, call]
    answered = [*items, {"type": "function_call_output", "call_id": "c", "output": None}]
    assert len(RESPONSES.read(json.dumps({"input": answered}).encode()).agent_request.messages) == 3
    bare = {"id": None, "function": {"name": "look", "arguments": None}}
    chat = [{"role": "assistant", "tool_calls": [bare]}, {"role": "user", "content": "q"}]
    options = {"stream_options": {"include_usage": None}}
    read_messages = CHAT.read(json.dumps({"messages": chat, **options}).encode()).agent_request.messages
    assert read_messages[0].tool_calls == (ToolCall("look", "{}", ""),) and read_messages[1] == USER


def test_no_text_of_anthropics_clients_is_lost() -> None:
    """A billing header takes nothing along that stands behind it; a document of text is its text."""
    agent_exchange = MESSAGES.exchange_of([USER], system=f"{messages.BILLING_HEADER} cc=1\nbe brief")
    assert agent_exchange.agent_request.messages[0] == Message("system", "be brief")
    assert "a billing header" in agent_exchange.ignored_parts
    image = {"type": "image", "source": {"type": "base64", "data": "iVBO"}}
    sources = [
        {"type": "text", "media_type": "text/plain", "data": "one"},
        {"type": "content", "content": "two"},
        {"type": "content", "content": [{"type": "text", "text": "three"}, image]},
        {"type": "base64", "data": "JVBE"},
    ]
    documents = [{"type": "document", "source": source} for source in sources]
    body = {"messages": [{"role": "user", "content": documents}]}
    (user_message,) = MESSAGES.read(json.dumps(body).encode()).agent_request.messages
    assert user_message.content == f"one\ntwo\nthree\n{IMAGE_NOTE}\n{messages.DOCUMENT_NOTE}"
    search_error = {"type": "web_search_tool_result", "tool_use_id": "a", "content": {"error_code": "x"}}
    search_call = {"type": "server_tool_use", "id": "a", "name": "n"}
    answer = [search_call, search_error, {"type": "text", "text": "hi"}]
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": "q"}]
    assert MESSAGES.read(json.dumps({"messages": turns}).encode()).agent_request.messages[0].content == "hi"


def test_what_does_no_harm_is_read_or_left_out() -> None:
    """Clients that were with another model before bring such things along."""
    search_result = {
        "type": "search_result",
        "title": "T",
        "source": "S",
        "content": [{"type": "text", "text": "c"}],
    }
    result = {
        "type": "tool_result",
        "content": [{"type": "tool_reference", "tool_name": "look"}, search_result],
    }
    turns = [{"role": "user", "content": [result, search_result]}]
    read = MESSAGES.read(json.dumps({"messages": turns}).encode()).agent_request.messages
    assert [message.content for message in read] == ["look\nT\nS\nc", "T\nS\nc"]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    for agent_exchange in (
        CHAT.read(json.dumps({"messages": [refusal, BRIEF]}).encode()),
        RESPONSES.read(json.dumps({"input": [{"type": "web_search_call"}, refusal, BRIEF]}).encode()),
    ):
        assert agent_exchange.agent_request.messages == (
            Message("assistant", "no"),
            Message("system", "be brief"),
        )
    thought = {"type": "reasoning", "summary": []}
    call = {"type": "web_search_call", "id": "ws", "action": {}}
    items = [thought, call, {"role": "assistant", "content": "so"}, {"role": "user", "content": "q"}]
    assert len(RESPONSES.read(json.dumps({"input": items}).encode()).agent_request.messages) == 2  # one turn
    for fine in ({"best_of": 1, "echo": False}, {"n": 2, "best_of": 2}):
        assert text_completions.read(json.dumps({"prompt": "a", **fine}).encode()).agent_request.prompt == "a"
    for more in ({"best_of": 2}, {"echo": True}):
        with pytest.raises(ApiError, match="not supported"):
            text_completions.read(json.dumps({"prompt": "a", **more}).encode())


def test_a_free_form_text_that_is_none_is_written_as_the_model_wrote_it() -> None:
    tools = [{"type": "custom", "name": "patch"}]
    agent_exchange = RESPONSES.read(json.dumps({"input": "q", "tools": tools}).encode())
    patch_message = Message("assistant", "", (ToolCall("patch", '{"input": 5}', "call_0"),))
    (item,) = agent_exchange.full_answer([reply(patch_message)])["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", '{"input": 5}')


def test_a_text_to_stop_at_is_named() -> None:
    agent_exchange = MESSAGES.exchange_of([USER], stop_sequences=["a", "b"])
    assert agent_exchange.agent_request.stops == ("a", "b")
    answer = replace(reply(Message("assistant", "4"), StopReason.TEXT), stopped_at="b")
    full_answer = agent_exchange.full_answer([answer])
    assert (full_answer["stop_reason"], full_answer["stop_sequence"]) == ("stop_sequence", "b")


PROMPTS: dict[str, tuple[Any, Any]] = {
    "a text": ("once", "once"),
    "a list of one text": (["once"], "once"),
    "ids": ([1, 2], (1, 2)),
    "a list of one list of ids": ([[1, 2]], (1, 2)),
    "none": (None, None),
    "an empty one": ("", None),
    "several": (["a", "b"], None),
    "ids below zero": ([-1], None),
    "something else": ([{}], None),
}


@pytest.mark.parametrize(("prompt", "expected_prompt"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_without_a_template(prompt: Any, expected_prompt: Any) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 3, "n": 2, "logprobs": 1}).encode()
    if expected_prompt is None:
        with pytest.raises(ApiError, match="prompt must be a non-empty string"):
            text_completions.read(body)
        return
    agent_exchange = text_completions.read(body)
    assert (
        agent_exchange.agent_request.prompt,
        agent_exchange.agent_request.max_new_tokens,
        agent_exchange.count,
    ) == (expected_prompt, 3, 2)
    texts = {"on": ("o", "n"), "off": ("of", "f")}
    answers = [reply(Message("assistant", text), texts=of) for text, of in texts.items()]
    full_answer = agent_exchange.full_answer(answers)
    assert [(choice["index"], choice["text"]) for choice in full_answer["choices"]] == [(0, "on"), (1, "off")]
    assert full_answer["choices"][1]["logprobs"] == {
        "tokens": ["of", "f"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": None,
        "text_offset": [0, 2],
    }
    streamed = [data for _, data in (*agent_exchange.begin(5), *agent_exchange.end(answers))]
    assert streamed[-1]["choices"] == full_answer["choices"] and "usage" not in streamed[-1]
