"""A runner of episodes over a scripted engine, with an outbox whose receiver the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from asyncrl.conversation.turns import rows_of
from asyncrl.engines.base import Request
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.rewards.loading import in_loop
from asyncrl.rollout.context import EpisodeContext
from asyncrl.rollout.episode_run import EpisodeRun
from asyncrl.rollout.episode_runner import EpisodeRunner, Player
from asyncrl.rollout.images import WorkerImages
from asyncrl.rollout.samplers import LocalSampler
from asyncrl.rollout.turn_player import TurnPlayer
from asyncrl.runtime.activity import BusyTimer, Waits
from asyncrl.tools import Tool, Toolbox, tool
from asyncrl.types import Turn
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import (
    Assign,
    Failed,
    Finished,
    Generated,
    Record,
    Records,
    Replied,
    Sampled,
)
from asyncrl.wire.outbox import Outbox
from tests.fakes.chat import FakeChat, call, read, rules, sample
from tests.fakes.engine import ScriptedEngine
from tests.fakes.image_data import refuse_request
from tests.fakes.loop import Intervals, settle

SECONDS = 60.0  # seconds that a whole episode of a test may take
BAD = "<tool_call>{nonsense</tool_call>"


def look(what: str) -> str:
    """What the model writes to look."""
    return call("look", f'{{"what": "{what}"}}')


def looker(calls: list[str], **options: Any) -> Tool:
    """Return a tool that records its calls."""

    @tool(name="look", **options)
    async def look(what: str = "") -> str:
        """Look."""
        calls.append(what)
        return f"saw {what}"

    return look


class Bench:
    """Plays episodes by a script.

    `script` returns the text of a turn, from its request. `config`: see RolloutConfig. `earlier_seconds`: the
    seconds that an earlier attempt took.
    """

    earlier_seconds = 0.0

    def __init__(
        self, script: Callable[[Request], str], reward: Any, chat: FakeChat | None = None, **config: Any
    ) -> None:
        self.sent: list[Record] = []
        self.frames: list[list[bytes]] = []
        self.auto_ack = True
        self.oldest = 0
        self.sample = sample()
        self.engine = ScriptedEngine(script)
        self.waits = Waits()
        self.outbox = Outbox(self._send)
        episode_rules = rules(chat=chat, **{"episode_timeout": SECONDS, "reward_timeout": SECONDS, **config})
        judge = EpisodeReward([in_loop(reward)], episode_rules.config.reward_timeout)
        self.context = EpisodeContext(
            episode_rules,
            judge,
            self.outbox,
            self.waits,
            WorkerImages(refuse_request, self.waits),
            min_version=lambda: self.oldest,
        )

    def player(self, run: EpisodeRun) -> Player:
        raise NotImplementedError

    @cached_property
    def sampler(self) -> LocalSampler:
        timeline = Intervals()
        timed = self.waits, BusyTimer(timeline), timeline, SECONDS
        return LocalSampler("train", lambda: self.engine, *timed, engine=self.engine)

    def assign(self, lane: str = "train", **options: Any) -> Assign:
        assignment = {"temperature": 0.7, "key": 99, "seconds": self.earlier_seconds, **options}
        return Assign(1, Attempt("u", 1), self.sample, lane, **assignment)

    async def _send(self, records: Records, frames: Sequence[bytes]) -> None:
        for record, record_frames in records.with_frames(frames):
            self.sent.append(record)
            self.frames.append(record_frames)
        if self.auto_ack:
            self.outbox.acknowledge(self.sent[-1].seq)

    async def run(self, frames: Sequence[bytes] = (), **assigned: Any) -> None:
        """Play an episode to its end."""
        service = asyncio.create_task(self.outbox.run_sender())
        try:
            async with asyncio.timeout(SECONDS):
                await EpisodeRunner(self.context, self.player).run(
                    self.assign(**assigned), frames, self.sampler
                )
                await settle()
        finally:
            service.cancel()

    def play(self, frames: Sequence[bytes] = (), **assigned: Any) -> Finished | Failed:
        asyncio.run(self.run(frames, **assigned))
        assert [record.seq for record in self.sent] == list(range(1, len(self.sent) + 1))
        end = self.sent[-1]
        assert isinstance(end, Finished | Failed)
        return end

    def finished(self, frames: Sequence[bytes] = (), **assigned: Any) -> Finished:
        end = self.play(frames, **assigned)
        assert isinstance(end, Finished), end
        return end

    def failed(self, frames: Sequence[bytes] = (), **assigned: Any) -> Failed:
        end = self.play(frames, **assigned)
        assert isinstance(end, Failed), end
        return end

    @property
    def turns(self) -> list[Turn]:
        """Return the posted turns."""
        pairs = zip(self.sent, self.frames, strict=True)
        return [msgspec.msgpack.decode(f[0], type=Turn) for r, f in pairs if isinstance(r, Generated)]

    @property
    def rows(self) -> list[str]:
        return [read(ids) for ids in rows_of(self.turns)]

    @property
    def record(self) -> list[bytes]:
        """Return the turns and their replies as an Assign brings them."""
        frames: list[bytes] = []
        for record, sent in zip(self.sent, self.frames, strict=True):
            match record:
                case Generated():
                    frames += [sent[0], b""]
                case Replied():
                    frames[-1] = sent[0]

        return frames


def parts_of(bench: Bench) -> list[bytes]:
    """Return the posted parts of turns."""
    return [f[0] for r, f in zip(bench.sent, bench.frames, strict=True) if isinstance(r, Sampled)]


def right(**arguments: Any) -> float:
    return float(arguments["solution_str"] == str(arguments["ground_truth"]))


class TurnBench(Bench):
    """An episode turn by turn, with the tool `look`, and with an environment if there is one."""

    def __init__(
        self, turns: Sequence[str], reward: Any = right, environment: Any = None, **config: Any
    ) -> None:
        left = list(turns)
        super().__init__(
            lambda request: left.pop(0), reward, environment="fake" if environment else "", **config
        )
        self.calls: list[str] = []
        self.tools = {"look": looker(self.calls)}
        self.environment = environment

    def player(self, run: EpisodeRun) -> Player:
        rules = run.context.rules
        toolbox = Toolbox(self.tools, rules.config.tool_timeout, rules.chat.image_layout)
        return TurnPlayer(run, toolbox, self.environment)

    async def run(self, frames: Sequence[bytes] = (), **assigned: Any) -> None:
        await super().run(frames, **assigned)
        assert self.engine.released[-1:] == ["u/1"]
