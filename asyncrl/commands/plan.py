"""`asyncrl plan`: what limits a run, and what other splits, slots, batches and bounds would do."""

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
from asyncrl.observe.summary import latest
from asyncrl.observe.timeline import Line, files, union
from asyncrl.registry import search_working_directory

if TYPE_CHECKING:
    from asyncrl.planning.devices import Comparison, Placed
    from asyncrl.planning.forecast import EngineLoad, Forecast, Rates, Row
    from asyncrl.planning.simulator import Recorded, Workload

HELP = """\
Say what limits a run, and predict other settings of it, from what it measured and a simulation.

  asyncrl plan demo                         of a run, which may be under way
  asyncrl plan demo rollout.slots=128       what it would do with other keys
  asyncrl plan demo small                   the engines' speed from two runs with different loads
  asyncrl plan demo --devices 16            split 16 devices, or give all of them to both sides in turn
  asyncrl plan demo --tail 2                long responses and slow tools twice as far from the median
  asyncrl plan experiment=calculator        without a run: two short ones measure first, one with fewer slots

docs/planning.md says what is assumed, and how far predictions were off."""

Keys = dict[str, int]
SLOTS = "rollout.slots"
GROUPS = "buffer.groups_per_batch"
BOUND = "buffer.max_staleness"
FIGURES = (
    ("seconds a step", "step_s", ".3g"),
    ("tokens/s within bound", "tokens_per_s", ".0f"),
    ("lag, mean", "lag", ".2f"),
    ("masked tokens", "masked", ".2%"),
    ("trainer idle", "trainer_idle", ".0%"),
    ("rollout idle", "rollout_idle", ".0%"),
)
MOST_GROUPS = 500  # the newest ones, that episodes are drawn from
NEWEST = (
    0.1  # share of the groups that is left out: of those, the fast ones have landed, and the slow ones not
)
# steps of a probe; the second one has 1/FEWER of the slots
PROBE_STEPS = 10
FEWER = 4
ROLES = ("rollout", "coordinator")  # whose timelines are read
MOST_SPLITS = 8
SHOWN = 10  # candidates
HEAD = "  s/step  formula   lag  masked"
SEEDS = (0, 1, 2)  # of the simulated runs of this configuration
ALIKE = 0.03  # tokens/s that differ by less are alike: then the lower lag is better


class Measurements(msgspec.Struct, frozen=True):
    """The recordings of a run. `recorded`: turns of episodes, by group; `publish_s`: seconds from the
    trainer's snapshot until an engine had it; `state_bytes`: of weights and optimizer in a checkpoint."""

    config: RunConfig
    rows: Sequence[Row]
    recorded: Recorded
    load: EngineLoad
    publish_s: float
    state_bytes: int

    @classmethod
    def of(cls, run_dir: Path, config: RunConfig) -> Measurements:
        """ConfigError where there is too little."""
        from asyncrl.planning.forecast import EngineLoad

        recorded, seconds, tokens = _episodes(run_dir)
        spans = [span for file in files(run_dir) if file.role in ROLES for span in file.added()]
        sampling = _sampling(spans, config)
        if not tokens or not sampling:
            raise ConfigError(f"{run_dir}: recorded no sampled turns; let the run go on, or name another")

        rows = latest(row for row in read_rows(run_dir) if "timing_s/step" in row)
        publish = sum(
            fmean([span.end - span.start for span in spans if span.name == name] or [0.0])
            for name in ("write_weights", "push")
        )

        load = EngineLoad(sampling, seconds / tokens)
        state = _state_bytes(config, run_dir)
        return cls(config, rows, recorded, load, publish, state)


def main(argv: list[str]) -> int:
    parser = command_parser("plan", HELP)
    parser.add_argument("what", nargs="+", metavar="RUN|KEY=VALUE", help="runs, or directories; overrides")
    parser.add_argument("--devices", type=int, default=0, help="of engines and trainer ranks; as they are")
    parser.add_argument("--shift", type=float, help="seconds of both changes by shifts, if you know")
    parser.add_argument("--tail", type=float, default=1.0, help="stretch what is longer than its median")
    parser.add_argument("--config-dir", type=Path, help="configuration groups of your own, for a probe")
    options = parser.parse_intermixed_args(argv)

    if options.tail <= 0:
        raise ConfigError(f"--tail {options.tail:g}: give a factor above 0; 1 leaves the tail as it is")

    names = [word for word in options.what if "=" not in word or Path(word, "config.yaml").is_file()]
    overrides = [word for word in options.what if word not in names]

    if names:
        found = [find_run(options.run_dir, name) for name in names]
        runs = [Measurements.of(path, recompose(path, [])) for path in found]
        wanted = recompose(found[0], overrides)
    else:
        wanted = compose(overrides, options.config_dir)
        runs = probe(wanted)
    from asyncrl.algorithms.recipe import with_group_policy
    from asyncrl.planning.forecast import fit, stretched

    first = runs[0]
    loads = [run.load for run in runs]
    rates = fit(first.config, first.rows, first.recorded, loads, first.publish_s, first.state_bytes)

    if options.shift is not None:
        rates = replace(rates, shift_s=options.shift, shift_source="as you say")
    if options.tail != 1:
        rates = replace(rates, recorded=stretched(rates.recorded, options.tail))

    same = options.tail == 1 and (not names or wanted == first.config)
    report(with_group_policy(wanted), rates, first.rows if same else (), options.devices)
    return 0


def probe(config: RunConfig) -> list[Measurements]:
    """Two short runs of a configuration, the second with fewer slots: how an engine's speed depends on its
    load shows only at different loads. AsyncrlError for one that fails, whose directory is kept."""
    from asyncrl.launch.process import INTERRUPTED
    from asyncrl.launch.start import train

    search_working_directory()
    runs = Path(config.run_dir)  # whose disk has room for checkpoints
    runs.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="plan-", dir=runs)

    found = []
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        for name, slots in ("all-slots", config.rollout.slots), ("few-slots", config.rollout.slots // FEWER):
            short = replace(
                config,
                name=name,
                run_dir=folder,
                total_steps=PROBE_STEPS,
                rollout=replace(config.rollout, slots=max(1, slots)),
                validation=replace(config.validation, samples=0),
                checkpoint=replace(config.checkpoint, every=0, directory=""),
                observe=replace(config.observe, console="plain", trackers=[]),
            )
            print(f"probe: {PROBE_STEPS} steps with rollout.slots={short.rollout.slots}", flush=True)

            code = train(short, summary=False)
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            run_dir = Path(folder) / name
            if code:
                cleanup.pop_all()
                raise AsyncrlError(f"the probe failed; its logs are kept: {run_dir / 'logs'}")
            found.append(Measurements.of(run_dir, recompose(run_dir, [])))
        return found


# -- reading a run ---------------------------------------------------------------------------------


def _episodes(run_dir: Path) -> tuple[Recorded, float, int]:
    """Turns of the groups that are over, seconds of sampling and tokens of them all."""
    from asyncrl.episodes.recorded import kept_turns
    from asyncrl.planning.forecast import recorded_turns
    from asyncrl.store.reader import RunReader

    found = []
    seconds = 0.0
    tokens = 0
    with closing(RunReader.open(run_dir)) as reader:
        groups = reader.groups()
        groups = groups[: len(groups) - round(NEWEST * len(groups))][-MOST_GROUPS:]

        for group in groups:
            episodes = []
            for episode in (e for e in reader.members(group.id) if e.stats.turns and not e.greedy):
                turns, missing = kept_turns(reader, episode)
                if turns and not missing:
                    episodes.append(recorded_turns(turns, episode.stats))
                    seconds += sum(turn.seconds for turn in turns)
                    tokens += sum(len(turn.ids) for turn in turns)
            if episodes:
                found.append(tuple(episodes))
    return tuple(found), seconds, tokens


def _sampling(spans: Sequence[Line], config: RunConfig) -> float:
    """Episodes that sampled on an engine at once, as those that sample meet it; validations apart."""
    from asyncrl.planning.forecast import engines
    from asyncrl.runtime.activity import DECODE

    held_out = union((span.start, span.end) for span in spans if span.name == "validation")
    ends = [end for _, end in held_out]

    def validates(span: Line) -> bool:
        after = bisect_right(ends, span.start)
        return after < len(held_out) and held_out[after][0] < span.end

    decode = [s for s in spans if s.name == DECODE and s.end > s.start and not validates(s)]
    total = sum(span.seconds for span in decode)
    at_once = sum(span.seconds**2 / (span.end - span.start) for span in decode) / total if total else 0.0
    return at_once * config.rollout.workers / engines(config)


def _state_bytes(config: RunConfig, run_dir: Path) -> int:
    """Of the newest checkpoint; 0 where there is none."""
    from asyncrl.store.checkpoints import checkpoints_of

    places = checkpoints_of(config, run_dir)
    files = places.manifest(places.steps()[0]).files if places.steps() else {}
    return sum(size for name, (size, _) in files.items() if name.startswith("state/"))


# -- candidates ------------------------------------------------------------------------------------


def changed(config: RunConfig, keys: Keys) -> RunConfig | None:
    """Returns the configuration with other values of some keys; None where they cannot work together."""
    tree = msgspec.to_builtins(config)
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree[section][name] = value

    try:
        return parse(tree)
    except ConfigError:
        return None


def splits(config: RunConfig, devices: int) -> list[Keys]:
    """Engines and trainer ranks that use all of so many devices, or, of many, some of these. Servers that
    are there already (engine.urls) stay as many."""
    key, tp = engine_key(config)
    most = (devices - 1) // tp
    own = config.engine.keepers or config.rollout.workers
    counts = [own] if config.engine.urls else [*range(1, most + 1, -(-most // MOST_SPLITS) or 1), own]
    return [{key: n, "trainer.ranks": devices - n * tp} for n in dict.fromkeys(counts) if n <= most]


def engine_key(config: RunConfig) -> tuple[str, int]:
    """The key that says how many engines there are, and how many devices one takes."""
    return ("engine.servers", config.engine.tp) if config.engine.remote else ("rollout.workers", 1)


def candidates(
    config: RunConfig, rates: Rates, devices: int, chosen: Keys | None = None
) -> list[tuple[Keys, Forecast]]:
    """Predict other values of these keys, the best first. Splits (or the `chosen` one) and slots are tried
    together; batch and bound with the best of them."""
    from asyncrl.planning.forecast import predict

    buffer = config.buffer
    slots = config.rollout.slots
    groups = buffer.groups_per_batch
    bound = buffer.max_staleness
    tried: dict[tuple[int, ...], tuple[Keys, Forecast]] = {}

    def attempt(keys: Keys) -> None:
        other = changed(config, keys)
        if other is not None and tuple(keys.values()) not in tried:
            tried[tuple(keys.values())] = keys, predict(other, rates)

    for split in [chosen] if chosen else splits(config, devices):
        for some in (slots // 2, slots, 2 * slots):
            attempt(split | {SLOTS: some, GROUPS: groups, BOUND: bound})

    if not tried:
        raise ConfigError(f"--devices {devices}: too few for an engine and a trainer rank; give more")

    best = ranked(tried.values())[0][0]
    for batch in (groups // 2, groups, 2 * groups):
        for most in (bound // 2, bound, 2 * bound):
            attempt(best | {GROUPS: batch, BOUND: most})

    return ranked(tried.values())


def ranked(tried: Iterable[tuple[Keys, Forecast]]) -> list[tuple[Keys, Forecast]]:
    """Sort: the ones with about the most tokens/s first, by their lag, then the others by tokens/s."""
    listed = sorted(tried, key=lambda one: -one[1].tokens_per_s)
    least = (1 - ALIKE) * listed[0][1].tokens_per_s
    alike = [one for one in listed if one[1].tokens_per_s >= least]
    return sorted(alike, key=lambda one: one[1].lag) + listed[len(alike) :]


# -- the report ------------------------------------------------------------------------------------


def report(config: RunConfig, rates: Rates, rows: Sequence[Row], asked: int) -> None:
    """Print it. `rows`: of a run with just this configuration; none where there was none. `asked`: devices,
    or 0."""
    from asyncrl.planning.forecast import engines, limits, measured, predict

    key, tp = engine_key(config)
    held = (engines(config) * tp, config.trainer.ranks)
    devices = asked or (max(held) if config.shifts else sum(held))

    own = changed(config, {"engine.colocated": 0}) or config
    shared = asked >= tp and not config.engine.urls
    unsplit = shared or (config.shifts and not asked)
    if not (splits(own, devices) or unsplit):
        raise ConfigError(f"--devices {devices}: too few for an engine and a trainer rank; give more")

    progress("simulating this configuration")
    predicted = predict(config, rates, seeds=SEEDS)
    progress("finding what limits it")
    saved = sorted(limits(config, rates, SEEDS).items(), key=lambda one: -one[1])

    columns = {"predicted": predicted} | ({"measured": measured(rows)} if rows else {})
    print(f"\n{'':24}" + "".join(f"{name:>12}" for name in columns))
    for label, name, form in FIGURES:
        print(f"{label:24}" + "".join(f"{getattr(one, name):>z12{form}}" for one in columns.values()))
    note = (
        "\n(how a token's time splits is assumed, as the load hardly differed: name a second run with other\n"
        "slots, or measure a probe)"
    )
    print(
        f"\nmeasured: {len(rates.recorded)} groups; a token takes {1e3 * rates.base:.3g} ms + "
        f"{1e3 * rates.share:.3g} ms for each episode that samples on its engine;\n"
        f"an episode {1e3 * rates.episode_s:.3g} ms of training on one rank, a step {rates.commit_s:.3g} s "
        f"more, a push {rates.publish_s:.3g} s{note * rates.assumed}"
    )

    print("\nshare of a step's time that would be saved by twice as much of it, or twice as fast:")
    print("  " + ", ".join(f"{name} {share:z.0%}" for name, share in saved))
    print(f"limited by: {saved[0][0] if saved[0][1] > ALIKE else 'nothing alone'}")

    chosen = report_sharing(own, rates, devices) if shared else None
    if (shared and not chosen) or not splits(own, devices):
        return

    progress("trying other slots, batches and bounds" + " with that split" * bool(chosen))
    found = candidates(own, rates, devices, chosen)
    names = (key, "trainer.ranks", SLOTS, GROUPS, BOUND)

    print(f"\n{devices} devices; tokens/s within about {ALIKE:.0%} of the best first, by lag:")
    print(
        " ".join(f"{name.partition('.')[2]:>16}" for name in names)
        + "   tokens/s  s/step   lag  masked  idle"
    )
    for keys, one in found[:SHOWN]:
        print(
            " ".join(f"{keys[name]:>16}" for name in names)
            + f"{one.tokens_per_s:>11.0f}{one.step_s:>8.3g}{one.lag:>6.2f}{one.masked:>8.1%}"
            + f"  trainer {one.trainer_idle:z.0%}, rollout {one.rollout_idle:z.0%}"
        )

    print("\n" + " ".join(f"{name}={found[0][0][name]}" for name in names))


def report_sharing(config: RunConfig, rates: Rates, devices: int) -> Keys | None:
    """Print what engines and trainer do apart, and by shifts on the same devices, and which way to take.
    Return that split; None where it is by shifts."""
    from asyncrl.planning.devices import compare, halves
    from asyncrl.planning.forecast import workload

    key, tp = engine_key(config)

    def work(engines: int, ranks: int) -> Workload:
        return workload(changed(config, {key: engines, "trainer.ranks": ranks}) or config, rates)

    progress(f"comparing splits and shifts on up to {devices} devices")
    g, t = halves(work(1, 1))
    print(
        f"\napart (engines+ranks), or by shifts on the same devices; a batch takes one engine {g:.3g} s, one "
        f"rank {t:.3g} s,\nboth changes of the devices {rates.shift_s:.3g} s ({rates.shift_source}):\n"
        f"devices   apart{HEAD} |    by shifts{HEAD} | elastic, at best"
    )

    for number in [*(n for n in map((1).__lshift__, range(16)) if n < devices), devices]:
        found = compare(work, number, rates.shift_s, tp)
        elastic = f"{found.elastic:.3g} ({-found.gain:.0%})" if found.apart else "-"
        sides = " | ".join(map(_figures, (found.apart, found.shifts)))
        print(f"{number:>7}{sides} | {elastic}", flush=True)

    print(_advice(found, key))
    split = {key: found.best.engines, "trainer.ranks": found.best.ranks}
    return split if found.best is found.apart else None


def progress(what: str) -> None:
    """Say what is simulated, as it takes seconds: on standard error, apart from the report."""
    print(f"plan: {what} …", file=sys.stderr, flush=True)


def _figures(placed: Placed | None) -> str:
    if placed is None:
        return f"{'-':>8}{'':31}"
    one = placed.forecast
    split = f"{placed.engines}+{placed.ranks}"
    return f"{split:>8}{one.step_s:>8.3g}{placed.formula:>9.3g}{one.lag:>6.2f}{one.masked:>8.1%}"


def _advice(found: Comparison, key: str) -> str:
    """Say what to take, and why."""
    best = found.best
    keys = f"{key}={best.engines} trainer.ranks={best.ranks}"
    keys += f" engine.colocated={best.engines}" * (best is found.shifts)
    if found.apart is None or found.shifts is None:
        return f"take {keys}: these devices allow nothing else"

    gain = 1 - found.fastest / max(found.apart.forecast.step_s, found.shifts.forecast.step_s)
    why = (
        "no split keeps both sides as busy"
        if best is found.shifts
        else "a shift leaves more idle than the split"
    )
    return f"take {keys}: " + (
        f"steps take {gain:.0%} less time, as {why}" if gain > ALIKE else "as fast, with less lag"
    )
