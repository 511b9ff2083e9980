"""Plans the processes of a run. Pure: the plan that `--dry-run` prints is the plan that is launched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.config import RunConfig
from asyncrl.registry import INSIDE_RUN

COORDINATOR = "coordinator"
ENGINE = "engine"
ROLLOUT = "rollout"
TRAINER = "trainer"
SCORER = "scorer"
ROLE_TARGETS = {
    COORDINATOR: "asyncrl.coordinator.loop:run",
    ENGINE: "asyncrl.server_supervisor.supervisor:run",
    SCORER: "asyncrl.server_supervisor.supervisor:run",
    ROLLOUT: "asyncrl.rollout.worker:run",
    TRAINER: "asyncrl.trainer.rank:run",
}
UNTRAINED_TARGET = "asyncrl.trainer.untrained:run"  # Runs in place of the trainer if nothing is trained.


@dataclass(frozen=True)
class PlannedProcess:
    """One process of the plan. The process runs the function `target`, and has `gpus` of its own."""

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
    """Processes that live and die together: the coordinator, one server, one worker, or all trainer ranks."""

    role: str
    processes: tuple[PlannedProcess, ...]

    @property
    def name(self) -> str:
        return self.processes[0].name if len(self.processes) == 1 else f"{self.role} (all ranks)"


def plan_units(config: RunConfig) -> tuple[Unit, ...]:
    """Return the units of a run, the coordinator first."""
    threads = config.launch.threads
    engine_gpus = 0 if config.engine.urls else config.engine.tp
    server_units = [
        Unit(ENGINE, (_planned_process(ENGINE, index, threads, engine_gpus),))
        for index in range(config.engine.server_count)
    ]

    for index, (name, _) in enumerate(config.scorer_places):
        scorer = config.scorers[name]
        scorer_gpus = 0 if scorer.urls else scorer.tp
        server_units.append(Unit(SCORER, (_planned_process(SCORER, index, threads, scorer_gpus),)))

    worker_units = [
        Unit(ROLLOUT, (_planned_process(ROLLOUT, index, threads),)) for index in range(config.rollout.workers)
    ]
    ranks = tuple(_planned_process(TRAINER, rank, threads) for rank in range(config.trainer.ranks))

    if not config.total_steps:
        ranks = (PlannedProcess(TRAINER, 0, threads, UNTRAINED_TARGET),)

    return (
        Unit(COORDINATOR, (_planned_process(COORDINATOR, 0, 1),)),
        *server_units,
        *worker_units,
        Unit(TRAINER, ranks),
    )


def _planned_process(role: str, index: int, threads: int, gpus: int = 0) -> PlannedProcess:
    return PlannedProcess(role, index, threads, ROLE_TARGETS[role], gpus)


def process_environment(process: PlannedProcess) -> dict[str, str]:
    """Return variables that must be set before the process imports any numeric library."""
    threads = str(process.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",  # progress bars make a log unreadable
        "PYTHONUNBUFFERED": "1",
        INSIDE_RUN: "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages for the KV cache: fewer TLB misses
    }


def assign_gpus(config: RunConfig, gpu_count: int) -> dict[str, list[int]]:
    """Assign the `gpu_count` GPUs of this machine to ranks, to servers started here and to embedded engines,
    by the process's name. Ranks come first; when all GPUs are assigned, numbering restarts at 0. Every
    process sees all GPUs."""
    from asyncrl.engines.sglang.process import server_gpus  # imports torch
    from asyncrl.rollout.samplers import engine_gpu

    embedded_engines = (
        config.rollout.workers if not config.engine.remote and config.model.device != "cpu" else 0
    )
    return {
        **{f"{TRAINER}-{rank}": [rank % gpu_count] for rank in range(config.ranks_on_gpus)},
        **server_gpus(config, gpu_count),
        **{
            f"{ROLLOUT}-{worker}": [engine_gpu(config, worker, gpu_count)]
            for worker in range(embedded_engines)
        },
    }


def describe_plan(
    config: RunConfig, units: Iterable[Unit], has_gpu: bool | None, gpu_count: int = 0
) -> list[str]:
    """Describe the plan for people, one line per kind of process. `has_gpu`: whether this machine has a GPU;
    None if unknown, as on a cluster. `gpu_count`: the number of its GPUs."""
    device = config.model.device
    if device == "auto" and has_gpu is not None:
        device = "cuda" if has_gpu else "cpu"
    gpus_text = (
        ""
        if has_gpu is False or config.engine.server_command
        else f" on {config.engine.tp} GPU{'s' * (config.engine.tp != 1)}"
    )

    rows = [("process", "count", "threads", "task")]
    work_by_role = {
        COORDINATOR: f"admission, replay buffer, journal; up to {config.buffer.max_live_groups} live groups",
        ENGINE: ", ".join(config.engine.urls) or f"a server{gpus_text}, supervised",
        SCORER: "; ".join(
            f"{name}: {', '.join(scorer.urls) or scorer.path}" for name, scorer in config.scorers.items()
        ),
        ROLLOUT: f"{config.rollout.slots} concurrent episodes on engine {config.engine.name!r}",
        TRAINER: f"{config.buffer.batch_size} episodes per step on {device}",
    }
    if not config.total_steps:
        work_by_role[TRAINER] = "no steps; passes the model to the engines unchanged"

    processes = [process for unit in units for process in unit.processes]
    assigned_gpus = assign_gpus(config, gpu_count) if gpu_count else {}
    for role, text in work_by_role.items():
        role_processes = [process for process in processes if process.role == role]
        if role_processes:
            gpu_numbers = ", ".join(
                str(number) for process in role_processes for number in assigned_gpus.get(process.name, ())
            )
            if gpu_numbers:
                text += f" (GPUs {gpu_numbers})"
            rows.append((role, str(len(role_processes)), str(role_processes[0].threads), text))

    total_threads = sum(process.threads for process in processes)
    rows.append(("total", str(len(processes)), str(total_threads), f"launched by {config.launch.kind}"))
    return [f"{role:<12} {count:>5} {threads:>8}  {work}" for role, count, threads, work in rows]
