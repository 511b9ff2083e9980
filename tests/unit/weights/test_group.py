"""A group of servers on a GPU, with fake events: what a broadcast waits for."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import DeadlineError
from asyncrl.weights import group as groups
from asyncrl.weights.group import ServerGroup


@pytest.mark.parametrize(("polls", "arrives"), [(3, True), (1000, False)])
def test_a_broadcast_is_over_when_the_device_has_sent_it(
    polls: int, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's own wait returns at once. One that a server does not take ends long before its watchdog does."""
    clock = SimpleNamespace(now=0.0, polls=0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def query() -> bool:
        clock.polls += 1
        return bool(clock.polls > polls)

    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    group: Any = ServerGroup.__new__(ServerGroup)
    group.name = "servers"
    group._seconds = timedelta(seconds=1)
    event = SimpleNamespace(query=query)
    if arrives:
        group._await_sent(event)
        assert clock.polls == polls + 1
    else:
        with pytest.raises(DeadlineError, match="group servers: a broadcast took longer than 1 s"):
            group._await_sent(event)
