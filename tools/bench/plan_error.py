"""How far predictions of `asyncrl plan` are from runs: seven configurations, each with several seeds.

    python tools/bench/plan_error.py --run-dir DIR             # 24 runs of one to nine minutes, six at once
    python tools/bench/plan_error.py --run-dir DIR --seeds 1
    python tools/bench/plan_error.py --run-dir DIR --only 'two workers'

The rates are measured in other runs, with seeds of their own: those of the engine with 32 and 8 slots, those
of the trainer with each loss. All runs are of the real
pipeline. Tools take log-normal times with a heavy tail, drawn by (seed, episode), and the engine and the
trainer take as long as paced.py says, mostly asleep, so that the machine's load matters little. Seconds a
step and lag are means over the steady steps, of the run and of a simulated run as long. By shifts, seconds of
both changes are the run's own, as given with --shift.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from async_ratio import COMMON, HERE, TOOL
from common import summary, table, train
from msgspec.structs import replace

from asyncrl.algorithms.recipe import with_group_policy
from asyncrl.commands.plan import Measurements
from asyncrl.config import RunConfig
from asyncrl.config.composition import recompose
from asyncrl.planning.forecast import Forecast, fit, measured_forecast, predict

STEPS = 20
SETTINGS = [
    *(f"engine.name={HERE / 'paced.py'}:paced", f"algorithm.loss={HERE / 'paced.py'}:paced_reinforce"),
    *(f"total_steps={STEPS}", "rollout.slots=32", "launch.restarts=0"),
]
DELAY = "mu: -1.5, sigma: 1.3"  # logarithm of a call's seconds: 0.52 s on average
SLOW = [f"algorithm.loss={HERE / 'paced.py'}:paced_reinforce_slow"]
PROBES: dict[str, list[str]] = {"probe": [], "probe-few": ["rollout.slots=8"], "probe-slow": SLOW}
PROBE_SEED = 100
CONFIGURATIONS: dict[str, list[str]] = {
    "rollout-bound": [],
    "few slots": ["rollout.slots=16"],
    "two workers": ["rollout.workers=2", "rollout.slots=64"],
    "slow trainer": SLOW,
    "bound of 1": ["buffer.max_staleness=1", "rollout.slots=64"],
    "by shifts": ["engine.colocated=1"],
    "by shifts, slow trainer": ["engine.colocated=1", *SLOW],
}


HEADER = ["configuration", "seed", "s/step: predicted", "measured", "error", "lag: predicted", "measured",
          "trainer idle: predicted", "measured"]  # fmt: skip


def run(name: str, folder: Path, seed: int, overrides: list[str]) -> None:
    """Run a configuration to the end, unless a complete run is there. SystemExit: the run failed."""
    arguments = (
        f"{{{TOOL.replace(':', chr(92) + ':')}: {{log: {folder / name}.lives, seed: {seed}, {DELAY}}}}}"
    )
    run_overrides = [f"rollout.tool_args={arguments}", f"seed={seed}", "resume=never"]
    all_overrides = [*COMMON, *SETTINGS, *run_overrides, *overrides]
    complete = summary(folder / name).get("outcome") == "completed"
    if not complete and train(name, folder, all_overrides, deadline=600.0)["exit_code"]:
        raise SystemExit(f"{name} failed; see {folder / name}.out")


def run_name(configuration: str) -> str:
    return configuration.replace(",", "").replace(" ", "-")


def error(predicted: float, measured_value: float) -> float:
    return abs(predicted / measured_value - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", choices=CONFIGURATIONS, help="configurations, besides those that measure"
    )
    parser.add_argument("--at-once", type=int, default=6, help="runs; each takes 2%% of a core once it runs")
    parser.add_argument("--run-dir", type=Path, required=True, help="complete runs in it stay")
    options = parser.parse_args()

    folder: Path = options.run_dir.resolve()
    chosen = options.only or list(CONFIGURATIONS)
    wanted = {name: (PROBE_SEED, keys) for name, keys in PROBES.items()} | {
        f"{run_name(name)}-{seed}": (seed, CONFIGURATIONS[name])
        for name in chosen
        for seed in range(options.seeds)
    }

    with ThreadPoolExecutor(options.at_once) as pool:
        under_way = [pool.submit(run, name, folder, *arguments) for name, arguments in wanted.items()]
        for future in under_way:
            future.result()

    runs = {name: Measurements.read_run(folder / name, recompose(folder / name, [])) for name in wanted}
    probes = [runs[name] for name in PROBES]
    loads = [probe.engine_load for probe in probes[:2]]
    fast, slow = (fit(p.config, p.rows, p.recorded, loads, p.publish_s) for p in (probes[0], probes[2]))
    print(f"a token: {fast.base:.4f} s + {fast.slope:.5f} s * n", flush=True)

    lines = []

    errors = []
    lags = []
    for name in chosen:
        for seed in range(options.seeds):
            probe_run = runs[f"{run_name(name)}-{seed}"]

            config: RunConfig = with_group_policy(probe_run.config)
            rates = slow if SLOW[0] in CONFIGURATIONS[name] else fast
            if config.shifts:
                fitted = fit(
                    probe_run.config,
                    probe_run.rows,
                    probe_run.recorded,
                    [probe_run.engine_load],
                    probe_run.publish_s,
                )
                rates = replace(rates, shift_s=fitted.shift_s)

            forecast = predict(config, rates, STEPS, (0, 1, 2))
            was = measured_forecast(probe_run.rows)
            errors.append(error(forecast.step_s, was.step_s))
            lags.append(abs(forecast.lag - was.lag))
            lines.append(line(name, seed, forecast, was))
            print(" ".join(lines[-1]), flush=True)

    print(table(HEADER, lines))
    print(
        f"\nseconds a step: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}; "
        f"lag: median error {statistics.median(lags):.2f} steps, largest {max(lags):.2f}"
    )


def line(name: str, seed: int, forecast: Forecast, was: Forecast) -> list[str]:
    return [
        *(
            name,
            str(seed),
            f"{forecast.step_s:.2f}",
            f"{was.step_s:.2f}",
            f"{forecast.step_s / was.step_s - 1:+.1%}",
        ),
        *(f"{forecast.lag:.2f}", f"{was.lag:.2f}", f"{forecast.trainer_idle:.0%}", f"{was.trainer_idle:.0%}"),
    ]


if __name__ == "__main__":
    main()
