"""Whole episodes of any kind: the machine keeps its promises whatever the model, the tools and the
environment say."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.conversation.branches import Branches
from asyncrl.conversation.commands import (
    CallTools,
    Command,
    Done,
    EpisodeScored,
    Event,
    Fail,
    Generate,
    Observed,
    Open,
    Opened,
    Rules,
    Score,
    Step,
    ToolsReplied,
    TurnGenerated,
)
from asyncrl.conversation.episode import (
    DROPPED_REPLY,
    Episode,
    advance_episode,
    begin_episode,
    conversation,
    expire_episode,
    resume_episode,
    shorten_observation,
)
from asyncrl.conversation.requests import AgentRequest, Placement, Refusal
from asyncrl.conversation.turns import rows_of
from asyncrl.errors import ProtocolError
from asyncrl.types import (
    EpisodeEnd,
    FailReason,
    Generation,
    Message,
    Observation,
    RewardResult,
    Routes,
    StopReason,
    TokenScores,
    ToolReply,
    Turn,
    VersionSpan,
)
from tests.fakes.chat import END, FakeChat, call, encode, rules, sample

SAMPLE = sample()
ANSWERS: dict[type, type] = {
    Open: Opened,
    Generate: TurnGenerated,
    CallTools: ToolsReplied,
    Step: Observed,
    Score: EpisodeScored,
}
WRONG: tuple[Event, ...] = (
    Opened(),
    TurnGenerated(Generation((END,), (0.0,), (VersionSpan(0, 1, 0, 0),), StopReason.STOP)),
    ToolsReplied(()),
    Observed(Observation()),
    EpisodeScored(RewardResult(0.0)),
)

# -- what may happen -----------------------------------------------------------------------------------

BAD = "<tool_call>{nonsense</tool_call>"
OTHER_BAD = '<tool_call>{"name": 1}</tool_call>'
CALLING = (
    call("a"),
    "<think>hm</think>so " + call("b", '{"x": 1}'),
    call("a") + call("b", '{"y": [2]}'),
    call("a") + " and " + call("a") + call("a"),
    call("own"),
    call("own") + call("a"),
    BAD + call("a") + OTHER_BAD,
)
TEXTS = (*CALLING, *CALLING, BAD, BAD + OTHER_BAD, "42", "")
ROOMY = {
    "max_turns": 7,
    "max_tokens": 2000,
    "max_new_tokens": 200,
    "max_bad_calls": 4,
    "max_calls": 20,
    "max_reply_tokens": 50,
    "max_rows": 5,
}
TIGHT = {
    "max_turns": (1, 3),
    "max_tokens": (1, 60, 150, 200, 250, 300, 300, 400, 400),
    "max_new_tokens": (1, 20, 100),
    "max_bad_calls": (1, 2),
    "max_calls": (1, 4),
    "max_reply_tokens": (1, 10),
    "max_rows": (1, 2),
}
rewards = st.sampled_from([0.0, 0.5, -1.0])
said = st.sampled_from(["", "y", "word " * 8, "x" * 100])


@st.composite
def setups(draw: st.DrawFn) -> Rules:
    """Rules of a roomy episode, but for at most two tight limits."""
    limits = dict(ROOMY)
    for name in draw(
        st.lists(st.sampled_from(sorted(TIGHT) + ["max_tokens"] * 4 + ["max_rows"] * 3), max_size=2)
    ):
        limits[name] = draw(st.sampled_from(TIGHT[name]))
    if limits["max_tokens"] < ROOMY["max_tokens"]:
        limits["max_tokens"] += draw(st.integers(0, 20))
    return rules(
        **limits,
        chat=FakeChat(draw(st.sampled_from([(), (), ("user",), ("tool",), ("user", "tool")]))),
        environment=draw(st.booleans()),
        history=draw(st.sampled_from(["fold", "fold", "fork", "fork", "append"])),
    )


message = st.builds(Message, st.sampled_from(["user", "user", "tool", "system"]), said)
messages = st.sampled_from([1, 1, 1, 2, 0]).flatmap(lambda count: st.tuples(*[message] * count))
opened = st.builds(
    Opened,
    tools=st.sampled_from([("",), ("{}",)]),
    own_tools=st.sampled_from([frozenset(), frozenset({"own"})]),
    messages=messages,
)
observations = st.builds(Observation, messages, rewards, st.sampled_from([False, False, False, True]))


def generated(text: str, command: Generate) -> TurnGenerated:
    """What an honest engine returns: it stops, or runs out of its budget, in one or two versions' spans. No
    field is left at its default: a field that gets lost on the way into the turn is noticed."""
    whole = (*encode(text), END)
    ids = whole[: command.max_new_tokens]
    middle = len(ids) // 2
    parts = [(0, middle, 3), (middle, len(ids), 5)] if middle else [(0, len(ids), 5)]
    spans = tuple(VersionSpan(start, end, version, 3) for start, end, version in parts)
    stop = StopReason.STOP if ids == whole else StopReason.LENGTH
    logprobs = tuple(-float(k) for k in range(len(ids)))

    routed_tokens = len(command.ids) + len(ids) - 1
    routes = Routes(0, routed_tokens, bytes(2 * routed_tokens))
    scores = TokenScores(bytes(4 * len(ids)), ids=bytes(8 * len(ids)), top=bytes(8 * len(ids)))
    generation = Generation(ids, logprobs, spans, stop, seconds=0.25, routes=routes, scores=scores)

    return TurnGenerated(generation)


def answer(draw: st.DrawFn, command: Command) -> Event:
    match command:
        case Open():
            return draw(opened)
        case Generate():
            return generated(draw(st.sampled_from(TEXTS)), command)
        case CallTools(calls=calls):
            text = draw(said)
            reward = draw(rewards)
            return ToolsReplied(
                tuple(ToolReply(c, f"{k}{text}", reward=reward + k) for k, c in enumerate(calls))
            )
        case Step():
            return Observed(draw(observations))
        case Score():
            return EpisodeScored(RewardResult(draw(rewards)))
        case _:
            raise AssertionError(command)


@dataclass
class Played:
    """Every state of an episode, and what was generated and replied in it."""

    rules: Rules
    states: list[Episode] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def last(self) -> Episode:
        return self.states[-1]

    @property
    def opened(self) -> Opened:
        return next(event for event in self.events if isinstance(event, Opened))


@st.composite
def played(draw: st.DrawFn) -> Played:
    """An episode to its end, or for as many events as can happen in one."""
    drawn_rules = draw(setups())
    play = Played(drawn_rules, [begin_episode(SAMPLE)])
    while not play.last.over and len(play.events) <= most_events(drawn_rules):
        play.events.append(answer(draw, play.last.command))
        play.states.append(advance_episode(drawn_rules, play.last, play.events[-1]))
    return play


def most_events(episode_rules: Rules) -> int:
    """Opened, a turn and its answer max_turns times, Scored."""
    return 2 + 2 * episode_rules.config.max_turns


# -- promises ------------------------------------------------------------------------------------------


def every_episode_ends_within_its_limits(play: Played) -> None:
    episode_rules = play.rules
    last = play.last
    assert last.over and len(play.events) <= most_events(episode_rules)
    assert len(last.turns) <= episode_rules.config.max_turns
    assert len(last.rows) <= episode_rules.config.max_rows
    assert last.tool_calls <= episode_rules.config.max_calls
    assert all(len(row) <= episode_rules.config.max_tokens for row in last.rows)
    if isinstance(last.command, Fail):
        assert last.command.reason in (
            FailReason.PROMPT_TOO_LONG,
            FailReason.MISALIGNED,
            FailReason.ENVIRONMENT_ERROR,
        )


def every_prompt_leaves_room(play: Played) -> None:
    limits = play.rules.config
    for state in play.states:
        if isinstance(command := state.command, Generate):
            assert 1 <= command.max_new_tokens <= limits.max_new_tokens
            assert len(command.ids) + command.max_new_tokens <= limits.max_tokens


def rows_are_exactly_what_the_engine_read_and_wrote(play: Played) -> None:
    """Each generation is in one turn, once, after the prompt that it was asked with."""
    commands_and_generations = [
        (state.command, event.generation)
        for state, event in zip(play.states, play.events, strict=False)
        if isinstance(event, TurnGenerated) and isinstance(state.command, Generate)
    ]
    assert len(play.last.turns) == len(commands_and_generations)
    rows: dict[int, tuple[int, ...]] = {}
    for turn, (command, generation) in zip(play.last.turns, commands_and_generations, strict=True):
        assert (turn.generation.ids, turn.generation.logprobs, turn.generation.spans) == (
            generation.ids,
            generation.logprobs,
            generation.spans,
        )
        assert rows.get(turn.row, ()) + turn.context == command.ids
        rows[turn.row] = command.ids + turn.generation.ids
    assert [rows[row] for row in sorted(rows)] == list(play.last.rows) == rows_of(play.last.turns)
    assert sorted(rows) == list(range(len(rows)))
    assert [turn.row for turn in play.last.turns] == sorted(turn.row for turn in play.last.turns)


def turns_line_up(play: Played) -> None:
    for index, turn in enumerate(play.last.turns):
        assert turn.index == index
        assert len(turn.generation.ids) == len(turn.generation.logprobs) > 0
        edges = [0, *(span.end for span in turn.generation.spans)]
        assert [span.start for span in turn.generation.spans] == edges[:-1] and edges[-1] == len(
            turn.generation.ids
        )


def calls_go_where_they_belong(play: Played) -> None:
    """An environment answers its own calls, and turns without any; tools never see those."""
    own = play.opened.own_tools
    for state in play.states[1:]:
        if not isinstance(state.command, CallTools | Step):
            continue
        said = play.rules.parse(play.rules.chat.decode(state.turns[-1].generation.ids))
        for_environment = not said.errors and any(tool_call.name in own for tool_call in said.calls)
        if isinstance(state.command, CallTools):
            assert not for_environment
            assert (state.command.calls, state.command.errors) == (said.calls, said.errors)
        else:
            assert for_environment or (play.rules.config.environment and not said.calls and not said.errors)
            assert state.command.message.tool_calls == said.calls


def no_reply_is_lost_and_the_next_turn_reads_it(play: Played) -> None:
    episode_rules = play.rules
    for before, event, after in zip(play.states, play.events, play.states[1:], strict=False):
        if not isinstance(event, ToolsReplied | Observed):
            continue
        turn = play.last.turns[len(after.turns) - 1]
        if isinstance(event, ToolsReplied):
            assert isinstance(before.command, CallTools)
            count = len(before.command.calls)
            assert [reply.call for reply in turn.replies[:count]] == list(before.command.calls)
            assert [reply.reward for reply in turn.replies] == [
                *(reply.reward for reply in event.replies),
                *(0.0 for _ in before.command.errors),
            ]
            for reply, given in zip(turn.replies, event.replies, strict=False):
                assert reply.content == given.content[: episode_rules.config.max_reply_tokens]
        else:
            assert isinstance(event, Observed)
            assert turn.observation == shorten_observation(episode_rules, event.observation)
        if isinstance(after.command, Generate):
            assert_read(after, turn)


def assert_read(episode: Episode, turn: Turn) -> None:
    """The prompt of the next turn ends with what the turn was answered."""
    assert isinstance(episode.command, Generate)
    heard = [f"[{reply.content}]" for reply in turn.replies]
    for message in turn.observation.messages if turn.observation else ():
        heard.append(f"[{message.content}]" if message.role == "tool" else message.content)
    assert "".join(map(chr, episode.command.ids[:-1])).endswith("".join(heard))


def the_conversation_has_everything(play: Played) -> None:
    for state in play.states:
        shown = conversation(play.rules, state)
        expected = len(SAMPLE.prompt) + len(state.opened.messages)
        for turn in state.turns:
            expected += 1 + len(turn.replies) + (len(turn.observation.messages) if turn.observation else 0)
        assert len(shown) == expected
        dropped = [message for message in shown if message.content == DROPPED_REPLY]
        assert len(dropped) == state.folded


def recorded_turns_give_the_state_at_every_moment(play: Played) -> None:
    for state in play.states[1:]:
        if isinstance(state.command, Done):
            continue  # the score is recorded with the episode, not with its turns
        assert state.turns[:-1] == play.last.turns[: max(0, len(state.turns) - 1)]
        recorded_turns = msgspec.msgpack.decode(msgspec.msgpack.encode(state.turns), type=tuple[Turn, ...])
        assert recorded_turns == state.turns
        assert resume_episode(play.rules, SAMPLE, play.opened, recorded_turns) == state


def only_answers_are_taken(play: Played) -> None:
    for state in play.states:
        for event in WRONG:
            fits = ANSWERS.get(type(state.command)) is type(event)
            if fits and not (isinstance(state.command, CallTools) and event == ToolsReplied(())):
                continue
            with pytest.raises(ProtocolError):
                advance_episode(play.rules, state, event)


def time_may_run_out_at_any_moment(play: Played) -> None:
    for state in play.states:
        if state.over:
            continue
        after = expire_episode(state)
        assert (after.turns, after.rows) == (state.turns, state.rows)
        if state.turns:
            assert isinstance(after.command, Score) and after.command.end is EpisodeEnd.TIMEOUT
            assert isinstance(
                advance_episode(play.rules, after, EpisodeScored(RewardResult(1.0))).command, Done
            )
        else:
            assert isinstance(after.command, Fail) and after.command.reason is FailReason.DEADLINE


def rewards_are_all_counted_once(play: Played) -> None:
    if not isinstance(done := play.last.command, Done):
        return
    verdict = next(event.result for event in play.events if isinstance(event, EpisodeScored))
    earned = [reply.reward for turn in play.last.turns for reply in turn.replies]
    earned += [turn.observation.reward for turn in play.last.turns if turn.observation]
    assert (
        done.result.reward
        == pytest.approx(verdict.score + sum(earned))
        == pytest.approx(sum(done.result.turn_rewards))
    )
    assert len(done.result.turn_rewards) == len(play.last.turns)


def an_agent_gets_the_same_rows_and_limits(play: Played) -> None:
    """Its requests are the conversation as the machine has it; rows of an agent are never folded."""
    episode_rules = play.rules
    branches = Branches(play.rules)
    if episode_rules.config.history != "fork":
        return
    for state, event in zip_longest(play.states, play.events):
        messages = conversation(episode_rules, state)
        ends = EpisodeEnd
        match state.command:
            case Generate() as asked:
                place = branches.place_request(AgentRequest(messages, state.opened.tools))
                assert isinstance(place, Placement) and isinstance(event, TurnGenerated)
                assert (place.ids, place.max_new_tokens) == (asked.ids, asked.max_new_tokens)
                branches.add_turn(place, branches.next_turn(place, event.generation))
            case Score(end=ends.LENGTH) if state.turns[-1].generation.stop is StopReason.LENGTH:
                assert branches.end is EpisodeEnd.LENGTH
            case Score(end=ends.LENGTH | ends.MAX_ROWS | ends.MAX_TURNS as end):
                more = (Message("user", "more"),) if end is ends.MAX_TURNS else ()
                placement_or_refusal = branches.place_request(
                    AgentRequest(messages + more, state.opened.tools)
                )
                assert (
                    isinstance(placement_or_refusal, Refusal)
                    and placement_or_refusal.end is branches.end is end
                )
                REFUSED.add(end)
            case Fail(reason=FailReason.PROMPT_TOO_LONG):
                placement_or_refusal = branches.place_request(AgentRequest(messages, state.opened.tools))
                assert isinstance(placement_or_refusal, Refusal)
                assert placement_or_refusal.end is EpisodeEnd.LENGTH
    shown = [(turn.index, turn.row, turn.context, turn.generation.ids) for turn in play.last.turns]
    assert [(turn.index, turn.row, turn.context, turn.generation.ids) for turn in branches.turns] == shown
    assert [row.ids for row in branches.rows] == list(play.last.rows)


REFUSED: set[EpisodeEnd] = set()
PROMISES = (
    an_agent_gets_the_same_rows_and_limits,
    every_episode_ends_within_its_limits,
    every_prompt_leaves_room,
    rows_are_exactly_what_the_engine_read_and_wrote,
    turns_line_up,
    calls_go_where_they_belong,
    no_reply_is_lost_and_the_next_turn_reads_it,
    the_conversation_has_everything,
    recorded_turns_give_the_state_at_every_moment,
    only_answers_are_taken,
    time_may_run_out_at_any_moment,
    rewards_are_all_counted_once,
)


@pytest.mark.slow
def test_promises() -> None:
    """Of drawn episodes, which end in every way. Time and engines are not drawn."""
    seen: collections.Counter[object] = collections.Counter()

    @settings(max_examples=250, deadline=None, derandomize=True, database=None)
    @given(played())
    def check(play: Played) -> None:
        for promise in PROMISES:
            promise(play)
        command = play.last.command
        seen[command.result.end if isinstance(command, Done) else command.reason] += 1  # type: ignore[union-attr]
        seen["folded"] += play.last.folded > 0
        seen["three rows"] += len(play.last.rows) >= 3

    check()
    # FakeChat has no token of images: see test_image_templates.py.
    assert seen.keys() >= {*EpisodeEnd} - {EpisodeEnd.TIMEOUT, EpisodeEnd.IMAGE_TOKEN}
    assert seen.keys() >= {FailReason.PROMPT_TOO_LONG, FailReason.MISALIGNED, FailReason.ENVIRONMENT_ERROR}
    assert seen["folded"] and seen["three rows"]
    assert {EpisodeEnd.LENGTH, EpisodeEnd.MAX_ROWS, EpisodeEnd.MAX_TURNS} == REFUSED
