"""Chat templates as packages ship them: how each continues a conversation, and which format its calls have;
then random conversations, whose rows must be the template's own tokens at every turn."""

from __future__ import annotations

import datetime
import functools
import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import yaml

from asyncrl.conversation.chat import Chat
from asyncrl.conversation.parsers import Parser, detect, parse_turn, parsers
from asyncrl.conversation.parsers.base import THINK, think_tags
from asyncrl.conversation.turns import OPENING_TOKENS
from asyncrl.errors import ConfigError
from asyncrl.types import MALFORMED_CALL, Message, ToolCall
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
# Its replies name all calls of the conversation that have their id.
SOLAR = "llama.cpp/upstage-Solar-Open-100B"
TURN_TRIES = 8
# Axolotl's DeepSeek V3 and Diffusion Gemma open a turn after tool replies only when the turn is written.
LATE_OPENINGS = ("<｜Assistant｜>", "<|turn>model\n")
CALLED_NAMES = ("weather", "search")
# No text is part of another: a test sees which of them a template writes. The cities have no quotes, which
# LFM2's template does not escape.
CONTENTS = ("It is 42.", "¶", "a\n\nb", "don't", "~~~", "é\u0301", "1.\n2.")
THOUGHTS = ("Is it 41?", "§", "c\n\nd", "can't", "***", "ó\u0300", "3.\n4.")
CITIES = ("Ulm 43;", "µ", "e\n\nf", "wont;", "```", "ú\u0300", "5.\n6.")


def schema(name: str) -> str:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}}
    function = {"name": name, "description": "Looks.", "parameters": parameters}
    return json.dumps({"type": "function", "function": function})


TOOLS = tuple(map(schema, CALLED_NAMES))


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
            random.choice(CALLED_NAMES),
            json.dumps({"city": random.choice(CITIES)}, ensure_ascii=False),
            f"call_{first_call + number}",
        )
        for number in range(call_count)
    )
    content = "" if calls and random.random() < 0.4 else random.choice(CONTENTS)
    reasoning = random.choice(THOUGHTS) if random.random() < 0.5 else ""
    return Message("assistant", content, calls, reasoning=reasoning)


def random_answer(random: Random, turn: Message, tools: tuple[str, ...]) -> tuple[Message, ...]:
    replies = tuple(
        Message("tool", random.choice(CONTENTS), tool_call_id=call.id, name=call.name)
        for call in turn.tool_calls
    )
    if tools and random.random() < 0.2:  # a call of the turn could not be read
        replies += (Message("tool", "error: no JSON", name="malformed_call"),)
    if replies and random.random() < 0.8:
        return replies
    return (*replies, Message("user", random.choice(CONTENTS)))


def play(name: str, seed: int) -> Counter[str]:
    """Play a conversation, and count the answered turns and their calls. A conversation ends where the
    template refuses a message, or writes no turn that the model can write."""
    chat = chat_of(name)
    parser_name = detect(shipped_templates()[name], chat.written_call())
    parser = parsers.get(parser_name) if parser_name else None
    random = Random(f"{name} {seed}")
    tools = TOOLS if random.random() < 0.8 else ()
    ids_continue = random.random() < 0.5  # else each turn's ids begin at 0
    max_calls = 1 if chat._render.shape.single_calls else 3
    system = (Message("system", random.choice(CONTENTS)),) * (random.random() < 0.5)
    messages = chat.fold((*system, Message("user", random.choice(CONTENTS))), True)
    counts = Counter[str]()
    try:
        row = chat.prompt_ids(messages, tools)
        for _ in range(random.randint(2, 4)):
            first_call = counts["calls"] if ids_continue else 0
            turns = [random_turn(random, first_call, tools, max_calls) for _ in range(TURN_TRIES)]
            turn, written = next(
                (turn, ids)
                for write in (written_ids, ids_after_opening)
                for turn in turns
                if (ids := write(chat, messages, turn, tools, parser))
            )
            if parser:
                check_reading(chat, parser, messages, turn, written, tools)

            answer = chat.fold(random_answer(random, turn, tools), False)
            history = (*messages, turn)
            messages = (*history, *answer)
            conversation = chat.prompt_ids(messages, tools)
            delta = chat.delta_ids(answer, written[-1], history, tools)

            if delta is None:
                check_shown(chat, conversation, turn, answer)
                row = conversation
            elif (answer[0].role == "tool" and not turn.tool_calls) or not turn.reasoning:
                # An answered turn may be written differently: with a call and another end after a malformed
                # call (Mistral, GLM), without an empty thought (Qwen3), even if the prompt has opened the
                # thought (MiniMax-M2, GLM-4.7-Flash, Nemotron 3). Everything before the turn stays the same.
                earlier_ids = before_thought(chat, row, parser)
                assert conversation[-len(delta) :] == delta
                assert conversation[: len(earlier_ids)] == earlier_ids or repeats_ids(name, messages)
                row = conversation
            elif repeats_ids(name, messages):  # earlier replies now name the new call, too
                assert conversation[-len(delta) :] == delta
                row = conversation
            else:
                row = row + written + delta
                assert chat.decode(row) == chat.decode(conversation)
                assert row == conversation

            counts["turns"] += 1
            counts["calls"] += len(turn.tool_calls)
    except StopIteration:
        return counts
    except ConfigError as error:
        if not str(error).startswith("the chat template "):
            raise

    return counts


def written_ids(
    chat: Chat, history: tuple[Message, ...], turn: Message, tools: tuple[str, ...], parser: Parser | None
) -> tuple[int, ...]:
    """Return the tokens with which the model writes the turn; none if no single turn says all of it."""
    try:
        ids = chat.turn_ids(history, turn, tools)
    except ConfigError:
        return ()
    return ids if says_all_calls(chat.decode(ids), turn) else ()


def ids_after_opening(
    chat: Chat, history: tuple[Message, ...], turn: Message, tools: tuple[str, ...], parser: Parser | None
) -> tuple[int, ...]:
    """Return the tokens with which the model writes the turn if the template omits the opening of the turn
    from later prompts: the model closes an open thought (DeepSeek R1), and then writes the same as there.
    None if the template changes or omits more."""
    before_opening = chat._encode(chat._render(history, tools, opening=False))
    prompt = chat.prompt_ids(history, tools)
    conversation = chat._encode(chat._render((*history, turn), tools, opening=False))
    opening_start = len(before_opening)
    if not prompt[:opening_start] == conversation[:opening_start] == before_opening:
        return ()

    opening = chat.decode(prompt[opening_start:]).rstrip()
    pairs = enumerate(zip(prompt, conversation, strict=False))
    turn_start = next((position for position, (written, kept) in pairs if written != kept), len(prompt))
    turn_ids = conversation[turn_start:]
    end = next((position for position, token in enumerate(turn_ids) if token in chat.stop_ids), len(turn_ids))
    think = think_tags(parser) if parser else THINK
    text = chat.decode(turn_ids[:end]).rpartition(think.close)[2].strip()
    if turn.content not in text or not says_all_calls(text, turn):
        return ()

    if opening.endswith(think.open):
        text = f"{turn.reasoning}\n{think.close}\n\n{text}"
    elif turn.reasoning:  # the opening says that the model does not think
        return ()

    stop_id = turn_ids[end] if end < len(turn_ids) else chat.stop_ids[0]
    return (*chat._encode(text), stop_id)


def before_thought(chat: Chat, row: tuple[int, ...], parser: Parser | None) -> tuple[int, ...]:
    """Return a row that ends with the opening of a turn, without the tag that opens a thought there."""
    think = think_tags(parser) if parser else THINK
    _, tag, space = chat.decode(row[-OPENING_TOKENS:]).rpartition(think.open)
    if not tag or space.strip():
        return row

    thought_opening = chat._encode(tag + space)
    assert row[-len(thought_opening) :] == thought_opening
    return row[: -len(thought_opening)]


def says_all_calls(text: str, turn: Message) -> bool:
    return sum(map(text.count, CALLED_NAMES)) == len(turn.tool_calls)


def check_reading(
    chat: Chat,
    parser: Parser,
    history: tuple[Message, ...],
    turn: Message,
    written: tuple[int, ...],
    tools: tuple[str, ...],
) -> None:
    """Check that a run reads the turn, without its reasoning, from the tokens that the model writes."""
    prompt_end = chat.decode(chat.prompt_ids(history, tools)[-OPENING_TOKENS:])
    parsed = parse_turn(parser, chat.decode(written), tools, prompt_end)
    assert not parsed.errors
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [
        (call.name, json.loads(call.arguments)) for call in turn.tool_calls
    ]
    omits_content = chat._render.shape.bare_calls or chat._render.shape.one_text
    if not (turn.tool_calls and omits_content):
        content = chat.content(parsed.content)
        for opening in LATE_OPENINGS:
            content = content.removeprefix(opening)
        assert content == turn.content


def check_shown(
    chat: Chat, conversation: tuple[int, ...], turn: Message, answer: tuple[Message, ...]
) -> None:
    """Check that the prompt of a new row shows the turn and its answer."""
    text = chat.decode(conversation)
    shown_texts = [message.content for message in answer] + [call.name for call in turn.tool_calls]
    becomes_call = answer[0].name == MALFORMED_CALL and chat._render.shape.called_only
    if not (becomes_call or (turn.tool_calls and chat._render.shape.bare_calls)):
        shown_texts.append(turn.content)
    for shown_text in shown_texts:  # some templates write replies as JSON
        assert shown_text in text or json.dumps(shown_text, ensure_ascii=False).strip('"') in text


def repeats_ids(name: str, messages: tuple[Message, ...]) -> bool:
    """Return True if calls share an id in a template that looks up the names of calls by id."""
    ids = [call.id for message in messages for call in message.tool_calls]
    return name == SOLAR and len(set(ids)) < len(ids)


def test_every_shipped_template_is_known() -> None:
    assert [*shipped_templates()] == [*BEHAVIOUR]


@pytest.mark.parametrize(
    "name", [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.full) for name in BEHAVIOUR]
)
def test_a_shipped_template(name: str, request: pytest.FixtureRequest) -> None:
    assert behaviour(name) == BEHAVIOUR[name]
    if BEHAVIOUR[name] != "refused":
        counts = sum((play(name, seed) for seed in range(6)), Counter[str]())
        assert counts["turns"]
        after_replies, _, parser_name = BEHAVIOUR[name]
        if after_replies == "appends" and parser_name and chat_of(name).written_call():
            assert counts["calls"]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name, described in BEHAVIOUR.items() if isinstance(described, list)]
)
def test_many_conversations_with_a_shipped_template(name: str) -> None:
    for seed in range(6, 200):
        play(name, seed)
