"""Which processes a run has. Pure: the plan that `--dry-run` prints is the plan that is launched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.config import RunConfig

COORDINATOR = "coordinator"
ENGINE = "engine"
ROLLOUT = "rollout"
TRAINER = "trainer"
SCORER = "scorer"
TARGETS = {
    COORDINATOR: "asyncrl.coordinator.loop:run",
    ENGINE: "asyncrl.keeper.keeper:run",
    SCORER: "asyncrl.keeper.keeper:run",
    ROLLOUT: "asyncrl.rollout.worker:run",
    TRAINER: "asyncrl.trainer.rank:run",
}
UNTRAINED = "asyncrl.trainer.untrained:run"  # in place of the trainer, where nothing is trained


@dataclass(frozen=True)
class RolePlace:
    """Names one process. It runs the function `target`, and has `gpus` of its own."""

    role: str
    index: int
    threads: int
    target: str
    gpus: int = 0

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True)
class Unit:
    """Processes that only live together: the coordinator, one server, one worker, or all trainer ranks."""

    role: str
    places: tuple[RolePlace, ...]

    @property
    def name(self) -> str:
        return self.places[0].name if len(self.places) == 1 else f"{self.role} (all ranks)"


def processes_of(config: RunConfig) -> tuple[Unit, ...]:
    """Return the units of a run, the coordinator first."""
    threads = config.launch.threads
    gpus = 0 if config.engine.urls else config.engine.tp
    engines = [Unit(ENGINE, (_place(ENGINE, i, threads, gpus),)) for i in range(config.engine.keepers)]

    owners = (config.scorers[name] for name, _ in config.scorer_places)
    held = [0 if one.urls else one.tp for one in owners]
    engines += [Unit(SCORER, (_place(SCORER, i, threads, gpus),)) for i, gpus in enumerate(held)]

    workers = [Unit(ROLLOUT, (_place(ROLLOUT, i, threads),)) for i in range(config.rollout.workers)]
    ranks = tuple(_place(TRAINER, rank, threads) for rank in range(config.trainer.ranks))

    if not config.total_steps:
        ranks = (RolePlace(TRAINER, 0, threads, UNTRAINED),)

    return (Unit(COORDINATOR, (_place(COORDINATOR, 0, 1),)), *engines, *workers, Unit(TRAINER, ranks))


def _place(role: str, index: int, threads: int, gpus: int = 0) -> RolePlace:
    return RolePlace(role, index, threads, TARGETS[role], gpus)


def environment(place: RolePlace) -> dict[str, str]:
    """Variables that must be set before the process imports anything numeric."""
    threads = str(place.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",  # progress bars make a log unreadable
        "PYTHONUNBUFFERED": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages for the KV cache: fewer TLB misses
    }


def dealt(config: RunConfig, count: int) -> dict[str, list[int]]:
    """Deal the `count` GPUs of this machine to ranks, to servers started here and to embedded engines, by the
    process's name. Ranks come first; where none is left, it begins at 0 again. Every process sees all."""
    from asyncrl.engines.sglang.process import server_gpus  # imports torch
    from asyncrl.rollout.samplers import engine_gpu

    embedded = config.rollout.workers if not config.engine.remote and config.model.device != "cpu" else 0
    return {
        **{f"{TRAINER}-{rank}": [rank % count] for rank in range(config.ranks_on_gpus)},
        **server_gpus(config, count),
        **{f"{ROLLOUT}-{worker}": [engine_gpu(config, worker, count)] for worker in range(embedded)},
    }


def describe(config: RunConfig, units: Iterable[Unit], gpu: bool | None, count: int = 0) -> list[str]:
    """The plan for a person to read: one line per kind of process. `gpu`: whether this machine has one; None:
    unknown, as on a cluster. `count`: how many it has."""
    device = config.model.device
    if device == "auto" and gpu is not None:
        device = "cuda" if gpu else "cpu"
    gpus = "" if gpu is False or config.engine.server_command else f" on {config.engine.tp} GPU(s)"

    rows = [("process", "count", "threads", "does")]
    does = {
        COORDINATOR: f"admission, replay buffer, journal; up to {config.buffer.max_live_groups} live groups",
        ENGINE: ", ".join(config.engine.urls) or f"a server{gpus}, supervised",
        SCORER: "; ".join(f"{n}: {', '.join(one.urls) or one.path}" for n, one in config.scorers.items()),
        ROLLOUT: f"{config.rollout.slots} episodes at once on engine {config.engine.name!r}",
        TRAINER: f"{config.buffer.batch_size} episodes per step on {device}"
        if config.total_steps
        else "none: gives the engines the model as it is",
    }

    places = [place for unit in units for place in unit.places]
    used = dealt(config, count) if count else {}
    for role, text in does.items():
        mine = [place for place in places if place.role == role]
        if mine:
            on = ", ".join(str(number) for place in mine for number in used.get(place.name, ()))
            rows.append((role, str(len(mine)), str(mine[0].threads), text + f" (GPUs {on})" * bool(on)))

    total = sum(place.threads for place in places)
    rows.append(("total", str(len(places)), str(total), f"launched by {config.launch.kind}"))
    return [f"{a:<12} {b:>5} {c:>8}  {d}" for a, b, c, d in rows]
