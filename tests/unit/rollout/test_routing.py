"""Routing of a pool: to the server with the prefix whenever its load allows it."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import hypothesis.strategies as st
from hypothesis import given

from asyncrl.rollout.server_pool import PooledServer, ServerPool, choose
from asyncrl.runtime.activity import BusyTimer, Waits
from asyncrl.wire.messages.worker import EngineEntry, EngineUse
from tests.fakes.loop import Intervals
from tests.fakes.servers import FakeServer, entry


class Routes:
    """A pool, and how its servers are called."""

    def __init__(self, *names: str) -> None:
        self.oldest = 0
        self.pool = ServerPool("train", FakeServer, Waits(), BusyTimer(Intervals()))
        self.table(*(entry(name) for name in names))

    def table(self, *entries: EngineEntry) -> None:
        self.pool.update_table(entries)

    def begin(self, session: str, avoid: str = "") -> PooledServer | None:
        avoided = [s for s in self.pool._servers.values() if s.entry.name in avoid]
        return self.pool.begin_request(session, avoided, self.oldest)

    def once(self, session: str, avoid: str = "") -> str:
        """A request that ends at once: the name of the server that gets it."""
        server = self.begin(session, avoid)
        assert server is not None
        server.running_requests -= 1
        return server.entry.name

    def stay(self, session: str) -> str:
        server = self.begin(session)
        assert server is not None
        return server.entry.name


async def test_turns_stay_where_the_prefix_is() -> None:
    routes = Routes("a", "b", "c")
    homes = {session: routes.once(session) for session in "stu"}
    assert homes == {"s": "a", "t": "b", "u": "c"}  # idle servers: by the prefixes they hold
    routes.stay("v")  # at a: the others are idle, and still nobody moves
    for session in "utsstu":
        assert routes.once(session) == homes[session]


async def test_few_requests_do_not_move() -> None:
    routes = Routes("a", "b", "c", "d")
    for session in "stu":
        routes.once(session, avoid="bcd")
    assert [routes.stay(session) for session in "stu"] == ["a", "a", "b"]


async def test_an_overloaded_home_is_left_for_the_least_loaded() -> None:
    routes = Routes("a", "b", "c")
    sessions = "qrstuvwxyz"
    for session in sessions:
        routes.once(session, avoid="bc")
    # a may hold 2 of up to 4 requests, 3 of up to 7, 4 of up to 9, 5 of 10
    assert "".join(routes.stay(session) for session in sessions) == "aabcabcaba"
    assert routes.stay("s") == "b"  # its prefix is there now


async def test_a_restarted_server_has_no_prefixes_and_a_released_session_no_home() -> None:
    routes = Routes("a", "b")
    assert routes.once("s") == "a"
    routes.table(entry("b"), entry("a", incarnation="2"))
    assert routes.once("s") == "b"
    routes.pool.release("s")
    assert routes.once("s", avoid="b") == "a"
    routes.pool.release("s")
    assert routes.once("s") == "b"  # the first of two that hold nothing


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=5), st.integers(0, 5))
def test_the_prefix_s_server_within_the_bound_else_the_least_loaded(
    loads: list[tuple[int, int]], at: int
) -> None:
    """`loads`: requests and prefixes of each server; `at`: the one with the prefix, or none of them."""
    servers = [
        PooledServer(entry(f"{number}"), FakeServer(entry(""), EngineUse("")), EngineUse(""), running)
        for number, (running, _) in enumerate(loads)
    ]
    prefixes = Counter({server.id: count for server, (_, count) in zip(servers, loads, strict=True)})
    home = servers[at] if at < len(servers) else None
    chosen = choose(servers, home.id if home else "somewhere else", prefixes)
    mean = Fraction(sum(running for running, _ in loads) + 1, len(loads))
    load_bound = max(2, math.ceil(Fraction(5, 4) * mean))
    assert chosen.running_requests + 1 <= load_bound
    if home is not None and home.running_requests + 1 <= load_bound:
        assert chosen is home
    else:
        assert chosen is min(servers, key=lambda server: (server.running_requests, prefixes[server.id]))
