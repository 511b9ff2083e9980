"""Whole turns of the coordinator's loop, with its real store and sockets: what must not end a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncrl.config import parse
from asyncrl.coordinator import loop, state
from asyncrl.coordinator.loop import Coordinator, Phase
from asyncrl.types import Message, Sample
from asyncrl.wire.messages.observer import ObserverHello
from asyncrl.wire.messages.shared import Stop, WireMessage
from asyncrl.wire.sockets import choose_endpoints, encode

ROWS = [Sample(row, "s", (Message("user", "?"),), "1") for row in range(50)]


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loop, state):
        monkeypatch.setattr(module, "load_samples", lambda path: ROWS)


class LoopSetup:
    """A coordinator, its peers, and its turns one by one."""

    def __init__(self, run_dir: Path, **keys: Any) -> None:
        base = {"name": "t", "run_dir": str(run_dir), "model": {"path": "m"}, "data": {"train": "d"}}
        sizes = {"groups_per_batch": 1, "episodes_per_group": 2, "filter_zero_variance": False}
        self.config = parse(base | {"buffer": sizes, "total_steps": 3} | keys)
        self.run_dir = run_dir / "t"
        self.context = zmq.Context()
        self.peers: dict[bytes, zmq.Socket] = {}
        self.start()

    def start(self) -> None:
        """A coordinator, or the next one after it was closed."""
        self.endpoints = choose_endpoints("127.0.0.1", 0)
        self.coordinator = Coordinator(self.config, self.endpoints, "launch")

    def send(self, peer: bytes, *parts: bytes) -> None:
        """To the control socket; waits until it is there."""
        if peer not in self.peers:
            socket = self.peers[peer] = self.context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, peer)
            socket.connect(self.endpoints.control)
        self.peers[peer].send_multipart(parts)
        assert self.coordinator.control.socket.poll(10_000), "nothing came"

    def say(self, peer: bytes, message: WireMessage) -> None:
        self.send(peer, *encode(message, []))
        self.turn()

    def turn(self) -> None:
        self.coordinator.turn(self.coordinator._turned_at + 0.05)

    def close(self) -> None:
        self.coordinator.close()
        self.context.destroy(linger=0)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[LoopSetup]:
    made = LoopSetup(tmp_path)
    yield made
    made.close()


def test_what_a_stranger_sends_does_not_end_the_run(setup: LoopSetup) -> None:
    for peer, parts in ((b"scanner", b"GET / HTTP/1.1"), (b"\xff\xfe", encode(ObserverHello("x"), [])[0])):
        setup.send(peer, parts)
        setup.turn()
    assert setup.coordinator.phase is Phase.STARTING and not setup.coordinator.error
    assert setup.coordinator._status().gauges["wire/refused"] == 2


def test_only_a_launcher_that_said_hello_can_stop_the_run(setup: LoopSetup) -> None:
    setup.say(b"observer/0/x", Stop("a stranger's"))
    assert setup.coordinator.phase is Phase.STARTING
    setup.say(b"observer/0/x", ObserverHello("x"))
    setup.say(b"observer/0/x", Stop("interrupted"))
    assert setup.coordinator.phase in (Phase.STOPPING, Phase.CLOSED)
