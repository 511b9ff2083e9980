"""Faults at sampled moments of whole runs: the real coordinator and store, played peers and their clock."""

from __future__ import annotations

import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from asyncrl.coordinator.trainer import MAX_SPIKES
from asyncrl.coordinator.validation import Validation
from asyncrl.store.checkpoints import Checkpoints
from tests.fakes.played import PlayedTrainer
from tests.fakes.world import LEASE, World

POINTS = 40  # at most so many writes and messages until the coordinator ends


@pytest.fixture
def root() -> Iterator[Path]:
    """In main memory: thousands of fsyncs must not wait for a disk."""
    shared = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="schedule-", dir=shared if shared.is_dir() else None))
    yield directory
    shutil.rmtree(directory)


def crash(world: World) -> None:
    world.crash_in = world.dice.randint(1, POINTS)


def kill_worker(world: World) -> None:
    world.start_worker(world.dice.randrange(2))


def stop_worker(world: World) -> None:
    world.dice.choice(world.workers).link.asleep_until = world.now + world.dice.uniform(0.5, 2) * LEASE


def stop_trainer(world: World) -> None:
    world.trainer.link.asleep_until = world.now + world.dice.uniform(0.5, 2) * LEASE


def stop_coordinator(world: World) -> None:
    world.asleep_until = world.now + world.dice.uniform(0.5, 2) * LEASE


def hang(world: World) -> None:
    world.dice.choice(world.workers).hangs_until = world.now + 6 * LEASE


def cut(world: World) -> None:
    """Nothing gets through between a process and the coordinator; what is under way is lost."""
    link = world.dice.choice(world.peers).link
    link.cut_until = world.now + world.dice.uniform(0.1, 2) * LEASE
    link.disconnect()


def hold(world: World) -> None:
    """Nothing gets through for a while, and then everything does."""
    world.dice.choice(world.peers).link.held_until = world.now + world.dice.uniform(0.1, 2) * LEASE


def kill_trainer(world: World) -> None:
    world.start_trainer()


def spike(world: World) -> None:
    """The next batch that is not a repeat is left out; too many of one step would end the run."""
    world.spikes += 1
    world.trainer.spikes = world.spikes <= MAX_SPIKES


def fill_disk(world: World) -> None:
    """Or lock the store: it cannot be written."""
    world.full_until = world.now + world.dice.uniform(0.1, 2) * LEASE


def refuse_weights(world: World) -> None:
    world.dice.choice(world.workers).refuses = world.dice.randint(1, 6)


def replace_coordinator(world: World) -> None:
    """Another takes its place while it is stopped; it goes on later, and may write nothing."""
    world.replace_coordinator()


def damage_segment(world: World) -> None:
    """A bit of a payload, or of several, is flipped."""
    for path in sorted((world.run_dir / "segments").glob("*.seg"))[-1:]:
        data = bytearray(path.read_bytes())
        for offset in world.dice.sample(range(len(data)), min(2, len(data))):
            data[offset] ^= 1
        path.write_bytes(data)


def damage_checkpoint(world: World) -> None:
    """The newest is not as written, where there is another; then the trainer resumes. Not the last one, after
    which nothing is trained again, and not one that is all that is left of its steps after a power cut."""
    checkpoints = Checkpoints(world.run_dir / "checkpoints")
    retained_batches = world.coordinator.state.ledger.batches.by_step
    if len(steps := checkpoints.steps()) < 2 or not retained_batches.keys() >= {
        *range(steps[1] + 1, steps[0] + 1)
    }:
        return
    if steps[0] < world.config.total_steps:
        Path(checkpoints.file_path(steps[0], "state")).write_bytes(b"damaged")
        world.start_trainer()


def damage_store(world: World) -> None:
    """Where there is a copy, and nobody else has the store open."""
    if world.zombie is None and list((world.run_dir / "copies").glob("0*")):
        world.restore_store()


def cut_power(world: World) -> None:
    world.crash_in = world.dice.randint(1, POINTS)
    world.power_goes = True


FAULTS = {
    fault.__name__: fault
    for fault in (
        *(crash, kill_worker, kill_trainer, replace_coordinator),
        *(stop_worker, stop_trainer, stop_coordinator, hang, cut, hold),
        *(spike, fill_disk, refuse_weights, damage_segment, damage_checkpoint, cut_power),
    )
}
RUNNING_ON = [name for name in FAULTS if name != "cut_power"]  # the machine stays up


def happening(seed: object, faults: list[str], max_faults: int) -> Callable[[World], None]:
    """A world in which at most so many faults happen, each some turns after the one before."""
    dice = random.Random(f"faults {seed}")
    chosen = [dice.choice(faults) for _ in range(dice.randint(1, max_faults))]
    due_passes = list(accumulate(dice.randint(1, 40) for _ in chosen))

    def happen(world: World) -> None:
        while due_passes and world.turns >= due_passes[0]:
            del due_passes[0]
            name = chosen.pop(0)
            world.log.append(f"{world.now:.1f} {name}")
            FAULTS[name](world)

    return happen


def play(root: Path, seed: object, faults: list[str], max_faults: int = 6, shifts: bool = False) -> World:
    power = "cut_power" in faults
    world = World(root / str(seed), seed, happening(seed, faults, max_faults), power, shifts)
    try:
        world.run()
        world.check()
    except BaseException:
        print(f"seed {seed}: {world.log}")
        raise
    shutil.rmtree(root / str(seed))
    return world


def test_without_faults(root: Path) -> None:
    world = World(root / "sound", 0, lambda world: None)
    world.run()
    world.check()


@pytest.mark.slow
def test_faults_at_sampled_moments(root: Path) -> None:
    """Held-out episodes go on from their durable turns, too, when their worker is lost. Tokens of attempts
    that are given up are counted once."""
    worlds = [play(root, seed, RUNNING_ON) for seed in range(60)]
    assert sum(world.continued for world in worlds) > 3
    assert sum(world.abandoned > 0 for world in worlds) > 8


@pytest.mark.slow
def test_faults_in_each_shift(root: Path) -> None:
    """Engines and trainer never use the same devices at once, whoever is killed or stopped in between."""
    worlds = [play(root, f"shifts {seed}", RUNNING_ON, shifts=True) for seed in range(30)]
    assert sum(world.seen["train"] > 0 for world in worlds) == len(worlds)
    assert {"rollout", "sleeping", "train", "waking"} == set().union(*(world.seen for world in worlds))


def test_an_engine_that_refuses_versions_costs_no_trainer(root: Path) -> None:
    """Another one holds them, but in some shifts, when none does."""

    def happen(world: World) -> None:
        if world.turns == 150:
            world.workers[1].refuses = 40

    for seed in (5, 9, 12, 14):
        world = World(root / str(seed), f"r{seed}", happen, shifts=True)
        world.run()
        world.check()
        assert not any("replaced: trainer" in line for line in world.log), world.log


@pytest.mark.parametrize("restarted", [False, True])
def test_a_trainer_that_does_not_come_to_rest_is_replaced(root: Path, restarted: bool) -> None:
    """Within the time of a start after it was told to, or after the coordinator was started again."""
    since: list[float] = []

    def happen(world: World) -> None:
        ranks = world.coordinator.trainer.ranks
        if not since and ranks.last_plan_kind == "rest" and not world.trainer.resting:
            since.append(world.now)
            world.trainer.link.asleep_until = world.now + 1000
        if restarted and len(since) == 1 and world.now > since[0] + 3:
            since.insert(0, world.now)
            world.lose_coordinator()

    world = World(root / "rest", 3, happen, shifts=True)
    world.run()
    world.check()
    (line,) = [line for line in world.log if "replaced: trainer" in line]
    assert "not offloaded within 120 s" in line and 119 < float(line.split()[0]) - since[0] < 122


@pytest.mark.parametrize(("seed", "mended"), [(0, True), (1, True), (1, False)])
def test_a_last_version_that_no_engine_can_load(root: Path, seed: int, mended: bool) -> None:
    """The next trainer publishes it anew. Where that does not help, and nothing is to be evaluated, the run
    is complete without it."""

    def happen(world: World) -> None:
        newest = world.coordinator.state.fleet.versions.newest
        steps = world.config.total_steps
        if newest.step == steps:
            damaged.setdefault("epoch", newest.epoch)
        bad = newest.step == steps and (newest.epoch == damaged["epoch"] or not mended)
        for worker in world.workers:
            worker.refuses = 99 * bad

    damaged: dict[str, int] = {}
    world = World(root / "last", f"last {seed}", happen, shifts=True)
    assert bool(world.config.data.test) is (seed == 0)
    world.run()
    world.check()
    assert world.now < 400, world.now


def test_the_last_validation_waits_for_the_last_version(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written long after its step, as where the disk is slow: longer than `weights.deadline`."""
    publish = PlayedTrainer._publish
    start = Validation._start_session
    judged = list[tuple[int, int]]()
    publish_times = list[float]()

    def happen(world: World) -> None:
        if publish_times and world.now > publish_times[0] + 100:
            publish_times[0] = math.inf
            publish(world.trainer)

    def published_late(trainer: PlayedTrainer) -> None:
        if publish_times or trainer.step < trainer.world.config.total_steps:
            publish(trainer)
        else:
            publish_times.append(trainer.world.now)

    def noted(validation: Validation, given: Any, now: float) -> Any:
        judged.append((given.step, given.ref.version.step))
        return start(validation, given, now)

    monkeypatch.setattr(PlayedTrainer, "_publish", published_late)
    monkeypatch.setattr(Validation, "_start_session", noted)
    world = World(root / "late", "last 0", happen, shifts=True)
    world.run()
    world.check()
    assert judged == [(0, 0), (4, 4)] and publish_times == [math.inf]


def restored(root: Path, seed: int, faults: list[str]) -> int:
    """How often the store was damaged, beside other faults, and made anew from a copy."""
    fault_schedule = happening(f"store {seed}", faults, 4)
    dice = random.Random(seed)

    def happen(world: World) -> None:
        fault_schedule(world)
        if world.restored < 3 and dice.random() < 0.1:
            damage_store(world)

    world = World(root / str(seed), f"store {seed}", happen)
    try:
        world.run()
        world.check()
    except BaseException:
        print(f"seed {seed}: {world.log}")
        raise
    shutil.rmtree(root / str(seed))
    return world.restored


@pytest.mark.slow
def test_a_damaged_store_is_made_anew_from_a_copy(root: Path) -> None:
    """At sampled moments: the account is exact, and nothing is trained twice."""
    faults = ["crash", "kill_trainer", "damage_segment"]
    assert sum(restored(root, seed, faults) for seed in range(12)) > 20


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_store_is_damaged_at_many_sampled_moments(root: Path) -> None:
    """No checkpoint is: one that is newer than the copy is all that is known of its steps until the next."""
    faults = [name for name in RUNNING_ON if name != "damage_checkpoint"]
    assert sum(restored(root, seed, faults) for seed in range(12, 1000)) > 500


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_faults_at_many_sampled_moments(root: Path) -> None:
    for seed in range(60, 2060):
        play(root, seed, RUNNING_ON, max_faults=10)


@pytest.mark.slow
def test_power_cuts_at_sampled_moments(root: Path) -> None:
    """Of each file any of what was not yet fsynced is left."""
    for seed in range(30):
        play(
            root, f"power {seed}", ["cut_power", "cut_power", "crash", "kill_trainer", "spike"], max_faults=4
        )


def test_a_payload_is_damaged_after_a_trainer_was_given_it(root: Path) -> None:
    """By a coordinator that was replaced; the next one is asked for the same again."""
    play(root, "power 371", list(FAULTS), max_faults=8)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_power_cuts_at_many_sampled_moments(root: Path) -> None:
    for seed in range(30, 2030):
        play(root, f"power {seed}", list(FAULTS), max_faults=8)
