"""Episodes with a sandbox go on after a crash: from snapshots on the same machine, else tools run again."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import RunConfig
from asyncrl.engines.base import Request
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.rewards import RewardError, in_loop
from asyncrl.rollout.worker import run
from asyncrl.tools import load_tools, snapshots, toolbox
from asyncrl.tools.snapshots import Snapshots
from asyncrl.types import FailReason, TurnReply
from asyncrl.wire.messages.shared import Attempt, Stop
from asyncrl.wire.messages.worker import Failed, Finished, Generated, Record, Records, Replied
from asyncrl.wire.sockets import Endpoints
from tests.fakes import worker as fake
from tests.fakes.chat import call
from tests.fakes.chatml import save_tiny_chat_model
from tests.fakes.coordinator import FakeCoordinator
from tests.fakes.episodes import TurnBench
from tests.fakes.forked import FORKED
from tests.fakes.images import small_image
from tests.fakes.worker import sample

LOST = toolbox.RESTORED_NOTE.strip()
RECORDS = 14  # of an episode of ShellEngine or CountingEngine
RANDOM = "cat /proc/sys/kernel/random/uuid | tee -a log"


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(snapshots, "PARENT", tmp_path / "asyncrl")
    return tmp_path / "asyncrl"


def shell(command: str) -> str:
    return call("shell", json.dumps({"command": command}))


def python(code: str) -> str:
    return call("python", json.dumps({"code": code}))


class SandboxBench(TurnBench):
    """An episode with a sandbox tool. With `lose` the worker is lost after the replies to the last turn."""

    def __init__(self, *turns: str, tool: str = "workspace", **options: Any) -> None:
        super().__init__(turns, tool_timeout=30.0, max_tokens=100_000)
        self.tools = load_tools([tool], {tool: {"require": "", **options}})
        self.context.snapshots = Snapshots("run", 1 << 30)
        self._left = list(turns)
        self._last = len(turns) - 1
        self._lost = asyncio.Event()
        self.engine.script = self._script

    def _script(self, request: Request) -> str:
        if len(self._left) == 1:
            self.engine.gate.clear()  # there is no turn after this one
        return self._left.pop(0)

    async def _send(self, records: Records, frames: Sequence[bytes]) -> None:
        await super()._send(records, frames)
        if any(isinstance(record, Replied) and record.turn == self._last for record, _ in records.counted):
            self._lost.set()

    def lose(self) -> list[bytes]:
        """Play until the crash; returns what is recorded."""

        async def main() -> None:
            playing = asyncio.create_task(self.run())
            await self._lost.wait()
            playing.cancel()
            await asyncio.wait([playing])

        asyncio.run(main())
        return self.record

    @property
    def replies(self) -> list[str]:
        """As they were posted."""
        pairs = zip(self.sent, self.frames, strict=True)
        turn_replies = [
            msgspec.msgpack.decode(f[0], type=TurnReply) for r, f in pairs if isinstance(r, Replied)
        ]
        return [reply.content for turn in turn_replies for reply in turn.replies]


def test_files_are_there_and_no_command_runs_twice(parent: Path) -> None:
    first = SandboxBench(shell(RANDOM), shell(RANDOM))
    recorded = first.lose()
    rest = SandboxBench(shell("cat log"), shell("echo again"), "done")
    rest.finished(recorded)
    assert rest.replies == ["\n".join((*first.replies, LOST)), "again"]
    assert [path for path in parent.rglob("*") if path.is_file()] == []


def test_calls_without_durable_replies_run_once_more_where_they_have_not_run() -> None:
    first = SandboxBench(shell(RANDOM), shell(RANDOM))
    recorded = first.lose()
    rest = SandboxBench(shell("cat log"), "done")
    rest.finished([*recorded[:-1], b""])
    again, log = rest.replies
    assert again.endswith(LOST) and again.split()[0] != first.replies[1]
    assert log.split() == [first.replies[0], again.split()[0]]


@pytest.mark.parametrize(
    ("reason", "kept"), [(FailReason.TESTS_FAILED_TO_RUN, True), (FailReason.REWARD_ERROR, False)]
)
def test_snapshots_stay_for_a_next_attempt_that_goes_on(parent: Path, reason: FailReason, kept: bool) -> None:
    def reward(**_: Any) -> float:
        raise RewardError("no", reason)

    bench = SandboxBench(shell(RANDOM), "done")
    bench.context.reward = EpisodeReward([in_loop(reward)], 60.0)
    asyncio.run(bench.run())
    assert isinstance(last := bench.sent[-1], Failed) and last.reason is reason
    assert bool([path for path in parent.rglob("*") if path.is_file()]) is kept


def test_only_the_turns_after_the_newest_snapshot_run_again() -> None:
    first = SandboxBench(shell(RANDOM), shell(RANDOM), shell("echo x >> log; wc -l < log"), snapshots=2)
    rest = SandboxBench(shell("cat log"), "done", snapshots=2)
    rest.finished(first.lose())
    assert rest.replies == ["\n".join((*first.replies[:2], "x", LOST))]


@pytest.mark.parametrize(
    ("options", "reply"),
    [({"tool": "python"}, "41"), ({}, LOST)],
)
def test_variables_are_there_only_where_all_runs_again(options: dict[str, Any], reply: str) -> None:
    first = SandboxBench(python("x = 41"), python("x + 1"), **options)
    rest = SandboxBench(python("x"), "done", **options)
    rest.finished(first.lose())
    assert rest.replies[0].endswith(reply) and ("NameError" in rest.replies[0]) == (reply == LOST)


def test_all_runs_again_where_the_rest_needs_what_is_lost() -> None:
    turns = python("x = 41"), shell("echo x >> log"), python("x + 1")
    first = SandboxBench(*turns, snapshots=2)
    rest = SandboxBench(python("x"), shell("cat log"), "done", snapshots=2)
    rest.finished(first.lose())
    assert rest.replies == ["41", "x"]


def test_on_another_machine_tools_run_again(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command, ends in ((RANDOM, Failed), ("echo x >> log", Finished)):
        recorded = SandboxBench(shell(command)).lose()
        monkeypatch.setattr(snapshots, "PARENT", parent.parent / f"other-{ends.__name__}")
        rest = SandboxBench(shell("cat log"), "done")
        end = rest.play(recorded)
        if ends is Failed:
            assert isinstance(end, Failed) and end.reason is FailReason.NOT_REPEATED
        else:
            assert isinstance(end, Finished) and rest.replies == ["x"]
        monkeypatch.setattr(snapshots, "PARENT", parent)


def test_the_setup_runs_again_over_the_files() -> None:
    setup = "data = [1, 2]\nopen('made', 'a').write('s')"
    extra = {"tools_kwargs": {"python": {"create_kwargs": {"setup": setup}}}}
    first = SandboxBench(shell("cp made kept; rm made"))
    rest = SandboxBench(python("data, open('made').read(), open('kept').read()"), "done")
    for bench in (first, rest):
        bench.sample = msgspec.structs.replace(bench.sample, extra_info_json=json.dumps(extra))
    rest.finished(first.lose())
    assert rest.replies == [f"([1, 2], 's', 's')\n{LOST}"]


def test_files_of_an_image_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    monkeypatch.setenv("ASYNCRL_IMAGES", str(tmp_path / "images"))
    small_image(tmp_path / "images")
    first = SandboxBench(shell(f"rm /usr/bin/dd && echo x > /etc/motd && {RANDOM} && id -un"), image="small")
    rest = SandboxBench(shell("cat /etc/motd log; ls /usr/bin/dd; id -un"), "done", image="small")
    rest.finished(first.lose())
    name, user = first.replies[0].split()
    assert rest.replies[0].startswith(f"x\n{name}\nls: ") and rest.replies[0].endswith(f"{user}\n{LOST}")


def test_what_is_too_much_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    first = SandboxBench(shell("echo x >> log"), shell("head -c 5000 /dev/zero > big; wc -c big"))
    first.context.snapshots = Snapshots("run", 2000)
    with caplog.at_level("INFO", "asyncrl.tools"):
        recorded = first.lose()
    assert "could not take a snapshot of Workspace: snapshots would take more than 2000 bytes" in caplog.text
    rest = SandboxBench(shell("cat log; wc -c big"), "done")
    rest.finished(recorded)
    assert rest.replies == [f"x\n5000 big\n{LOST}"]


# A worker that is killed again and again


class Ledger(FakeCoordinator):
    """Keeps what is durable of each episode, as a store does."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts: dict[str, Attempt] = {}
        self.durable: dict[str, list[list[bytes]]] = {}
        self.ends: dict[str, Finished | Failed] = {}
        self.records = 0

    def issue(self, uid: str) -> None:
        """Assign an episode, or what is left of it."""
        number = self.attempts[uid].attempt + 1 if uid in self.attempts else 0
        frames = [frame for turn in self.durable.setdefault(uid, []) for frame in turn]
        self.attempts[uid] = Attempt(uid, number)
        self.assign(uid, sample(), frames, attempt=number)

    def work(self, seconds: float) -> None:
        """Serve for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.poller.wait(left)
            self._drain()

    def follow(self, records: int, more: float) -> None:
        """Serve until so many records have come, and `more` of the time that each of them took."""
        began = time.monotonic()
        wanted = self.records + records
        self.until(lambda: self.records >= wanted or len(self.ends) == len(self.durable), "records")
        self.work(more * (time.monotonic() - began) / max(1, records))

    def replies(self, uid: str) -> list[str]:
        turns = [
            msgspec.msgpack.decode(frames[1], type=TurnReply) for frames in self.durable[uid] if frames[1]
        ]
        return [reply.content for turn in turns for reply in turn.replies]

    def _handle(self, peer: bytes, message: Any, frames: list[bytes]) -> None:
        super()._handle(peer, message, frames)
        if not isinstance(message, Record) or message.attempt != self.attempts[message.attempt.uid]:
            return
        self.records += 1
        turns = self.durable[message.attempt.uid]
        match message:
            case Generated():
                turns[message.turn :] = [[frames[0], b""]]
            case Replied():
                turns[message.turn][1] = frames[0]
            case Finished() | Failed():
                self.ends[message.attempt.uid] = message


def work(config: bytes, endpoints: Endpoints, parent: Path) -> None:
    logging.disable()
    snapshots.PARENT = parent
    sys.exit(run(msgspec.json.decode(config, type=RunConfig), endpoints, 0, secrets.token_hex(4)))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("engine", "every", "kills"), [("ShellEngine", 1, 200), ("CountingEngine", 3, 100)])
def test_kills_leave_each_effect_once(
    engine: str, every: int, kills: int, parent: Path, tmp_path: Path
) -> None:
    """With a snapshot every turn no recorded command runs twice: its reply would be another one."""
    tools = {"tools": ["shell"], "tool_args": {"shell": {"require": "", "snapshots": every}}}
    rollout = {**tools, "max_new_tokens": 300, "max_tokens": 6000, "tool_timeout": 60.0}
    engine_config = {"name": f"tests.fakes.worker:{engine}"}
    config = fake.config(save_tiny_chat_model(tmp_path), tmp_path, engine=engine_config, rollout=rollout)
    hub = Ledger()
    draw = random.Random(7)
    live = set[str]()
    issued = 0
    for kill in range(kills + 1):
        hub.hellos = 0
        child = FORKED.Process(target=work, args=(msgspec.json.encode(config), hub.endpoints, parent))
        child.start()
        hub.join()
        for uid in live:
            hub.issue(uid)
        while len(live) < 3 and kill < kills:
            live.add(uid := f"e{(issued := issued + 1)}")
            hub.issue(uid)
        if kill < kills:
            hub.follow(draw.randint(0, RECORDS), draw.random())
        else:
            hub.until(lambda: len(hub.ends) == len(hub.durable), "ends")
            hub.send(Stop("end of the test"))
            child.join()
        child.kill()
        child.join()
        hub.work(0.05)
        live -= hub.ends.keys()
    hub.close()
    assert len(hub.ends) == issued
    for uid, end in hub.ends.items():
        assert isinstance(end, Finished), end
        *replies, last = [reply.splitlines() for reply in hub.replies(uid)]
        lines = [line for line in last if not line.startswith("[")]
        assert lines == ["0", "1", "2", "3", "4", *(reply[0] for reply in replies if engine == "ShellEngine")]
    assert sum(end.attempt.attempt for end in hub.ends.values()) > kills
    print(
        len(hub.ends),
        "episodes",
        sum(LOST in reply for uid in hub.ends for reply in hub.replies(uid)),
        "restored",
    )
    # What is left is of episodes whose worker was killed between their durable end and the removal.
    left = {path.name for path in (parent / "snapshots").glob("*/*")}
    assert left <= hub.ends.keys() and len(left) <= kills / 10
    assert (parent / "snapshots").exists()
