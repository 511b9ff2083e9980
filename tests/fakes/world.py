"""A run in one thread: the real coordinator and store, played workers, trainer and launcher, and their clock.

Everything happens in turns. What a peer and the coordinator send each other arrives some time later, or
never; `point` is called wherever the coordinator or a checkpoint writes or sends something, and may end it.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.buffer import payloads
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.config import RunConfig, parse
from asyncrl.coordinator import fleet, ledger, loop, reporting
from asyncrl.coordinator.held_out import RECORD_PREFIX
from asyncrl.coordinator.loop import Coordinator
from asyncrl.observe.files import read_rows
from asyncrl.observe.held_out import GREEDY, SAMPLED, HeldOut, uid_prefix
from asyncrl.store import checkpoints, runstore, schema, segments
from asyncrl.store.copies import restore_newest
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StorePaused, SupersededError
from asyncrl.types import Turn
from asyncrl.wire.addresses import Listeners, incarnation_of
from asyncrl.wire.messages.shared import ObserverHello, Replace, RunEnd, WireMessage
from asyncrl.wire.sockets import Endpoints
from tests.fakes.data import give, rows
from tests.fakes.played import PlayedRank, PlayedTrainer, PlayedWorker
from tests.fakes.power import DurableFiles

LEASE = 5.0
OBSERVER = b"observer/0/o"
Mail = defaultdict[bytes, deque[tuple[float, tuple[WireMessage, list[bytes]]]]]
MOST_TURNS = 6000


class Crash(BaseException):
    """The process ends here, as by kill -9."""


class PlayedHub:
    """In place of the coordinator's end of a channel."""

    refused_count = 0

    def __init__(self, world: World, bulk: bool) -> None:
        self.world = world
        self.bulk = bulk

    def send(self, peer: bytes, message: WireMessage, frames: Sequence[bytes] = ()) -> bool:
        self.world.point("send")
        return self.world.deliver(peer, message, list(frames), self.bulk)

    def receive(self) -> tuple[bytes, Any, list[bytes]] | None:
        arriving = self.world.arriving[self.bulk]
        now = self.world.now
        due_peers = [peer for peer, queue in arriving.items() if queue and queue[0][0] <= now]
        if not due_peers:
            return None
        self.world.point("receive")
        peer = self.world.dice.choice(due_peers)
        return peer, *arriving[peer].popleft()[1]

    def close(self) -> None: ...


def damage(database: Path) -> None:
    """Overwrite the middle of a database, and drop its log."""
    size = database.stat().st_size
    with database.open("r+b") as file:
        file.seek(size // 4)
        file.write(b"\xff" * (size // 2))
    database.with_name(f"{database.name}-wal").unlink(missing_ok=True)


class World:
    """A run, to its end. `dice` decides everything; `happen` is called before each turn, with the world."""

    def __init__(
        self,
        root: Path,
        seed: object,
        happen: Callable[[World], None],
        power: bool = False,
        shifts: bool = False,
    ) -> None:
        self.dice = random.Random(str(seed))
        self.now = 100.0
        self.turns = 0
        self.root = root
        self.run_dir = root / "t"
        self.happen = happen

        self.run_dir.mkdir(parents=True)
        self.files = DurableFiles(root) if power else None
        self.crash_in: int | None = None  # calls of `point` until the coordinator ends
        self.full_until = 0.0  # the disk is full, or the store is locked
        self.arriving: tuple[Mail, Mail] = defaultdict(deque), defaultdict(deque)  # control, bulk
        self.launches = self.starts = self.spikes = self.restored = 0
        self.counted = not power  # tokens: no record of a landing is lost
        self.abandoned = 0  # tokens
        self.continued = 0  # held-out episodes that were given to a worker with their durable turns
        self.asleep_until = 0.0  # the coordinator, stopped
        self.power_goes = False  # with the coordinator's end
        self.zombie: Coordinator | None = None  # stopped, replaced, and to go on
        self.log: list[str] = []
        self.config = self._config(random.Random(f"ranks {seed}").choice([1, 2]), shifts)
        self.seen: Counter[str] = Counter()  # turns in each shift
        self.end: RunEnd | None = None

    def _config(self, ranks: int, shifts: bool) -> RunConfig:
        dice = self.dice
        validated = dice.random() < 0.5
        return parse(
            {
                "name": "t",
                "run_dir": str(self.root),
                "model": {"path": "m"},
                "data": {"train": "d", "test": "d" if validated else ""},
                "total_steps": 4,
                "buffer": {
                    "groups_per_batch": 2,
                    "episodes_per_group": 2,
                    "filter_zero_variance": dice.random() < 0.3,
                    "on_stale": dice.choice(["mask", "hold", "drop"]),
                    "max_staleness": dice.choice([0, 1, 4]),
                    "shift_fill": random.Random(f"fill {self.root.name}").choice(["auto", 0.0, 1.0]),
                },
                "engine": {"colocated": 2 * shifts},
                "checkpoint": {"every": dice.choice([1, 2]), "keep": 2},
                "trainer": {
                    "micro_batch_tokens": dice.choice([40, 100]),
                    "on_spike": "rollback",
                    "ranks": 2 if shifts else ranks,
                },
                "launch": {"lease": LEASE},
                "rollout": {"workers": 2},
                "validation": {"samples": 2, "every": dice.choice([0, 2]) if validated else 0},
                "store": {"keep_bytes": dice.choice([0, 1000, 1 << 30])},
            }
        )

    @contextmanager
    def patched(self) -> Iterator[None]:
        """In place of clocks, sockets and data."""
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        with pytest.MonkeyPatch.context() as patch:
            give(patch, rows(9))
            for module in (loop, fleet, ledger, reporting):
                patch.setattr(module, "time", clock)
            patch.setattr(schema, "OPEN_DEADLINE", 0.0)
            patch.setattr(runstore, "MAX_FORGOTTEN", 2)
            patch.setattr(segments, "MAX_REMOVED", 1)
            patch.setattr(loop, "Hub", lambda endpoint, unions, gate: PlayedHub(self, endpoint == "bulk"))

            patch.setattr(
                loop,
                "Gate",
                lambda *arguments: SimpleNamespace(close=lambda: None, members={}, listeners=Listeners()),
            )

            self._count_tokens(patch)
            patch.setattr(runstore.RunStore, "commit", self._around(runstore.RunStore.commit, paused=True))
            patch.setattr(
                segments.SegmentWriter, "append_record", self._around(segments.SegmentWriter.append_record)
            )
            for module in (runstore, segments):
                patch.setattr(module, "fsync", self._around(segments.fsync))

            patch.setattr(checkpoints.HashedFile, "close", self._around(checkpoints.HashedFile.close))
            if self.files is None:
                yield
            else:
                with self.files.recorded():
                    yield

    def _count_tokens(self, patch: pytest.MonkeyPatch) -> None:
        """Count tokens in the store, in the coordinator's transactions: `sampled` as turns become durable,
        `delivered` as their episodes land."""
        on_turn = reporting.Reporter.count_turn
        on_landed = reporting.Reporter.note_landed

        def add(store: runstore.RunStore, key: str, tokens: int) -> None:
            both = "ON CONFLICT(key) DO UPDATE SET value=value+excluded.value"
            store._add_statement(f"INSERT INTO meta VALUES(?, ?) {both}", (key, str(tokens)))

        def sampled(reporter: reporting.Reporter, tokens: int) -> None:
            on_turn(reporter, tokens)
            add(reporter.journal.store, "sampled", tokens)

        def delivered(reporter: reporting.Reporter, episode: EpisodeRecord, sample: int, answer: str) -> None:
            on_landed(reporter, episode, sample, answer)
            add(reporter.journal.store, "delivered", 10 * episode.turns)

        def cut_back(buffer: ReplayBuffer, episode: EpisodeRecord, turns: Sequence[Turn]) -> None:
            self.counted &= episode.state is not State.LANDED  # the episode will land again
            payloads.cut_back(buffer, episode, turns)

        patch.setattr(reporting.Reporter, "count_turn", sampled)
        patch.setattr(reporting.Reporter, "note_landed", delivered)
        patch.setattr(ledger, "cut_back", cut_back)

    def _around(self, function: Callable[..., Any], paused: bool = False) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.point("before")
            if paused and self.now < self.full_until:
                raise StorePaused("no room")
            result = function(*arguments, **named)
            self.point("after")
            return result

        return call

    def point(self, where: str) -> None:
        """The coordinator may end here."""
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in <= 0:
                self.crash_in = None
                raise Crash

    # -- mail ------------------------------------------------------------------------------------------

    def send(
        self,
        peer: bytes,
        message: WireMessage,
        frames: list[bytes],
        bulk: bool = False,
        held_until: float = 0.0,
    ) -> None:
        """From a peer to the coordinator, after `held` at the earliest."""
        self.arriving[bulk][peer].append((max(held_until, self._delayed()), (message, frames)))

    def deliver(self, peer: bytes, message: WireMessage, frames: list[bytes], bulk: bool) -> bool:
        """Deliver a message from the coordinator to a peer. False: the peer is not there."""
        if peer == OBSERVER:
            self._observe(message)
            return True

        for link in (each_peer.link for each_peer in self.peers):
            if link.peer == peer:
                if self.now >= link.cut_until:
                    link.inbox[bulk].append((max(link.held_until, self._delayed()), (message, frames)))
                return True

        return False

    def _delayed(self) -> float:
        """Return the arrival time of a message: in order on each channel, and in any order between the two
        channels."""
        return self.now + self.dice.choice([0.0, 0.0, 0.1, 0.5])

    @property
    def peers(self) -> list[PlayedWorker | PlayedRank]:
        return [*self.workers, *self.trainer.ranks]

    def _observe(self, message: WireMessage) -> None:
        if isinstance(message, RunEnd):
            self.end = message
        if isinstance(message, Replace):
            self.log.append(f"{self.now:.1f} replaced: {message.role} {message.reason}")
            if message.role == "trainer" and message.incarnation in ("", self.trainer.incarnation):
                self.start_trainer()
            for worker in self.workers:
                if message.role == "rollout" and message.incarnation in ("", worker.incarnation):
                    self.start_worker(worker.index)

    # -- processes -------------------------------------------------------------------------------------

    def launch(self) -> None:
        """All processes anew, after a power cut or a launcher's end."""
        self.launches += 1
        self.arriving[0].clear(), self.arriving[1].clear()
        self.full_until = self.asleep_until = 0.0
        self.workers = [self._worker(index) for index in range(2)]
        self.start_trainer()
        self.start_coordinator()

    def _incarnation(self) -> str:
        self.starts += 1
        return incarnation_of(f"launch{self.launches}", self.starts)

    def _worker(self, index: int) -> PlayedWorker:
        return PlayedWorker(self, index, self._incarnation())

    def start_worker(self, index: int) -> None:
        self.workers[index] = self._worker(index)

    def start_trainer(self) -> None:
        self.trainer = PlayedTrainer(self, self._incarnation())

    def start_coordinator(self) -> None:
        """Start the coordinator, which may end while starting."""
        while True:
            try:
                self.coordinator = Coordinator(
                    self.config, Endpoints("control", "bulk"), f"launch{self.launches}"
                )
                self.send(OBSERVER, ObserverHello(), [])
                return
            except Crash:
                self.log.append(f"{self.now:.1f} ended while it started")

    def lose_coordinator(self) -> None:
        """Lose the coordinator's connections, and the file handles that the kernel would close."""
        self._forget(self.coordinator)
        self.arriving[0].clear(), self.arriving[1].clear()
        for peer in self.peers:
            peer.link.disconnect()
        self.now += 1.0
        self.start_coordinator()

    def cut_power(self) -> None:
        """Leave of the files the parts that a crash of the machine may leave."""
        assert self.files is not None
        self.files.cut_power(self.dice)
        self._forget(self.coordinator)
        self.now += 10.0
        self.launch()

    def restore_store(self) -> None:
        """End all processes, damage the middle of run.db, and make the store anew from a copy."""
        state = self.coordinator.state
        copies = sorted((self.run_dir / "copies").iterdir())
        self._forget(self.coordinator)
        damage(self.run_dir / "run.db")

        if len(copies) > 1 and self.dice.random() < 0.3:
            damage(copies[-1] / "run.db")
        self.log += restore_newest(self.run_dir)
        self.restored += 1
        self.now += 10.0

        self.launch()
        now = self.coordinator.state
        assert now.journal.store.epoch > state.journal.store.epoch
        assert now.fleet.trainer_epoch > state.fleet.trainer_epoch

    def _forget(self, coordinator: Coordinator) -> None:
        """SQLite copies its log into the database when the last connection closes: not after a kill -9."""
        left = {path: path.read_bytes() for path in self.run_dir.glob("run.db*") if path.suffix != ".db-shm"}
        crash_in = self.crash_in
        self.crash_in = None
        coordinator.state.journal.store.close()
        coordinator.reporter._metrics_file.close()

        self.crash_in = crash_in
        for path in self.run_dir.glob("run.db*"):
            path.unlink()
        for path, data in left.items():
            path.write_bytes(data)

    # -- the run ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end. AssertionError: the run does not end."""
        with self.patched():
            self.launch()
            while not self.coordinator.is_over:
                self.turns += 1
                assert self.turns < MOST_TURNS, (
                    f"no end: {self.coordinator.state.fleet.waits} {self.log[-20:]}"
                )
                self._turn()
            self.crash_in = None
            self._forget(self.coordinator)

    def _turn(self) -> None:
        self.now += self.dice.choice([0.05, 0.1, 0.3])
        self.happen(self)

        for peer in self.peers:
            if self.now >= peer.link.asleep_until:
                try:
                    peer.tick()
                except Crash:  # a checkpoint was under way
                    self._check_end(by_trainer=True)
                    break

        self._one_side()
        if self.zombie is not None:
            self._wake_zombie(self.zombie)
        if self.now < self.asleep_until:
            return

        try:
            self.coordinator.run_pass(self.now)
            self.coordinator.state.journal.store.copies.wait_for_copy()
        except Crash:
            self._check_end()

    def _one_side(self) -> None:
        """Assert that engines and trainer never compute at once on the same devices."""
        shifts = self.coordinator.state.fleet.shifts
        if shifts is None:
            return
        self.seen[shifts.shift] += 1
        awake = [worker.index for worker in self.workers if not worker.asleep]
        assert not (awake and self.trainer.holds_devices), (
            f"both sides in {shifts.shift}: {awake}, {self.log[-20:]}"
        )

    def _check_end(self, by_trainer: bool = False) -> None:
        self.log.append(f"{self.now:.1f} {'the trainer' if by_trainer else 'the coordinator'} ended")
        if self.power_goes:
            self.power_goes = False
            self.log.append(f"{self.now:.1f} power cut")
            self.cut_power()
        elif by_trainer:
            self.start_trainer()
        else:
            self.lose_coordinator()

    def replace_coordinator(self) -> None:
        if self.zombie is None:
            self.zombie = self.coordinator
            self.coordinator.reporter._metrics_file.close()
            self.start_coordinator()

    def _wake_zombie(self, zombie: Coordinator) -> None:
        """Wake a coordinator that was replaced while stopped: the first write must tell it of its
        successor."""
        if self.now < self.full_until or self.crash_in is not None:
            return
        self.zombie = None
        zombie.state.journal.store.put_meta("written by", "a zombie")
        with pytest.raises(SupersededError):
            zombie.state.journal.persist()
        zombie.state.journal.store.close()

    # -- what must hold --------------------------------------------------------------------------------

    def check(self) -> None:
        """At the end. The model is the newest checkpoint's."""
        summary = json.loads((self.run_dir / "summary.json").read_bytes())
        assert summary["outcome"] == "completed", (summary["error"], self.log)
        assert summary["conserved"], (summary["flow"], self.log)
        flow = summary["flow"]
        checkpoints = self.trainer.checkpoints
        with checkpoints.open_file(checkpoints.steps()[0], "state") as file:
            trained = json.loads(file.read())

        assert flow["taken"] == flow["ready"] == flow["in_flight"] == 0, (flow, self.log)
        assert len(set(trained)) == len(trained) == flow["trained"], (flow, trained, self.log)
        again = runstore.RunStore(self.run_dir)
        counts = {status.value: count for status, count in again.reader.counts().items()}
        assert again.reader.trained_in_plans() == flow["trained"] == counts.get("trained", 0), self.log
        assert sum(counts.values()) == flow["issued"]

        if self.counted and not self.restored:
            sampled, delivered, abandoned = (
                int(again.reader.meta(key, "0")) for key in ("sampled", "delivered", ledger.ABANDONED_KEY)
            )
            assert sampled == delivered + abandoned, (sampled, delivered, abandoned, self.log)
            self.abandoned = abandoned

        if self.config.data.test:
            self._check_validations(summary["held_out"], again.reader)
        again.close()

    def _check_validations(self, flow: dict[str, int], read: RunReader) -> None:
        """Assert that each episode of the last validation is over, once, and that each begun episode has
        an account."""
        last = [HeldOut.from_uid(uid) for uid, _ in read.held_out(uid_prefix(4))]
        assert Counter((episode.row, episode.mode) for episode in last) == Counter(
            product(range(2), (SAMPLED, GREEDY))
        )
        assert not [*read.held_out(RECORD_PREFIX)] and not flow["in_flight"], flow
        assert flow["issued"] == flow["scored"] + flow["failed"], flow

        rows = [row for row in read_rows(self.run_dir) if "val-aux/episodes" in row]
        assert all(row["val-aux/episodes"] + row["val-aux/failed"] == len(last) for row in rows), rows
        assert rows and rows[-1]["training/step"] == 4
        needed = read.rows("SELECT count(*) FROM frames WHERE uid LIKE 'val%' AND NOT spare")
        assert needed == [(0,)], "nothing needs payloads of held-out episodes"

        listed = read.rows("SELECT uid FROM episodes WHERE kind='held out' AND step=4 ORDER BY uid")
        assert listed == [(uid,) for uid in sorted(episode.uid for episode in last)]
