"""Measures what the gateway costs a worker, and who waits for whom.

    python tools/bench/gateway.py [--tokenizer .tokenizers/qwen3] [--repeats 5]

Episodes run through the real gateway, player, chat template, parser and outbox; the engine is a script, and
records are acknowledged at once. Clients are a process of their own (gateway_client.py). CPU per turn: of all
threads of the worker, from one call of the engine to the next, in a row that goes on, the mean of 8 turns.
Loop: the longest time that a task of the same event loop, which sleeps 1 ms at a time, was late.
Each number is the median of the repeats, with the least and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, loop_delays, table
from gateway_client import PATHS, SAID, STOP

from asyncrl.config import RolloutConfig
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.commands import Rules
from asyncrl.conversation.parsers import hermes
from asyncrl.conversation.tokenizer import load_tokenizer
from asyncrl.engines.base import Request
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.gateway import Endpoint, Gateway
from asyncrl.isolation.child import raise_file_limit
from asyncrl.rewards import in_loop
from asyncrl.rollout.agent_player import AgentPlayer, Agents
from asyncrl.rollout.context import EpisodeContext
from asyncrl.rollout.episode_runner import EpisodeRunner
from asyncrl.rollout.images import WorkerImages
from asyncrl.runtime.activity import Sleeps, Waits
from asyncrl.types import Generation, Message, Sample, StopReason, VersionSpan
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Assign, Failed, Records
from asyncrl.wire.outbox import Outbox
from tests.fakes.image_data import refuse_request

TURNS = 9  # turns of a conversation; the first one continues no row
CALL = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
SIZES = {"short": (1, 60), "long": (40, 19_500)}  # messages and words at the beginning
FIRST = (1, 19_000)
SEEDS = itertools.count()  # no text comes twice: what is tokenised is kept
CLIENT = Path(__file__).with_name("gateway_client.py")


class Engine:
    """A sampler that gives the same text in each turn, four tokens at a time."""

    def __init__(self, says: Sequence[int]) -> None:
        self._says = tuple(says)
        self.cpu: list[float] = []  # when each turn began
        self.wall: list[float] = []
        self._rows: set[str] = set()

    @property
    def sleeps(self) -> Sleeps:
        return Sleeps()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        yield

    async def generate(self, request: Request, oldest: Callable[[], int]) -> Generation:
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())
        self._rows.add(request.session)

        ids = self._says
        stop = StopReason.STOP
        for end in range(4, len(ids) + 4, 4) if request.stop_check else ():
            await asyncio.sleep(0)
            if request.stop_check and request.stop_check(ids[:end]):
                ids = ids[:end]
                stop = StopReason.TEXT
                break

        return Generation(ids, (-0.5,) * len(ids), (VersionSpan(0, len(ids), 0, 0),), stop)

    def release(self, session: str) -> None: ...

    def per_turn(self, times: Sequence[float]) -> float:
        """Milliseconds of a continuing turn."""
        if len(self._rows) > 1:
            raise RuntimeError("a turn began a row")
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


Agent = Callable[[Sample, Endpoint], Awaitable[None]]


class Worker:
    """The parts of a worker that serve agents."""

    def __init__(self, path: Path) -> None:
        tokenizer = load_tokenizer(str(path))
        chat = Chat(tokenizer)
        call, text = (tokenizer.encode(f"{SAID}{more}") for more in (f"\n{CALL}", f" {STOP}"))
        self._turns = dict.fromkeys(PATHS, (*call, chat.stop_ids[0])) | {"text": text}
        self._outbox = Outbox(self._send)
        config = RolloutConfig(max_turns=64, max_tokens=1 << 15, agent="bench", episode_timeout=3600.0)
        rules = Rules(chat, hermes, config)
        episode_reward = EpisodeReward([in_loop(lambda **_: 1.0)], 60.0)
        waits = Waits()
        images = WorkerImages(refuse_request, waits)
        self._context = EpisodeContext(rules, episode_reward, self._outbox, waits, images, lambda: 0)
        self.gateway = Gateway()
        self._service = asyncio.create_task(self._outbox.run_sender())
        self._episodes = 0

    async def _send(self, records: Records, frames: Sequence[bytes]) -> None:
        for record, _ in records.with_frames(frames):
            if isinstance(record, Failed):
                raise RuntimeError(record.detail)
            self._outbox.acknowledge(record.seq)

    async def episode(self, agent: Agent, dialect: str = "chat") -> Engine:
        """Play an episode of the agent; return its engine."""
        self._episodes += 1
        sample = Sample(0, "bench", (Message("user", "go"),), "42")
        assign = Assign(1, Attempt(str(self._episodes), 1), sample, "train", temperature=1.0, key=1)
        shared = Agents(agent, self.gateway)
        engine = Engine(self._turns[dialect])
        playing = EpisodeRunner(self._context, lambda run: AgentPlayer(run, shared)).run(assign, (), engine)
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(playing), self._service], return_when=asyncio.FIRST_COMPLETED
        )
        done.pop().result()
        shared.threads.close()

        return engine


@asynccontextmanager
async def client(*work: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, str(CLIENT), json.dumps(work))

    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def conversation(dialect: str, messages: int, words: int, turns: int, stream: bool = False) -> Agent:
    """Return an agent that is a client with such a conversation."""

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        arguments = (dialect, messages, words, turns, next(SEEDS), stream)
        async with client("converse", endpoint.base_url, endpoint.api_key, *arguments) as process:
            if await process.wait():
                raise RuntimeError("the client has failed")

    return agent


@asynccontextmanager
async def connections(url: str, key: str, count: int) -> AsyncIterator[None]:
    async with client("idle", url, key, count) as process:
        assert process.stdout is not None
        if await process.stdout.readline() != b"open\n":
            raise RuntimeError("the connections could not be opened")
        yield


def figure(measurements: Sequence[float]) -> str:
    return f"{statistics.median(measurements):.2f} ({min(measurements):.2f}–{max(measurements):.2f})"


async def cpu(worker: Worker, repeats: int) -> list[list[str]]:
    """Measure the CPU time of a continuing turn in each dialect: short, long, long and streamed."""
    lines = []
    for dialect in PATHS:
        cells = []
        for size, stream in (("short", False), ("short", True), ("long", False), ("long", True)):
            cpu_ms = []
            for _ in range(repeats):
                agent = conversation(dialect, *SIZES[size], TURNS, stream)
                engine = await worker.episode(agent, dialect)
                cpu_ms.append(engine.per_turn(engine.cpu))
            cells.append(figure(cpu_ms))

        lines.append([dialect, *cells])

    return lines


async def first(worker: Worker, repeats: int) -> list[list[str]]:
    """Measure how long a first prompt keeps the loop, at most, in each dialect."""
    lines = []
    for dialect in PATHS:
        longest_waits = []
        for _ in range(repeats):
            async with loop_delays() as times:
                await worker.episode(conversation(dialect, *FIRST, 1), dialect)
            longest_waits.append(max(times))
        lines.append([f"{dialect}: longest wait of another episode, ms", figure(longest_waits), "50"])

    return lines


async def crowds(worker: Worker, repeats: int) -> list[list[str]]:
    """The memory of idle connections with a key; the turns of an episode beside idle strangers."""
    memory = list[float]()
    alone = list[float]()

    beside = list[float]()
    resident = psutil.Process().memory_info
    for _ in range(repeats):

        async def holding(sample: Sample, endpoint: Endpoint) -> None:
            before = resident().rss
            async with connections(endpoint.base_url, endpoint.api_key, 1000):
                memory.append((resident().rss - before) / 2**20)
            await conversation("chat", *SIZES["short"], 1)(sample, endpoint)

        async def crowded(sample: Sample, endpoint: Endpoint) -> None:
            async with connections(endpoint.base_url, "", 5000):
                await conversation("chat", *SIZES["short"], TURNS)(sample, endpoint)

        await worker.episode(holding)
        for agent, wall_ms in ((conversation("chat", *SIZES["short"], TURNS), alone), (crowded, beside)):
            engine = await worker.episode(agent)
            wall_ms.append(engine.per_turn(engine.wall))

    return [
        ["1,000 idle connections with a key, the most, MiB", f"{max(memory):.0f}", "200"],
        ["a short turn, ms of wall time", figure(alone), ""],
        ["the same beside 5,000 idle strangers", figure(beside), "goes on"],
    ]


async def measure(options: argparse.Namespace) -> None:
    worker = Worker(options.tokenizer)
    await worker.gateway.start()
    await worker.episode(conversation("chat", *SIZES["short"], 2))  # imports, caches
    gc.collect()
    gc.freeze()  # as a worker does

    heads = [
        "CPU per turn, ms",
        "short (goal 1)",
        "streamed",
        "20,000 tokens, 40 messages (goal 5)",
        "streamed",
    ]

    print(table(heads, await cpu(worker, options.repeats)), flush=True)
    lines = [*await first(worker, options.repeats), *await crowds(worker, options.repeats)]
    print(table(["", "measured", "goal"], lines))
    await worker.gateway.close()


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / ".tokenizers" / "qwen3")
    parser.add_argument("--repeats", type=int, default=5)
    raise_file_limit()
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
