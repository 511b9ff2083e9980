"""Servers with supervisors, as the coordinator sees them: who is updated when, and who may be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import parse
from asyncrl.coordinator.engines import MAX_REFUSALS, TABLES_PER_SECOND, EngineHandler
from asyncrl.coordinator.mismatches import MIN_TOKENS
from asyncrl.coordinator.state import RunState
from asyncrl.coordinator.versions import MAX_PROBES, VersionLedger
from asyncrl.store.runstore import RunStore
from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.weights.manifest import LogprobGaps, Probe, WeightsRef
from asyncrl.wire.messages.engine import SupervisorHeartbeat, SupervisorHello
from asyncrl.wire.messages.shared import Loaded, LoadWeights, ProbeGap, ProbeSamples, SampledSequence, Stop
from asyncrl.wire.messages.trainer import Probed, ScoredSamples, SurprisalSums
from asyncrl.wire.messages.worker import EngineEntry, Engines, EngineUse
from tests.fakes.mail import Sent
from tests.unit.buffer.machine import make

A = b"engine/0/a"
B = b"engine/1/b"
WORKER = b"rollout/0/w"
HEALTHY = SupervisorHeartbeat(healthy=True, starting=False)

ROUNDING = LogprobGaps(1e-6, 1e-6, 1e-6)


class EngineSetup:
    """Two supervisors whose servers are up; times are passed in."""

    def __init__(
        self, run_dir: Path, scorers: dict[str, Any] | None = None, lora_rank: int = 0, **weights: Any
    ) -> None:
        config = parse(
            {
                "name": "t",
                "model": {"path": "m", "lora_rank": lora_rank},
                "data": {"train": "d"},
                "engine": {"name": "sglang", "servers": 2},
                "launch": {"lease": 10.0},
                "weights": weights,
                "scorers": scorers or {},
            }
        )
        buffer, batches = make(rows=1)
        self.sent = Sent()
        self.state = RunState(
            config,
            run_dir,
            [],
            buffer,
            batches,
            VersionLedger(),
            RunStore(run_dir),
            self.sent,  # type: ignore[arg-type]
        )
        self.handler = EngineHandler(self.state, 0.0)
        for index, peer in enumerate((A, B)):
            self.join(peer, index)

    def join(self, peer: bytes, index: int, url: str = "http://host") -> None:
        self.handler.welcome_supervisor(
            peer, SupervisorHello(index, peer.decode()[-1], url, pid=1, engine="sglang 0"), 0.0
        )
        self.beat(peer, 0.0)

    def beat(self, peer: bytes, now: float, beat: SupervisorHeartbeat = HEALTHY) -> None:
        self.handler.supervisors.note_contact(peer, now)
        self.handler.note_heartbeat(peer, beat, now)

    def publish(self, version: int) -> WeightsRef:
        ref = WeightsRef(PolicyVersion(1, version), f"v{version}")
        assert self.state.fleet.versions.set_newest(ref)
        return ref

    def pushed(self, now: float = 0.0) -> dict[bytes, int]:
        """Versions sent at a tick, by supervisor."""
        self.handler.push_newest(now)
        return {peer: message.ref.version.step for peer, message in self.sent.take(LoadWeights)}

    def ack(self, peer: bytes, ref: WeightsRef, checksum: str = "sum", error: str = "", **more: Any) -> None:
        self.handler.confirm_load(peer, Loaded(ref, "train", checksum, 0.1, error, **more), 0.0)

    def serve(self, version: int) -> WeightsRef:
        """Both servers load a version."""
        ref = self.publish(version)
        while pushed := self.pushed():
            for peer in pushed:
                self.ack(peer, ref)
        return ref

    def version(self, needed: int) -> int | None:
        """That an episode which needs one starts on."""
        versions = self.handler.usable_versions([WORKER])[WORKER]
        return next((version for version in versions if version >= needed), None)

    def table(self) -> list[tuple[int, bool, str]]:
        return [(entry.version.step, entry.healthy, entry.lane) for entry in self.handler.server_table()]


@pytest.fixture
def setup(tmp_path: Path) -> EngineSetup:
    return EngineSetup(tmp_path)


class Script:
    """Events of two servers, A and B. X is the one that a case sees first, Y the other.

    `serve 4`: both load version 4; `publish 5`. `at 1 X5`: this is sent at 1 s, and no more; `at 1 ?`:
    whatever. `acks X`: it has loaded the newest; `refuses X`: cannot; `differs X`: has loaded other weights.
    `beats X 9`; `down X`: it is not healthy; `hello A`: out of silence. `pins 5`: validation sets one aside,
    or `all`, or `waits`; `releases`. `pinned X`: it alone is; `here X`: only its supervisor is connected.
    `starts 2 5`: an episode that needs version 2 starts on 5; `starts 0`: on none. `table 4+ 5v 0-`: these
    may sample in training, in the validation, not at all.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.names = {"A": A, "B": B}

    def play(self, events: str) -> None:
        for event in events.split("; "):
            self.act(*event.split())

    def peer(self, name: str, known_peer: bytes = b"") -> bytes:
        if name == "X" and known_peer and "X" not in self.names:
            self.names |= {"X": known_peer, "Y": B if known_peer == A else A}
        return self.names[name]

    def act(self, verb: str, argument: str = "", *more: str) -> None:
        setup = self.setup
        handler = self.setup.handler
        versions = self.setup.state.fleet.versions
        match verb:
            case "serve":
                setup.serve(int(argument))
            case "publish":
                setup.publish(int(argument))
            case "at":
                pushed_peers = setup.pushed(float(argument))
                wanted = {
                    self.peer(one[0], next(iter(pushed_peers), b"")): int(one[1:] or 0)
                    for one in more
                    if one != "?"
                }
                assert pushed_peers == wanted or "?" in more
            case "acks" | "refuses" | "differs":
                assert versions.ref is not None
                error = "no such file" if verb == "refuses" else ""
                setup.ack(self.peer(argument), versions.ref, "wrong" if verb == "differs" else "sum", error)
            case "beats":
                setup.beat(self.peer(argument), float(more[0]))
            case "down":
                setup.beat(self.peer(argument), 0.0, SupervisorHeartbeat(healthy=False, starting=False))
            case "hello":
                setup.join(self.peer(argument), "AB".index(argument))
            case "pins":
                assert handler.reserve_servers(PolicyVersion(1, int(argument)), "all" in more) is (
                    "waits" not in more
                )
            case "releases":
                handler.release_servers()
            case "pinned":
                (one,) = [peer for peer, engine in versions.engines.items() if engine.reserved_for_validation]
                assert one == self.peer(argument, one)
            case "here":
                assert [one.peer for one in handler.supervisors] == [self.peer(argument)]
            case "starts":
                assert setup.version(int(argument)) == (int(more[0]) if more else None)
                assert handler.can_sample is bool(more)
            case "table":
                signs = {(True, "train"): "+", (True, "eval"): "v"}
                table = [f"{step}{signs.get((healthy, lane), '-')}" for step, healthy, lane in setup.table()]
                assert sorted(table) == sorted((argument, *more))
            case _:
                raise AssertionError(verb)


CASES = {
    "a server gets no work before it holds a published version; neither waits for the other": (
        "table 0- 0-; starts 0; publish 0; at 0 A0 B0; acks A; table 0+ 0-; starts 0 0"
    ),
    "servers are updated one after another; new episodes may start on the slower one": (
        "serve 0; publish 1; at 1 X1; at 2; starts 0 0; acks X; starts 0 0; at 3 Y1; acks Y; starts 0 1"
    ),
    "versions that come faster than pushes reach both in turn": (
        "serve 0; publish 1; at 1 X1; acks X; publish 2; at 2 Y2; acks Y; publish 3; at 3 X3; acks X; "
        "publish 4; at 4 Y4"
    ),
    "one that does not confirm holds the other up for one deadline (60 s)": (
        "serve 0; publish 1; at 1 X1; beats X 20; beats Y 20; at 20; beats X 40; beats Y 40; at 40; "
        "beats X 60; beats Y 60; at 60; beats A 62; beats B 62; at 62 ?; at 62.1 Y1"
    ),
    "a version that cannot be loaded is sent again later": (
        "publish 0; at 0 A0 B0; refuses A; at 0.5; at 1.1 A0"
    ),
    "a server with other weights is not used": (
        "publish 0; at 0 A0 B0; acks A; differs B; table 0+ 0-; at 1 B0; acks B; table 0+ 0+"
    ),
    "one that reloads after a failure still holds the other off: unhealthy is not idle": (
        "serve 0; publish 1; at 1 X1; down X; at 2"
    ),
    "a hello out of silence does not push again": "serve 0; hello A; at 1",
    "one that cannot keep up does not hold up new episodes": (
        "serve 0; publish 5; at 1 X5; acks X; starts 2 5"
    ),
    "validation pins one of two; training does not wait for it": (
        "serve 4; pins 4; table 4v 4+; publish 5; at 1 X5; acks X; table 4v 5+; at 2; starts 1 5; releases; "
        "at 3 Y5"
    ),
    "when training is over validation has all": (
        "serve 4; publish 5; at 1 X5; acks X; pins 5 all; table 4+ 5v; at 2 Y5; acks Y; pins 5 all; "
        "table 5v 5v; releases; table 5+ 5+"
    ),
    "validation waits for its version": "serve 4; publish 5; pins 5 waits; at 1 X5; acks X; pins 5",
    "a single one is not pinned": "serve 4; beats A 9; at 10.1; pins 4; table 4+",
    "one of two that is away for a moment does not leave validation unpinned": (
        "serve 4; down B; pins 4; table 4v 4-"
    ),
    "one that is being loaded is not set aside": "serve 4; publish 5; at 1 X5; pins 4; pinned Y",
    "a server of validation that dies is replaced by the other, shared with training": (
        "serve 4; pins 4; pinned X; beats Y 9; at 10.1; here Y; pins 4; table 4+"
    ),
}


@pytest.mark.parametrize("events", CASES.values(), ids=CASES)
def test_two_servers(setup: EngineSetup, events: str) -> None:
    Script(setup).play(events)


def test_without_rolling_all_are_updated_at_once(tmp_path: Path) -> None:
    Script(EngineSetup(tmp_path, rolling=False)).play("serve 0; publish 1; at 1 A1 B1")


def test_a_server_that_was_started_samples_only_after_the_probe(setup: EngineSetup) -> None:
    """Each server is compared with the trainer before its first token; the version that it loaded first came
    without a probe. A newer one without is not loaded meanwhile; the others load it."""
    versions = setup.state.fleet.versions
    probe = Probe(((1, 2),), ((-1.0,),))
    first = setup.publish(0)
    assert setup.pushed() == {A: 0, B: 0} and not versions.lacks_probe(first.version)
    setup.ack(A, first)
    setup.ack(B, first, uncompared=True)
    assert [healthy for _, healthy, _ in setup.table()] == [True, False]
    assert versions.lacks_probe(first.version) and setup.pushed() == {}
    second = setup.publish(1)
    assert setup.pushed(1.0) == {A: 1}
    setup.ack(A, second)
    versions.add_probe(Probed(first.version, probe), 2.0)
    assert setup.pushed(2.0) == {} and versions.lacks_probe(second.version)
    versions.add_probe(Probed(second.version, probe), 3.0)
    setup.handler.push_newest(3.0)  # the one that samples compares, too, and goes on
    order = LoadWeights(second, "train", probe)
    assert sorted(setup.sent.take(LoadWeights)) == [(A, order), (B, order)]
    assert [healthy for _, healthy, _ in setup.table()] == [True, False]
    setup.ack(B, second)
    assert [healthy for _, healthy, _ in setup.table()] == [True, True]
    assert [step for step in (1, 2, 50, 51) if versions.lacks_probe(PolicyVersion(1, step))] == [2, 50, 51]


def test_tokens_of_an_engine_without_scores_are_judged_by_the_probe_s_rounding(tmp_path: Path) -> None:
    setup = EngineSetup(tmp_path, on_mismatch="replace")
    ref = setup.serve(3)
    probe = Probe(((1, 2),), ((-1.0,),), rounding=LogprobGaps(1e-6, 1e-6, 1e-6))
    setup.state.fleet.versions.add_probe(Probed(ref.version, probe), 1.0)
    setup.ack(A, ref)
    setup.handler.mismatches.judge_tokens(4, 1.5, MIN_TOKENS)
    assert setup.handler.mismatches.count == 1


def test_samples_of_engines_are_held_and_judged_unless_the_engine_is_gone_or_to_be_replaced(
    tmp_path: Path,
) -> None:
    setup = EngineSetup(tmp_path, on_mismatch="replace")
    ref = setup.serve(3)
    gap = ProbeGap(0.0, 0.0, 0.0, tokens=512, rounding=LogprobGaps(1e-6, 1e-6, 1e-6))
    setup.ack(A, ref, probe_gap=gap)
    samples = ProbeSamples(ref.version, (SampledSequence((1, 2), (-1.0,)),))
    for peer in (A, b"engine/7/gone"):
        setup.handler.note_samples(peer, samples)
    assert [engine.engine for engine in setup.state.fleet.samples.take(ref.version)] == [A.decode()]

    def scored(peer: bytes, deviation: float) -> ScoredSamples:
        sums = SurprisalSums(peer.decode(), 1024, deviation, squares=1024.0, variance=1024.0, median_gap=0.0)
        return ScoredSamples(ref.version, (sums,))

    mismatches = setup.handler.mismatches
    rolled_back = PolicyVersion(ref.version.epoch, ref.version.step + 1)
    setup.handler.note_samples(A, ProbeSamples(rolled_back, (), wrong_label=ref.version.step))
    setup.handler.judge_samples(scored(b"engine/7/gone", -500.0))
    setup.handler.judge_samples(scored(B, -20.0))
    assert mismatches.count == 0 and mismatches.sample_tokens == 1024
    setup.handler.judge_samples(scored(A, -500.0))
    setup.handler.judge_samples(scored(A, -500.0))  # on their way at the same time
    assert mismatches.count == 1 and len(mismatches.replacements) == 1 and not mismatches.fatal
    assert setup.table() == [(3, True, "train")], "turns that run on the other server go on elsewhere"

    # Neither a load that was under way nor a new probe gives it work again, and it is sent no version.
    setup.ack(A, ref)
    setup.state.fleet.versions.add_probe(Probed(ref.version, Probe(((1, 2),), ((-1.0,),))), 1.0)
    setup.ack(A, ref, probe_gap=gap)
    assert setup.table() == [(3, True, "train")] and A not in setup.pushed(1.0)
    assert mismatches.count == 1 and not mismatches.fatal


def test_a_server_is_compared_again_under_a_restarted_coordinator(setup: EngineSetup) -> None:
    """The coordinator before may have ended in the very pass that brought a bad comparison."""
    ref = setup.serve(3)
    setup.handler = EngineHandler(setup.state, 0.0)
    setup.join(A, 0)
    assert setup.pushed() == {A: 3}
    setup.ack(A, ref, uncompared=True)
    assert setup.table() == [(0, False, "train")] and setup.state.fleet.versions.lacks_probe(ref.version)
    setup.state.fleet.versions.add_probe(Probed(ref.version, Probe(((1, 2),), ((-1.0,),))), 1.0)
    assert A in setup.pushed(1.0)
    setup.ack(A, ref)
    assert setup.table() == [(3, True, "train")]
    setup.ack(A, setup.publish(4), uncompared=True)
    assert setup.table() == [(4, True, "train")], "later versions need no probe"


def test_two_servers_that_are_both_wrong_are_replaced_at_once_and_serve_again(tmp_path: Path) -> None:
    setup = EngineSetup(tmp_path, on_mismatch="replace")
    ref = setup.serve(3)
    for peer in (A, B):
        gap = ProbeGap(1.0, 1.0, 1.0, tokens=512, rounding=ROUNDING)
        setup.ack(peer, ref, probe_gap=gap)
    assert setup.handler.comparison_waits == [
        f"engine {index} waits to be replaced, because it differs from the trainer" for index in range(2)
    ]
    assert setup.handler.missing_server and setup.pushed(2.0) == {}
    assert [peer for peer, *_ in setup.handler.mismatches.due_replacements(2.0, ())] == [A, B]

    successors = [b"engine/0/c", b"engine/1/d"]
    for index, peer in enumerate(successors):
        setup.join(peer, index)
    assert setup.pushed(3.0) == dict.fromkeys(successors, 3)
    for peer in successors:
        setup.ack(peer, ref, uncompared=True)
    assert setup.handler.comparison_waits == [
        f"engine {index} waits to be compared with the trainer" for index in range(2)
    ]
    assert setup.handler.missing_server
    for peer in successors:
        setup.ack(peer, ref, probe_gap=ProbeGap(0.0, 0.0, 0.0, tokens=512, rounding=ROUNDING))
    assert setup.table() == [(3, True, "train")] * 2 and setup.handler.comparison_waits == []


def test_a_replaced_engine_is_compared_by_another_probe(tmp_path: Path) -> None:
    """While no engine samples, the trainer stays at the version with which the first process has failed."""
    setup = EngineSetup(tmp_path, on_mismatch="replace")
    versions = setup.state.fleet.versions
    ref = setup.serve(3)
    failed = Probed(ref.version, Probe(((1, 2),), ((-1.0,),)))
    versions.add_probe(failed, 1.0)
    rounding = LogprobGaps(1e-6, 1e-6, 1e-6)
    setup.ack(B, ref, probe_gap=ProbeGap(1e-6, 1e-6, 1e-6, tokens=512, rounding=rounding))
    assert versions.find_probe(ref.version) == failed.probe, "an engine that passes needs no other probe"

    setup.ack(A, ref, probe_gap=ProbeGap(0.5, 0.5, 0.5, tokens=512, rounding=rounding))
    assert not versions.lacks_probe(ref.version), "no engine waits for a probe yet"
    versions.add_probe(failed, 2.0)  # the trainer repeats its newest probe
    assert versions.find_probe(ref.version) is None

    versions.engines[A].uncompared = True
    assert versions.lacks_probe(ref.version)
    other = Probed(ref.version, Probe(((3, 4),), ((-1.0,),)))
    versions.add_probe(other, 3.0)
    assert versions.find_probe(ref.version) == other.probe and not versions.lacks_probe(ref.version)


def test_a_server_is_compared_where_writing_takes_longer_than_a_step(setup: EngineSetup) -> None:
    """When a version can be loaded, the trainer has scored the probe with newer ones already."""
    versions = setup.state.fleet.versions
    first = setup.publish(0)
    assert setup.pushed() == {A: 0, B: 0}
    setup.ack(A, first)
    setup.ack(B, first, uncompared=True)
    for step in range(1, 6):
        if versions.lacks_probe(PolicyVersion(1, step)):
            versions.add_probe(Probed(PolicyVersion(1, step), Probe(((step,),), ((-1.0,),))), 1.0)
        if step > 2:
            setup.publish(step - 2)
        setup.handler.push_newest(1.0)
        for peer, order in setup.sent.take(LoadWeights):
            if peer == B:
                assert order.probe == Probe(((order.ref.version.step,),), ((-1.0,),))
            setup.ack(peer, order.ref)
    assert versions.engines[B].acked.step > 0 and len(versions.recent_probes) <= 3


def test_probes_of_versions_that_are_never_written_do_not_pile_up(setup: EngineSetup) -> None:
    versions = setup.state.fleet.versions
    for step in range(1000):
        versions.add_probe(Probed(PolicyVersion(1, step), Probe(((1,),), ((-1.0,),))), 1.0)
    assert len(versions.recent_probes) == MAX_PROBES and versions.recent_probes[-1].version.step == 999


def test_a_version_is_not_given_up_while_an_engine_tries_it_for_the_first_time(setup: EngineSetup) -> None:
    ref = setup.publish(0)
    assert setup.pushed() == {A: 0, B: 0}
    for again in range(MAX_REFUSALS):
        setup.ack(A, ref, error="cut off")
        assert not setup.handler.pop_load_failure()
        assert setup.pushed(2.0 * again + 1) == {A: 0}
    setup.ack(B, ref, error="cut off")
    assert setup.handler.pop_load_failure() == "no engine can load v0: cut off"


def test_a_silent_supervisor_is_lost_and_its_successor_starts_without_versions(setup: EngineSetup) -> None:
    setup.serve(3)
    setup.beat(B, 9.0)
    setup.handler.push_newest(10.1)
    assert [supervisor.peer for supervisor in setup.handler.supervisors] == [B]
    setup.join(b"engine/0/c", 0, url="")
    assert setup.table() == [(3, True, "train"), (0, False, "train")]
    assert setup.pushed(0.0) == {}  # its server is not up yet
    setup.join(b"engine/0/c", 0)
    assert setup.pushed(0.1) == {b"engine/0/c": 3}


class Tables:
    """What workers know of the servers."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.now = 0.0
        self.known: dict[bytes, dict[str, EngineEntry]] = {}

    def send(self, *workers: bytes, after: float = 10.0, lost: bytes = b"") -> int:
        """Entries that left; the messages to one worker may be lost."""
        self.now += after
        self.setup.handler.send_table(workers, self.now)
        mail = self.setup.sent.take(Engines)
        self.setup.sent.unreachable = {peer for peer, _ in mail if peer == lost}
        for peer, message in mail:
            if peer != lost:
                self.known[peer] = message.updated_table(self.known.get(peer, {}))
        return sum(len(message.entries) for _, message in mail)

    def know(self, *workers: bytes) -> bool:
        table = sorted(self.setup.handler.server_table(), key=lambda entry: entry.name)
        return all(sorted(self.known[peer].values(), key=lambda e: e.name) == table for peer in workers)


def test_workers_get_what_changes_of_the_table_and_all_of_it_after_a_hello(setup: EngineSetup) -> None:
    second_worker = b"rollout/1/x"
    tables = Tables(setup)
    assert tables.send(WORKER) == 2 and tables.know(WORKER)
    assert tables.send(WORKER) == 0
    ref = setup.serve(0)
    assert tables.send(WORKER, second_worker) == 4 and tables.know(WORKER, second_worker)
    setup.beat(A, 0.0, SupervisorHeartbeat(healthy=False, starting=False))
    assert tables.send(WORKER, second_worker) == 2 and tables.know(WORKER, second_worker)
    setup.handler.resend_to_worker(WORKER, NO_VERSION, 0.0)
    assert tables.send(WORKER, second_worker) == 2 and tables.know(WORKER, second_worker)
    setup.beat(A, 0.0)
    assert tables.send(WORKER, second_worker, lost=second_worker) == 2 and not tables.know(second_worker)
    assert tables.send(WORKER, second_worker) == 2 and tables.know(WORKER, second_worker)
    assert setup.handler.reserve_servers(ref.version, False)
    setup.handler.supervisors.remove_process(B, "gone", 0.0)
    tables.setup.handler._started_at = -100.0  # its supervisor is not waited for
    tables.send(WORKER, second_worker)
    assert tables.know(WORKER, second_worker) and len(tables.known[WORKER]) == 1


def test_changes_of_the_table_that_come_fast_go_out_together(setup: EngineSetup) -> None:
    workers = [f"rollout/{number}/w".encode() for number in range(512)]
    tables = Tables(setup)
    pause = 512 / TABLES_PER_SECOND
    tables.send(*workers)
    setup.serve(0)
    assert tables.send(*workers) == 2 * 512
    setup.beat(A, 0.0, SupervisorHeartbeat(healthy=False, starting=False))
    assert tables.send(*workers, after=0.5 * pause) == 0
    setup.beat(A, 0.0)
    ref = setup.serve(1)
    assert tables.send(*workers, after=0.6 * pause) == 2 * 512 and tables.know(*workers)
    setup.ack(A, setup.publish(2))
    assert tables.send(*workers, after=0.0) == 0
    assert setup.handler.reserve_servers(ref.version, False)  # its episodes follow at once
    assert tables.send(*workers, after=0.0) > 0 and tables.know(*workers)


def test_what_workers_had_from_each_server_is_counted(setup: EngineSetup) -> None:
    setup.serve(2)
    first = [EngineUse("engine 0", requests=2, prompt_tokens=60, cached_tokens=15)]
    more = EngineUse("engine 0", 4, prompt_tokens=70, cached_tokens=25, retracted=3)
    later = [more, EngineUse("engine 7", requests=9)]
    setup.handler.add_use([], first)
    setup.handler.add_use(first, later)
    setup.handler.add_use(later, later)
    setup.handler.add_use([], [EngineUse("engine 0", requests=1, prompt_tokens=30, cached_tokens=25)])
    gauges = setup.handler.gauges()
    assert gauges["engine/0/requests"] == 5 and gauges["engine/0/cache_hit"] == 0.5
    assert gauges["engine/0/retracted"] == 3 == setup.state.ledger.live_limit.kv_cap.retracted_requests
    assert gauges["rollout/prefix_cache_hit"] == 0.5
    assert gauges["engine/1/requests"] == 0 and gauges["engine/1/version"] == 2
    assert gauges["async/engines"] == 2 and not any("engine/7" in name for name in gauges)


def test_the_memory_of_the_fullest_server_is_what_counts(setup: EngineSetup) -> None:
    setup.serve(2)
    for peer, use in ((A, 0.9), (B, 0.7), (A, 0.3), (B, None)):
        setup.beat(peer, 1.0, msgspec.structs.replace(HEALTHY, kv_use=use))
    gauges = setup.handler.gauges()
    assert (gauges["engine/0/kv_use"], gauges["engine/1/kv_use"]) == (0.3, 0.7)
    assert setup.state.ledger.live_limit.kv_cap.mean_use == 0.7


def test_a_restarted_coordinator_waits_for_the_supervisors_before_it_tells_of_them(
    setup: EngineSetup,
) -> None:
    setup.handler.supervisors.remove_process(B, "gone", 0.0)
    setup.join(b"engine/2/c", 2)  # which has joined the run: B is still to come
    setup.handler.send_table([WORKER], 1.0)
    assert setup.sent.take(Engines) == []
    setup.handler.send_table([WORKER], 10.1)  # the lease is over: B is gone
    assert len(setup.sent.take(Engines)) == 1


def test_servers_of_scorers_are_in_the_table_and_count_for_nothing_else(tmp_path: Path) -> None:
    setup = EngineSetup(tmp_path, {"reward": {"path": "m"}, "teacher": {"urls": ["http://a", "http://b"]}})
    scorer = b"scorer/2/s"
    setup.handler.welcome_supervisor(scorer, SupervisorHello(2, "s", "", pid=1), 0.0)
    setup.beat(scorer, 0.0, SupervisorHeartbeat(healthy=False, starting=True))
    setup.handler.welcome_supervisor(scorer, SupervisorHello(2, "s", "http://b", pid=1), 0.0)
    setup.beat(scorer, 0.0)
    last = setup.handler.server_table()[-1]
    assert last == EngineEntry("scorer teacher 1", "http://b", "s", NO_VERSION, True, lane="teacher")
    setup.publish(1)
    assert scorer not in setup.pushed() and not setup.handler.can_sample
    setup.handler.add_use((), (EngineUse(last.name, requests=3, prompt_tokens=40, cached_tokens=30),))
    gauges = setup.handler.gauges()
    assert gauges["scorer/teacher/cache_hit"] == 0.75 and gauges["scorer/teacher/servers"] == 1
    assert gauges["scorer/reward/servers"] == 0 and "rollout/prefix_cache_hit" not in gauges
    setup.handler.push_newest(11.0)  # silent for longer than its lease
    assert len(setup.handler.server_table()) == 0


def test_engines_score_for_a_scorer_without_servers_of_its_own(tmp_path: Path) -> None:
    """Those that are not set aside for validation, whatever version they hold."""
    setup = EngineSetup(tmp_path, {"reference": {"urls": ["engines"]}}, lora_rank=2, adapters=True)
    setup.serve(1)
    assert setup.handler.missing_server == ""
    setup.state.fleet.versions.engines[B].reserved_for_validation = True
    *_, last = setup.handler.server_table()
    lent = EngineEntry("scorer reference engine 0", "http://host", "a", NO_VERSION, True, lane="reference")
    assert last == lent and [entry.lane for entry in setup.handler.server_table()] == [
        "train",
        "eval",
        "reference",
    ]
    setup.handler.add_use((), (EngineUse(last.name, requests=3, prompt_tokens=40, cached_tokens=30),))
    gauges = setup.handler.gauges()
    assert gauges["scorer/reference/cache_hit"] == 0.75 and gauges["scorer/reference/servers"] == 1
    setup.handler.add_use((), (EngineUse("scorer reference engine 1", requests=1, prompt_tokens=10),))
    assert setup.handler.gauges()["scorer/reference/turns"] == 4  # it did that before it was set aside
    assert "rollout/prefix_cache_hit" not in gauges
    setup.publish(2)
    setup.beat(A, 0.0, SupervisorHeartbeat(healthy=False, starting=False))
    *_, last = setup.handler.server_table()
    assert last == msgspec.structs.replace(lent, healthy=False)


def test_new_episodes_wait_for_a_server_of_each_scorer_that_reads_turns(tmp_path: Path) -> None:
    teachers = {"teacher": {"urls": ["http://a", "http://b"]}, "teacher_b": {"path": "m", "sources": ["b"]}}
    setup = EngineSetup(tmp_path, {"reward": {"path": "m"}, **teachers})
    assert setup.handler.missing_server == "a server that has loaded a published version"
    setup.serve(1)
    for index, lacks in ((1, "a scorers.teacher_b server"), (3, "")):
        peer = f"scorer/{index}/s".encode()
        assert setup.handler.missing_server
        setup.handler.welcome_supervisor(peer, SupervisorHello(index, "s", "http://a", pid=1), 0.0)
        setup.beat(peer, 0.0)
        assert setup.handler.missing_server == lacks
    setup.beat(peer, 0.0, SupervisorHeartbeat(healthy=False, starting=True))
    assert setup.handler.missing_server == "a scorers.teacher_b server" and setup.handler.can_sample


def test_a_scorer_that_no_key_names_is_asked_to_end(tmp_path: Path) -> None:
    setup = EngineSetup(tmp_path, {"teacher": {"path": "m"}})
    setup.handler.welcome_supervisor(b"scorer/1/s", SupervisorHello(1, "s", "http://a", pid=1), 0.0)
    setup.beat(b"scorer/1/s", 0.0)
    assert len(setup.sent.take(Stop)) == 1 and len(setup.handler.server_table()) == 2
