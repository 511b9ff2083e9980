"""Chat templates as packages ship them: how each continues a conversation, and which format its calls have;
then random conversations, whose rows must be the template's own tokens at every turn."""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from random import Random

import pytest
import yaml

from asyncrl.conversation.chat import Chat
from asyncrl.conversation.parsers import detect
from asyncrl.errors import ConfigError
from asyncrl.types import Message, ToolCall
from tests.fakes.shipped import shipped_templates, shipped_tokenizer

pytestmark = pytest.mark.slow

# By name: how a conversation goes on after tool replies and after a user message, and the parser.
BEHAVIOUR = yaml.safe_load((Path(__file__).parents[2] / "fixtures/chat/shipped.yaml").read_text())
IN_GATE = (
    "axolotl/command_a_tool_use",
    "axolotl/llama4",
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use",
    "llama.cpp/Kimi-K2-Instruct",
    "llama.cpp/moonshotai-Kimi-K2",
    "llama.cpp/upstage-Solar-Open-100B",
    "trl/gemma4",
    "trl/qwen3_training",
)
# The ids of calls are written, and replies get the names of all calls with their id.
MODEL_IDS = {"llama.cpp/upstage-Solar-Open-100B"}
TURN_TRIES = 8
WORDS = ("It is 42.", "x", "a\n\nb", "don't", "```", "é\u0301", "1.\n2.")


def schema(name: str) -> str:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}}
    function = {"name": name, "description": "Looks.", "parameters": parameters}
    return json.dumps({"type": "function", "function": function})


TOOLS = (schema("weather"), schema("search"))


@functools.cache
def chat_of(name: str) -> Chat:
    return Chat(shipped_tokenizer(name), datetime.date(2026, 1, 31))


def behaviour(name: str) -> object:
    try:
        chat = chat_of(name)
    except ConfigError as error:
        return describe_refusal(error, "refused")

    described: list[str | None] = []
    for role in ("tool", "user"):
        try:
            continuation = chat._cached_continuation((role,))
        except ConfigError as error:
            described.append(describe_refusal(error, "refuses"))
        else:
            appends = "depends on history" if continuation.depends_on_history else "appends"
            described.append("rewrites" if continuation.rewriting else appends)
    return [*described, detect(shipped_templates()[name], chat.written_call())]


def describe_refusal(error: ConfigError, description: str) -> str:
    """Return the description of an error that names the template, and the text of any other error."""
    return description if str(error).startswith("the chat template ") else str(error)


def random_turn(random: Random, first_call: int, tools: tuple[str, ...], max_calls: int) -> Message:
    call_count = random.randint(1, max_calls) if tools and random.random() < 0.7 else 0
    calls = tuple(
        ToolCall(
            random.choice(("weather", "search")),
            json.dumps({"city": random.choice(WORDS)}, ensure_ascii=False),
            f"call_{first_call + number}",
        )
        for number in range(call_count)
    )
    content = "" if calls and random.random() < 0.4 else random.choice(WORDS)
    reasoning = random.choice(WORDS) if random.random() < 0.5 else ""
    return Message("assistant", content, calls, reasoning=reasoning)


def random_answer(random: Random, turn: Message, tools: tuple[str, ...]) -> tuple[Message, ...]:
    replies = tuple(
        Message("tool", random.choice(WORDS), tool_call_id=call.id, name=call.name)
        for call in turn.tool_calls
    )
    if tools and random.random() < 0.2:  # a call of the turn could not be read
        replies += (Message("tool", "error: no JSON", name="malformed_call"),)
    if replies and random.random() < 0.8:
        return replies
    return (*replies, Message("user", random.choice(WORDS)))


def play(name: str, seed: int) -> int:
    """Play a conversation, and return the number of answered turns. A conversation ends where the template
    refuses a message, or writes no turn that the model can write."""
    chat = chat_of(name)
    random = Random(f"{name} {seed}")
    tools = TOOLS if random.random() < 0.8 else ()
    ids_continue = name in MODEL_IDS or random.random() < 0.5  # else each turn's ids begin at 0
    max_calls = 1 if chat._render.shape.single_calls else 3
    system = (Message("system", random.choice(WORDS)),) * (random.random() < 0.5)
    messages = chat.fold((*system, Message("user", random.choice(WORDS))), True)
    call_count = answered_turns = 0
    try:
        row = chat.prompt_ids(messages, tools)
        for _ in range(random.randint(2, 4)):
            first_call = call_count if ids_continue else 0
            turns = [random_turn(random, first_call, tools, max_calls) for _ in range(TURN_TRIES)]
            turn, written = next(
                (turn, ids) for turn in turns if (ids := written_ids(chat, messages, turn, tools))
            )
            answer = chat.fold(random_answer(random, turn, tools), False)
            history = (*messages, turn)
            messages = (*history, *answer)
            conversation = chat.prompt_ids(messages, tools)
            delta = chat.delta_ids(answer, written[-1], history, tools)

            if delta is None:
                row = conversation
            elif (answer[0].role == "tool" and not turn.tool_calls) or not turn.reasoning:
                # An answered turn may be written differently: with a call and another end after a malformed
                # call (Mistral, GLM), without an empty thought (Qwen3).
                assert conversation[-len(delta) :] == delta
                assert turn.reasoning or conversation[: len(row)] == row
                row = conversation
            else:
                row = row + written + delta
                assert chat.decode(row) == chat.decode(conversation)
                assert row == conversation

            answered_turns += 1
            call_count += len(turn.tool_calls)
    except StopIteration:
        return answered_turns
    except ConfigError as error:
        if not str(error).startswith("the chat template "):
            raise

    return answered_turns


def written_ids(
    chat: Chat, history: tuple[Message, ...], turn: Message, tools: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the tokens with which the model writes the turn; none if no single turn says all of it."""
    try:
        ids = chat.turn_ids(history, turn, tools)
    except ConfigError:
        return ()
    return ids if all(call.name in chat.decode(ids) for call in turn.tool_calls) else ()


def test_every_shipped_template_is_known() -> None:
    assert [*shipped_templates()] == [*BEHAVIOUR]


@pytest.mark.parametrize(
    "name", [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.full) for name in BEHAVIOUR]
)
def test_a_shipped_template(name: str, request: pytest.FixtureRequest) -> None:
    assert behaviour(name) == BEHAVIOUR[name]
    if BEHAVIOUR[name] != "refused":
        for seed in range(6):
            play(name, seed)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name, described in BEHAVIOUR.items() if isinstance(described, list)]
)
def test_many_conversations_with_a_shipped_template(name: str) -> None:
    for seed in range(6, 200):
        play(name, seed)
