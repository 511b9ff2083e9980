"""`asyncrl plan`: finds what limits a run, and predicts other splits, slots, batches and staleness bounds."""

from __future__ import annotations

import shutil
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from asyncrl.commands import command_parser, find_run
from asyncrl.config import RunConfig, parse
from asyncrl.config.composition import compose, recompose
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.observe.files import read_rows
from asyncrl.observe.summary import latest_steps
from asyncrl.observe.timeline import TimelineLine, merge_spans, timeline_files
from asyncrl.registry import search_working_directory

if TYPE_CHECKING:
    from asyncrl.planning.devices import Comparison, Placed
    from asyncrl.planning.forecast import EngineLoad, Forecast, Rates, Row
    from asyncrl.planning.simulator import Recorded, Workload

HELP = """\
Find the bottleneck of a run, and predict the effect of other settings by simulation from its measurements.

  asyncrl plan demo                         a run, which may still be running
  asyncrl plan demo rollout.slots=128       the same run with other settings
  asyncrl plan demo small                   engine speed from two runs with different loads
  asyncrl plan demo --devices 16            split 16 devices, or give all of them to each side in turn
  asyncrl plan demo --tail 2                long responses and slow tools twice as far from the median
  asyncrl plan experiment=calculator        no run yet: first measures two short runs, one with fewer slots

See docs/guides/scale.md for the assumptions, and for the accuracy of past predictions."""

Keys = dict[str, int]
SLOTS_KEY = "rollout.slots"
GROUPS_KEY = "buffer.groups_per_batch"
STALENESS_KEY = "buffer.max_staleness"
FIGURES = (
    ("seconds per step", "step_s", ".3g"),
    ("trainable tokens/s", "tokens_per_s", ".0f"),
    ("mean lag", "lag", ".2f"),
    ("masked tokens", "masked", ".2%"),
    ("trainer idle", "trainer_idle", ".0%"),
    ("rollout idle", "rollout_idle", ".0%"),
)
MAX_GROUPS = 500  # Newest groups from which episodes are drawn.
# Fraction of groups, the newest, that is left out: only their fast episodes have landed by now.
NEWEST_FRACTION = 0.1
# Steps of a probe, and the divisor of the slots in the second probe.
PROBE_STEPS = 10
FEWER_SLOTS_DIVISOR = 4
TIMELINE_ROLES = ("rollout", "coordinator")  # Roles whose timelines are read.
MAX_SPLITS = 8
SHOWN_CANDIDATES = 10  # Candidates in the table.
FIGURES_HEADER = "  s/step  formula   lag  masked"
SIMULATION_SEEDS = (0, 1, 2)  # Seeds of the simulated runs of this configuration.
SIMILAR_FRACTION = 0.03  # Tokens/s that differ by less count as equal; then the lower lag is better.


class Measurements(msgspec.Struct, frozen=True):
    """The recordings of a run. `recorded`: turns of episodes, by group; `publish_s`: seconds from the
    trainer's snapshot until an engine has the weights; `state_bytes`: size of weights and optimizer in the
    newest checkpoint, 0 without one."""

    config: RunConfig
    rows: Sequence[Row]
    recorded: Recorded
    engine_load: EngineLoad
    publish_s: float
    state_bytes: int

    @classmethod
    def read_run(cls, run_dir: Path, config: RunConfig) -> Measurements:
        """Read the recordings of a run. Raises ConfigError if the run has recorded too little."""
        from asyncrl.planning.forecast import EngineLoad
        from asyncrl.store.checkpoints import checkpoints_of

        recorded, seconds, tokens = _recorded_episodes(run_dir)
        spans = [
            span
            for file in timeline_files(run_dir)
            if file.role in TIMELINE_ROLES
            for span in file.read_added()
        ]
        sampling = _concurrent_episodes(spans, config)
        if not tokens or not sampling:
            raise ConfigError(
                f"{run_dir}: the run has not recorded any sampled turns yet; let the run continue, or "
                "name another run"
            )

        # The newest checkpoint has the size of weights and optimizer.
        checkpoints = checkpoints_of(config, run_dir)
        steps = checkpoints.steps()
        files = checkpoints.manifest(steps[0]).files if steps else {}

        return cls(
            config=config,
            rows=latest_steps(row for row in read_rows(run_dir) if "timing_s/step" in row),
            recorded=recorded,
            engine_load=EngineLoad(sampling, seconds / tokens),
            publish_s=sum(
                fmean([span.end - span.start for span in spans if span.name == name] or [0.0])
                for name in ("write_weights", "push")
            ),
            state_bytes=sum(size for name, (size, _) in files.items() if name.startswith("state/")),
        )


def main(argv: list[str]) -> int:
    parser = command_parser("plan", HELP)
    parser.add_argument(
        "what", nargs="+", metavar="RUN|KEY=VALUE", help="names or directories of runs, or overrides"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        help="total devices for engines and trainer (default: as in the run)",
    )
    parser.add_argument(
        "--shift",
        type=float,
        help="seconds to switch the devices to the trainer and back (default: estimated)",
    )
    parser.add_argument(
        "--tail", type=float, default=1.0, help="stretch durations above the median by this factor"
    )
    parser.add_argument(
        "--config-dir", type=Path, help="directory with your own configuration groups, for a probe"
    )
    options = parser.parse_intermixed_args(argv)

    if options.tail <= 0:
        raise ConfigError(f"--tail {options.tail:g}: use a factor above 0; 1 leaves the tail unchanged")

    names = [word for word in options.what if "=" not in word or Path(word, "config.yaml").is_file()]
    overrides = [word for word in options.what if word not in names]

    if names:
        run_dirs = [find_run(options.run_dir, name) for name in names]
        measurements = [Measurements.read_run(path, recompose(path, [])) for path in run_dirs]
        wanted_config = recompose(run_dirs[0], overrides)
    else:
        wanted_config = compose(overrides, options.config_dir)
        measurements = probe(wanted_config)
    from asyncrl.algorithms.recipe import with_group_policy
    from asyncrl.planning.forecast import fit, stretch_tail

    first_run = measurements[0]
    loads = [run.engine_load for run in measurements]
    rates = fit(
        first_run.config,
        first_run.rows,
        first_run.recorded,
        loads,
        first_run.publish_s,
        first_run.state_bytes,
    )

    if options.shift is not None:
        rates = replace(rates, shift_s=options.shift, shift_source="set by --shift")
    if options.tail != 1:
        rates = replace(rates, recorded=stretch_tail(rates.recorded, options.tail))

    is_measured = options.tail == 1 and (not names or wanted_config == first_run.config)
    print_report(
        with_group_policy(wanted_config), rates, first_run.rows if is_measured else (), options.devices
    )
    return 0


def probe(config: RunConfig) -> list[Measurements]:
    """Measure a configuration by two short runs, the second with fewer slots: how an engine's speed depends
    on its load shows only at different loads. Raises AsyncrlError if a run fails; the directory of that run
    is kept."""
    from asyncrl.launch.process import INTERRUPTED
    from asyncrl.launch.start import train

    search_working_directory()
    runs_directory = Path(config.run_dir)  # The run directory's disk has room for checkpoints.
    runs_directory.mkdir(parents=True, exist_ok=True)
    probe_directory = tempfile.mkdtemp(prefix="plan-", dir=runs_directory)

    measurements = []
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, probe_directory, ignore_errors=True)
        for name, slots in (
            ("all-slots", config.rollout.slots),
            ("few-slots", config.rollout.slots // FEWER_SLOTS_DIVISOR),
        ):
            probe_config = replace(
                config,
                name=name,
                run_dir=probe_directory,
                total_steps=PROBE_STEPS,
                rollout=replace(config.rollout, slots=max(1, slots)),
                validation=replace(config.validation, samples=0),
                checkpoint=replace(config.checkpoint, every=0, directory=""),
                observe=replace(config.observe, console="plain", trackers=[]),
            )
            print(f"probe: {PROBE_STEPS} steps with rollout.slots={probe_config.rollout.slots}", flush=True)

            exit_code = train(probe_config, show_summary=False)
            if exit_code == INTERRUPTED:
                raise KeyboardInterrupt
            run_dir = Path(probe_directory) / name
            if exit_code:
                cleanup.pop_all()
                raise AsyncrlError(f"the probe failed; see {run_dir / 'logs'}")
            measurements.append(Measurements.read_run(run_dir, recompose(run_dir, [])))
        return measurements


# -- reading a run ---------------------------------------------------------------------------------


def _recorded_episodes(run_dir: Path) -> tuple[Recorded, float, int]:
    """Return the turns of finished groups, and the seconds and tokens of their sampling."""
    from asyncrl.episodes.recorded import stored_turns
    from asyncrl.planning.forecast import recorded_turns
    from asyncrl.store.reader import RunReader

    recorded_groups = []
    sampling_seconds = 0.0
    token_count = 0
    with closing(RunReader.open(run_dir)) as reader:
        groups = reader.groups()
        groups = groups[: len(groups) - round(NEWEST_FRACTION * len(groups))][-MAX_GROUPS:]

        for group in groups:
            episodes = []
            for episode in (
                member
                for member in reader.group_members(group.id)
                if member.stats.turns and not member.greedy
            ):
                turns, missing = stored_turns(reader, episode)
                if turns and not missing:
                    episodes.append(recorded_turns(turns, episode.stats))
                    sampling_seconds += sum(turn.generation.seconds for turn in turns)
                    token_count += sum(len(turn.generation.ids) for turn in turns)
            if episodes:
                recorded_groups.append(tuple(episodes))
    return tuple(recorded_groups), sampling_seconds, token_count


def _concurrent_episodes(spans: Sequence[TimelineLine], config: RunConfig) -> float:
    """Return how many episodes sampled on an engine at once, averaged over sampling time, without
    validations."""
    from asyncrl.planning.forecast import engine_count
    from asyncrl.runtime.activity import DECODE

    validations = merge_spans((span.start, span.end) for span in spans if span.name == "validation")
    validation_ends = [end for _, end in validations]

    def during_validation(span: TimelineLine) -> bool:
        next_index = bisect_right(validation_ends, span.start)
        return next_index < len(validations) and validations[next_index][0] < span.end

    decode_spans = [
        span
        for span in spans
        if span.name == DECODE and span.end > span.start and not during_validation(span)
    ]
    total_seconds = sum(span.seconds for span in decode_spans)
    concurrency = (
        sum(span.seconds**2 / (span.end - span.start) for span in decode_spans) / total_seconds
        if total_seconds
        else 0.0
    )
    return concurrency * config.rollout.workers / engine_count(config)


# -- candidates ------------------------------------------------------------------------------------


def with_keys(config: RunConfig, keys: Keys) -> RunConfig | None:
    """Return the configuration with other values of some keys; None if the values are not valid together."""
    tree = msgspec.to_builtins(config)
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree[section][name] = value

    try:
        return parse(tree)
    except ConfigError:
        return None


def splits(config: RunConfig, devices: int) -> list[Keys]:
    """Return splits of the devices into engines and trainer ranks; if there are many devices, only some of
    the splits. Attached servers (engine.urls) stay as many as they are."""
    key, tp = engine_key(config)
    max_engines = (devices - 1) // tp
    current_engines = config.engine.server_count or config.rollout.workers
    engine_counts = (
        [current_engines]
        if config.engine.urls
        else [*range(1, max_engines + 1, -(-max_engines // MAX_SPLITS) or 1), current_engines]
    )
    return [
        {key: engines, "trainer.ranks": devices - engines * tp}
        for engines in dict.fromkeys(engine_counts)
        if engines <= max_engines
    ]


def engine_key(config: RunConfig) -> tuple[str, int]:
    """Return the key that sets the number of engines, and the devices of one engine."""
    return ("engine.servers", config.engine.tp) if config.engine.remote else ("rollout.workers", 1)


def candidates(
    config: RunConfig, rates: Rates, devices: int, chosen_split: Keys | None = None
) -> list[tuple[Keys, Forecast]]:
    """Predict other values of these keys, the best first. Splits (or `chosen_split`) and slots are varied
    together; batch and staleness with the best of these."""
    from asyncrl.planning.forecast import predict

    buffer = config.buffer
    slots = config.rollout.slots
    groups = buffer.groups_per_batch
    max_staleness = buffer.max_staleness
    tried_forecasts: dict[tuple[int, ...], tuple[Keys, Forecast]] = {}

    def attempt(keys: Keys) -> None:
        changed_config = with_keys(config, keys)
        if changed_config is not None and tuple(keys.values()) not in tried_forecasts:
            tried_forecasts[tuple(keys.values())] = keys, predict(changed_config, rates)

    for split in [chosen_split] if chosen_split else splits(config, devices):
        for slot_count in (slots // 2, slots, 2 * slots):
            attempt(split | {SLOTS_KEY: slot_count, GROUPS_KEY: groups, STALENESS_KEY: max_staleness})

    if not tried_forecasts:
        raise ConfigError(f"--devices {devices}: too few for an engine and a trainer rank; use more")

    best_keys = rank_candidates(tried_forecasts.values())[0][0]
    for batch_groups in (groups // 2, groups, 2 * groups):
        for staleness in (max_staleness // 2, max_staleness, 2 * max_staleness):
            attempt(best_keys | {GROUPS_KEY: batch_groups, STALENESS_KEY: staleness})

    return rank_candidates(tried_forecasts.values())


def rank_candidates(forecasts: Iterable[tuple[Keys, Forecast]]) -> list[tuple[Keys, Forecast]]:
    """Sort forecasts: first all with about the most tokens/s, by lag; then the rest by tokens/s."""
    by_speed = sorted(forecasts, key=lambda candidate: -candidate[1].tokens_per_s)
    lowest_speed = (1 - SIMILAR_FRACTION) * by_speed[0][1].tokens_per_s
    similar = [candidate for candidate in by_speed if candidate[1].tokens_per_s >= lowest_speed]
    return sorted(similar, key=lambda candidate: candidate[1].lag) + by_speed[len(similar) :]


# -- the report ------------------------------------------------------------------------------------


def print_report(config: RunConfig, rates: Rates, rows: Sequence[Row], requested_devices: int) -> None:
    """Print the report. `rows`: metrics of a run with exactly this configuration, empty if there is none.
    `requested_devices`: the number of devices, or 0."""
    from asyncrl.planning.forecast import engine_count, measured_forecast, predict, time_savings

    key, tp = engine_key(config)
    current_devices = (engine_count(config) * tp, config.trainer.ranks)
    devices = requested_devices or (max(current_devices) if config.shifts else sum(current_devices))

    unshared_config = with_keys(config, {"engine.colocated": 0}) or config
    compares_sharing = requested_devices >= tp and not config.engine.urls
    is_unsplit = compares_sharing or (config.shifts and not requested_devices)
    if not (splits(unshared_config, devices) or is_unsplit):
        raise ConfigError(f"--devices {devices}: too few for an engine and a trainer rank; use more")

    print_progress("simulating this configuration")
    predicted = predict(config, rates, seeds=SIMULATION_SEEDS)
    print_progress("finding the bottleneck")
    savings = time_savings(config, rates, SIMULATION_SEEDS)
    saved_fractions = sorted(savings.items(), key=lambda saving: -saving[1])

    columns = {"predicted": predicted} | ({"measured": measured_forecast(rows)} if rows else {})
    print(f"\n{'':24}" + "".join(f"{name:>12}" for name in columns))
    for label, name, number_format in FIGURES:
        print(
            f"{label:24}"
            + "".join(f"{getattr(forecast, name):>z12{number_format}}" for forecast in columns.values())
        )
    assumed_note = (
        "\n(the two parts of a token's time are assumed, because the load hardly varied; name a second run "
        "with\na different number of slots, or run a probe)"
    )
    print(
        f"\nmeasured on {len(rates.recorded)} groups: a token takes {1e3 * rates.base:.3g} ms, plus "
        f"{1e3 * rates.slope:.3g} ms per episode that its engine is sampling;\n"
        f"training takes {1e3 * rates.episode_s:.3g} ms per episode on one rank, plus {rates.commit_s:.3g} s "
        f"per step; a push takes {rates.publish_s:.3g} s{assumed_note * rates.assumed}"
    )

    print("\nstep time saved by doubling the number or the speed of each part:")
    print("  " + ", ".join(f"{name} {fraction:z.0%}" for name, fraction in saved_fractions))
    limiting_part, largest_saving = saved_fractions[0]
    print(f"bottleneck: {limiting_part if largest_saving > SIMILAR_FRACTION else 'no single part'}")

    chosen_split = print_sharing(unshared_config, rates, devices) if compares_sharing else None
    if (compares_sharing and not chosen_split) or not splits(unshared_config, devices):
        return

    split_text = " with that split" if chosen_split else ""
    print_progress(f"trying other slot counts, batch sizes and bounds{split_text}")
    ranked_candidates = candidates(unshared_config, rates, devices, chosen_split)
    key_names = (key, "trainer.ranks", SLOTS_KEY, GROUPS_KEY, STALENESS_KEY)

    print(
        f"\n{devices} devices; settings within about {SIMILAR_FRACTION:.0%} of the best tokens/s come first, "
        "sorted by lag:"
    )
    print(
        " ".join(f"{name.partition('.')[2]:>16}" for name in key_names)
        + "   tokens/s  s/step   lag  masked  idle"
    )
    for keys, forecast in ranked_candidates[:SHOWN_CANDIDATES]:
        print(
            " ".join(f"{keys[name]:>16}" for name in key_names)
            + f"{forecast.tokens_per_s:>11.0f}{forecast.step_s:>8.3g}"
            + f"{forecast.lag:>6.2f}{forecast.masked:>8.1%}"
            + f"  trainer {forecast.trainer_idle:z.0%}, rollout {forecast.rollout_idle:z.0%}"
        )

    print("\n" + " ".join(f"{name}={ranked_candidates[0][0][name]}" for name in key_names))


def print_sharing(config: RunConfig, rates: Rates, devices: int) -> Keys | None:
    """Print the forecasts of engines and trainer apart and by shifts on the same devices, and which way to
    choose. Return the best split; None if shifts are best."""
    from asyncrl.planning.devices import batch_seconds, compare
    from asyncrl.planning.forecast import workload

    key, tp = engine_key(config)

    def work(engines: int, ranks: int) -> Workload:
        return workload(with_keys(config, {key: engines, "trainer.ranks": ranks}) or config, rates)

    print_progress(f"comparing splits and shifts on up to {devices} devices")
    sampling_seconds, training_seconds = batch_seconds(work(1, 1))
    print(
        "\nseparate devices (split: engines+ranks), or shifts on the same devices; a batch takes "
        f"{sampling_seconds:.3g} s on one engine and {training_seconds:.3g} s on one rank,\n"
        f"and switching the devices to the trainer and back takes {rates.shift_s:.3g} s "
        f"({rates.shift_source}):\n"
        f"devices   split{FIGURES_HEADER} |   shifts{FIGURES_HEADER} | elastic, at best"
    )

    for device_count in [*(power for power in map((1).__lshift__, range(16)) if power < devices), devices]:
        comparison = compare(work, device_count, rates.shift_s, tp)
        elastic_text = f"{comparison.elastic:.3g} ({-comparison.gain:.0%})" if comparison.apart else "-"
        sides_text = " | ".join(map(_format_placed, (comparison.apart, comparison.shifts)))
        print(f"{device_count:>7}{sides_text} | {elastic_text}", flush=True)

    print(_sharing_advice(comparison, key))
    split = {key: comparison.best.engines, "trainer.ranks": comparison.best.ranks}
    return split if comparison.best is comparison.apart else None


def print_progress(activity: str) -> None:
    """Print which simulation runs, as simulations take seconds; on standard error, apart from the report."""
    print(f"plan: {activity} …", file=sys.stderr, flush=True)


def _format_placed(placed: Placed | None) -> str:
    if placed is None:
        return f"{'-':>8}{'':31}"
    forecast = placed.forecast
    split = f"{placed.engines}+{placed.ranks}"
    return (
        f"{split:>8}{forecast.step_s:>8.3g}{placed.formula:>9.3g}{forecast.lag:>6.2f}{forecast.masked:>8.1%}"
    )


def _sharing_advice(comparison: Comparison, key: str) -> str:
    """Say which way to choose, and why."""
    best_placed = comparison.best
    keys = f"{key}={best_placed.engines} trainer.ranks={best_placed.ranks}"
    if best_placed is comparison.shifts:
        keys += f" engine.colocated={best_placed.engines}"
    if comparison.apart is None or comparison.shifts is None:
        return f"use {keys}: the only option with these devices"

    gain = 1 - comparison.fastest / max(comparison.apart.forecast.step_s, comparison.shifts.forecast.step_s)
    reason = (
        "no split keeps both sides equally busy"
        if best_placed is comparison.shifts
        else "shifts leave more idle time than the split"
    )
    return f"use {keys}: " + (
        f"steps take {gain:.0%} less time, because {reason}"
        if gain > SIMILAR_FRACTION
        else "equally fast, with less lag"
    )
