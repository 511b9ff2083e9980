"""The episode machine: no event order hangs it, loses a reply or misaligns tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from asyncrl.conversation.commands import (
    CallTools,
    Done,
    EpisodeScored,
    Fail,
    Generate,
    Observed,
    Opened,
    Rules,
    Score,
    Step,
    ToolsReplied,
    TurnGenerated,
)
from asyncrl.conversation.episode import (
    Episode,
    advance_episode,
    begin_episode,
    conversation,
    resume_episode,
    teacher_prompt,
)
from asyncrl.errors import ProtocolError
from asyncrl.types import (
    EpisodeEnd,
    EpisodeResult,
    FailReason,
    Generation,
    Message,
    Observation,
    RewardResult,
    StopReason,
    ToolCall,
    ToolReply,
    VersionSpan,
)
from tests.fakes.chat import END, OPENED, FakeChat, call, encode, rules, sample, start
from tests.fakes.engine import generation

BAD = "<tool_call>{nonsense</tool_call>"


def replies(command: CallTools, text: str = "ok") -> ToolsReplied:
    return ToolsReplied(tuple(ToolReply(c, text, seconds=0.5) for c in command.calls))


def play(script: list[str], episode_rules: Rules | None = None) -> Episode:
    """Feed whole turns, answering every command, until the episode is over or the script is."""
    episode_rules = episode_rules or rules()
    episode = start(episode_rules)
    for text in script:
        episode = advance_episode(episode_rules, episode, TurnGenerated(generation(text)))
        if isinstance(episode.command, CallTools):
            episode = advance_episode(episode_rules, episode, replies(episode.command))
    return episode


ENDINGS: dict[str, tuple[list[str], dict[str, Any], Score]] = {
    "no calls": (["the answer is 42"], {}, Score("the answer is 42", EpisodeEnd.ANSWERED)),
    "malformed calls in a row": ([BAD, BAD, BAD], {}, Score("", EpisodeEnd.BAD_CALLS)),
    "the last turn, whose tools do not run": (
        *([call("a"), "done " + call("b")], {"max_turns": 2}),
        Score("done", EpisodeEnd.MAX_TURNS),
    ),
    "too many calls": (
        *([call("a") + call("b"), "so " + call("c") + call("d")], {"max_calls": 3}),
        Score("so", EpisodeEnd.MAX_CALLS),
    ),
}


@pytest.mark.parametrize(("script", "limits", "end"), ENDINGS.values(), ids=ENDINGS)
def test_an_episode_ends(script: list[str], limits: dict[str, Any], end: Score) -> None:
    episode_rules = rules(**limits)
    episode = play(script, episode_rules)
    assert episode.command == end
    assert episode.turns[-1].replies == () or end.end is EpisodeEnd.BAD_CALLS
    tokens = sum(len(turn.generation.ids) for turn in episode.turns)
    earned = (*(0.0 for _ in episode.turns[1:]), 1.0)
    done = advance_episode(episode_rules, episode, EpisodeScored(RewardResult(1.0))).command
    assert done == Done(EpisodeResult(1.0, tokens, earned, end=end.end))


def test_replies_become_the_context_of_the_next_turn() -> None:
    episode = play(["look " + call("a"), "42"])
    first, second = episode.turns
    assert first.context == (*encode("q"), 2)
    assert second.context == (*encode("[ok]"), 2)
    assert episode.rows == (first.context + first.generation.ids + second.context + second.generation.ids,)
    assert [reply.content for reply in first.replies] == ["ok"]
    assert (episode.tool_calls, episode.tool_seconds) == (1, 0.5)


def test_calls_keep_their_order_and_malformed_ones_are_answered_last() -> None:
    episode_rules = rules()
    episode = advance_episode(
        episode_rules, start(episode_rules), TurnGenerated(generation(call("a") + BAD + call("b")))
    )
    assert isinstance(episode.command, CallTools)
    assert [c.name for c in episode.command.calls] == ["a", "b"]
    episode = advance_episode(episode_rules, episode, replies(episode.command))
    assert [reply.call.name for reply in episode.turns[0].replies] == ["a", "b", "malformed_call"]
    assert episode.turns[0].replies[2].content.startswith("error: ")


def test_a_turn_of_only_malformed_calls_needs_no_tool() -> None:
    episode = play([BAD])
    assert isinstance(episode.command, Generate)
    assert len(episode.turns[0].replies) == 1
    assert episode.tool_calls == 0


def test_a_good_call_breaks_a_row_of_malformed_ones() -> None:
    assert isinstance(play([BAD, BAD, call("a"), BAD, BAD]).command, Generate)


def test_a_turn_cut_by_its_budget_ends_the_episode() -> None:
    episode_rules = rules()
    cut = generation("the answer is <tool_call>{", stop=StopReason.LENGTH)
    episode = advance_episode(episode_rules, start(episode_rules), TurnGenerated(cut))
    assert episode.command == Score("the answer is", EpisodeEnd.LENGTH)


def test_the_episode_budget_shrinks_the_last_turn() -> None:
    episode_rules = rules(max_tokens=60, max_new_tokens=55)
    episode = start(episode_rules, sample("0123456789"))
    assert isinstance(episode.command, Generate)
    assert episode.command.max_new_tokens == 60 - 11


def test_replies_that_leave_no_room_end_the_episode() -> None:
    text = "so " + call("a")
    episode_rules = rules(max_tokens=2 + len(text) + 1 + 5)
    episode = advance_episode(episode_rules, start(episode_rules), TurnGenerated(generation(text)))
    assert isinstance(episode.command, CallTools)
    episode = advance_episode(episode_rules, episode, replies(episode.command, "0123456789"))
    assert episode.command == Score("so", EpisodeEnd.LENGTH)
    assert len(episode.turns[0].replies) == 1


def test_a_prompt_without_room_fails_at_once() -> None:
    command = start(rules(max_tokens=4, max_new_tokens=4), sample("long prompt")).command
    assert isinstance(command, Fail)
    assert command.reason is FailReason.PROMPT_TOO_LONG


def test_a_prompt_leaves_room_for_one_token() -> None:
    command = start(rules()).command
    assert isinstance(command, Generate)
    assert isinstance(start(rules(max_tokens=len(command.ids))).command, Fail)
    assert start(rules(max_tokens=len(command.ids) + 1)).command == Generate(command.ids, max_new_tokens=1)


SPAN = VersionSpan(0, 2, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        Generation((65, END), (-1.0, -1.0), (SPAN,), StopReason.ABORT),
        Generation((), (), (), StopReason.STOP),
        Generation((65,) * 600, (-1.0,) * 600, (VersionSpan(0, 600, 0, 0),), StopReason.LENGTH),
        Generation((65, END), (-1.0,), (SPAN,), StopReason.STOP),
        Generation((65, END), (-1.0, -1.0), (), StopReason.STOP),
        Generation((65, END), (-1.0, -1.0), (VersionSpan(0, 1, 0, 0),), StopReason.STOP),
        Generation((65, END), (-1.0, -1.0), (SPAN, VersionSpan(1, 2, 0, 0)), StopReason.STOP),
        Generation((65, END), (-1.0, -1.0), (VersionSpan(1, 2, 0, 0),), StopReason.STOP),
        Generation((65, END), (-1.0, -1.0), (VersionSpan(0, 0, 1, 1), SPAN), StopReason.STOP),
        Generation((65, 66), (-1.0, -1.0), (SPAN,), StopReason.STOP),
    ],
)
def test_an_unusable_generation_is_an_engine_error(wrong: Generation) -> None:
    episode_rules = rules()
    episode = advance_episode(episode_rules, start(episode_rules), TurnGenerated(wrong))
    assert isinstance(episode.command, Fail)
    assert episode.command.reason is FailReason.ENGINE_ERROR
    assert episode.turns == ()


def test_missing_or_swapped_replies_are_refused() -> None:
    episode_rules = rules()
    episode = advance_episode(
        episode_rules, start(episode_rules), TurnGenerated(generation(call("a") + call("b")))
    )
    assert isinstance(episode.command, CallTools)
    good = replies(episode.command).replies
    for wrong in (good[:1], good[::-1], (), good + good[:1]):
        with pytest.raises(ProtocolError):
            advance_episode(episode_rules, episode, ToolsReplied(wrong))


def test_recorded_turns_that_do_not_fit_are_refused() -> None:
    turns = play([call("a"), call("b")]).turns
    changed = msgspec.structs.replace(turns[1], context=(9, 9))
    with pytest.raises(ProtocolError, match="does not continue"):
        resume_episode(rules(), sample(), OPENED, [turns[0], changed])
    with pytest.raises(ProtocolError, match="does not continue"):
        resume_episode(rules(), sample("another prompt"), OPENED, turns)
    with pytest.raises(ProtocolError, match="does not match the turn"):
        resume_episode(
            rules(), sample(), OPENED, [msgspec.structs.replace(turns[0], replies=turns[0].replies * 2)]
        )


# -- limits, environments, rewritten histories --------------------------------------------------------


def test_refused_calls_in_a_row_end_the_episode_like_malformed_ones() -> None:
    """Calls of tools that are not there, or with wrong arguments: nothing was run."""
    episode_rules = rules(max_bad_calls=3)

    def answered(episode: Episode, text: str, refused: bool) -> Episode:
        episode = advance_episode(episode_rules, episode, TurnGenerated(generation(text)))
        if not isinstance(episode.command, CallTools):
            return episode
        said = (ToolReply(c, "no", refused=refused) for c in episode.command.calls)
        return advance_episode(episode_rules, episode, ToolsReplied(tuple(said)))

    episode = answered(answered(start(episode_rules), BAD, True), call("nope"), True)
    assert episode.bad_calls == 2
    assert answered(episode, call("a"), False).bad_calls == 0
    assert answered(episode, call("a") + BAD, False).bad_calls == 1
    assert answered(episode, call("nope"), True).command == Score("", EpisodeEnd.BAD_CALLS)


def test_calls_that_the_environment_answers_are_limited_too() -> None:
    own = Opened(("",), own_tools=frozenset({"move"}))
    episode_rules = rules(environment=True, max_calls=1)
    episode = advance_episode(
        episode_rules, start(episode_rules, opened=own), TurnGenerated(generation(call("move")))
    )
    episode = advance_episode(episode_rules, episode, said("moved"))
    assert episode.tool_calls == 1
    episode = advance_episode(episode_rules, episode, TurnGenerated(generation(call("move"))))
    assert episode.command == Score("", EpisodeEnd.MAX_CALLS)


def test_what_an_environment_says_is_cut() -> None:
    episode_rules = rules(environment=True, max_reply_tokens=3)
    hello = Opened(messages=(Message("user", "guess"),))
    episode = advance_episode(
        episode_rules, start(episode_rules, opened=hello), TurnGenerated(generation("5"))
    )
    assert episode.turns[0].context == (*encode("qgue"), 2)
    thinking = Observation((Message("user", "higher", reasoning="because"),))
    episode = advance_episode(episode_rules, episode, Observed(thinking))
    assert episode.turns[0].observation == Observation((Message("user", "hig", reasoning="bec"),))
    assert resume_episode(episode_rules, sample(), hello, episode.turns) == episode


def test_a_recorded_turn_that_is_too_long_by_now_is_refused() -> None:
    turns = play([call("a"), "a long answer"]).turns
    with pytest.raises(ProtocolError, match="recorded turn 0: the engine returned"):
        resume_episode(rules(max_new_tokens=5), sample(), OPENED, turns)


def test_replies_are_cut_before_anybody_reads_them() -> None:
    episode_rules = rules(max_reply_tokens=3)
    episode = start(episode_rules)
    episode = advance_episode(episode_rules, episode, TurnGenerated(generation(call("a") + BAD)))
    assert isinstance(episode.command, CallTools)
    episode = advance_episode(episode_rules, episode, replies(episode.command, "0123456789"))
    assert [reply.content for reply in episode.turns[0].replies] == ["012", "err"]
    assert isinstance(episode.command, Generate)
    assert episode.command.ids[-len("[012][err]") - 1 : -1] == encode("[012][err]")


@pytest.mark.parametrize("text", ["so " + call("a"), "so " + BAD])
def test_without_tools_nothing_is_a_call(text: str) -> None:
    episode_rules = rules()
    episode = advance_episode(
        episode_rules,
        start(episode_rules, opened=Opened()),
        TurnGenerated(generation("<think>hm</think>" + text)),
    )
    assert episode.command == Score(text, EpisodeEnd.ANSWERED)


def said(*words: str, reward: float = 0.0, done: bool = False) -> Observed:
    return Observed(Observation(tuple(Message("user", word) for word in words), reward, done))


WORLD = rules(environment=True, max_turns=3)


def test_an_environment_answers_turns_without_calls() -> None:
    hello = Opened(("",), messages=(Message("user", "guess"),))
    episode = advance_episode(WORLD, start(WORLD, opened=hello), TurnGenerated(generation("5")))
    assert episode.turns[0].context == (*encode("qguess"), 2)
    assert episode.command == Step(Message("assistant", "5"))
    episode = advance_episode(WORLD, episode, said("higher", reward=0.25))
    assert isinstance(episode.command, Generate)
    assert episode.command.ids == episode.rows[0] + encode("higher") + (2,)
    episode = advance_episode(
        WORLD, advance_episode(WORLD, episode, TurnGenerated(generation("7"))), said(reward=1.0, done=True)
    )
    assert episode.command == Score("7", EpisodeEnd.DONE)
    done = advance_episode(WORLD, episode, EpisodeScored(RewardResult(0.5))).command
    assert isinstance(done, Done)
    assert done.result.turn_rewards == (0.25, 1.5)
    assert resume_episode(WORLD, sample(), hello, episode.turns) == episode


def test_the_last_turn_still_meets_its_environment() -> None:
    episode = start(WORLD)
    for word in ("1", "2", "3"):
        episode = advance_episode(
            WORLD, advance_episode(WORLD, episode, TurnGenerated(generation(word))), said("no", reward=0.1)
        )
    assert episode.command == Score("3", EpisodeEnd.MAX_TURNS)
    assert [turn.observation.reward for turn in episode.turns if turn.observation] == [0.1] * 3


def test_an_environment_that_says_nothing_fails_the_episode() -> None:
    episode = advance_episode(
        WORLD, advance_episode(WORLD, start(WORLD), TurnGenerated(generation("5"))), said()
    )
    assert isinstance(episode.command, Fail)
    assert episode.command.reason is FailReason.ENVIRONMENT_ERROR


def test_calls_that_the_environment_answers_go_to_it_and_others_to_tools() -> None:
    own = Opened(("",), own_tools=frozenset({"move"}))
    episode = advance_episode(
        WORLD, start(WORLD, opened=own), TurnGenerated(generation("so " + call("move")))
    )
    assert isinstance(episode.command, Step)
    assert [tool_call.name for tool_call in episode.command.message.tool_calls] == ["move"]
    other = advance_episode(WORLD, start(WORLD, opened=own), TurnGenerated(generation(call("look"))))
    assert isinstance(other.command, CallTools)


def forking(history: str = "fork", **limits: Any) -> Rules:
    return rules(chat=FakeChat(rewrites=("user",)), environment=True, history=history, **limits)


def test_a_template_that_rewrites_fails_or_begins_a_row() -> None:
    episode_rules = forking("append")
    episode = advance_episode(
        episode_rules,
        advance_episode(episode_rules, start(episode_rules), TurnGenerated(generation("5"))),
        said("higher"),
    )
    assert isinstance(episode.command, Fail)
    assert episode.command.reason is FailReason.MISALIGNED
    episode_rules = forking()
    episode = advance_episode(
        episode_rules,
        advance_episode(episode_rules, start(episode_rules), TurnGenerated(generation("5"))),
        said("higher"),
    )
    assert episode.command == Generate((*encode("q5higher"), 2), 512, row=1)
    episode = advance_episode(episode_rules, episode, TurnGenerated(generation("7")))
    assert [turn.row for turn in episode.turns] == [0, 1]
    assert episode.rows == tuple(turn.context + turn.generation.ids for turn in episode.turns)
    assert resume_episode(episode_rules, sample(), OPENED, episode.turns) == episode


def test_rows_are_limited() -> None:
    episode_rules = forking(max_rows=2)
    episode = start(episode_rules)
    for word in ("1", "2"):
        episode = advance_episode(
            episode_rules,
            advance_episode(episode_rules, episode, TurnGenerated(generation(word))),
            said("no"),
        )
    assert episode.command == Score("2", EpisodeEnd.MAX_ROWS)


def test_a_full_row_goes_on_without_the_oldest_replies() -> None:
    episode_rules = rules(history="fold", max_tokens=800, max_new_tokens=60, max_turns=9)
    episode = start(episode_rules)
    while isinstance(episode.command, Generate) and episode.command.row == 0:
        episode = advance_episode(episode_rules, episode, TurnGenerated(generation(call("a"))))
        assert isinstance(episode.command, CallTools)
        episode = advance_episode(
            episode_rules, episode, replies(episode.command, f"{'x' * 99} {len(episode.turns)}")
        )
    assert isinstance(episode.command, Generate)
    shown = "".join(map(chr, episode.command.ids))
    assert len(episode.command.ids) <= 800 - 800 // 4
    assert 0 < episode.folded < len(episode.turns)
    assert shown.count("[[dropped]]") == episode.folded
    assert shown.endswith(f"x {len(episode.turns)}]\x02")
    assert conversation(episode_rules, episode)[0] == Message("user", "q")
    again = resume_episode(episode_rules, sample(), OPENED, episode.turns)
    assert again == episode


def test_a_row_is_full_when_the_longest_turn_no_longer_fits() -> None:
    def third_turn(max_tokens: int) -> Episode:
        episode_rules = rules(history="fold", max_tokens=max_tokens, max_new_tokens=60)
        episode = start(episode_rules)
        for _ in range(2):
            episode = advance_episode(episode_rules, episode, TurnGenerated(generation(call("a"))))
            assert isinstance(episode.command, CallTools)
            episode = advance_episode(episode_rules, episode, replies(episode.command, "x" * 99))
        return episode

    command = third_turn(4096).command
    assert isinstance(command, Generate)
    needed_tokens = len(command.ids) + command.max_new_tokens
    assert [third_turn(max_tokens).folded for max_tokens in (needed_tokens, needed_tokens - 1)] == [0, 1]


def test_a_row_that_nothing_can_be_dropped_from_ends_the_episode() -> None:
    episode_rules = rules(history="fold", max_tokens=100, max_new_tokens=60)
    episode = advance_episode(episode_rules, start(episode_rules), TurnGenerated(generation(call("a"))))
    assert isinstance(episode.command, CallTools)
    episode = advance_episode(episode_rules, episode, replies(episode.command, "x" * 90))
    assert episode.command == Score("", EpisodeEnd.LENGTH)


def test_a_teacher_s_prompt_begins_each_row_otherwise() -> None:
    """With what only it is told; the turns that follow in a row are the same, also after a restart."""
    episode_rules = dataclasses.replace(rules(), privilege="It is {ground_truth}.")
    given = sample("2 plus 2", ground_truth='"4"')
    episode = start(episode_rules, given)
    for text in (call("add"), "4"):
        episode = advance_episode(episode_rules, episode, TurnGenerated(generation(text)))
        if isinstance(episode.command, CallTools):
            episode = advance_episode(episode_rules, episode, replies(episode.command))
            assert isinstance(episode.command, Generate)
            second_prompt = teacher_prompt(episode_rules, episode, episode.command)
    first, second = episode.turns
    assert second_prompt == first.taught + first.generation.ids + second.context
    assert "It is 4.\n\n2 plus 2" in FakeChat().decode(first.taught) and second.taught == ()
    assert first.context == start(rules(), given).command.ids  # type: ignore[union-attr]
    assert resume_episode(episode_rules, given, OPENED, episode.turns).turns == episode.turns
    plain = start(rules(), given)
    assert advance_episode(rules(), plain, TurnGenerated(generation("4"))).turns[0].taught == ()


@pytest.mark.parametrize(
    ("last", "turn", "prompt"),
    [
        (Message("assistant", "It is"), " 41", "?It is 41no"),
        (Message("assistant", "It is", (ToolCall("f", "{}"),)), " 41", f"?It is{call('f')}41no"),
        (Message("assistant", " "), " 41", "? 41no"),
        (Message("assistant", "It is"), f" 41 {BAD}", f"?It is 41 {BAD}[error: "),
        (Message("assistant", "<think>\nLet me"), " see.</think>41", "?(Let me see.)41no"),
        (
            Message("assistant", "<think>\nLet me"),
            f" see.</think>{BAD}",
            f"?<think>\nLet me see.</think>{BAD}[error",
        ),
        (Message("assistant", "It is", reasoning="Hm."), " 41", "?(Hm.)It is 41no"),
        (Message("user", "<think>"), " 41", "?<think>41no"),
    ],
)
def test_a_row_that_begins_anew_shows_the_first_turn_with_the_words_that_it_goes_on_with(
    last: Message, turn: str, prompt: str
) -> None:
    episode_rules = rules(
        chat=FakeChat(rewrites=("user", "tool"), thoughts=True), environment=True, history="fork", max_rows=2
    )
    opened = Opened(OPENED.tools, messages=(Message("user", "?"), last))
    given = msgspec.structs.replace(sample(), prompt=())
    episode = advance_episode(episode_rules, begin_episode(given), opened)
    episode = advance_episode(episode_rules, episode, TurnGenerated(generation(turn)))
    if isinstance(episode.command, Step):
        episode = advance_episode(episode_rules, episode, Observed(Observation((Message("user", "no"),))))
    assert isinstance(episode.command, Generate) and episode.command.row == 1
    assert episode_rules.chat.decode(episode.command.ids[:-1]).startswith(prompt)
    assert resume_episode(episode_rules, given, opened, episode.turns) == episode


@pytest.mark.parametrize(
    ("begun", "turn", "content", "reasoning"),
    [
        ("<think>\nLet me", " see", "", "see"),
        ("<think>\nLet me", " see.</think>41", "41", "see."),
        ("<think>", "see.</think>41", "41", "see."),
        ("<think>a</think>It", " is 41", "is 41", ""),
        ("Sure", " <think>a</think>41", "41", "a"),
    ],
)
def test_a_thought_that_the_prompt_leaves_open_is_no_content(
    begun: str, turn: str, content: str, reasoning: str
) -> None:
    given = msgspec.structs.replace(sample(), prompt=(Message("user", "?"), Message("assistant", begun)))
    cut = generation(turn, stop=StopReason.LENGTH)
    episode = advance_episode(
        rules(), advance_episode(rules(), begin_episode(given), OPENED), TurnGenerated(cut)
    )
    assert (episode.read[0].content, episode.read[0].reasoning) == (content, reasoning)
    assert episode.command == Score(content, EpisodeEnd.LENGTH)
