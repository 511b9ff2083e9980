"""Verdicts on engines in any order of events: the real coordinator and store, played workers and launcher.

The workers have embedded engines. The launcher replaces a process when it is asked to, perhaps much later.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.records import State
from asyncrl.config import parse
from asyncrl.coordinator import loop, state
from asyncrl.coordinator.engines import VERDICTS_KEY
from asyncrl.coordinator.loop import Coordinator
from asyncrl.coordinator.mismatches import Mismatches
from asyncrl.data import Samples
from asyncrl.types import EpisodeResult, EpisodeStats, PolicyVersion
from asyncrl.weights.manifest import LogprobGaps, Probe, WeightsRef
from asyncrl.wire.addresses import Listeners, incarnation_of
from asyncrl.wire.messages.shared import (
    Attempt,
    Loaded,
    LoadWeights,
    ObserverHello,
    ProbeGap,
    Replace,
    WireMessage,
)
from asyncrl.wire.messages.trainer import Probed, Published, ScoredSamples, SurprisalSums, TrainerHello
from asyncrl.wire.messages.worker import Assign, Finished, Generated, Records, WorkerHello
from asyncrl.wire.sockets import Endpoints
from tests.fakes.data import rows, stored
from tests.unit.buffer.machine import turn_payload

OBSERVER = b"observer/0/o"
TRAINER = b"trainer/0/t"
PROBE = Probe(((1, 2),), ((-1.0,),), LogprobGaps(1e-6, 1e-6, 1e-6))
REQUEST_PERIOD = 60.0  # twice launch.lease

HONEST = "honest"
WRONG_WEIGHTS = "wrong weights"  # fails comparisons of the probe
WRONG_SAMPLING = "wrong sampling"  # passes them, and fails the test of its samples


class Crash(BaseException):
    """The coordinator ends here, as by kill -9."""


class PlayedHub:
    """In place of the coordinator's end of a channel."""

    refused_count = 0

    def __init__(self) -> None:
        self.arriving: deque[tuple[bytes, WireMessage, list[bytes]]] = deque()
        self.sent: deque[tuple[bytes, WireMessage]] = deque()

    def receive(self) -> tuple[bytes, WireMessage, list[bytes]] | None:
        return self.arriving.popleft() if self.arriving else None

    def send(self, peer: bytes, message: WireMessage, frames: Sequence[bytes] = ()) -> bool:
        self.sent.append((peer, message))
        return True

    def close(self) -> None: ...


@dataclass
class Process:
    """A worker's process. `is_proven`: a comparison that it failed is durable. `landed_count`: its episodes
    that had landed until then."""

    index: int
    incarnation: str
    nature: str
    is_proven: bool = False
    landed_count: int = 0
    is_connected: bool = False
    offers: deque[LoadWeights] = field(default_factory=deque)
    attempts: deque[Attempt] = field(default_factory=deque)
    record_count: int = 0

    @property
    def peer(self) -> bytes:
        return f"rollout/{self.index}/{self.incarnation}".encode()


class Play:
    """A run whose events come one by one; the invariants are checked after each of them."""

    def __init__(self, root: Path, hubs: list[PlayedHub], natures: tuple[str, str]) -> None:
        self.config = parse(
            {
                "name": "t",
                "run_dir": str(root),
                "model": {"path": "m"},
                "data": {"train": "d"},
                "weights": {"on_mismatch": "replace"},
                "rollout": {"workers": 2},
                "buffer": {"groups_per_batch": 4, "episodes_per_group": 2, "max_staleness": 4},
            }
        )
        self.hubs = hubs
        self.start_count = 0
        self.step = 0
        self.requests: list[str] = []  # incarnations that the launcher was asked to replace
        self.replaced_lines: list[str] = []  # of the log
        self.uncompared: set[int] = set()  # indices whose last process was proven wrong
        self.rounding_is_known = False
        self.processes = [self.new_process(index, nature) for index, nature in enumerate(natures)]
        self.start_coordinator()
        self.control(TRAINER, TrainerHello(0, 1, incarnation_of("launch", 1), 0))
        self.publish()
        self.score_probe()
        self.control(OBSERVER, ObserverHello())
        for process in self.processes:
            self.say_hello(process)

    # -- processes -------------------------------------------------------------------------------------

    def new_process(self, index: int, nature: str) -> Process:
        self.start_count += 1
        return Process(index, incarnation_of("launch", self.start_count), nature)

    def start_coordinator(self) -> None:
        self.hubs.clear()
        self.coordinator = Coordinator(self.config, Endpoints("control", "bulk"), "launch")
        self.rounding_is_known = False
        for process in self.processes:
            process.is_connected = False
            process.offers.clear()

    def restart_coordinator(self) -> None:
        self.coordinator.close()
        self.start_coordinator()

    def crash_coordinator(self) -> None:
        """End the coordinator in a pass that is not committed, and start the next."""

        def commit(*_: object) -> bool:
            raise Crash

        self.coordinator.journal.commit_pass = commit  # type: ignore[method-assign]
        line_count = len(self.replaced_lines)
        with pytest.raises(Crash):
            self.run_pass()
        del self.replaced_lines[line_count:]  # the pass has not happened
        self.restart_coordinator()

    def deliver(self, peer: bytes, message: WireMessage) -> None:
        """Deliver a message of the coordinator, and check that the peer may get it."""
        if peer == OBSERVER and isinstance(message, Replace):
            self.requests.append(message.incarnation)

        for process in self.processes:
            if process.peer == peer and isinstance(message, LoadWeights):
                assert not process.is_proven, "an engine that is proven wrong was sent a version"
                process.offers.append(message)
            if process.peer == peer and isinstance(message, Assign):
                assert not process.is_proven, "an engine that is proven wrong was given an episode"
                assert process.index not in self.uncompared, "a successor was given an episode too early"
                process.attempts.append(message.attempt)

    # -- passes ----------------------------------------------------------------------------------------

    def run_pass(self, seconds: float = 0.05) -> None:
        self.coordinator.run_pass(self.coordinator._last_pass_at + seconds)
        for hub in self.hubs:
            while hub.sent:
                self.deliver(*hub.sent.popleft())

    def control(self, peer: bytes, message: WireMessage) -> None:
        """Have the coordinator read a message in the next pass, with the records that have arrived."""
        self.hubs[0].arriving.append((peer, message, []))
        self.run_pass()

    def publish(self) -> None:
        ref = WeightsRef(PolicyVersion(1, self.step), self.config.run_dir)
        self.step += 1
        self.control(TRAINER, Published(ref, 0.0, 0.0))

    def score_probe(self) -> None:
        self.control(TRAINER, Probed(PolicyVersion(1, self.step - 1), PROBE))

    # -- what a process does ---------------------------------------------------------------------------

    def say_hello(self, process: Process) -> None:
        process.is_connected = True
        hello = WorkerHello(process.index, process.incarnation, 8, pid=1, acked=process.record_count)
        self.control(process.peer, hello)

    def lose(self, process: Process) -> None:
        """The process is silent for longer than its lease."""
        process.is_connected = False
        self.coordinator.workers.peers.remove_process(process.peer, "silent", self.coordinator._last_pass_at)
        self.run_pass()

    def load(self, process: Process, is_lost: bool = False) -> None:
        """Answer the oldest offer. `is_lost`: the coordinator ends in the pass that reads the answer."""
        if not process.offers:
            return
        offer = process.offers.popleft()
        probe_gap = None
        if offer.probe is not None:
            mean_gap = 0.5 if process.nature == WRONG_WEIGHTS else 0.0
            probe_gap = ProbeGap(mean_gap, mean_gap, mean_gap, tokens=512, rounding=PROBE.rounding)
        answer = Loaded(offer.ref, "train", "sum", 0.1, probe_gap=probe_gap, uncompared=offer.probe is None)

        if is_lost:
            self.hubs[0].arriving.append((process.peer, answer, []))
            self.crash_coordinator()
            return

        if process.is_connected and probe_gap is not None and not process.is_proven:
            self.rounding_is_known = True
            self.uncompared.discard(process.index)
            if process.nature == WRONG_WEIGHTS:
                self.note_verdict(process)
        self.control(process.peer, answer)

    def score_samples(self, process: Process) -> None:
        """The trainer has scored samples of the process."""
        deviation = -500.0 if process.nature == WRONG_SAMPLING else 0.0
        sums = SurprisalSums(
            process.peer.decode(), 1024, deviation, squares=1024.0, variance=1024.0, median_gap=0.0
        )
        is_judged = process.is_connected and self.rounding_is_known and not process.is_proven
        if is_judged and process.nature == WRONG_SAMPLING:
            self.note_verdict(process)
        self.control(TRAINER, ScoredSamples(PolicyVersion(1, self.step - 1), (sums,)))

    def note_verdict(self, process: Process) -> None:
        """The next pass will find the process wrong."""
        process.is_proven = True
        process.landed_count = self.count_landed(process)
        self.uncompared.add(process.index)

    def finish_episode(self, process: Process) -> None:
        """Send the records of an episode, which the next pass reads after the control messages."""
        if not (process.attempts and process.is_connected):
            return
        attempt = process.attempts.popleft()
        turn = Generated(process.record_count + 1, attempt, 0)
        end = Finished(process.record_count + 2, attempt, EpisodeResult(1.0), EpisodeStats(1))
        process.record_count += 2
        self.hubs[1].arriving.append((process.peer, Records(((turn, 1), (end, 0))), [turn_payload(0)]))

    def count_landed(self, process: Process) -> int:
        episodes = self.coordinator.ledger.buffer.episodes.values()
        return sum(
            episode.state is State.LANDED and episode.worker == process.incarnation for episode in episodes
        )

    # -- the launcher ----------------------------------------------------------------------------------

    def obey_requests(self, nature: str) -> None:
        """Replace the processes that the launcher was asked to replace, by processes of this nature."""
        for process in list(self.processes):
            if process.incarnation in self.requests:
                self.processes[process.index] = self.new_process(process.index, nature)
                self.say_hello(self.processes[process.index])

    # -- invariants ------------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """True once an engine is wrong again after it was replaced: the run has to stop."""
        fatal = self.coordinator.engines.mismatches.fatal
        assert not fatal or "replacing its process once did not help" in fatal
        assert not fatal or self.coordinator.lifecycle.ending
        return bool(fatal)

    def check(self) -> None:
        mismatches = self.coordinator.engines.mismatches
        unchanged = Mismatches(self.config).encode_verdicts("launch")
        stored = self.coordinator.journal.store.reader.meta(VERDICTS_KEY) or unchanged
        assert stored == mismatches.encode_verdicts("launch"), "a change was not stored"
        for process in self.processes:
            assert mismatches.may_load(process.peer) is not process.is_proven, (
                "a verdict was lost, or is wrong"
            )
            if process.incarnation in self.requests:
                assert process.is_proven, "an honest engine is replaced"
            if process.is_proven:
                assert self.count_landed(process) == process.landed_count, (
                    "an episode landed after the verdict"
                )
            if process.is_proven and process.is_connected:
                assert any(f"worker {process.index} " in wait for wait in self.coordinator.fleet.waits)

    def check_requests(self) -> None:
        """Check that the launcher hears of each process that is proven wrong, after all contacts are back."""
        self.control(OBSERVER, ObserverHello())
        for process in self.processes:
            self.say_hello(process)
        self.run_pass(REQUEST_PERIOD)
        for process in self.processes:
            if process.is_proven:
                assert process.incarnation in self.requests, "nobody was asked to replace the process"


class ReplacedLines(logging.Handler):
    """Collects the log lines that name an engine to be replaced."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("replacing "):
            self._lines.append(record.getMessage())


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> list[PlayedHub]:
    """The ends of the channels that coordinators have opened, control before bulk."""
    opened_hubs: list[PlayedHub] = []
    samples = stored(rows(50))

    def open_hub(*_: object) -> PlayedHub:
        opened_hubs.append(PlayedHub())
        return opened_hubs[-1]

    monkeypatch.setattr(Samples, "open", lambda path: samples)
    monkeypatch.setattr(loop, "Gate", lambda *_: SimpleNamespace(close=lambda: None, listeners=Listeners()))
    monkeypatch.setattr(loop, "Hub", open_hub)
    return opened_hubs


@pytest.fixture
def root() -> Iterator[Path]:
    """In main memory: thousands of fsyncs must not wait for a disk."""
    shared = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="verdicts-", dir=shared if shared.is_dir() else None))
    yield directory
    shutil.rmtree(directory)


NATURES = st.sampled_from([HONEST, WRONG_WEIGHTS, WRONG_SAMPLING])
# Frequent events are named more than once.
EVENTS = st.sampled_from(
    [
        *3 * ["load"],
        *2 * ["hello", "probe", "finish", "samples"],
        *["publish", "lose", "launcher", "restart", "lost load", "observer"],
    ]
)


def play_event(play: Play, event: str, index: int, nature: str) -> None:
    process = play.processes[index]
    match event:
        case "load":
            play.load(process)
        case "hello":
            play.say_hello(process)
        case "probe":
            play.score_probe()
        case "finish":
            play.finish_episode(process)
        case "samples":
            play.score_samples(process)
        case "publish":
            play.publish()
        case "lose":
            play.lose(process)
        case "launcher":
            play.obey_requests(nature)
        case "restart":
            play.restart_coordinator()
        case "lost load":
            play.load(process, is_lost=True)
        case "observer":
            play.control(OBSERVER, ObserverHello())
        case _:
            raise AssertionError(event)


@pytest.mark.parametrize("examples", [20, pytest.param(1000, marks=pytest.mark.full)])
def test_verdicts_hold_in_any_order_of_events(root: Path, hubs: list[PlayedHub], examples: int) -> None:
    """An engine that is proven wrong gets no version and no episode, and no episode of it lands; nor does its
    successor get an episode before it is compared. No honest engine is replaced. Each verdict leads to one
    request, of one line, to replace the process, also if the coordinator is restarted."""

    @given(
        natures=st.tuples(NATURES, NATURES),
        events=st.lists(st.tuples(EVENTS, st.integers(0, 1), NATURES), min_size=10, max_size=40),
    )
    @settings(deadline=None, max_examples=examples, derandomize=True, database=None)
    def play_all(natures: tuple[str, str], events: list[tuple[str, int, str]]) -> None:
        run_dir = root / str(next(numbers))
        play = Play(run_dir, hubs, natures)
        log_handler = ReplacedLines(play.replaced_lines)
        state.log.addHandler(log_handler)
        try:
            for event in events:
                play_event(play, *event)
                if play.is_stopped:
                    return
                play.check()
            play.check_requests()
            assert len(play.replaced_lines) == len(set(play.requests))
        finally:
            state.log.removeHandler(log_handler)
            play.coordinator.close()
            shutil.rmtree(run_dir)

    numbers = itertools.count()
    play_all()
