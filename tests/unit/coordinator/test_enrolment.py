"""Tokens, over a real socket and a real coordinator: one key for one role, once, for a while."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.coordinator import loop
from asyncrl.coordinator.loop import Coordinator
from asyncrl.coordinator.state import RunState, load_state
from asyncrl.errors import ConfigError
from asyncrl.wire.addresses import is_older, launch_of
from asyncrl.wire.enrolment import enrol, invitation
from asyncrl.wire.messages.channels import ToObserver, ToSupervisor, ToWorkerControl
from asyncrl.wire.messages.engine import SupervisorHello
from asyncrl.wire.messages.shared import Enrolled, ObserverHello, Stop, Welcome
from asyncrl.wire.messages.worker import Leave, WorkerHello
from asyncrl.wire.sockets import Endpoints, Link, Poller, choose_endpoints
from tests.fakes.data import give, rows

DEADLINE = 30.0


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, rows(5))


class Joining:
    """A coordinator, and the launcher's link to it."""

    def __init__(self, run_dir: Path, **sections: object) -> None:
        base = {"name": "t", "run_dir": str(run_dir), "model": {"path": "m"}, "data": {"train": "d"}}
        self._config = parse(base | sections)
        self.endpoints = choose_endpoints("127.0.0.1", 0)
        self.observer = Link(self.endpoints.control, ToObserver, b"observer/0/x", self.endpoints.keys)
        self.start("launch")

    def start(self, launch: str) -> None:
        self.coordinator = Coordinator(self._config, self.endpoints.for_role("coordinator"), launch)

    def during(self, act: Callable[[], Any]) -> Any:
        """What a function gives that runs in a thread, while the coordinator turns."""
        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(act)
            while not acting.done():
                Poller(self.coordinator.control).wait(0.01)
                self.coordinator.run_pass(self.coordinator._last_pass_at + 0.05)
            return acting.result()

    def token(self, role: str = "rollout", seconds: float = 1e6) -> str:
        """One that the coordinator knows of: its answer to a later message has come."""
        invite, token = invitation(self.endpoints, role, seconds)
        self.observer.send(invite)
        self.observer.send(ObserverHello())
        while not isinstance(self.received(self.observer), Welcome):
            pass
        return token

    @property
    def refused(self) -> int:
        """Messages."""
        return self.coordinator.control.refused_count

    def enrol(self) -> Endpoints:
        return self.enrolled()[0]

    def enrolled(self, role: str = "rollout") -> tuple[Endpoints, Enrolled]:
        token = self.token(role)
        enrolment: tuple[Endpoints, Enrolled] = self.during(lambda: enrol(token, DEADLINE))
        return enrolment

    def received(self, link: Link) -> Any:
        message = self.during(lambda: link.receive(DEADLINE))
        assert message is not None, "nothing came"
        return message[0]


@pytest.fixture
def joining(tmp_path: Path) -> Iterator[Joining]:
    setup = Joining(tmp_path)
    yield setup
    setup.coordinator.close()
    setup.observer.close()


def worker(endpoints: Endpoints) -> Link:
    link = Link(endpoints.control, ToWorkerControl, b"rollout/7/x", endpoints.keys)
    link.send(WorkerHello(7, "x", slots=4, pid=1))
    return link


def test_a_token_lets_one_key_in_for_its_role_and_no_other(joining: Joining) -> None:
    enrolment = joining.enrol()
    assert enrolment.keys.keys() == {"coordinator", "rollout"} and not enrolment.keys["coordinator"].secret
    assert enrolment.keys["rollout"].secret and enrolment.keys["rollout"] != joining.endpoints.keys["rollout"]
    link = worker(enrolment)
    assert isinstance(joining.received(link), Welcome)
    usurper = Link(
        enrolment.control,
        ToObserver,
        b"observer/0/y",
        {**enrolment.keys, "observer": enrolment.keys["rollout"]},
    )
    usurper.send(Stop("mine now"))
    joining.during(lambda: [0 for _ in range(1000) if not joining.refused and usurper.receive(0.03)])
    assert joining.refused == 1 and not joining.coordinator.lifecycle.ending
    joining.coordinator.close()
    assert joining.coordinator.lifecycle.ending is False
    joining.start("launch")  # a coordinator that was restarted still knows whom it has enrolled
    again = worker(enrolment)
    assert isinstance(joining.received(again), Welcome)
    for joined_link in (link, again, usurper):
        joined_link.close()


def test_a_token_is_of_use_once(joining: Joining) -> None:
    token = joining.token()
    joining.during(lambda: enrol(token))
    with pytest.raises(ConfigError, match="rejects this token, which was used"):
        joining.during(lambda: enrol(token, DEADLINE))


@pytest.mark.parametrize(
    ("role", "seconds"), [("trainer", 1e6), ("observer", 1e6), ("engine", 1e6), ("rollout", -1.0)]
)
def test_a_token_for_another_role_or_one_that_is_over_lets_nobody_in(
    joining: Joining, role: str, seconds: float
) -> None:
    token = joining.token(role, seconds)
    joining.token()  # a turn later
    with pytest.raises(ConfigError, match="get a new token"):
        joining.during(lambda: enrol(token, DEADLINE))


def test_who_dials_while_a_coordinator_restarts_is_not_refused(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ would never dial again."""
    enrolment = joining.enrol()
    links = list[Link]()
    joining.coordinator.close()

    def slow(*loaded: Any) -> RunState:
        """The handshake is over before the state is there."""
        links.append(worker(enrolment))
        assert loaded[-1].control.socket.poll(5000), "refused"
        return load_state(*loaded)

    monkeypatch.setattr(loop, "load_state", slow)
    joining.start("launch")
    assert isinstance(joining.received(links[0]), Welcome)
    links[0].close()


def test_keys_of_an_earlier_launch_are_forgotten(joining: Joining) -> None:
    enrolment = joining.enrol()
    assert enrolment.keys["rollout"].public in joining.coordinator._gate.role_by_key
    joining.coordinator.close()
    joining.start("the next")
    assert enrolment.keys["rollout"].public not in joining.coordinator._gate.role_by_key


def test_what_is_no_token_is_said_to_be_none() -> None:
    _, token = invitation(choose_endpoints("127.0.0.1", 0), "rollout", 1.0)
    for wrong_token in ("", "x", token[:-8], "ä"):
        with pytest.raises(ConfigError, match="not a valid token for a run"):
            enrol(wrong_token)


def test_a_token_holds_no_key_of_the_run() -> None:
    endpoints = choose_endpoints("127.0.0.1", 0)
    invite, token = invitation(endpoints, "rollout", 1.0)
    content = base64.urlsafe_b64decode(token)
    assert not any(key.secret.encode() in content for key in endpoints.keys.values())
    assert msgspec.msgpack.decode(content, type=Endpoints).keys["token"].secret not in repr(invite)


def test_each_process_learns_what_it_is_in_the_run(joining: Joining) -> None:
    """Also by a coordinator that was restarted: no index is given twice in a launch."""
    (joining.coordinator.run_dir / "started").write_text("2026-11-23 00ff")

    first = joining.enrolled()[1]
    second = joining.enrolled()[1]
    joining.coordinator.close()
    joining.start("launch")
    third = joining.enrolled()[1]
    assert [process.index for process in (first, second, third)] == [1, 2, 3], "the launcher's worker is 0"
    assert len({process.incarnation for process in (first, second, third)}) == 3
    assert not is_older(first.incarnation, "launch.5") and launch_of(first.incarnation) == "launch"
    assert first.role == "rollout" and first.started == "2026-11-23 00ff"
    assert msgspec.json.decode(first.config, type=RunConfig) == joining.coordinator.state.config


def test_who_leaves_gives_its_episodes_back_at_once(joining: Joining) -> None:
    enrolment = joining.enrol()
    link = worker(enrolment)
    assert isinstance(joining.received(link), Welcome)
    assert len(joining.coordinator.workers.peers) == 1
    link.send(Leave())
    joining.during(
        lambda: [0 for _ in range(1000) if joining.coordinator.workers.peers and link.receive(0.03)]
    )
    assert not joining.coordinator.workers.peers
    link.close()


def test_servers_are_counted_apart_and_one_that_leaves_is_gone_at_once(tmp_path: Path) -> None:
    joining = Joining(tmp_path, engine={"name": "sglang", "servers": 2})
    engines = joining.coordinator.engines
    workers = joining.coordinator.workers
    (_, first), (_, worker), (enrolment, second) = (
        joining.enrolled(role) for role in ("engine", "rollout", "engine")
    )
    assert [(process.role, process.index) for process in (first, worker, second)] == [
        ("engine", 2),
        ("rollout", 1),
        ("engine", 3),
    ]
    assert len({process.incarnation for process in (first, worker, second)}) == 3
    link = Link(enrolment.control, ToSupervisor, b"engine/3/x", enrolment.keys)
    link.send(SupervisorHello(3, second.incarnation, "http://host", pid=1))
    assert isinstance(joining.received(link), Welcome) and engines.supervisors and not workers.peers
    link.send(Leave())
    joining.during(lambda: [0 for _ in range(1000) if engines.supervisors and link.receive(0.03)])
    assert not engines.supervisors
    link.close()
    joining.coordinator.close()
    joining.observer.close()
