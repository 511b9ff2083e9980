"""What running 1,000 episodes in one worker costs beside the work, and who disturbs whom.

    python tools/bench/episodes.py [--episodes 1000] [--turns 8] [--tool-seconds 0.5] [--turn-seconds 1.0]

Episodes run through the real runner, chat template, parser, toolbox and outbox, and begin one after another.
The engine is scripted (a turn takes --turn-seconds, give or take half), the tool sleeps a log-normal time of
mean --tool-seconds (sigma 1.5), records are acknowledged at once. Overhead: the wall time from one request
to the next, less what engine and tool were told to take. "ideal": the same sleeps in bare asyncio tasks.
"with bad tools": in a fifth of the episodes the tools hang (coroutines, threads, processes), crash,
reply 10 MB or ignore cancellation: overhead is of the good episodes, CPU is that of all by the turns of all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import ROOT
from transformers import AutoTokenizer

from asyncrl.config import RolloutConfig
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.commands import Rules
from asyncrl.conversation.parsers import hermes
from asyncrl.engines.base import Request
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.rewards import in_loop
from asyncrl.rollout.context import EpisodeContext
from asyncrl.rollout.episode_runner import EpisodeRunner
from asyncrl.rollout.images import WorkerImages
from asyncrl.rollout.turn_player import TurnPlayer
from asyncrl.runtime.activity import Sleeps, Waits
from asyncrl.tools import Tool, Toolbox, load_tool, tool
from asyncrl.types import Generation, Message, Sample, StopReason, VersionSpan
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Assign, Failed, Records
from asyncrl.wire.outbox import Outbox
from tests.fakes.image_data import refuse_request

MODEL = ROOT / "examples/multiturn/calculator/model"
SIGMA = 1.5
ROUNDS = 2  # episodes one after another in each place
BAD_SECONDS = 1.0  # deadline of the bad tools
LONGEST = 30.0  # seconds of one good call: a run should end


@dataclass(frozen=True)
class Load:
    """The load of a measurement: `bad` of the episodes have bad tools. Times in seconds."""

    episodes: int
    turns: int
    tool_seconds: float
    turn_seconds: float
    bad: int = 0


@dataclass
class Figures:
    """`overhead`: seconds of each measured turn. `cpu`: seconds per turn of all episodes."""

    overhead: list[float] = field(default_factory=list)
    turns: int = 0
    cpu: float = 0.0
    wall: float = 0.0
    failed: list[str] = field(default_factory=list)

    def row(self, label: str) -> str:
        p99 = statistics.quantiles(self.overhead, n=100)[98]
        median = statistics.median(self.overhead)
        rate = self.turns / self.wall
        cells = (f"{1e3 * median:.2f}", f"{1e3 * p99:.2f}", f"{1e3 * self.cpu:.2f}", f"{rate:.0f}")
        return f"| {label} | {' | '.join(cells)} |"


def draw(load: Load, random_: random.Random) -> tuple[float, float]:
    """Draw the seconds of a turn and of its tool."""
    center = math.log(load.tool_seconds) - SIGMA**2 / 2  # so that the mean is as asked
    return load.turn_seconds * random_.uniform(0.5, 1.5), min(LONGEST, random_.lognormvariate(center, SIGMA))


def starts(load: Load, count: int) -> list[float]:
    """Return the seconds after which episodes begin, spread over the length of an episode, as in a run
    whose episodes replace each other."""
    return [load.turns * (load.turn_seconds + load.tool_seconds) * n / count for n in range(count)]


# -- tools -------------------------------------------------------------------------------------------------


@tool
async def work(seconds: float) -> str:
    """Take some time."""
    await asyncio.sleep(seconds)
    return "done"


@tool(timeout=BAD_SECONDS)
async def hung(seconds: float) -> str:
    """Never end."""
    await asyncio.Event().wait()
    return "never"


@tool(timeout=BAD_SECONDS, blocking=True)
def hung_thread(seconds: float) -> str:
    """Hold a thread for longer than anybody waits."""
    time.sleep(3 * BAD_SECONDS)
    return "late"


@tool(timeout=BAD_SECONDS)
async def stubborn(seconds: float) -> str:
    """Ignore cancellation."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


LARGE = "x" * 10_000_000


@tool
async def crashing(seconds: float) -> str:
    """Fail."""
    raise RuntimeError(LARGE)


@tool
async def large(seconds: float) -> str:
    """Reply 10 MB."""
    return LARGE


HUNG_PROCESS = load_tool(
    f"{Path(__file__).with_name('hung_process.py')}:hung_process"
)  # a tool's process imports only this module
BAD = (hung, hung_thread, HUNG_PROCESS, stubborn, crashing, large)


# -- the worker --------------------------------------------------------------------------------------------


class Engine:
    """A sampler whose episodes call the tool that their name begins with, and answer in the last turn."""

    def __init__(self, load: Load, encode: Callable[[str], Sequence[int]], stop: int) -> None:
        self._load = load
        self._encode = encode
        self._stop = stop
        self._random = random.Random(1)
        self.request_times: dict[str, list[float]] = defaultdict(
            list
        )  # when each turn of a session was asked for
        self.planned_seconds: dict[str, list[float]] = defaultdict(
            list
        )  # seconds that it and its tool are to take

    @property
    def sleeps(self) -> Sleeps:
        return Sleeps()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        yield

    async def generate(self, request: Request, oldest: Callable[[], int]) -> Generation:
        request_times = self.request_times[request.session]
        request_times.append(time.perf_counter())
        name = request.session.partition("-")[0]
        turn, seconds = draw(self._load, self._random)
        self.planned_seconds[request.session].append(turn + seconds)

        call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"seconds": {seconds}}}}}\n</tool_call>'
        await asyncio.sleep(turn)

        ids = (
            *self._encode(call if len(request_times) < self._load.turns else "The answer is 42."),
            self._stop,
        )

        spans = (VersionSpan(0, len(ids), 0, 0),)
        return Generation(ids, (-0.5,) * len(ids), spans, StopReason.STOP, turn)

    def release(self, session: str) -> None: ...

    def overheads(self) -> list[float]:
        return [
            after - before - planned
            for session, request_times in self.request_times.items()
            if session.startswith("work-")
            for before, after, planned in zip(
                request_times, request_times[1:], self.planned_seconds[session], strict=False
            )
        ]


async def run(load: Load) -> Figures:
    """The load through the real runner."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    chat = Chat(tokenizer)
    tools: dict[str, Tool] = {tool.name: tool for tool in (work, *BAD)}
    box = Toolbox(tools, 2 * LONGEST)
    engine = Engine(load, lambda text: tokenizer.encode(text, add_special_tokens=False), chat.stop_ids[0])

    outbox = Outbox(None)
    figures = Figures()

    async def send(records: Records, frames: Sequence[bytes]) -> None:
        for record, _ in records.with_frames(frames):
            if isinstance(record, Failed):
                figures.failed.append(record.detail)
            outbox.acknowledge(record.seq)

    outbox._send = send
    config = RolloutConfig(
        max_turns=load.turns,
        max_tokens=1 << 16,
        max_new_tokens=512,
        episode_timeout=3600.0,
        tool_timeout=2 * LONGEST,
    )

    waits = Waits()
    context = EpisodeContext(
        Rules(chat, hermes, config),
        EpisodeReward([in_loop(lambda **_: 1.0)], 60.0),
        outbox,
        waits,
        WorkerImages(refuse_request, waits),
        lambda: 0,
    )

    runner = EpisodeRunner(context, lambda run: TurnPlayer(run, box))
    bad = [f"{BAD[n % len(BAD)].name}-{n}" for n in range(load.bad)]
    names = [*bad, *(f"work-{n}" for n in range(load.episodes - load.bad))]
    random.Random(2).shuffle(names)

    async def begin(name: str, start: float) -> None:
        await asyncio.sleep(start)
        for number in range(ROUNDS):
            await runner.run(assign(f"{name}-{number}"), (), engine)

    service = asyncio.create_task(outbox.run_sender())
    gc.collect()
    gc.freeze()  # as a worker should: a scan of torch and all modules takes half a second
    wall = time.perf_counter()
    cpu = time.process_time()

    await asyncio.gather(*map(begin, names, starts(load, len(names))))
    figures.wall = time.perf_counter() - wall
    figures.turns = sum(map(len, engine.request_times.values()))
    figures.cpu = (time.process_time() - cpu) / figures.turns
    figures.overhead = engine.overheads()

    service.cancel()
    await box.close()
    return figures


def assign(name: str) -> Assign:
    extra = f'{{"tools": ["{name.partition("-")[0]}"]}}'
    sample = Sample(0, "bench", (Message("user", "What is 6 times 7?"),), "42", extra_info_json=extra)
    return Assign(1, Attempt(name, 1), sample, "train", temperature=1.0, key=1)


async def ideal(load: Load) -> Figures:
    """Sleep for the same times in tasks that do nothing else."""
    figures = Figures()
    random_ = random.Random(1)

    async def episode(start: float) -> None:
        await asyncio.sleep(start)
        for _ in range(ROUNDS * load.turns):
            begin = time.perf_counter()
            durations = draw(load, random_)
            for seconds in durations:
                await asyncio.sleep(seconds)
            figures.overhead.append(time.perf_counter() - begin - sum(durations))

    wall = time.perf_counter()
    cpu = time.process_time()
    await asyncio.gather(*map(episode, starts(load, load.episodes)))
    figures.wall = time.perf_counter() - wall
    figures.turns = ROUNDS * load.episodes * load.turns
    figures.cpu = (time.process_time() - cpu) / figures.turns

    return figures


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tool-seconds", type=float, default=0.5)
    parser.add_argument("--turn-seconds", type=float, default=1.0)
    options = parser.parse_args()

    good = Load(options.episodes, options.turns, options.tool_seconds, options.turn_seconds)
    mixed = replace(good, bad=max(len(BAD), good.episodes // 5))
    print("| | overhead per turn, median ms | p99 ms | CPU per turn, ms | turns/s |\n|---|---|---|---|---|")

    failed: list[str] = []
    for label, play, load in (("ideal", ideal, good), ("asyncrl", run, good), ("with bad tools", run, mixed)):
        figures = asyncio.run(play(load))
        failed += figures.failed
        print(figures.row(label), flush=True)

    for detail in failed[:5]:
        print(f"failed: {detail}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
