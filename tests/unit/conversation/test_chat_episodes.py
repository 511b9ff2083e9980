"""The machine, the parser and the template of a family together: what the model wrote, read and rendered
anew, is what is in the row."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.config import RolloutConfig
from asyncrl.conversation.branches import Branches
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.chat_render import Renderer
from asyncrl.conversation.commands import (
    CallTools,
    Generate,
    Observed,
    Opened,
    Rules,
    Score,
    Step,
    ToolsReplied,
    TurnGenerated,
)
from asyncrl.conversation.episode import Episode, advance_episode, begin_episode, conversation, resume_episode
from asyncrl.conversation.parsers import load_parser
from asyncrl.conversation.requests import AgentRequest, Placement
from asyncrl.errors import ProtocolError
from asyncrl.types import (
    EpisodeEnd,
    Generation,
    Message,
    Observation,
    Sample,
    StopReason,
    ToolCall,
    ToolReply,
    VersionSpan,
)
from tests.fakes.families import FAMILIES, tokenizer_of
from tests.unit.conversation.test_chat import TOOL

PARSERS = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "llama3.1": "llama3",
    "command-r7b": "cohere",
    "command-a": "cohere",
    "glm4.5": "glm",
    "deepseek-v3": "deepseek",
    "deepseek-v3-0324": "deepseek",
    "deepseek-r1": "deepseek",
    "gpt-oss": "harmony",
    "mistral-v3": "mistral",
    "mistral-v7": "mistral",
}
SAMPLE = Sample(0, "test", (Message("system", "Be brief."), Message("user", "Rain in Ulm?")), "yes")


def rules_of(name: str, *, environment: bool = False, history: str = "append") -> Rules:
    chat = Chat(tokenizer_of(name), datetime.date(2026, 1, 31))
    config = RolloutConfig(
        max_turns=8,
        max_tokens=100_000,
        max_new_tokens=4096,
        history=history,  # type: ignore[arg-type]
        environment="fake" if environment else "",
    )
    return Rules(chat, load_parser(PARSERS[name]), config)


def engine_output(name: str, turn: Message) -> Generation:
    """The tokens with which the family's model writes the turn."""
    family = FAMILIES[name]
    written = family.writes(turn) + family.ends[bool(turn.tool_calls)]
    ids = tuple(tokenizer_of(name).encode(written, add_special_tokens=False))
    return Generation(ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 1, 1),), StopReason.STOP)


def says(name: str, rules: Rules, episode: Episode, turn: Message) -> Episode:
    return advance_episode(rules, episode, TurnGenerated(engine_output(name, turn)))


def turn_of(name: str, city: str) -> Message:
    """A turn that asks for the weather, as the family's models write it."""
    family = FAMILIES[name]
    calls = tuple(
        ToolCall("weather", f'{{"city": "{city} {n}"}}', f"abcdefgh{n}")
        for n in range(1 if family.one_call else 2)
    )
    return Message(
        "assistant", "" if family.bare_calls else "I look.", calls, reasoning="Hm." * family.thinks
    )


def answered(name: str, rules: Rules, episode: Episode, turn: Message) -> Episode:
    """The family's model says the turn; its calls get replies, other turns a question."""
    episode = says(name, rules, episode, turn)
    command = episode.command
    if isinstance(command, Step):
        assert command.message == turn
        return advance_episode(rules, episode, Observed(Observation((Message("user", "Sure?"),))))
    assert isinstance(command, CallTools)
    assert [call.arguments for call in command.calls] == [call.arguments for call in turn.tool_calls]
    return advance_episode(
        rules, episode, ToolsReplied(tuple(ToolReply(call, "rain") for call in command.calls))
    )


def check_row(rules: Rules, episode: Episode) -> None:
    """A row is its turns' contexts and ids, and the next prompt extends it."""
    command = episode.command
    assert isinstance(command, Generate)
    for at, row in enumerate(episode.rows):
        assert row == sum(
            (turn.context + turn.generation.ids for turn in episode.turns if turn.row == at), ()
        )
    if command.row < len(episode.rows):
        assert command.ids[: len(episode.rows[-1])] == episode.rows[-1]
    assert command.ids == rules.chat.prompt_ids(conversation(rules, episode), (TOOL,))


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_answers_extend_the_row_or_begin_one_where_the_template_rewrites(name: str, role: str) -> None:
    family = FAMILIES[name]
    rules = rules_of(name, environment=role == "user", history="fork")
    episode = advance_episode(rules, begin_episode(SAMPLE), Opened((TOOL,)))
    for n in range(3):
        plain = Message("assistant", f"Rain in Ulm {n}.", reasoning="Hm." * family.thinks)
        episode = answered(name, rules, episode, turn_of(name, f"Ulm {n}") if role == "tool" else plain)
    assert [turn.row for turn in episode.turns] == [0, 0, 0] if role in family.appends else [0, 1, 2]
    check_row(rules, episode)
    assert resume_episode(rules, SAMPLE, episode.opened, episode.turns) == episode
    if role == "user" and family.thinks:
        shown = rules.chat.decode(episode.rows[-1])
        assert shown.count("Hm.") == 1, "only the turn that the row is for thinks in it"


@pytest.mark.parametrize(("name", "reads_history"), [("qwen2.5", False), ("command-a", True)])
def test_the_history_is_built_only_for_templates_that_read_it(
    name: str, reads_history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    histories: list[tuple[Message, ...]] = []
    delta_ids = Chat.delta_ids

    def recorded_delta_ids(
        self: Chat, messages: tuple[Message, ...], last: int, history: tuple[Message, ...], tools: Any
    ) -> tuple[int, ...] | None:
        histories.append(history)
        return delta_ids(self, messages, last, history, tools)

    monkeypatch.setattr(Chat, "delta_ids", recorded_delta_ids)
    rules = rules_of(name)
    episode = advance_episode(rules, begin_episode(SAMPLE), Opened((TOOL,)))
    for n in range(2):
        episode = answered(name, rules, episode, turn_of(name, f"Ulm {n}"))
        written = conversation(rules, episode)
        assert histories[n] == (
            written[: len(written) - len(episode.turns[n].replies)] if reads_history else ()
        )
    check_row(rules, episode)


@pytest.mark.parametrize(("name", "reads_history"), [("qwen2.5", False), ("command-a", True)])
def test_an_agents_long_conversation_is_rendered_in_the_thread_for_templates_that_read_it(
    name: str, reads_history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if only a short reply is new; the placement then needs no further rendering."""
    monkeypatch.setattr("asyncrl.conversation.requests.LONG_TEXT_CHARACTERS", 1000)
    branches = Branches(rules_of(name))
    messages = (Message("user", "Rain in Ulm? " * 100),)
    for n in range(2):
        placement = branches.place_request(AgentRequest(messages, (TOOL,)))
        assert isinstance(placement, Placement)
        output = engine_output(name, turn_of(name, f"Ulm {n}"))
        model_message = branches.add_turn(placement, branches.next_turn(placement, output))
        messages += (
            model_message,
            *(Message("tool", f"{n}", tool_call_id=call.id) for call in model_message.tool_calls),
        )

    lengths: list[int] = []
    render = Renderer.__call__

    def counted_render(self: Renderer, messages: Sequence[Message], *arguments: Any, **options: Any) -> str:
        lengths.append(len(messages))
        return render(self, messages, *arguments, **options)

    monkeypatch.setattr(Renderer, "__call__", counted_render)
    request = AgentRequest(messages, (TOOL,))
    pending = branches.pending_rendering(request)
    assert (pending is not None) == reads_history
    assert all(length < len(messages) - 1 for length in lengths), "the event loop renders no history"
    if pending is not None:
        pending()
        assert max(lengths) == len(messages)

    lengths.clear()
    placement = branches.place_request(request)
    assert isinstance(placement, Placement) and (placement.row, lengths) == (0, [])
    assert placement.ids == branches._rules.chat.prompt_ids(placement.messages, (TOOL,))


def test_a_prompt_of_another_day_does_not_continue() -> None:
    """Why the date of a Chat is fixed."""
    rules = rules_of("llama3.1")
    episode = advance_episode(rules, begin_episode(SAMPLE), Opened((TOOL,)))
    episode = answered("llama3.1", rules, episode, turn_of("llama3.1", "Ulm"))
    later = Rules(
        Chat(tokenizer_of("llama3.1"), datetime.date(2026, 2, 1)),
        rules.parse,
        rules.config,
    )
    with pytest.raises(ProtocolError, match="does not continue"):
        resume_episode(later, SAMPLE, episode.opened, episode.turns)


# -- a prompt that opens the thought ------------------------------------------------------------------

CUT = "I could write <answer>7</answer>, or call"
CALL = turn_of("deepseek-r1", "Ulm").tool_calls
CALLING = FAMILIES["deepseek-v3-0324"].writes(Message("assistant", tool_calls=CALL))


def wrote(text: str, stop: StopReason = StopReason.STOP) -> Generation:
    written = text + FAMILIES["deepseek-r1"].ends[0] * (stop is StopReason.STOP)
    ids = tuple(tokenizer_of("deepseek-r1").encode(written, add_special_tokens=False))
    return Generation(ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 1, 1),), stop)


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.STOP])
@pytest.mark.parametrize("text", [CUT, f"I call {CALLING}", f"<think>\nI call {CALLING}"])
def test_a_thought_that_the_prompt_opened_lasts_until_it_is_closed(text: str, stop: StopReason) -> None:
    """It is no answer, and a call in it is not carried out; the ids are what they are."""
    rules = rules_of("deepseek-r1", history="fork")
    episode = advance_episode(rules, begin_episode(SAMPLE), Opened((TOOL,)))
    written_generation = wrote(text, stop)
    episode = advance_episode(rules, episode, TurnGenerated(written_generation))
    assert episode.command == Score(
        "", EpisodeEnd.LENGTH if stop is StopReason.LENGTH else EpisodeEnd.ANSWERED
    )
    assert episode.turns[0].generation.ids == written_generation.ids
    message = conversation(rules, episode)[-1]
    assert (message.content, message.tool_calls) == ("", ())
    assert message.reasoning == text.removeprefix("<think>").strip()


def test_a_thought_that_is_closed_is_followed_by_calls_and_an_answer() -> None:
    """After replies of tools this template opens no thought."""
    rules = rules_of("deepseek-r1", history="fork")
    episode = advance_episode(rules, begin_episode(SAMPLE), Opened((TOOL,)))
    episode = advance_episode(rules, episode, TurnGenerated(wrote(f"I call {CALLING}</think>\n\n{CALLING}")))
    assert isinstance(episode.command, CallTools)
    assert [call.arguments for call in episode.command.calls] == [call.arguments for call in CALL]
    replies = tuple(ToolReply(call, "rain") for call in episode.command.calls)
    episode = advance_episode(rules, episode, ToolsReplied(replies))
    check_row(rules, episode)
    episode = advance_episode(rules, episode, TurnGenerated(wrote("Rain.")))
    assert episode.command == Score("Rain.", EpisodeEnd.ANSWERED)


def test_an_agent_gets_a_thought_that_was_cut_as_reasoning() -> None:
    branches = Branches(rules_of("deepseek-r1", history="fork"))
    place = branches.place_request(AgentRequest(SAMPLE.prompt, (TOOL,)))
    assert isinstance(place, Placement)
    said = branches.add_turn(place, branches.next_turn(place, wrote(f"I call {CALLING}", StopReason.LENGTH)))
    assert said == Message("assistant", reasoning=f"I call {CALLING}")
    assert (branches.answer, branches.calls) == ("", 0)
