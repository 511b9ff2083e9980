"""Routing: never an unfit engine, never over the bound, at home whenever that is allowed."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule

from asyncrl.rollout.routing import Place, Router

NAMES = ("a", "b", "c", "d")
SESSIONS = tuple("stuvwxyz")


def place(id: str, version: int = 0, healthy: bool = True) -> Place:
    return Place(id, version, healthy)


def router(*ids: str) -> Router:
    made = Router()
    made.update(place(id) for id in ids)
    return made


def test_turns_stay_where_the_prefix_is() -> None:
    made = router("a", "b", "c")
    homes = {}
    for session in "stu":
        homes[session] = made.begin(session, 0)
        made.end(homes[session] or "")
    assert homes == {"s": "a", "t": "b", "u": "c"}  # idle engines: by the prefixes they hold
    made.begin("v", 0)  # at a: the others are idle, and still nobody moves
    for session in "utsstu":
        assert made.begin(session, 0) == homes[session]
        made.end(homes[session] or "")


def test_few_requests_do_not_move() -> None:
    made = router("a", "b", "c", "d")
    for session in ("s", "t", "u"):
        made.end(made.begin(session, 0, avoid={"b", "c", "d"}) or "")
    assert [made.begin(session, 0) for session in "stu"] == ["a", "a", "b"]


def test_an_overloaded_home_is_left_for_the_least_loaded() -> None:
    made = router("a", "b", "c")
    sessions = "qrstuvwxyz"
    for session in sessions:
        made.end(made.begin(session, 0, avoid={"b", "c"}) or "")
    taken = [made.begin(session, 0) for session in sessions]
    # a may hold 2 of up to 4 requests, 3 of up to 7, 4 of up to 9, 5 of 10
    assert taken == ["a", "a", "b", "c", "a", "b", "c", "a", "b", "a"]
    assert made.begin("s", 0) == "b"  # its prefix is there now


def test_a_restarted_engine_has_no_prefixes() -> None:
    made = router("a1", "b1")
    assert made.begin("s", 0) == "a1"
    made.update([place("b1"), place("a2")])
    assert made.begin("s", 0) == "b1"
    made.end("a1")  # its request fails only now


def test_a_released_session_has_no_home() -> None:
    made = router("a", "b")
    made.end(made.begin("s", 0, avoid={"a"}) or "")
    made.forget("s")
    assert made.begin("s", 0) == "a"


class Routing(RuleBasedStateMachine):
    """Engines come, go, restart, sicken and are updated, under requests that begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.places: dict[str, Place] = {}
        self.incarnations = dict.fromkeys(NAMES, 0)
        self.homes: dict[str, str] = {}
        self.running: list[str] = []

    @rule(name=st.sampled_from(NAMES), version=st.integers(0, 3), healthy=st.booleans())
    def change(self, name: str, version: int, healthy: bool) -> None:
        self.places[name] = place(f"{name}{self.incarnations[name]}", version, healthy)
        self.router.update(self.places.values())

    @rule(name=st.sampled_from(NAMES), restarts=st.booleans())
    def leave(self, name: str, restarts: bool) -> None:
        """What comes back under this name later is itself, or another incarnation."""
        self.incarnations[name] += restarts
        self.places.pop(name, None)
        self.router.update(self.places.values())

    @rule(session=st.sampled_from(SESSIONS), oldest=st.integers(0, 3), avoid=st.sets(st.sampled_from(NAMES)))
    def begin(self, session: str, oldest: int, avoid: set[str]) -> None:
        fit = [
            place.id
            for name, place in self.places.items()
            if place.healthy and place.version >= oldest and name not in avoid
        ]
        loads = {id: self.running.count(id) for id in fit}
        chosen = self.router.begin(session, oldest, {f"{name}{self.incarnations[name]}" for name in avoid})
        if not fit:
            assert chosen is None
            return
        assert chosen in fit
        mean = Fraction(sum(loads.values()) + 1, len(fit))
        most = max(2, math.ceil(Fraction(5, 4) * mean))
        home = self.homes.get(session)
        assert loads[chosen] + 1 <= most
        if home in fit and loads[home] + 1 <= most:
            assert chosen == home
        else:
            prefixes = Counter(self.homes.values())
            assert chosen == min(fit, key=lambda id: (loads[id], prefixes[id]))
        self.homes[session] = chosen
        self.running.append(chosen)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            place = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.router.end(place)

    @rule(session=st.sampled_from(SESSIONS))
    def forget(self, session: str) -> None:
        self.router.forget(session)
        self.homes.pop(session, None)


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
