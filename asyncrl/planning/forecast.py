"""Predicts other settings from a run's measurements: fitted rates, a workload, a simulated run.

    episodes, metrics, engine loads ──► Rates ──► workload(config) ──► predict ──► seconds a step, lag, idle

Pure: `asyncrl plan` reads the runs. Assumed to scale: seconds of training with the episodes, and inversely
with the number of ranks; engines share sampling episodes equally.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.planning.simulator import Recorded, RecordedTurn, Simulation, Workload
from asyncrl.types import EpisodeStats, Turn

Row = Mapping[str, float]
T = TypeVar("T")

# Phases of timing_s/ whose time grows with the batch.
EPISODE_TIMINGS = (
    "read_images",
    "update_actor",
    "update_critic",
    "values",
    "ref",
    "adv",
)
# Phases in which the trainer computes nothing.
WAITING_TIMINGS = ("wait_data", "wait_devices", "rest", "wake")
# Assumed fraction of a token's seconds that does not depend on the load, if measured loads hardly differ.
ASSUMED_FIXED_FRACTION = 0.5
MIN_ROWS = 4  # Committed steps that a run needs, as the first third and the last step are left out.
DIFFERING_RATIO = 1.2  # Loads that differ by a smaller ratio do not show how speed depends on load.
# Bounds of a simulated run.
MAX_EPISODES = 16_000
MAX_STEPS = 40
MIN_STEPS = 18
# Assumed bytes/s between a device and main memory if no change of devices was measured.
MOVE_BYTES_PER_SECOND = 1e10


class EngineLoad(msgspec.Struct, frozen=True):
    """The engines' load in one run: seconds per sampled token, with `sampling` episodes on an engine."""

    sampling: float
    token_s: float


class Rates(msgspec.Struct, frozen=True):
    """Measured costs of a run's parts. A token takes `base + slope * n` seconds if n episodes sample on an
    engine; `assumed`: loads differed too little to separate the two terms. Seconds of training refer to one
    rank. `filtered`: fraction of the groups."""

    recorded: Recorded
    base: float
    slope: float
    assumed: bool
    episode_s: float  # training seconds per episode
    commit_s: float  # seconds per batch, whatever its size
    publish_s: float
    group_tokens: float  # tokens of a group that the trainer computes
    filtered: float
    shift_s: float = 0.0  # seconds of both changes of shared devices
    shift_source: str = ""


class Forecast(msgspec.Struct, frozen=True):
    """A measured or predicted run. Fractions are in [0, 1]; tokens are sampled tokens within the staleness
    bound."""

    step_s: float
    lag: float
    trainer_idle: float
    rollout_idle: float
    masked: float
    tokens: float  # tokens of a batch

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


def recorded_turns(turns: Sequence[Turn], stats: EpisodeStats) -> tuple[RecordedTurn, ...]:
    """Convert an episode for the simulator. Waits are the waits for tools and the environment; all other time
    of the episode (reward, acknowledgements) is waited for at its end. Parallel calls wait once."""
    waits = [
        sum(reply.seconds for reply in turn.replies)
        + (turn.observation.seconds if turn.observation is not None else 0.0)
        for turn in turns
    ]

    other_seconds = max(0.0, stats.seconds - sum(turn.generation.seconds for turn in turns))
    scale = min(1.0, other_seconds / total_waits) if (total_waits := sum(waits)) else 1.0
    waits = [wait * scale for wait in waits]
    waits[-1] += other_seconds - sum(waits)
    return tuple(
        RecordedTurn(len(turn.generation.ids), wait) for turn, wait in zip(turns, waits, strict=True)
    )


def fit_engine(loads: Sequence[EngineLoad]) -> tuple[float, float, bool]:
    """Return (base, slope, assumed): seconds of a token = base + slope * n, by least squares, neither
    negative."""
    sampling, token_seconds = (
        np.array([getattr(load, name) for load in loads]) for name in ("sampling", "token_s")
    )
    if sampling.max() < DIFFERING_RATIO * sampling.min():
        token_s = float(token_seconds.mean())
        return (
            ASSUMED_FIXED_FRACTION * token_s,
            (1 - ASSUMED_FIXED_FRACTION) * token_s / float(sampling.mean()),
            True,
        )

    slope, base = np.polyfit(sampling, token_seconds, 1)
    if slope < 0:
        return float(token_seconds.mean()), 0.0, False
    if base < 0:
        return 0.0, float(sampling @ token_seconds / (sampling @ sampling)), False
    return float(base), float(slope), False


def steady_steps(rows: Sequence[T]) -> Sequence[T]:
    """Leave out the first third of the committed steps, while the pipeline fills, and the last one or two,
    while the pipeline empties."""
    return rows[len(rows) // 3 : len(rows) - math.ceil(len(rows) / 20)]


def fit(
    config: RunConfig,
    rows: Sequence[Row],
    recorded: Recorded,
    loads: Sequence[EngineLoad],
    publish_s: float,
    state_bytes: float = 0.0,
) -> Rates:
    """Fit the rates of a run. `rows`: metrics of its committed steps; `loads`: of this run and of other runs
    with these engines; `state_bytes`: size of weights and optimizer of all ranks. Raises ConfigError if the
    run is too short."""
    if len(rows) < MIN_ROWS or not recorded:
        raise ConfigError(
            f"not enough data for planning, which needs {MIN_ROWS} committed steps and groups with stored "
            "turns (store.keep_bytes); let the run continue, or run a probe"
        )

    rows = steady_steps(rows)
    episode_seconds = [sum(row.get(f"timing_s/{name}", 0.0) for name in EPISODE_TIMINGS) for row in rows]
    waiting_seconds = [sum(row.get(f"timing_s/{name}", 0.0) for name in WAITING_TIMINGS) for row in rows]
    busy_seconds = [row["timing_s/step"] - waited for row, waited in zip(rows, waiting_seconds, strict=True)]

    trajectories = _mean(rows, "trainer/trajectories")
    base, slope, assumed = fit_engine(loads)
    shift_s = sum(_mean(rows, name) for name in ("shift/sleep_s", "timing_s/wake", "shift/wake_s"))
    shift_source = (
        f"{state_bytes / 1e9:.3g} GB of weights and optimizer state moved in both directions at "
        f"{MOVE_BYTES_PER_SECOND / 1e9:g} GB/s per rank"
    )

    return Rates(
        recorded=recorded,
        base=base,
        slope=slope,
        assumed=assumed,
        episode_s=statistics.mean(episode_seconds) / trajectories * config.trainer.ranks,
        commit_s=max(0.0, statistics.mean(busy_seconds) - statistics.mean(episode_seconds)),
        publish_s=publish_s,
        group_tokens=_mean(rows, "perf/computed_tokens") / trajectories * config.buffer.episodes_per_group,
        filtered=_mean(rows, "rollout/discarded_group_frac"),
        shift_s=shift_s or publish_s + 2 * state_bytes / config.trainer.ranks / MOVE_BYTES_PER_SECOND,
        shift_source="measured" if shift_s else f"not measured: a push plus {shift_source}",
    )


def measured_forecast(rows: Sequence[Row]) -> Forecast:
    """Summarize a run's steady steps."""
    rows = steady_steps(rows)
    tokens = _mean(rows, "trainer/model_tokens")
    masked = _mean(rows, "staleness/masked_token_frac")
    return Forecast(
        step_s=_mean(rows, "timing_s/step"),
        lag=_mean(rows, "staleness/lag/mean"),
        trainer_idle=_mean(rows, "async/trainer_idle_frac"),
        rollout_idle=_mean(rows, "async/rollout_idle_frac"),
        masked=masked,
        tokens=tokens * (1 - masked),
    )


def _mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean over the rows that have the metric; 0 if no row has it."""
    return statistics.mean([row[name] for row in rows if name in row] or [0.0])


def stretch_tail(recorded: Recorded, tail: float) -> Recorded:
    """Stretch the tokens and the waits of turns: a value above the median moves to `tail` times its distance
    from the median."""
    turns = [turn for group in recorded for episode in group for turn in episode]
    median_tokens = statistics.median(turn.tokens for turn in turns)
    median_wait = statistics.median(turn.wait for turn in turns)

    def stretch(turn: RecordedTurn) -> RecordedTurn:
        return RecordedTurn(
            tokens=turn.tokens + (tail - 1) * max(0.0, turn.tokens - median_tokens),
            wait=turn.wait + (tail - 1) * max(0.0, turn.wait - median_wait),
        )

    return tuple(tuple(tuple(map(stretch, episode)) for episode in group) for group in recorded)


def scale_waits(recorded: Recorded, factor: float) -> Recorded:
    """Multiply all waits by a factor."""
    return tuple(
        tuple(tuple(replace(turn, wait=turn.wait * factor) for turn in episode) for episode in group)
        for group in recorded
    )


def workload(config: RunConfig, rates: Rates) -> Workload:
    """Return the workload of a configuration whose group policy is resolved."""
    buffer = config.buffer
    ranks = config.trainer.ranks
    episode_tokens = statistics.mean(
        sum(turn.tokens for turn in episode) for group in rates.recorded for episode in group
    )

    # Once refills are used up, filtered groups are trained.
    return Workload(
        buffer=buffer,
        slots=config.rollout.slots * config.rollout.workers,
        recorded=rates.recorded,
        speed=math.inf,
        rate=engine_count(config) / rates.slope if rates.slope else math.inf,
        base=rates.base,
        train=rates.episode_s * buffer.batch_size / ranks,
        commit=rates.commit_s,
        publish=rates.publish_s,
        shift=rates.shift_s if config.shifts else None,
        ranks=ranks,
        micro_tokens=config.trainer.micro_batch_tokens,
        computed=rates.group_tokens / max(1.0, buffer.episodes_per_group * episode_tokens),
        filtered=min(rates.filtered, buffer.max_refill / (1 + buffer.max_refill)),
        limit=config.rollout.episode_timeout,
    )


def engine_count(config: RunConfig) -> int:
    return config.engine.server_count or config.rollout.workers


def predict(config: RunConfig, rates: Rates, steps: int = 0, seeds: Sequence[int] = (0,)) -> Forecast:
    """Return the mean over the steady steps of simulated runs of `steps` steps; 0: as many steps as are
    needed to settle. Raises ConfigError if no batch could ever fill."""
    return simulate(workload(config, rates), steps, seeds)


def simulate(work: Workload, steps: int = 0, seeds: Sequence[int] = (0,)) -> Forecast:
    """Predict a workload, as `predict` does."""
    steps = steps or min(MAX_STEPS, max(MIN_STEPS, MAX_EPISODES // work.buffer.batch_size))
    with ConfigError.instead_of(
        ValueError, text="cannot predict the duration of a step with this configuration"
    ):
        simulated_steps = [step for seed in seeds for step in steady_steps(Simulation(work, seed).run(steps))]

    names = ("seconds", "train", "rollout", "awake", "lag", "masked", "tokens")
    columns = ([getattr(step, name) for step in simulated_steps] for name in names)
    seconds, train, rollout, awake, lag, masked, tokens = map(statistics.mean, columns)
    # By shifts each side is idle only in its own half of the step.
    trainer_seconds = seconds - awake or seconds
    return Forecast(
        step_s=seconds,
        lag=lag,
        trainer_idle=1 - train / trainer_seconds,
        rollout_idle=1 - rollout / awake,
        masked=masked,
        tokens=tokens,
    )


def time_savings(config: RunConfig, rates: Rates, seeds: Sequence[int] = (0,)) -> dict[str, float]:
    """Return, by name, the fraction of a step's seconds that is saved if one part is twice as fast, or twice
    as large. The same simulated runs are compared, with and without the change."""
    work = workload(config, rates)
    longer_buffer = replace(work.buffer, max_staleness=work.buffer.max_staleness * 2 + 1)

    changed_workloads = {
        "engines": replace(work, base=work.base / 2, rate=work.rate * 2),
        "trainer": replace(work, train=work.train / 2, commit=work.commit / 2),
        "tools and rewards": replace(work, recorded=scale_waits(work.recorded, 0.5)),
        "rollout.slots": replace(work, slots=work.slots * 2),
        "buffer.max_staleness": replace(work, buffer=longer_buffer),
        "weight pushes": replace(work, publish=work.publish / 2),
    }

    if work.shift is not None:
        changed_workloads["device changes"] = replace(work, shift=work.shift / 2)
        del changed_workloads["weight pushes"]  # pushes are a part of these changes

    current_seconds = simulate(work, seeds=seeds).step_s
    return {
        name: max(0.0, 1 - simulate(changed_workload, seeds=seeds).step_s / current_seconds)
        for name, changed_workload in changed_workloads.items()
    }
