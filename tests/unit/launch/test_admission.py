"""A command asks the launcher for a token, through a FIFO in the run directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.session import admit_invited, ask_for_token
from asyncrl.wire.enrolment import read_token
from asyncrl.wire.messages.channels import ToCoordinatorControl, ToObserver
from asyncrl.wire.messages.shared import Invite
from asyncrl.wire.sockets import Endpoints, Gate, Hub, Link, Poller, choose_endpoints


@pytest.fixture
def endpoints() -> Endpoints:
    return choose_endpoints("127.0.0.1", 0)


@pytest.fixture
def link(endpoints: Endpoints) -> Iterator[Link]:
    observer_link = Link(endpoints.control, ToObserver, b"observer/0/x", endpoints.keys)
    yield observer_link
    observer_link.close()


def test_each_token_comes_with_an_invitation_of_its_public_half(
    endpoints: Endpoints, link: Link, tmp_path: Path
) -> None:
    gate = Gate(endpoints)
    hub = Hub(endpoints.control, ToCoordinatorControl, gate)
    admit_invited(tmp_path, endpoints, link)  # nobody asks
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask_for_token, tmp_path, role) for role in ("rollout", "engine")]
        while len(list(tmp_path.iterdir())) < 2:  # both at once
            assert not any(one.done() for one in asking)
        while not all(one.done() for one in asking):
            admit_invited(tmp_path, endpoints, link)
        tokens = [read_token(one.result()) for one in asking]
    invited = {}
    for _ in tokens:
        Poller(hub).wait(10.0)
        received = hub.receive()
        assert received is not None and isinstance(received[1], Invite)
        invited[received[1].token] = received[1].role
    assert [invited[token.keys["token"].public] for token in tokens] == ["rollout", "engine"]
    assert not any(token.keys["coordinator"].secret for token in tokens)
    assert not list(tmp_path.iterdir())
    hub.close()
    gate.close()


def test_who_does_not_wait_any_more_is_forgotten(endpoints: Endpoints, link: Link, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the launcher did not answer within"):
        ask_for_token(tmp_path, "rollout", 0.05)
    assert not list(tmp_path.iterdir())
    os.mkfifo(tmp_path / "invite-rollout-0", 0o600)  # of a command that was killed
    admit_invited(tmp_path, endpoints, link)
