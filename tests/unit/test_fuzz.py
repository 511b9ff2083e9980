"""Garbage for every decoder and for the coordinator, a small part of what `tools/fuzz.py` gives them."""

from __future__ import annotations

import ast
import random
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from asyncrl.wire.messages.channels import ToCoordinatorControl, ToObserver
from asyncrl.wire.messages.shared import ObserverHello
from asyncrl.wire.sockets import Gate, Hub, Link, choose_endpoints
from tools.fuzz import Stopped, Target, feed, fuzz, targets

ROOT = Path(__file__).resolve().parents[2] / "asyncrl"
TARGETS = targets()


@pytest.mark.slow
def test_nothing_but_the_documented_errors() -> None:
    took = fuzz(18_000, seed=20260101)
    assert len(took) == len(TARGETS) + 2
    assert sum(count > 50 for count in took.values()) > 15, took  # many inputs get past the decoder


def test_what_is_not_documented_is_found() -> None:
    fragile = Target("fragile", lambda data: 1 / (data[0] & 1), ValueError, dict[str, int])
    with pytest.raises(Stopped, match=r"fragile: ZeroDivisionError: .*; input: b"):
        feed(fragile, 1000, random.Random(0))


@seed(1)
@settings(
    max_examples=2000,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
)
@given(st.sampled_from(TARGETS), st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes(target: Target, data: bytes) -> None:
    with suppress(target.error):
        target.read(data)


def test_what_is_no_zmq_at_all_on_a_socket_harms_nobody() -> None:
    endpoints = choose_endpoints("127.0.0.1", 0)
    gate = Gate(endpoints)
    hub = Hub(endpoints.control, ToCoordinatorControl, gate)
    port = int(endpoints.control.rpartition(":")[2])
    rng = random.Random(0)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01CURVE" + b"\0" * 15 + b"\0" + b"\0" * 31
    opened = []
    for number in range(200):
        opened.append(stranger := socket.create_connection(("127.0.0.1", port), 10.0))
        stranger.sendall((greeting if number % 2 else b"") + rng.randbytes(rng.randrange(1, 2000)))
    link = Link(endpoints.control, ToObserver, b"observer/0/x", endpoints.keys)
    link.send(ObserverHello())
    assert hub.socket.poll(10_000) and hub.receive() == (b"observer/0/x", ObserverHello(), [])
    assert hub.receive() is None and hub.refused_count == 0
    for one in (*opened, link, hub, gate):
        one.close()


# -- what no decoder may do --------------------------------------------------------------------------

UNPICKLING = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def test_nothing_is_unpickled() -> None:
    """Nor loaded by torch without `weights_only`, nor is code of a model's repository run that was not asked
    for."""
    found = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                names -= {"pickle"} if names == {"pickle", "dumps"} else set()  # `from pickle import dumps`
            given = (
                {keyword.arg: keyword.value for keyword in node.keywords}
                if isinstance(node, ast.Call)
                else {}
            )
            loads = isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
            trusts = [value for name, value in given.items() if name in ("trust_remote_code", "allow_pickle")]
            if (
                {name.partition(".")[0] for name in names} & UNPICKLING
                or (loads and ast.unparse(given.get("weights_only", ast.Constant(None))) != "True")
                or any(ast.unparse(value) != "False" for value in trusts)
            ):
                found.append(f"{path.name}:{node.lineno}")
    assert not found
