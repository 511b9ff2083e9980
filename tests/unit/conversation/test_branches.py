"""The rows of an agent's episode: what extends a row, what begins one, what is refused, what is recalled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.conversation.branches import Branches
from asyncrl.conversation.requests import AgentRequest, Placement, Refusal, same_message
from asyncrl.conversation.tokenizer import CHARACTERS_PER_TOKEN
from asyncrl.conversation.turns import last_words, rows_of
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.types import EpisodeEnd, Message, StopReason, ToolCall, Turn
from tests.fakes.chat import FakeChat, call, encode, rules
from tests.fakes.engine import generation

USER = Message("user", "q")
AGAIN = Message("user", "and?")
TOOLS = ("",)  # there are tools; the prompt does not show them


def placed(branches: Branches, *messages: Message, **options: Any) -> Placement:
    place = branches.place_request(AgentRequest(messages, **options))
    assert isinstance(place, Placement), place
    return place


def answered(branches: Branches, place: Placement, text: str, stop: StopReason = StopReason.STOP) -> Message:
    return branches.add_turn(place, branches.next_turn(place, generation(text, stop=stop)))


def say(branches: Branches, text: str, *messages: Message, **options: Any) -> Message:
    return answered(branches, placed(branches, *messages, **options), text)


def shape(branches: Branches) -> list[int]:
    """The row of each turn."""
    return [turn.row for turn in branches.turns]


def test_news_extend_the_row_after_the_very_ids_of_the_model() -> None:
    branches = Branches(rules())
    said = say(branches, "  42 ", USER)  # its content is stripped, its ids are not
    place = placed(branches, USER, said, AGAIN)
    assert place.row == 0
    assert place.ids == (*encode("q"), 2, *encode("  42 "), 3, *encode("and?"), 2)
    assert place.context == (*encode("and?"), 2)
    answered(branches, place, "43")
    assert shape(branches) == [0, 0]


def test_of_equal_rows_the_first_is_extended() -> None:
    branches = Branches(rules())
    answer = say(branches, "42", USER)
    say(branches, "42", USER)
    assert placed(branches, USER, answer, AGAIN).row == 0


def test_where_adapters_are_by_agent_a_row_is_of_one() -> None:
    for apart, rows in ((False, [0, 0]), (True, [0, 1])):
        branches = Branches(dataclasses.replace(rules(), rows_apart=apart))
        said = say(branches, "42", USER, agent="planner")
        say(branches, "43", USER, said, AGAIN, agent="coder")
        assert shape(branches) == rows


def look(arguments: str = "{}", *, content: str = "look", name: str = "a", **fields: Any) -> Message:
    return Message("assistant", content, (ToolCall(name, arguments, "other"),), **fields)


SAID = Message("assistant", "42")
CALLING = "look" + call("a", '{"x": 1, "y": [2]}')
REPLY = Message("tool", "7", tool_call_id="other", name="a")
SAME = '{"y":[2],"x":1}'
REQUESTS: dict[str, tuple[str, tuple[Message, ...], int | None]] = {
    "the same and more": ("42", (USER, SAID, AGAIN), 0),
    "the same prompt again": ("42", (USER,), None),
    "another conversation": ("42", (Message("user", "other"), USER), None),
    "no news": ("42", (USER, SAID), None),
    "words put in its mouth": ("42", (USER, SAID, Message("assistant", "43"), AGAIN), None),
    "other white space": (CALLING, (USER, look(SAME, content=" \nlook "), REPLY), 0),
    "other spelling of arguments": (CALLING, (USER, look(SAME), REPLY), 0),
    "arguments filled in": (CALLING, (USER, look('{"y":[2],"z":{},"x":1}'), REPLY), 0),
    "an argument left out": (CALLING, (USER, look('{"x": 1}'), REPLY), None),
    "other content": (CALLING, (USER, look(SAME, content="looked"), REPLY), None),
    "other arguments": (CALLING, (USER, look('{"x": 2}'), REPLY), None),
    "another name": (CALLING, (USER, look(SAME, name="b"), REPLY), None),
    "a call less": (CALLING, (USER, Message("assistant", "look"), REPLY), None),
    "another role": (CALLING, (USER, Message("user", "look"), REPLY), None),
    "other reasoning": (CALLING, (USER, look(SAME, reasoning="no"), REPLY), None),
}


@pytest.mark.parametrize(("said", "messages", "row"), REQUESTS.values(), ids=REQUESTS)
def test_the_row_of_a_request(said: str, messages: tuple[Message, ...], row: int | None) -> None:
    """A row goes on with what the model said in another spelling; all else begins one, as do other tools."""
    branches = Branches(rules())
    say(branches, said, USER, tools=TOOLS)
    assert placed(branches, *messages, tools=('{"name": "t"}',)).row is None
    place = placed(branches, *messages, tools=TOOLS)
    assert place.row == row
    if row is None:
        assert place.ids == place.context
        answered(branches, place, "ok")
        assert shape(branches) == [0, 1]


def test_a_template_that_rewrites_begins_a_row() -> None:
    branches = Branches(rules(chat=FakeChat(rewrites=("user",))))
    said = say(branches, "42", USER)
    assert placed(branches, USER, said, AGAIN).row is None
    assert placed(branches, USER, said, Message("tool", "7")).row == 0


class CountingChat(FakeChat):
    """Lists the kinds of texts that were rendered."""

    def __init__(self, rewrites: tuple[str, ...] = ()) -> None:
        super().__init__(rewrites)
        self.rendered: list[str] = []

    def prompt_ids(self, messages: tuple[Message, ...], tools: tuple[str, ...] = ()) -> tuple[int, ...]:
        self.rendered.append("prompt")
        return super().prompt_ids(messages, tools)

    def delta_after_end(self, messages: tuple[Message, ...]) -> tuple[int, ...] | None:
        delta = super().delta_after_end(messages)
        if delta is not None:
            self.rendered.append("delta")
        return delta

    def text_ids(self, text: str, beginning: bool) -> tuple[int, ...]:
        self.rendered += ["text"] * len(text)
        return super().text_ids(text, beginning)


LENGTHY = Message("user", "x" * 100)
PRERENDERED: dict[str, tuple[tuple[str, ...], Message, Message, list[str]]] = {
    "a first prompt": ((), LENGTHY, AGAIN, ["prompt"]),
    "news": ((), USER, LENGTHY, ["delta"]),
    "short news after which the template rewrites": (("user",), LENGTHY, AGAIN, ["prompt"]),
    "long news after which the template rewrites": (("user",), USER, LENGTHY, ["prompt"]),
}


@pytest.mark.parametrize(("rewrites", "first", "news", "rendered"), PRERENDERED.values(), ids=PRERENDERED)
def test_what_is_rendered_before_is_not_rendered_again(
    rewrites: tuple[str, ...],
    first: Message,
    news: Message,
    rendered: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever asks for it: a count before the request, and each of its answers."""
    monkeypatch.setattr("asyncrl.conversation.requests.LONG_TEXT_CHARACTERS", 100)
    branches = Branches(rules(chat=(chat := CountingChat(rewrites)), max_tokens=4096))
    request = AgentRequest((first,))
    if rendered == ["delta"] or rewrites:
        said = say(branches, "42", first)
        request = AgentRequest((first, said, news))
    chat.rendered.clear()
    render = branches.pending_rendering(request)
    assert render is not None and chat.rendered == []
    render()
    assert branches.count_prompt_tokens(request) > 100
    recorded_answers = branches.find_answers(request, 1 if rendered == ["delta"] else 3)
    assert isinstance(recorded_answers, list) and chat.rendered == rendered


def test_a_long_text_without_a_template_is_tokenised_before_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning of a row, and where it goes on."""
    monkeypatch.setattr("asyncrl.conversation.requests.LONG_TEXT_CHARACTERS", 100)
    branches = Branches(rules(chat=(chat := CountingChat()), max_tokens=4096))

    def asked(prompt: str, new: int) -> Placement:
        request = AgentRequest((Message("user", prompt),), prompt=prompt)
        render = branches.pending_rendering(request)
        assert render is not None and chat.rendered == []
        render()
        placement_or_refusal = branches.place_request(request)
        assert isinstance(placement_or_refusal, Placement) and chat.rendered == ["text"] * new
        chat.rendered.clear()
        return placement_or_refusal

    answered(branches, asked("x" * 200, 200), "42", StopReason.LENGTH)
    assert asked("x" * 200 + "42" + "y" * 150, 150).row == 0
    short = AgentRequest((Message("user", "z"),), prompt="z")
    assert branches.pending_rendering(short) is None and chat.rendered == []


def test_a_new_row_shows_the_models_words_as_it_spelled_them() -> None:
    branches = Branches(rules())
    said = say(branches, call("a", '{"x":   1}'), USER, tools=TOOLS)
    theirs = msgspec.structs.replace(said, tool_calls=(ToolCall("a", '{"x": 1}'),))
    reply = Message("tool", "7")
    say(branches, "one", USER, theirs, reply, tools=TOOLS)
    again = placed(branches, USER, theirs, reply, tools=TOOLS)  # the row has gone on since
    assert again.row is None
    assert again.messages[1].tool_calls[0].arguments == said.tool_calls[0].arguments


def test_a_turn_that_was_cut_has_no_end_to_go_on_from() -> None:
    branches = Branches(rules())
    said = answered(branches, placed(branches, USER), "forty-", StopReason.LENGTH)
    assert branches.end is EpisodeEnd.LENGTH
    assert placed(branches, USER, said, AGAIN).row is None


def test_of_two_requests_that_extend_a_row_the_first_gets_it() -> None:
    branches = Branches(rules())
    said = say(branches, "42", USER)
    first = placed(branches, USER, said, AGAIN)
    second = placed(branches, USER, said, AGAIN)
    assert (first.row, second.row) == (0, None)
    assert first.session != second.session
    answered(branches, second, "b")
    answered(branches, first, "a")
    assert shape(branches) == [0, 1, 0]
    assert [turn.index for turn in branches.turns] == [0, 1, 2]


def test_what_is_forgotten_leaves_no_trace() -> None:
    branches = Branches(rules(max_rows=1))
    branches.cancel_placement(placed(branches, USER))
    said = say(branches, "42", USER)
    branches.cancel_placement(placed(branches, USER, said, AGAIN))
    assert placed(branches, USER, said, AGAIN).row == 0


def test_answers_of_which_one_cannot_be_written_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two would continue the row; the template refuses the prompt of the second."""

    def refuse(*_: object) -> tuple[int, ...]:
        raise ConfigError("no")

    branches = Branches(rules())
    said = say(branches, "42", USER)
    monkeypatch.setattr(FakeChat, "prompt_ids", refuse)
    with pytest.raises(ConfigError):
        branches.find_answers(AgentRequest((USER, said, AGAIN)), 2)
    assert placed(branches, USER, said, AGAIN).row == 0


# -- limits ------------------------------------------------------------------------------------------


def test_limits_refuse_and_name_the_end() -> None:
    for limits, end in (
        ({"max_turns": 1}, EpisodeEnd.MAX_TURNS),
        ({"max_rows": 1}, EpisodeEnd.MAX_ROWS),
        ({"max_tokens": 6}, EpisodeEnd.LENGTH),
    ):
        branches = Branches(rules(**limits))
        say(branches, "4", USER)
        refusal = branches.place_request(AgentRequest((Message("user", "a longer prompt"),)))
        assert isinstance(refusal, Refusal)
        assert (refusal.end, branches.end) == (end, end)


@pytest.mark.parametrize("limit", ["max_turns", "max_rows"])
def test_requests_under_way_count(limit: str) -> None:
    branches = Branches(rules(**{limit: 1}))
    placed(branches, USER)
    assert isinstance(branches.place_request(AgentRequest((AGAIN,))), Refusal)


def test_several_answers_fit_a_limit_or_none_is_sampled() -> None:
    branches = Branches(rules(max_turns=2))
    refusal = branches.find_answers(AgentRequest((USER,)), 3)
    assert isinstance(refusal, Refusal) and refusal.end is EpisodeEnd.MAX_TURNS
    recorded_answers = branches.find_answers(AgentRequest((USER,)), 2)
    assert not isinstance(recorded_answers, Refusal) and len(recorded_answers) == 2


def test_places_are_given_back_where_a_function_about_the_request_raises() -> None:
    def untrained(request: AgentRequest) -> bool:
        return bool(branches._pending_placements) and 1 / 0 > 0

    branches = Branches(rules(max_turns=2), is_untrained=untrained)
    for count in (2, 3):  # for the second answer there is a place under way
        with pytest.raises(ZeroDivisionError):
            branches.find_answers(AgentRequest((USER,)), count)
    assert len(branches.find_answers(AgentRequest((USER,)), 1)) == 1  # type: ignore[arg-type]


def test_an_agent_that_goes_on_after_a_refusal_is_not_held_to_it() -> None:
    branches = Branches(rules(max_tokens=10))
    say(branches, "4", USER)
    assert isinstance(branches.place_request(AgentRequest((Message("user", "a longer prompt"),))), Refusal)
    say(branches, "5", Message("user", "short"))
    assert branches.end is EpisodeEnd.DONE


def test_the_answer_to_a_side_request_does_not_undo_a_refusal() -> None:
    branches = Branches(rules(max_turns=1), is_untrained=lambda request: request.agent == "titles")
    say(branches, "42", USER)
    assert isinstance(branches.place_request(AgentRequest((AGAIN,))), Refusal)
    say(branches, "Questions", USER, agent="titles")
    assert branches.end is EpisodeEnd.MAX_TURNS


def test_a_row_needs_room_for_one_token_of_the_answer() -> None:
    prompt_tokens = len(placed(Branches(rules()), USER).ids)
    refusal = Branches(rules(max_tokens=prompt_tokens)).place_request(AgentRequest((USER,)))
    assert isinstance(refusal, Refusal) and refusal.end is EpisodeEnd.LENGTH
    assert placed(Branches(rules(max_tokens=prompt_tokens + 1)), USER).max_new_tokens == 1


def test_a_request_can_lower_the_limit_of_a_turn_and_the_row_does() -> None:
    branches = Branches(rules(max_tokens=100, max_new_tokens=50))
    assert placed(branches, USER).max_new_tokens == 50
    assert placed(branches, USER, max_new_tokens=7).max_new_tokens == 7
    assert placed(branches, USER, max_new_tokens=70).max_new_tokens == 50
    assert placed(branches, Message("user", "x" * 79)).max_new_tokens == 20


def test_text_that_no_row_can_hold_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """To tokenise it would hold up all episodes of the worker."""
    branches = Branches(rules(max_tokens=100))
    said = say(branches, "42", USER)
    read: list[object] = []
    monkeypatch.setattr(FakeChat, "prompt_ids", lambda *given: read.append(given) or (1,))
    monkeypatch.setattr(FakeChat, "delta_ids", lambda *given: read.append(given) or (1,))
    most = CHARACTERS_PER_TOKEN * 100
    long = Message("user", "x" * most)
    call_ids = ToolCall("t", "{}", "x" * most)
    for ask in (
        AgentRequest((long,)),
        AgentRequest((USER, said, long)),
        AgentRequest((USER, Message("assistant", "", (call_ids,)), AGAIN)),
        AgentRequest((Message("user"),) * 101),
        AgentRequest((USER,), ("x" * (most + 1),)),
    ):
        refusal = branches.place_request(ask)
        assert isinstance(refusal, Refusal)
        assert refusal.end is EpisodeEnd.LENGTH
        assert "maximum context length is 100 tokens (rollout.max_tokens)" in refusal.detail
    assert read == []
    placed(branches, Message("user", "x" * (most - CHARACTERS_PER_TOKEN)))
    assert len(read) == 1


def test_what_a_row_shows_is_no_news() -> None:
    """However long its tokens are: some are a hundred dashes."""

    class Dashes(FakeChat):
        def prompt_ids(self, messages: tuple[Message, ...], tools: tuple[str, ...] = ()) -> tuple[int, ...]:
            return (1, 2, 3)

        def decode(self, ids: Sequence[int]) -> str:
            return "-" * 100 * len(ids)

    branches = Branches(rules(max_tokens=100, chat=Dashes(rewrites=("user",))))
    said = say(branches, "x" * 50, USER)
    assert len(said.content) > CHARACTERS_PER_TOKEN * 100
    assert placed(branches, USER, said, AGAIN).ids == (1, 2, 3)
    assert isinstance(
        branches.place_request(AgentRequest((USER, Message("assistant", said.content + "!"), AGAIN))), Refusal
    )


# -- agents without tools ----------------------------------------------------------------------------


def test_without_tools_nothing_is_a_call() -> None:
    branches = Branches(rules())
    text = "The format is " + call("look")
    said = say(branches, text, USER)
    assert said == Message("assistant", text)
    assert (branches.calls, branches.answer) == (0, text)
    assert placed(branches, USER, said, AGAIN).row == 0
    said = say(branches, text, USER, tools=TOOLS)
    assert (said.content, len(said.tool_calls)) == ("The format is", 1)
    assert (branches.calls, branches.answer) == (1, "The format is")


# -- turns that nobody heard -------------------------------------------------------------------------


def test_a_turn_that_was_lost_answers_the_same_request() -> None:
    branches = Branches(rules())
    said = say(branches, "42", USER)
    assert branches.redeliver(AgentRequest((USER,))) is None  # it was heard: another sample is wanted
    branches.mark_undelivered(branches.turns[0])
    for other in (
        AgentRequest((AGAIN,)),
        AgentRequest((USER,), TOOLS),
        AgentRequest((USER,), (), 7),
        AgentRequest((USER, said, AGAIN)),
    ):
        assert branches.redeliver(other) is None
    assert branches.redeliver(AgentRequest((USER,))) is branches.turns[0]
    assert branches.redeliver(AgentRequest((USER,))) is None


def test_of_several_lost_turns_the_newest_comes_first() -> None:
    branches = Branches(rules())
    say(branches, "a", USER)
    say(branches, "b", USER)
    for turn in branches.turns:
        branches.mark_undelivered(turn)
    assert [branches.redeliver(AgentRequest((USER,))) for _ in range(3)] == [*reversed(branches.turns), None]


def test_a_turn_that_its_row_goes_on_from_was_heard() -> None:
    branches = Branches(rules())
    said = say(branches, "42", USER)
    branches.mark_undelivered(branches.turns[0])
    place = placed(branches, USER, said, AGAIN)
    assert branches.redeliver(AgentRequest((USER,))) is None
    branches.cancel_placement(place)
    answered(branches, placed(branches, USER, said, AGAIN), "43")
    branches.mark_undelivered(branches.turns[0])
    assert branches.redeliver(AgentRequest((USER,))) is None
    assert branches.redeliver(AgentRequest((USER, said, AGAIN))) is None


TRIES: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "a try counted further did not read the turn": ((0, 1, 2), [0, 0, 0]),
    "a second sample is read, and not taken for the first": ((0, 0, 1, 1), [0, 1, 1, 2]),
    "the first try of the second sample was cancelled": ((0, -1, 1), [0, 1]),
    "two samples side by side, neither read": ((0, 0, 1, 2), [0, 1, 1, 1]),
    "a further try that sampled is not another's": ((-1, -1, 1, 1, 2), [0, 1, 1]),
}


@pytest.mark.parametrize(("attempts", "turns"), TRIES.values(), ids=TRIES)
def test_a_try_gets_the_turn_of_the_try_before(attempts: tuple[int, ...], turns: list[int]) -> None:
    """Of equal requests, by the numbers of their tries; -1: a first try whose client leaves at once."""
    branches = Branches(rules())
    answers: list[int] = []
    for attempt in attempts:
        (answer,) = branches.find_answers(AgentRequest((USER,)), 1, max(attempt, 0))
        if isinstance(answer, Placement) and attempt < 0:
            branches.cancel_placement(answer)
            continue
        if isinstance(answer, Placement):
            answered(branches, answer, "42")
            answer = branches.turns[-1]
        answers.append(answer.index)
    assert answers == turns


def test_both_answers_that_were_not_read_are_given_again_once() -> None:
    """As equal requests side by side, whose answers a proxy lost, come again one after the other."""
    branches = Branches(rules())
    places = [branches.find_answers(AgentRequest((USER,)), 1)[0] for _ in range(2)]
    for place in places:
        answered(branches, place, "42")
    tries = [branches.find_answers(AgentRequest((USER,)), 1, 1) for _ in range(2)]
    assert tries == [[branches.turns[1]], [branches.turns[0]]]
    assert isinstance(branches.find_answers(AgentRequest((USER,)), 1, 1)[0], Placement)


def test_a_try_whose_earlier_one_got_no_turn_goes_on_with_that() -> None:
    """Beside it, an equal request was answered and read."""
    branches = Branches(rules())
    first, second = (branches.find_answers(AgentRequest((USER,)), 1)[0] for _ in range(2))
    answered(branches, first, "42")
    branches.cancel_placement(second)
    (again,) = branches.find_answers(AgentRequest((USER,)), 1, 1)
    assert isinstance(again, Placement) and again.session == second.session


def test_a_turn_that_is_lost_again_is_given_again() -> None:
    """Also after it seemed to be read: a second request with the same messages came."""
    branches = Branches(rules())
    for _ in range(2):
        answered(branches, branches.find_answers(AgentRequest((USER,)), 1)[0], "42")
    first, _ = branches.turns
    branches.mark_undelivered(first)
    assert branches.find_answers(AgentRequest((USER,)), 1, 1) == [first]
    assert branches.find_answers(AgentRequest((USER,)), 1, 2) == [first]


# -- recalling ---------------------------------------------------------------------------------------


def test_an_agent_that_does_not_repeat_itself_is_found_out() -> None:
    first = Branches(rules())
    say(first, "42", USER)
    second = Branches(rules(), first.turns)
    with pytest.raises(ProtocolError, match="did not repeat its recorded turn 0"):
        second.recorded_turn(placed(second, AGAIN))


@pytest.mark.parametrize("before", [True, False])
def test_a_recorded_turn_is_not_that_of_a_request_that_is_trained_otherwise_now(before: bool) -> None:
    """`untrained_agents` was changed in between: a row would have turns of both kinds."""
    first = Branches(rules(), is_untrained=lambda request: before)
    say(first, "42", USER)
    second = Branches(rules(), first.turns, is_untrained=lambda request: not before)
    with pytest.raises(ProtocolError, match="did not repeat its recorded turn 0"):
        second.recorded_turn(placed(second, USER))


def test_twins_are_recalled_one_by_one() -> None:
    first = Branches(rules())
    say(first, "a", USER)
    say(first, "b", USER)
    second = Branches(rules(), first.turns)
    one = placed(second, USER)
    two = placed(second, USER)
    for place, text in ((two, "a"), (one, "b")):
        turn = second.recorded_turn(place)
        assert turn is not None
        assert second.add_turn(place, turn).content == text


def test_a_turn_of_another_place_changes_nothing() -> None:
    branches = Branches(rules())
    one = placed(branches, USER)
    two = placed(branches, AGAIN)
    with pytest.raises(ProtocolError, match="does not continue"):
        branches.add_turn(one, branches.next_turn(two, generation("a")))
    assert branches.turns == []
    answered(branches, one, "a")


# -- properties --------------------------------------------------------------------------------------

TEXTS = st.sampled_from(["", "a", " a", call("t"), call("t", '{"x": 1}'), "<tool_call>{bad"])
STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), TEXTS), max_size=24)


def drive(branches: Branches, steps: list[tuple[int, int, str]]) -> tuple[list[Placement], list[Placement]]:
    """Requests that begin, extend, repeat, are answered in any order, or are forgotten. All places, and those
    of the turns."""
    known: list[tuple[Message, ...]] = [(USER,), (AGAIN,)]
    waiting: list[Placement] = []
    seen: list[Placement] = []
    done: list[Placement] = []
    for action, which, text in steps:
        if action < 3:
            placement_or_refusal = branches.place_request(AgentRequest(known[-1 - which % len(known)], TOOLS))
            if isinstance(placement_or_refusal, Placement):
                waiting.append(placement_or_refusal)
                seen.append(placement_or_refusal)
        elif waiting:
            place = waiting.pop(which % len(waiting))
            if action == 3:
                branches.cancel_placement(place)
                continue
            stop = StopReason.LENGTH if action == 5 and text else StopReason.STOP
            said = answered(branches, place, text, stop)
            done.append(place)
            known.append((*place.messages, said, Message("tool" if said.tool_calls else "user", text[:3])))
    return seen, done


@settings(deadline=None, max_examples=150)
@given(STEPS, st.integers(1, 3), st.integers(1, 8), st.sampled_from([(), ("user",)]))
def test_tokens_line_up_whatever_the_agent_does(
    steps: list[tuple[int, int, str]], max_rows: int, max_turns: int, rewrites: tuple[str, ...]
) -> None:
    episode_rules = rules(max_tokens=120, max_rows=max_rows, max_turns=max_turns, chat=FakeChat(rewrites))
    branches = Branches(episode_rules)
    seen, _ = drive(branches, steps)
    assert [turn.index for turn in branches.turns] == list(range(len(branches.turns)))
    assert [row.ids for row in branches.rows] == rows_of(branches.turns)
    firsts = list(dict.fromkeys(shape(branches)))
    assert firsts == list(range(len(branches.rows)))  # numbered without gaps, in order
    assert len(branches.rows) <= max_rows
    assert len(branches.turns) <= max_turns
    assert all(len(place.ids) + place.max_new_tokens <= 120 for place in seen)
    for row in branches.rows:
        assert row.messages[-1].role == "assistant"


@settings(deadline=None, max_examples=100)
@given(STEPS, st.integers(0, 8), st.booleans())
def test_any_beginning_of_the_record_can_be_recalled(
    steps: list[tuple[int, int, str]], count: int, overlap: bool
) -> None:
    """Requests that overlapped may find their rows taken by others than before: then the episode starts
    again. It is never answered with a turn that belongs elsewhere."""
    if not overlap:
        steps = [(action, which, text) for _, which, text in steps for action in (0, 4)]
    first = Branches(rules())
    _, requests = drive(first, steps)
    recorded: list[Turn] = first.turns[:count]
    second = Branches(rules(), recorded)
    for before in requests[:count]:
        place = placed(second, *before.messages, tools=TOOLS)
        try:
            recorded_turn = second.recorded_turn(place)
        except ProtocolError:
            assert overlap
            return
        assert recorded_turn is not None
        if recorded_turn.index > len(second.turns):
            assert overlap
            return
        second.add_turn(place, recorded_turn)
    assert not second.replaying
    assert second.turns == recorded


PLAN = st.lists(st.tuples(st.integers(0, 3), TEXTS, st.integers(0, 2)), max_size=8)


def converse(branches: Branches, plan: list[tuple[int, str, int]], lossy: bool) -> list[Turn]:
    """Conversations one turn at a time, by a client that repeats a request until it hears the answer. What it
    heard."""
    known: list[tuple[Message, ...]] = [(USER,), (AGAIN,)]
    heard: list[Turn] = []
    for which, text, losses in plan:
        ask = AgentRequest(known[-1 - which % len(known)], TOOLS)
        for left in range(losses if lossy else 0, -1, -1):
            turn = branches.redeliver(ask)
            if turn is None:
                place = branches.place_request(ask)
                assert isinstance(place, Placement)
                turn = branches.recorded_turn(place) or branches.next_turn(place, generation(text))
                branches.add_turn(place, turn)
            if left:
                branches.mark_undelivered(turn)
        heard.append(turn)
        known.append((*branches.rows[turn.row].messages, AGAIN))
    return heard


@settings(deadline=None, max_examples=100)
@given(PLAN, st.integers(0, 8), st.booleans(), st.booleans())
def test_answers_that_were_lost_leave_no_trace(
    plan: list[tuple[int, str, int]], count: int, lossy: bool, lossy_again: bool
) -> None:
    """Every turn is heard once; neither losses before a crash nor after it change the episode."""
    episode_rules = rules(max_turns=8, max_rows=8)
    first = Branches(episode_rules)
    second = Branches(episode_rules)
    heard = converse(first, plan, lossy)
    assert [turn.index for turn in heard] == list(range(len(plan)))
    assert heard == first.turns == converse(second, plan, not lossy)
    assert [row.ids for row in first.rows] == [row.ids for row in second.rows]
    third = Branches(episode_rules, first.turns[:count])
    assert converse(third, plan, lossy_again) == first.turns
    assert not third.replaying


@given(TEXTS)
def test_a_message_is_itself(text: str) -> None:
    message = Message("assistant", text, (ToolCall("t", '{"x": NaN}'),))
    assert same_message(message, message)


@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_the_words_that_lists_show_are_those_about_the_task_and_no_title(tools: tuple[str, ...]) -> None:
    """The conversation may go on in a new row."""
    branches = Branches(rules(max_turns=9))
    title_messages = Message("system", "Give a title."), USER
    if tools:
        say(branches, "Sums", *title_messages)
    said = say(branches, "let me see", USER, tools=tools)
    say(branches, "<think>hm</think> It is 42 <tool_call>{", USER, said, AGAIN, tools=tools)
    say(branches, "Forty-two", *title_messages, AGAIN)
    assert last_words(branches.task_messages) == "It is 42"
    say(branches, "43 after all", Message("user", "a summary"), AGAIN, tools=tools)
    assert last_words(branches.task_messages) == ("43 after all" if tools else "It is 42")


def test_words_of_the_prompt_are_not_the_models_last_words() -> None:
    prompt = (USER, SAID, AGAIN)
    assert last_words(prompt, prompt) == ""
    assert last_words((*prompt, Message("assistant", "43"), Message("assistant", " ")), prompt) == "43"
