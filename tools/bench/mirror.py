"""Versions of the weights on their way to machines that share nothing with the trainer's, on limited links.

    python tools/bench/mirror.py [--megabytes 64] [--megabits 200] [--machines 2] [--engines 1 5]

Machines are emulated by Linux namespaces; their links are limited in each direction by tc (0: not at all). On
the first one versions of random numbers are published, and served as the coordinator serves them; on each of
the others so many processes fetch every version as a worker or a keeper does, and check each byte. Prints for
each number of engines a machine how many versions' bytes left the first machine for one, by its network card,
and the seconds from the end of its writing until the last engine had checked it, beside those that its bytes
take on one link: medians. Ends with 1 where more than 1.1 versions left the first machine, or it took more
than 1.5 times as long.

`--servers N`: one engine on each of the first N of these machines is a real SGLang server on a CPU, started
and loaded as its keeper does it; what it prints goes to stderr. Versions are SmolLM2's weights then, each a
little different, and the time is until the servers, too, have the version: their `/model_info` must name it.
`make sglang-cpu smollm2` fetches what this needs.

`--paper C`: nothing is run. The same by arithmetic for 64 servers and models of 32 and 235 billion
parameters, where one connection carries C MB/s (`--machines 1 --engines 1 --megabits 0` measures that):
S/r + (M - 1) p/r seconds, with S bytes of a version, M machines, p bytes of a piece, and r the smaller one of
C and a link's rate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from common import ROOT, SINGLE_THREAD, table

from asyncrl.config import RunConfig, parse
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime.mirror import Mirror
from asyncrl.runtime.version_server import root
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsRef
from asyncrl.wire.addresses import local_address
from asyncrl.wire.messages.shared import PIECE
from asyncrl.wire.sockets import Endpoints, Gate, choose_endpoints
from tests.fakes.nodes import WORK, Node, emulated, forbidden

TENSORS = 16
MODEL = ROOT / ".models/smollm2-135m-instruct"  # of real servers
SERVER = [str(ROOT / ".venv-sglang/bin/python"), str(ROOT / "tools/sglang_cpu/launch.py")]
# on paper: servers, and GPUs of a machine
SERVERS = 64
GPUS = 8
DELTA = 68.7  # on paper: whole / delta, bfloat16 with lr 1e-6, by tools/bench/weights.py
DEADLINE = 300.0
"""Seconds for a version to reach an engine; the first one waits for a server's start."""


class Given(msgspec.Struct):
    """What an engine is started with."""

    endpoints: Endpoints
    index: int
    server: bool


def config() -> RunConfig:
    engine = {"name": "sglang", "server_command": SERVER, "server_args": {"log-level": "warning"}}
    model = {"path": str(MODEL), "dtype": "bfloat16"}
    keys = {"name": "mirror", "run_dir": WORK, "model": model, "engine": engine, "data": {"train": "none"}}
    return parse(keys | {"launch": {"host": "0.0.0.0"}})


def source(address: str, megabytes: int) -> None:
    """Publish a version for each line of input, and say where it is. 0 MB: of the servers' model."""
    import torch  # engines that are simulated have no use for it
    from safetensors.torch import load_file

    from tests.fakes.weights import publish

    endpoints = choose_endpoints(address, 0)
    run = config()
    gate = Gate(endpoints)
    newest = list[WeightsRef]()
    server = root(run, endpoints, gate, lambda: newest[-1] if newest else None)
    say(endpoints)
    if megabytes:
        size = (megabytes << 20) // 2 // TENSORS
        tensors = {f"tensor.{i}": torch.zeros(size, dtype=torch.bfloat16) for i in range(TENSORS)}
    else:
        tensors = load_file(MODEL / disk.PAYLOAD)
    needed = 5 * sum(tensor.nbytes for tensor in tensors.values())
    directory = disk.weights_directory("shm", Path(WORK, "mirror"), "mirror", needed)
    for step, _ in enumerate(sys.stdin):
        for tensor in tensors.values():
            tensor += 1e-3 * torch.randn_like(tensor)
        newest.append(publish(tensors, directory, PolicyVersion(1, step)))
        disk.prune(directory)
        say(newest[-1])
    if server is not None:
        server.close()
    gate.close()


async def engine(given: Given) -> None:
    """Fetch the version that each line of input names, and load it into a server, or only check it; say when
    that was done, and what is there then."""
    run = config()
    directory = Path(WORK, "mirror")
    os.makedirs(directory, exist_ok=True)
    timeline = Timeline(Path(WORK, f"timeline-{given.index}.jsonl"))
    role = "engine" if given.server else "rollout"
    mirror = Mirror(run, given.endpoints, role, given.index, timeline)
    if given.server:
        from asyncrl.engines.sglang.process import ServerProcess
        from asyncrl.engines.sglang.server import attach, loader

        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # for what the server prints
        host = local_address(given.endpoints.control)
        process = await ServerProcess.start(run, given.index, host, directory)
        server = loader(run, given.index, await attach(run, process.url, fresh=True))
        process.ready()
    while line := await asyncio.to_thread(sys.stdin.readline):
        async with mirror.local_copy(msgspec.json.decode(line, type=WeightsRef)) as local:
            if given.server:
                await server.load(local)
                label = await server.api.weight_label()
            else:
                label = (await asyncio.to_thread(disk.verify_version, local)).version.label
        say((time.monotonic(), label))
    if given.server:
        await process.stop()
        await server.close()
    mirror.close()


def say(what: Any) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)


class Program:
    """This file, as a process on a machine."""

    def __init__(self, node: Node, *arguments: str) -> None:
        command = node.command("env", f"--chdir={WORK}", sys.executable, str(Path(__file__)), *arguments)
        env = os.environ | SINGLE_THREAD | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], DEADLINE)[0]:
            sys.exit(f"a process has said nothing for {DEADLINE:g} s")
        if not (line := self.process.stdout.readline()):
            sys.exit(f"a process ended with {self.process.wait(DEADLINE)}")
        return line


def measure(options: argparse.Namespace, engines: int, size: int) -> tuple[float, float]:
    """Versions of `size` bytes that left the first machine, and seconds, for one version: medians."""
    with emulated(1 + options.machines) as nodes:
        for node in nodes if options.megabits else ():
            node.limit(options.megabits)
        first, *others = nodes
        megabytes = 0 if options.servers else options.megabytes
        publisher = Program(first, "--source", first.address, f"--megabytes={megabytes}")
        endpoints = msgspec.json.decode(publisher.hear(), type=Endpoints)
        readers = []
        for index, node in enumerate(node for node in others for _ in range(engines)):
            real = index % engines == 0 and index // engines < options.servers
            given = msgspec.json.encode(Given(endpoints, index, real)).decode()
            readers.append(Program(node, "--engine", given))
        found = [publish(first, publisher, readers, size) for _ in range(1 + options.versions)]
        for program in (*readers, publisher):
            assert program.process.stdin is not None
            program.process.stdin.close()
            program.process.wait(DEADLINE)
    sent, seconds = zip(*found[1:], strict=True)  # the first one is for imports and connections
    return statistics.median(sent), statistics.median(seconds)


def publish(first: Node, publisher: Program, readers: Sequence[Program], size: int) -> tuple[float, float]:
    publisher.tell("")
    ref = publisher.hear().strip()
    sent = first.sent
    begin = time.monotonic()
    for reader in readers:
        reader.tell(ref)
    done = [msgspec.json.decode(reader.hear(), type=tuple[float, str]) for reader in readers]
    label = msgspec.json.decode(ref, type=WeightsRef).label
    if wrong := [found for _, found in done if found != label]:
        sys.exit(f"engines have {wrong} in place of {label}")
    return (first.sent - sent) / size, max(done)[0] - begin


def on_paper(rate: float) -> str:
    """The table of `--paper`; `rate` in MB/s."""
    rows = []
    for name, billions, tp in (("32B", 32.8, 4), ("235B", 235.0, 8)):
        machines = SERVERS * tp // GPUS
        for kind, size in (("whole", 2e3 * billions), ("delta", 2e3 * billions / DELTA)):  # MB
            cells = [name, kind, f"{size / 1e3:.2f}", str(machines), f"{SERVERS * size / 1e3:.1f}"]
            for gigabits in (10, 100):
                carried = min(rate, gigabits * 125.0)
                cells.append(f"{size / carried + (machines - 1) * PIECE / 1e6 / carried:.1f}")
            rows.append(cells)
    header = ["model", "version", "GB sent", "machines", "GB if each server read it", "s, 10 Gbit/s"]
    return table([*header, "s, 100 Gbit/s"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--megabits", type=int, default=200)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--paper", type=float, default=0.0)
    parser.add_argument("--source", default="", help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        source(options.source, options.megabytes)
        return 0
    if options.engine:
        asyncio.run(engine(msgspec.json.decode(options.engine, type=Given)))
        return 0
    if options.paper:
        print(on_paper(options.paper))
        return 0
    if why := forbidden():
        sys.exit(why)
    if options.servers > options.machines:
        parser.error("--servers: one on each of --machines at most")
    if options.servers and not (Path(SERVER[0]).exists() and MODEL.exists()):
        sys.exit("--servers: `make sglang-cpu smollm2` fetches what it needs")
    payload = MODEL / disk.PAYLOAD
    size = payload.stat().st_size if options.servers else options.megabytes << 20
    header = ["machines", "engines each", "versions sent", "seconds", "MB/s", "of bytes/bandwidth"]
    rows = list[list[str]]()
    failed = False
    for engines in options.engines:
        sent, seconds = measure(options, engines, size)
        least = size * 8 / (options.megabits * 1e6) if options.megabits else 0.0
        ratio = f"{seconds / least:.2f}" if least else "-"
        rate = f"{size / 1e6 / seconds:.0f}"
        rows.append([str(options.machines), str(engines), f"{sent:.3f}", f"{seconds:.2f}", rate, ratio])
        failed = failed or sent > 1.1 or (least > 0 and seconds > 1.5 * least)
    print(table(header, rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
