"""Lease, waits, meter and lanes of a rollout worker."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from asyncrl.config import parse
from asyncrl.engines.base import EngineRefused, Request, Sampling
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.errors import EngineError
from asyncrl.rollout.samplers import MAX_FAILURES, LocalSampler
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.runtime.activity import ASLEEP, BusyTimer, Notifier, Waits
from asyncrl.runtime.liveness import Contact, ContactState
from asyncrl.runtime.probe_sampling import REQUESTS_AT_ONCE, SAMPLE_COUNT, ProbeSampling
from asyncrl.runtime.weight_loader import LOAD_TRIES
from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.weights.manifest import LogprobGaps, Probe, WeightsRef
from asyncrl.wire.messages.shared import Loaded, ProbeGap, ProbeSamples
from asyncrl.wire.sockets import Endpoints
from tests.fakes.chatml import save_tiny_chat_model
from tests.fakes.engine import ScriptedEngine
from tests.fakes.loop import Intervals, settle

REQUEST = Request("s", (1,), Sampling(8, (3,)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# -- lease -------------------------------------------------------------------------------------------


def test_a_lease_grows_quiet_expires_and_ends() -> None:
    contact = Contact(10.0, give_up=30.0, now=0.0)
    assert contact.contact_state(1.0) is ContactState.QUIET  # not welcomed yet
    contact.welcomed = True
    contact.message_arrived(1.0)
    expected = {
        6: ContactState.FINE,
        7: ContactState.QUIET,
        11: ContactState.QUIET,
        12: ContactState.EXPIRED,
        32: ContactState.GONE,
    }
    seen = {now: contact.contact_state(float(now)) for now in range(2, 33)}
    assert {now: seen[now] for now in expected} == expected
    contact.message_arrived(32.5)
    assert contact.contact_state(33.0) is ContactState.FINE


def test_time_spent_stopped_is_not_held_against_the_coordinator() -> None:
    contact = Contact(10.0, give_up=30.0, now=0.0)
    contact.welcomed = True
    assert contact.contact_state(100.0) is ContactState.FINE  # nobody read the mail for 100 s
    assert contact.contact_state(101.0) is ContactState.FINE


# -- waits and meter ---------------------------------------------------------------------------------


def test_the_oldest_wait_is_reported_once_it_lasts() -> None:
    clock = Clock()
    waits = Waits(clock)
    with waits.wait_named("tool a"):
        clock.now = 0.5
        assert waits.longest_wait() == ""
        with waits.wait_named("tool b"), waits.wait_named("tool a"):
            clock.now = 4.0
            assert waits.longest_wait() == "tool a (4 s, 2 episodes)"
    assert waits.longest_wait() == ""


def test_a_wait_is_in_time_up_to_its_own_deadline() -> None:
    clock = Clock()
    waits = Waits(clock)
    with waits.wait_named("weights v7"), waits.wait_named("tool slow", 900.0):
        clock.now = 899.0
        assert waits.within_deadline
        clock.now = 900.0
        assert not waits.within_deadline
    assert not waits.within_deadline


def test_overlapping_turns_are_one_busy_interval() -> None:
    """A wall clock that is set in between moves the intervals, and nothing else."""
    clock = Clock()
    timeline = Intervals()
    ahead = 0.0
    meter = BusyTimer(timeline, clock, wall=lambda: clock.now + ahead)
    clock.now = 1.0
    with meter.busy_span():
        clock.now = 2.0
        with meter.busy_span():
            clock.now = 3.0
        meter.flush()
        clock.now = 5.0
        ahead = -3600.0
        assert meter.seconds == (4.0, 1.0)
    clock.now = 9.0
    meter.flush()
    assert timeline.records == [("decode", 1.0, 3.0), ("decode", -3597.0, -3595.0)]
    assert meter.seconds == (4.0, 5.0)


# -- lanes -------------------------------------------------------------------------------------------


class Fixture:
    """A started lane and the answers it gave."""

    def __init__(self, pinned: bool = False, built: bool = True) -> None:
        self.engine = ScriptedEngine(lambda request: "hello")
        self.answers: list[Loaded] = []
        self.heard = Notifier()
        self.waits = Waits(Clock())
        self.builds = 0
        timeline = Intervals()
        first = None if pinned or not built else self.engine
        self.lane = LocalSampler(
            "lane",
            self.build,
            self.waits,
            BusyTimer(timeline),
            timeline,
            60.0,
            keeps_version=pinned,
            engine=first,
        )
        self.task = asyncio.create_task(self.lane.run(self.report))

    def build(self) -> ScriptedEngine:
        self.builds += 1
        return self.engine

    async def report(self, answer: Loaded) -> None:
        self.answers.append(answer)
        self.heard.notify()

    async def answered(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.answers) < count:
                await self.heard.wait()

    @property
    def versions(self) -> list[int]:
        return [answer.ref.version.step for answer in self.answers]


def ref(version: int, path: str = "somewhere") -> WeightsRef:
    return WeightsRef(PolicyVersion(0, version), path)


async def test_a_compared_version_is_sampled_after_its_report_until_the_engine_sleeps() -> None:
    f = Fixture()
    f.engine.load_gate.clear()
    config = parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}})
    f.lane.probe_sampling = ProbeSampling(config, 0, f.lane.generate_uncounted, f.lane.release)
    f.lane.loads.offer_version(ref(1), Probe(((1, 2, 3),), ((-1.0, -1.5),)))
    await settle()
    assert not f.engine.requests

    f.engine.gate.clear()  # the next version does not wait for samples
    f.engine.load_gate.set()
    await f.answered(1)
    f.lane.loads.offer_version(ref(2), Probe(((1, 2, 3),), ((-1.0, -1.5),)))
    await f.answered(2)
    await settle()
    assert [request.session.split("-")[2] for request in f.engine.requests[::REQUESTS_AT_ONCE]] == [
        "v1",
        "v2",
    ]
    await f.lane.sleep()
    await settle()
    assert len(f.engine.cancelled) == 2 * REQUESTS_AT_ONCE and f.versions == [1, 2]
    f.task.cancel()
    await f.lane.close()


async def test_samples_for_the_test_leave_the_count_of_failed_turns_alone() -> None:
    f = Fixture()
    config = parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}})
    f.lane.probe_sampling = ProbeSampling(config, 0, f.lane.generate_uncounted, f.lane.release)
    failing = ["s"]

    def script(request: Request) -> str:
        if request.session.startswith(tuple(failing)):
            raise EngineError("the engine failed")
        return "hello"

    f.engine.script = script
    for _ in range(MAX_FAILURES - 1):
        with pytest.raises(EngineError):
            await f.lane.generate(REQUEST)

    for version, failing[:] in ((1, ["s"]), (2, ["probe"])):
        f.lane.loads.offer_version(ref(version), Probe(((1, 2, 3),), ((-1.0, -1.5),)))
        async with asyncio.timeout(60):
            while len(f.engine.requests) < MAX_FAILURES - 1 + version * SAMPLE_COUNT:
                await settle()
        assert f.lane.failures_in_row == MAX_FAILURES - 1 and not f.task.done()

    assert any(isinstance(answer, ProbeSamples) for answer in f.answers)
    f.task.cancel()
    await f.lane.close()


def test_only_a_run_that_trains_samples_for_the_test(tmp_path: Path) -> None:
    model_path = save_tiny_chat_model(tmp_path / "model")
    base = {"name": "t", "run_dir": str(tmp_path), "model": {"path": model_path}, "data": {"train": "d"}}
    for total_steps in (0, 1):
        worker = RolloutWorker(
            Endpoints("", ""),
            index=0,
            incarnation="i",
            episode_parts=EpisodeParts(parse(base | {"total_steps": total_steps})),
            build_engine=lambda: ScriptedEngine(lambda request: ""),
            connectors={},
            engine=None,
        )
        probe_sampling = worker._local_samplers["train"].probe_sampling
        assert (probe_sampling is not None) is bool(total_steps)
        worker.timeline.close()


@pytest.mark.parametrize(("engine", "gap"), [(-1.0, 0.5), (math.nan, math.inf)])
async def test_a_load_compares_the_probe(engine: float, gap: float) -> None:
    """Wrong weights, or none at all, show at the load and not in the training curve. A version that came
    without the probe is not loaded again for it."""
    f = Fixture()
    f.engine.score = lambda ids: asyncio.sleep(0, tuple(engine for _ in ids[1:]))  # type: ignore[method-assign]
    rounding = LogprobGaps(largest=0.5, mean=0.25, median=0.125)
    probe = Probe(((1, 2, 3), (3, 2, 1)), ((-1.0, -1.5), (-1.0, -1.25)), rounding)
    for count, offered in enumerate((None, probe, None), start=1):
        f.lane.loads.offer_version(ref(1), offered)
        await f.answered(count)
    assert [answer.uncompared for answer in f.answers] == [True, False, True]
    expected_gap = ProbeGap(largest=gap, mean=0.375 * gap, median=0.25 * gap, tokens=4, rounding=rounding)
    assert [answer.probe_gap for answer in f.answers] == [None, expected_gap, None]
    assert len(f.engine.loads) == 1
    f.task.cancel()


async def test_a_registered_engine_that_knows_no_sleep_is_awake() -> None:
    f = Fixture()
    f.lane.engine = SimpleNamespace(version=3)  # type: ignore[assignment]
    assert f.lane.version == 3 and not f.lane._engine_asleep
    f.task.cancel()


async def test_the_latest_offer_wins_and_the_same_one_is_only_confirmed() -> None:
    f = Fixture()
    f.engine.load_gate.clear()
    for version in (1, 1):  # the second while the first is being loaded: one answer is enough
        f.lane.loads.offer_version(ref(version))
        await settle()
    assert not f.lane.loads.has_waiting and f.lane.loads.version == NO_VERSION
    for version in (2, 3):
        f.lane.loads.offer_version(ref(version))
    f.engine.load_gate.set()
    await f.answered(2)
    assert f.versions == [1, 3]
    f.lane.loads.offer_version(ref(3))
    await f.answered(3)
    assert [r.version.step for r in f.engine.loads] == [1, 3]
    assert f.answers[2].checksum == "sum-3" and f.lane.loads.version == ref(3).version
    f.task.cancel()


def test_an_engine_that_refuses_every_version_is_given_up() -> None:
    """With a deadline of 0 s at the third; validation has one of its own."""

    async def main(pinned: bool) -> Fixture:
        f = Fixture(pinned)
        f.lane.load_deadline = 0.0
        for count in range(1, LOAD_TRIES + 1):
            f.lane.loads.offer_version(ref(count, "damaged"))
            await f.answered(count)
        await settle()
        if pinned:
            f.task.cancel()
        else:
            with pytest.raises(EngineError, match="3 loads in a row failed; last error: WeightsError"):
                await f.task
        return f

    for pinned in (False, True):
        asyncio.run(main(pinned))


async def test_a_turn_waits_by_name_until_the_weights_are_fresh() -> None:
    f = Fixture()
    oldest = 2
    waiting = asyncio.create_task(f.lane.wait_for_version(lambda: oldest))
    await settle()
    f.waits._clock.now = 3.0  # type: ignore[attr-defined]
    assert f.waits.longest_wait() == "weights v2: engine has v0 (3 s)"
    f.lane.loads.offer_version(ref(1))
    await f.answered(1)
    assert not waiting.done()
    f.lane.loads.offer_version(ref(2))
    await f.answered(2)
    await asyncio.wait_for(waiting, 60)
    f.task.cancel()


async def test_damaged_weights_are_reported_and_the_lane_goes_on() -> None:
    f = Fixture()
    f.lane.loads.offer_version(ref(1, "damaged"))
    await f.answered(1)
    assert "damaged" in f.answers[0].error
    assert f.lane.version == 0
    f.lane.loads.offer_version(ref(2))
    await f.answered(2)
    assert (f.answers[1].error, f.lane.version) == ("", 2)
    f.task.cancel()


async def test_the_pinned_lane_is_built_when_needed_and_changes_only_when_idle() -> None:
    f = Fixture(pinned=True)
    entered = asyncio.Event()
    leave = asyncio.Event()

    async def episode() -> None:
        async with f.lane.episode():
            entered.set()
            await leave.wait()

    first = asyncio.create_task(episode())
    await settle()
    assert not entered.is_set()  # it has no weights yet
    f.lane.loads.offer_version(ref(1))
    await f.answered(1)
    await asyncio.wait_for(entered.wait(), 60)
    f.lane.loads.offer_version(ref(2))
    await settle()
    assert f.versions == [1]
    assert f.lane.version == 1
    entered.clear()
    second = asyncio.create_task(episode())  # waits for the offered version, and does not hold it up
    await settle()
    assert not entered.is_set()
    leave.set()
    await first
    await f.answered(2)
    await second
    assert f.lane.version == 2
    assert f.builds == 1
    f.task.cancel()


async def test_an_engine_that_only_fails_ends_the_lane() -> None:
    f = Fixture()

    def broken(request: Request) -> str:
        raise errors.pop()

    f.engine.script = broken
    errors = [
        *[EngineError("the engine failed")] * MAX_FAILURES,
        *[EngineRefused("the prompt is empty")] * MAX_FAILURES,
    ]
    for refused in (True, False):
        for _ in range(MAX_FAILURES):
            with pytest.raises(EngineError):
                await f.lane.generate(REQUEST)
        assert f.lane.failures_in_row == (
            0 if refused else MAX_FAILURES
        )  # a wrong request is not the engine's fault
    with pytest.raises(EngineError, match="in a row"):
        await asyncio.wait_for(f.task, 60)


# -- sleep -------------------------------------------------------------------------------------------


async def test_a_sleep_waits_for_the_load_under_way_and_keeps_the_order() -> None:
    """What was offered before it is dropped; what is offered after it is loaded after it, also if that is the
    version that is being loaded."""
    f = Fixture()
    f.engine.load_gate.clear()
    f.lane.loads.offer_version(ref(1))
    await settle()
    f.lane.loads.offer_version(ref(2))
    sleep = asyncio.ensure_future(f.lane.sleep())
    f.lane.loads.offer_version(ref(1))
    await settle()
    assert not sleep.done() and not f.engine.asleep
    f.engine.load_gate.set()
    await asyncio.wait_for(sleep, 60)
    await f.answered(2)
    assert f.versions == [1, 1] and len(f.engine.loads) == 2
    assert not f.engine.asleep and not f.lane.sleeps.asleep
    await f.lane.sleep()
    assert f.engine.asleep and f.lane.sleeps.asleep and f.lane.loads.version == NO_VERSION
    f.lane.loads.offer_version(ref(3, "damaged"))
    await f.answered(3)
    assert f.answers[-1].error and f.lane.sleeps.asleep
    f.task.cancel()


async def test_an_engine_that_does_not_fall_asleep_is_reported() -> None:
    f = Fixture()
    f.engine.sleep = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    f.lane.loads._deadline = 0.01
    with pytest.raises(EngineError, match="did not go to sleep in time"):
        await f.lane.sleep()
    f.lane.loads.offer_version(ref(1))
    await f.answered(1)
    f.task.cancel()


async def test_turns_of_a_sleeping_engine_are_not_busy_and_wait_by_name() -> None:
    """Those under way, and those that come meanwhile, which are not asked of it before it is awake."""
    f = Fixture()
    f.engine.gate.clear()
    clock = Clock()
    timeline = Intervals()
    slept = list[str]()
    f.lane.busy_timer = BusyTimer(timeline, clock, clock)

    @contextmanager
    def off(name: str) -> Iterator[None]:
        slept.append(f"{name} in")
        yield
        slept.append(f"{name} out")

    async def turn(name: str) -> None:
        with f.lane.sleeps.during(asleep=lambda: off(name)):
            await f.lane.generate(replace(REQUEST, session=name))

    turns = [asyncio.create_task(turn("first"))]
    await settle()
    clock.now = 1.0
    await f.lane.sleep()
    clock.now = 5.0
    turns.append(asyncio.create_task(turn("second")))
    await settle()
    assert [request.session for request in f.engine.requests] == ["first"]
    assert f.lane.version == -1 and f.lane.busy_timer.seconds == (1.0, 4.0)
    f.waits._clock.now = 3.0  # type: ignore[attr-defined]
    assert f.waits.longest_wait() == f"{ASLEEP} (3 s, 2 episodes)"
    f.lane.loads.offer_version(ref(1))
    await f.answered(1)
    await settle()
    assert [request.session for request in f.engine.requests] == ["first", "second"]
    clock.now = 7.0
    f.engine.gate.set()
    await asyncio.gather(*turns)
    assert f.lane.busy_timer.seconds == (3.0, 4.0)
    assert timeline.records == [("decode", 0.0, 1.0), ("decode", 5.0, 7.0)]
    assert slept == ["first in", "second in", "first out", "second out"]
    f.task.cancel()


async def test_the_engine_of_validation_sleeps_until_its_next_version() -> None:
    f = Fixture(pinned=True)
    f.lane.loads.offer_version(ref(1))
    await f.answered(1)
    await f.lane.sleep()
    assert f.engine.asleep and f.lane.version == -1
    entered = asyncio.Event()

    async def episode() -> None:
        async with f.lane.episode():
            entered.set()
            await f.lane.generate(REQUEST)

    late_episode = asyncio.create_task(episode())
    await settle()
    assert not entered.is_set()
    f.lane.loads.offer_version(ref(1))
    await f.answered(2)
    await asyncio.wait_for(late_episode, 60)
    assert (f.builds, f.lane.version, len(f.engine.loads)) == (1, 1, 2)
    f.task.cancel()


async def test_an_engine_of_training_that_is_built_late_sleeps_until_there_is_a_version() -> None:
    f = Fixture(built=False)
    assert f.lane.sleeps.asleep
    turn = asyncio.create_task(f.lane.generate(REQUEST))
    await f.lane.sleep()
    assert f.builds == 0
    f.lane.loads.offer_version(ref(1, "damaged"))
    await f.answered(1)
    assert f.engine.asleep and f.lane.sleeps.asleep and not f.engine.requests
    f.lane.loads.offer_version(ref(1))
    await f.answered(2)
    await asyncio.wait_for(turn, 60)
    assert f.builds == 1 and not f.lane.sleeps.asleep
    f.task.cancel()
