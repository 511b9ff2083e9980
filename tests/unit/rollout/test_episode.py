"""The episode machine: no event order hangs it, loses a reply or misaligns tokens."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ProtocolError
from asyncrl.rollout.episode import (
    CallTools,
    Done,
    Episode,
    Fail,
    Generate,
    Generated,
    Replied,
    Rules,
    Score,
    Scored,
    advance,
    begin,
    resume,
)
from asyncrl.types import EpisodeEnd, FailReason, Generation, StopReason, ToolReply, Verdict, VersionSpan
from tests.fakes.chat import END, call, encode, rules, sample
from tests.fakes.engine import generation

BAD = "<tool_call>{nonsense</tool_call>"


def replies(command: CallTools, text: str = "ok") -> Replied:
    return Replied(tuple(ToolReply(c, text, seconds=0.5) for c in command.calls))


def play(script: list[str], made: Rules | None = None) -> Episode:
    """Feed whole turns, answering every command, until the episode is over or the script is."""
    made = made or rules()
    episode = begin(made, sample())
    for text in script:
        episode = advance(made, episode, Generated(generation(text)))
        if isinstance(episode.command, CallTools):
            episode = advance(made, episode, replies(episode.command))
    return episode


def test_a_turn_without_calls_answers() -> None:
    episode = play(["the answer is 42"])
    assert episode.command == Score("the answer is 42", EpisodeEnd.ANSWERED)
    assert advance(rules(), episode, Scored(Verdict(1.0))).command == Done(1.0, EpisodeEnd.ANSWERED, (1.0,))


def test_replies_become_the_context_of_the_next_turn() -> None:
    episode = play(["look " + call("a"), "42"])
    first, second = episode.turns
    assert first.context == (*encode("q"), 2)
    assert second.context == (*encode("[ok]"), 2)
    assert episode.ids == first.context + first.ids + second.context + second.ids
    assert [reply.content for reply in first.replies] == ["ok"]
    assert (episode.tool_calls, episode.tool_seconds) == (1, 0.5)


def test_calls_keep_their_order_and_malformed_ones_are_answered_last() -> None:
    made = rules()
    episode = advance(made, begin(made, sample()), Generated(generation(call("a") + BAD + call("b"))))
    assert isinstance(episode.command, CallTools)
    assert [c.name for c in episode.command.calls] == ["a", "b"]
    episode = advance(made, episode, replies(episode.command))
    assert [reply.call.name for reply in episode.turns[0].replies] == ["a", "b", "malformed_call"]
    assert episode.turns[0].replies[2].content.startswith("error: ")


def test_a_turn_of_only_malformed_calls_needs_no_tool() -> None:
    episode = play([BAD])
    assert isinstance(episode.command, Generate)
    assert len(episode.turns[0].replies) == 1
    assert episode.tool_calls == 0


def test_malformed_calls_in_a_row_end_the_episode() -> None:
    assert play([BAD, BAD, BAD]).command == Score("", EpisodeEnd.BAD_CALLS)
    assert isinstance(play([BAD, BAD, call("a"), BAD, BAD]).command, Generate)  # a good one breaks the row


def test_the_last_turn_ends_the_episode_without_running_its_tools() -> None:
    made = rules(max_turns=2)
    episode = play([call("a"), "done " + call("b")], made)
    assert episode.command == Score("done", EpisodeEnd.MAX_TURNS)
    assert episode.turns[1].replies == ()


def test_a_turn_cut_by_its_budget_ends_the_episode() -> None:
    made = rules()
    cut = generation("the answer is <tool_call>{", stop=StopReason.LENGTH)
    episode = advance(made, begin(made, sample()), Generated(cut))
    assert episode.command == Score("the answer is", EpisodeEnd.LENGTH)


def test_the_episode_budget_shrinks_the_last_turn() -> None:
    made = rules(max_tokens=60, max_new_tokens=55)
    episode = begin(made, sample("0123456789"))
    assert isinstance(episode.command, Generate)
    assert episode.command.max_new_tokens == 60 - 11


def test_replies_that_leave_no_room_end_the_episode() -> None:
    text = "so " + call("a")
    made = rules(max_tokens=2 + len(text) + 1 + 5)
    episode = advance(made, begin(made, sample()), Generated(generation(text)))
    assert isinstance(episode.command, CallTools)
    episode = advance(made, episode, replies(episode.command, "0123456789"))
    assert episode.command == Score("so", EpisodeEnd.LENGTH)
    assert len(episode.turns[0].replies) == 1


def test_a_prompt_without_room_fails_at_once() -> None:
    command = begin(rules(max_tokens=4, max_new_tokens=4), sample("long prompt")).command
    assert isinstance(command, Fail)
    assert command.reason is FailReason.PROMPT_TOO_LONG


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
        Generation((65, 66), (-1.0, -1.0), (SPAN,), StopReason.STOP),
    ],
)
def test_an_unusable_generation_is_an_engine_error(wrong: Generation) -> None:
    made = rules()
    episode = advance(made, begin(made, sample()), Generated(wrong))
    assert isinstance(episode.command, Fail)
    assert episode.command.reason is FailReason.ENGINE_ERROR
    assert episode.turns == ()


def test_missing_or_swapped_replies_are_refused() -> None:
    made = rules()
    episode = advance(made, begin(made, sample()), Generated(generation(call("a") + call("b"))))
    assert isinstance(episode.command, CallTools)
    good = replies(episode.command).replies
    for wrong in (good[:1], good[::-1], (), good + good[:1]):
        with pytest.raises(ProtocolError):
            advance(made, episode, Replied(wrong))


def test_recorded_turns_that_do_not_fit_are_refused() -> None:
    turns = play([call("a"), call("b")]).turns
    changed = msgspec.structs.replace(turns[1], context=(9, 9))
    with pytest.raises(ProtocolError, match="does not continue"):
        resume(rules(), sample(), [turns[0], changed])
    with pytest.raises(ProtocolError, match="does not continue"):
        resume(rules(), sample("another prompt"), turns)
    with pytest.raises(ProtocolError, match="do not answer"):
        resume(rules(), sample(), [msgspec.structs.replace(turns[0], replies=turns[0].replies * 2)])


# -- properties --------------------------------------------------------------------------------------

TURN = st.lists(st.sampled_from([call("a"), call("b", '{"x": 1}'), BAD, "so ", "42"]), min_size=1, max_size=4)
TURNS = st.lists(TURN.map("".join), min_size=1, max_size=12)
LIMITS = st.builds(
    rules,
    max_turns=st.integers(1, 6),
    max_tokens=st.integers(1, 600),
    max_new_tokens=st.integers(1, 200),
    max_bad_calls=st.integers(1, 4),
)


def scripted(episode: Episode, text: str, split: int) -> Generation:
    """What an honest engine returns for `text`, in two versions' spans."""
    command = episode.command
    assert isinstance(command, Generate)
    whole = (*encode(text), END)
    ids = whole[: command.max_new_tokens]
    stop = StopReason.STOP if ids == whole else StopReason.LENGTH
    cut = min(split, len(ids) - 1)
    parts = [(0, cut, 3), (cut, len(ids), 5)] if cut else [(0, len(ids), 5)]
    spans = tuple(VersionSpan(start, end, version, 3) for start, end, version in parts)
    return Generation(ids, tuple(-float(i) for i in range(len(ids))), spans, stop)


def check(episode: Episode) -> None:
    """Tokens, masks, log-probs, spans and replies line up."""
    joined: list[int] = []
    for index, turn in enumerate(episode.turns):
        assert turn.index == index
        assert len(turn.ids) == len(turn.logprobs) > 0
        assert [turn.spans[0].start, *(s.end for s in turn.spans)] == [
            *(s.start for s in turn.spans),
            len(turn.ids),
        ]
        joined += [*turn.context, *turn.ids]
    assert tuple(joined) == episode.ids
    for turn in episode.turns[:-1]:
        assert turn.replies
    if isinstance(episode.command, Generate):
        assert episode.command.ids[: len(episode.ids)] == episode.ids
        assert len(episode.command.ids) > len(episode.ids)


@given(LIMITS, TURNS, st.integers(0, 40))
def test_every_script_keeps_its_tokens_and_replies(made: Rules, script: list[str], split: int) -> None:
    episode = begin(made, sample())
    asked = 0
    for text in script:
        if not isinstance(episode.command, Generate):
            break
        before = episode.ids
        episode = advance(made, episode, Generated(scripted(episode, text, split)))
        check(episode)
        assert episode.ids[: len(before)] == before
        if isinstance(episode.command, CallTools):
            asked += len(episode.command.calls)
            episode = advance(made, episode, replies(episode.command))
            check(episode)
    assert len(episode.turns) <= made.limits.max_turns
    assert len(episode.ids) <= made.limits.max_tokens
    real = [r for turn in episode.turns for r in turn.replies if r.call.name != "malformed_call"]
    assert len(real) == episode.tool_calls == asked
    if len(script) > made.limits.max_turns:
        assert isinstance(episode.command, Score | Fail)


@given(LIMITS, TURNS, st.integers(0, 40), st.booleans())
def test_folding_recorded_turns_gives_the_same_state(
    made: Rules, script: list[str], split: int, lose_replies: bool
) -> None:
    episode = begin(made, sample())
    for text in script:
        if not isinstance(episode.command, Generate):
            break
        episode = waiting = advance(made, episode, Generated(scripted(episode, text, split)))
        if isinstance(episode.command, CallTools):
            episode = advance(made, episode, replies(episode.command))
            if lose_replies:  # the worker died before they were durable
                assert resume(made, sample(), waiting.turns) == waiting
    assert resume(made, sample(), episode.turns) == episode


EVENTS = st.one_of(
    st.builds(lambda text: Generated(generation(text)), TURN.map("".join)),
    st.just(Scored(Verdict(1.0))),
    st.just(Replied(())),
    st.just("replies"),
)


@given(LIMITS, st.lists(EVENTS, max_size=20))
def test_events_that_answer_nothing_change_nothing(made: Rules, events: list[object]) -> None:
    episode = begin(made, sample())
    for event in events:
        if event == "replies":
            if not isinstance(episode.command, CallTools):
                continue
            event = replies(episode.command)
        fits = {Generate: Generated, CallTools: Replied, Score: Scored}.get(type(episode.command))
        try:
            after = advance(made, episode, event)  # type: ignore[arg-type]
        except ProtocolError:
            assert fits is not type(event) or event == Replied(())
            continue
        assert fits is type(event)
        assert after != episode
        check(after)
        episode = after
