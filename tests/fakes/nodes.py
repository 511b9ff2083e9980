"""Machines that share nothing but the programs, emulated by Linux namespaces.

    outer user and network namespace: a bridge
      ├── node-1: 10.77.0.1, own hostname, /dev/shm, files of Ray, WORK, semaphores, loopback
      └── node-2: 10.77.0.2, the same

Each node is a process that holds its namespaces; `Node.start` runs a program in them. Processes are in view
of all nodes, as signals must reach them from here; `Node.kill` ends all that are in a node.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

START_SECONDS = 20.0
BRIDGE = "ip link set lo up && ip link add switch type bridge && ip link set switch up"
NODE = (
    "hostname {name} && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && mkdir -p {own} && "
    "for each in {own}; do mount -t tmpfs tmpfs $each; done"
)
WORK = "/tmp/asyncrl-node"
OWN = f"/tmp/ray {WORK}"  # not all of /tmp: the checkout may lie there
CABLE = (
    "ip link add {name} type veth peer name eth0 netns {pid} && ip link set {name} master switch && "
    "ip link set {name} up"
)
ADDRESS = "ip address add {address}/24 dev eth0 && ip link set eth0 up && ip route add default dev eth0"


@dataclass(frozen=True)
class Node:
    """An emulated machine. WORK is a directory of its own on each machine."""

    name: str
    address: str
    pid: int
    outer: int  # the process that holds the bridge

    def command(self, *words: str) -> list[str]:
        return enter(self.pid, "--mount", "--uts", "--ipc", *words)

    def start(
        self,
        *words: str,
        out: IO[bytes] | int = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        cwd: str = WORK,
    ) -> subprocess.Popen[bytes]:
        """Run a program on this machine, in the background."""
        inside = ["env", f"--chdir={cwd}", *words]
        return subprocess.Popen(
            self.command(*inside), stdout=out, stderr=subprocess.STDOUT, env=dict(env or os.environ)
        )

    def run(self, script: str) -> str:
        """Return the output of a shell script on this machine. CalledProcessError: the script failed."""
        return _shell(self.command("sh", "-c", script))

    def seen(self, path: str) -> Path:
        """Return the path of a file of this machine for a process outside of all machines."""
        return Path(f"/proc/{self.pid}/root{path}")

    def cut(self) -> None:
        """Take the cable out: packets are lost, connections stay open."""
        _shell(enter(self.outer, "ip", "link", "set", self.name, "down"))

    def join(self) -> None:
        _shell(enter(self.outer, "ip", "link", "set", self.name, "up"))

    def limit(self, megabits: int) -> None:
        """Limit the bandwidth of the cable, in each direction."""
        rate = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms")
        _shell(enter(self.outer, "tc", "qdisc", "replace", "dev", self.name, *rate))
        _shell(enter(self.pid, "tc", "qdisc", "replace", "dev", "eth0", *rate))

    def kill(self) -> None:
        """Send SIGKILL to all processes of this machine except its holder."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/net")
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/net") == namespace:
                    process.kill()

    @property
    def sent(self) -> int:
        """Return the bytes that left this machine."""
        line = next(line for line in self.run("cat /proc/net/dev").splitlines() if "eth0:" in line)
        return int(line.split(":")[1].split()[8])


def enter(pid: int, *words: str) -> list[str]:
    return ["nsenter", f"--target={pid}", "--user", "--preserve-credentials", "--net", *words]


def forbidden() -> str:
    """Return why this machine cannot emulate machines; '' if emulation works."""
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    try:
        with emulated(1):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces are forbidden here ({error})"


@contextmanager
def emulated(count: int) -> Iterator[list[Node]]:
    """Emulate so many machines on a network."""
    with ExitStack() as stack:
        outer = stack.enter_context(_holder(["unshare", "-rn"], BRIDGE))
        yield [stack.enter_context(_node(outer, number)) for number in range(1, count + 1)]


@contextmanager
def _node(outer: int, number: int) -> Iterator[Node]:
    name = f"node-{number}"
    address = f"10.77.0.{number}"
    with _holder(enter(outer, "unshare", "-mnui"), NODE.format(name=name, own=OWN)) as pid:
        _shell(enter(outer, "sh", "-c", CABLE.format(name=name, pid=pid)))
        _shell(enter(pid, "sh", "-c", ADDRESS.format(address=address)))
        node = Node(name, address, pid, outer)
        try:
            yield node
        finally:
            node.kill()


@contextmanager
def _holder(command: Sequence[str], setup: str) -> Iterator[int]:
    """Start a process with namespaces of its own, set up; yield its id."""
    shell = ["sh", "-ec", f"{setup}; echo ready; exec cat"]
    process = subprocess.Popen([*command, *shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout

    try:
        first_line = process.stdout.readline()
        if first_line != b"ready\n":
            raise OSError(f"{' '.join(command)} ended with {process.wait(START_SECONDS)}")
        yield process.pid
    finally:
        process.stdin.close()  # the holder ends with its input
        process.wait(START_SECONDS)
        process.stdout.close()


def _shell(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=True)
    return done.stdout
