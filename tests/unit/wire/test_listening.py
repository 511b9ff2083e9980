"""Idle connections, more than a process may have descriptors: its files and its peers do not feel them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.wire.addresses import SPARE_DESCRIPTORS, Listeners

IDLE = """
import os, resource, select, socket, sys, time
from pathlib import Path
import zmq
from asyncrl.isolation import child
from asyncrl.isolation.child import raise_file_limit, wrapped_command
from asyncrl.store.segments import SegmentWriter
from asyncrl.wire import sockets
from asyncrl.wire.messages.shared import ObserverHello, Status
from asyncrl.wire.messages.shared import Stop

hard, out, COUNT = int(sys.argv[1]), Path(sys.argv[2]), 1100
sockets.HANDSHAKE_MILLISECONDS = 1500 if hard > COUNT else 700  # milliseconds
endpoints = sockets.choose_endpoints("127.0.0.1", 0)


def greeted(one, seconds):
    # what ZeroMQ says once it has accepted
    poll = select.poll()
    poll.register(one, select.POLLIN)
    return poll.poll(1000 * seconds)


# Another process, which is told nothing and says nothing.
ours, theirs = os.pipe()
if os.fork() == 0:
    os.close(theirs)
    raise_file_limit()
    os.read(ours, 1)
    ports = [int(one.rpartition(":")[2]) for one in (endpoints.control, endpoints.bulk)]
    held, patience = [socket.socket() for _ in range(COUNT)], 2.0 if hard > COUNT else 0.5
    for at, one in enumerate(held):
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", ports[at % 2]))
        if at % 50 == 0:  # a listener looks at its files every 10 ms, and could not see a faster burst
            time.sleep(0.01)
        if patience and not greeted(one, patience):
            patience = 0  # nobody hears
    os.read(ours, 1)  # until the other process has ended
    os._exit(0)

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
child.FILE_LIMIT, child.HARD_FILE_LIMIT, child.ROLE_FILE_LIMIT = 1024, hard, max(1024, hard)
raise_file_limit()
gate = sockets.Gate(endpoints)
union = {"observer": ObserverHello | Stop}
hubs = [sockets.Hub(endpoint, union, gate) for endpoint in (endpoints.control, endpoints.bulk)]
failed = [hub.socket.get_monitor_socket(zmq.EVENT_ACCEPT_FAILED) for hub in hubs]
segments = SegmentWriter(out, segment_bytes=1)  # each record opens a file
poller, links = sockets.Poller(*hubs), []


def heard(link):
    link.send(ObserverHello())
    until = time.monotonic() + 20
    while time.monotonic() < until:
        poller.wait(0.02)
        if hubs[0].receive() is not None:
            return True
    return False


def dialled(index):
    name = sockets.identity("observer", index)
    links.append(sockets.Link(endpoints.control, Status, name, endpoints.keys))
    return links[-1]


first = dialled(0)
print("before", heard(first))
os.write(theirs, b"g")
seen, until = set(), time.monotonic() + 20
opened = lambda: len(os.listdir("/proc/self/fd"))
floor, top = opened(), 0
while time.monotonic() < until and not (top > floor + 700 and opened() < floor + 100):
    poller.wait(0.02)
    seen.update(gate.listeners.shortage)
    if (now := opened()) > max(top, floor + 600):
        heard(first)
        segments.append_record(b"x")
    top = max(top, now)
print("wait", *seen)
print("after", heard(dialled(1)), gate.listeners.shortage)
print("refused", sum(monitor.poll(0) for monitor in failed))
from subprocess import run
print("child", run(wrapped_command(["sh", "-c", "ulimit -n"]), capture_output=True, text=True).stdout.strip())
print("top", top, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("hard", [2048, 1024], ids=["raised", "at the hard limit"])
def test_idle_connections_cost_neither_files_nor_peers(tmp_path: Path, hard: int) -> None:
    command = [sys.executable, "-c", IDLE, str(hard), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    output = done.stdout + done.stderr
    lines = dict(line.partition(" ")[::2] for line in output.splitlines())
    assert lines["before"] == "True", output
    assert lines.get("after") == "True []" and lines["refused"] == "0" and lines["child"] == "1024", output
    assert (int(lines["top"]) > 1024) == (hard > 1100), output
    wait = "new connections must wait: 256 of 1024 open files are reserved; raise ulimit -n"
    assert lines["wait"] == ("" if hard > 1100 else wait)


@pytest.mark.parametrize(
    ("left", "milliseconds"), [(20_000, 100), (5_000, 50), (1_100, 11), (100, 10), (0, 10)]
)
def test_an_idle_process_far_from_the_limit_looks_seldom(
    monkeypatch: pytest.MonkeyPatch, left: int, milliseconds: int
) -> None:
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    limit = lowest + SPARE_DESCRIPTORS + left if left else 4 * lowest // 3  # of so few a quarter is kept
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    listeners = Listeners()
    assert listeners.watch_descriptors() == milliseconds
    assert bool(listeners.shortage) == (not left)
