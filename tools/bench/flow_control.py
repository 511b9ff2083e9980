"""Flow control in simulated runs: tokens/s, masked tokens and lag of eight workloads, with four seeds each;
how runs begin and end; or what settings give under heavy tails, beside the most that any setting can give.

    python tools/bench/flow_control.py                     # a minute; prints a table for docs/dev/log.md
    python tools/bench/flow_control.py --budget 0.02       # of another buffer.stale_budget
    python tools/bench/flow_control.py --begin             # five minutes on two cores; for docs/dev/log.md
    python tools/bench/flow_control.py --end               # a minute on two cores; for docs/dev/log.md
    python tools/bench/flow_control.py --settings          # ten minutes on two cores; `--settings tail`: two

T is seconds per step, charged for masked tokens: the time in which so many unmasked tokens are trained as a
batch has on average. g and t are what generation and training take alone. With --settings the first two
fifths of the steps are left out, and the runs of a workload are compared with synchronous ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from random import Random

import msgspec
import numpy as np
from common import table
from msgspec.structs import replace

from asyncrl.buffer import flow_control
from asyncrl.buffer.lifetimes import Deadlines
from asyncrl.planning.simulator import (
    QUARTER_MIDPOINTS,
    Recorded,
    RecordedTurn,
    SimulatedStep,
    Simulation,
    Workload,
)

GROUPS = 1000  # groups to draw episodes from


def drawn(
    members: int,
    turns: int,
    tokens: tuple[float, float],
    call: tuple[float, float] = (0.0, 0.0),
    again: float = 0.0,
    cap: float = math.inf,
) -> Recorded:
    """Groups whose episodes sample `turns` times, and once more with probability `again`, and again, with a
    tool call between two turns. Medians and sigmas of log-normal tokens of a turn, which has `cap` at most,
    and seconds of a call."""
    random = Random(0)

    def episode() -> tuple[RecordedTurn, ...]:
        count = turns
        while random.random() < again:
            count += 1
        played = [RecordedTurn(min(log_normal(*tokens), cap), log_normal(*call)) for _ in range(count)]
        return (*played[:-1], replace(played[-1], wait=0.0))

    def log_normal(median: float, sigma: float) -> float:
        return median * math.exp(random.gauss(0.0, sigma))

    return tuple(tuple(episode() for _ in range(members)) for _ in range(GROUPS))


def with_keys(work: Workload, **keys: object) -> Workload:
    """With other values of keys of the buffer."""
    return replace(work, buffer=replace(work.buffer, **keys))


PLAIN = with_keys(Workload(drawn(4, 2, (20.0, 0.0))), max_staleness=4)  # the budget is met in few steps
EIGHT = replace(PLAIN.buffer, episodes_per_group=8)
SLOW_TOOL = Workload(drawn(8, 4, (20.0, 0.0), (0.097, 1.5)), EIGHT)
G = 0.219  # seconds: a batch of 64 episodes of 13.7 tokens on the engines of `tail`


def with_calls(median: float, sigma: float, limit: float) -> Workload:
    """The demo's model with a tool whose calls take so many g; an episode takes at most `limit` g."""
    episodes = drawn(8, 1, (7.0, 0.3), (median * G, sigma), again=0.47)
    return Workload(episodes, EIGHT, speed=600.0, train=0.085, publish=0.02, limit=limit * G)


TAIL = with_calls(0.5, 1.5, 3000.0)
TAILS = {  # workloads of async_ratio.py
    "tail": TAIL,
    "harder": with_calls(1.5, 1.5, 3000.0),
    "real": with_calls(0.5, 2.42, 32.0),
    # With a bound of 4, a tenth of the tokens lie in turns that outlast it.
    "answers": Workload(
        drawn(8, 1, (128.0, 2.0), cap=8192.0), EIGHT, speed=600.0, rate=10000.0, train=1.3, limit=1e9
    ),
}
TAILS = {name: with_keys(work, group_policy="partial") for name, work in TAILS.items()}

WORKLOADS = {
    "tail": TAILS["tail"],
    "tail, complete": TAIL,
    "rollout bound": PLAIN,
    "trainer bound": replace(PLAIN, train=1.0),
    "slow tool": SLOW_TOOL,
    "slow tool, partial": with_keys(SLOW_TOOL, group_policy="partial", group_deadline=1.0),
    "lengths": replace(PLAIN, recorded=drawn(4, 1, (100.0, 1.0)), slots=256),
    "synchronous": with_keys(SLOW_TOOL, max_staleness=0),
}


def beginning(work: Workload, t: float = 0.085, bound: int = 16) -> Workload:
    """Return a workload whose trainer takes `t` seconds and whose slots are no limit. g is about 0.2 s."""
    return with_keys(replace(work, slots=256, train=t), group_policy="partial", max_staleness=bound)


INSTANT = with_calls(1e-9, 0.0, 3000.0)
STEP_LONG = with_calls(1.0, 2.0, 40.0)
BEGIN = {
    "no calls, g > t": beginning(INSTANT),
    "no calls, t > g": beginning(INSTANT, 0.4),
    "calls of 0.5 g, sigma 1.5; g > t": beginning(TAIL),
    "the same, t > g": beginning(TAIL, 0.4),
    "the same, g > t, η = 8": beginning(TAIL, bound=8),
    "the same, g > t, η = 4": beginning(TAIL, bound=4),
    "calls of 1.5 g, sigma 1.5; g > t": beginning(TAILS["harder"]),
    "calls of 1 g, sigma 2; g > t": beginning(STEP_LONG),
    "the same calls, t > g": beginning(STEP_LONG, 0.4),
    "no calls, lengths of sigma 1": beginning(WORKLOADS["lengths"], 0.2),
}
FIRST = (10, 30, 300)  # steps


# -- the ceiling -------------------------------------------------------------------------------------------


class Alone(msgspec.Struct, frozen=True):
    """A workload's episodes, each played as if it had the engines for itself. Times are in seconds from the
    start of a group. `lives`, of groups: until the second episode has ended, until the last. `parts`: rows of
    (tokens, when they were sampled, when their episode ended; of their group: its row of `lives`)."""

    g: float
    t: float
    batch: float  # tokens
    episode: float  # the mean time of one
    lives: np.ndarray
    parts: np.ndarray


@cache
def alone(work: Workload) -> Alone:
    groups = [[_play(work, turns) for turns in members] for members in work.recorded]
    ends = np.sort([[end for _, _, end in members] for members in groups], 1)
    lives = ends[:, [1, -1]]
    parts = np.array(
        [
            (tokens / QUARTER_MIDPOINTS.size, at, end, second, last)
            for members, (second, last) in zip(groups, lives, strict=True)
            for sampled, turns, end in members
            for at, tokens in zip(sampled, turns, strict=True)
        ]
    )

    batch = work.buffer.batch_size * parts[:, 0].sum() / ends.size
    speed = work.slots / max(1 / work.speed, work.base + work.slots / work.rate)
    return Alone(batch / speed, work.train + work.commit, batch, float(ends.mean()), lives, parts)


def _play(work: Workload, turns: Sequence[RecordedTurn]) -> tuple[list[float], list[float], float]:
    """Return the times at which parts of turns are sampled, the tokens of each part's turn, and the end."""
    now = 0.0

    sampled = []
    tokens = []
    for turn in turns:
        seconds = turn.tokens / work.speed
        sampled += [now + seconds * (1 - part) for part in QUARTER_MIDPOINTS]
        tokens += [turn.tokens] * QUARTER_MIDPOINTS.size
        now += seconds
        if now > work.limit:
            break
        now += min(turn.wait, work.limit - now)

    return sampled, tokens, now


def quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(shares, q)), values.size - 1)])


# -- runs --------------------------------------------------------------------------------------------------


class Shorter(Deadlines):
    """Deadlines that are the time in which the share `q` of the groups land all of their members, and at most
    `wait` of the time that a token may be old, in the last twenty steps."""

    def __init__(self, run: Simulation, q: float, wait: float) -> None:
        super().__init__("auto")
        self.run = run
        self.q = q
        self.wait = wait

    def patience(self, now: float) -> float:
        patience_s = self.lifetimes.quantile(self.q, now)
        if newest := self.run.steps[-20:]:
            step = statistics.mean(step_result.seconds for step_result in newest)
            patience_s = min(patience_s, self.wait * self.run.workload.buffer.max_staleness * step)
        return patience_s


DEADLINES = {  # (q, wait) of Shorter
    "auto": (0.5, math.inf),
    "a quarter of the groups": (0.25, math.inf),
    "half of the wait": (0.5, 0.5),
}


class Settings(msgspec.Struct, frozen=True):
    """A row of the table."""

    slots: int
    bound: int  # max_staleness; 0: synchronous
    budget: float = 0.01
    target: float | str = "auto"
    deadline: str = "auto"

    def of(self, work: Workload) -> Workload:
        """Return the workload with these settings."""
        keys = {"max_staleness": self.bound, "stale_budget": self.budget, "target_staleness": self.target}
        if not self.bound:
            keys |= {"group_policy": "complete"}
        return with_keys(replace(work, slots=self.slots), **keys)

    def run(self, work: Workload, steps: int, seed: int) -> list[SimulatedStep]:
        """All but the first two fifths of the steps."""
        run = Simulation(self.of(work), seed)
        if self.deadline != "auto":
            run.buffer.deadlines = Shorter(run, *DEADLINES[self.deadline])
        return run.run(steps)[2 * steps // 5 :]

    def ceiling(self, work: Workload, masked: float, t: float) -> float:
        """The highest max(g, t)/T with that share of tokens masked (docs/background/staleness.md, "What the
        bound gives"). Where the share is small and the tail heavy, a few episodes decide it: it is known to
        about 10% then. `t`: seconds per step, on which some deadlines depend."""
        unhindered = alone(replace(work, slots=self.slots))
        keys = self.of(work).buffer
        q, wait = DEADLINES[self.deadline]
        deadline = min(float(np.quantile(unhindered.lives[:, 1], q)), wait * self.bound * t)
        if keys.group_policy == "complete":
            deadline = math.inf

        def settled(second: np.ndarray, last: np.ndarray) -> np.ndarray:
            return np.minimum(last, np.maximum(second, deadline))

        tokens, at, end, *group = unhindered.parts.T
        waits = quantile(np.maximum(end, settled(*group)) - at, tokens, 1 - masked)  # X, or W if it is longer
        live = keys.groups_per_batch * settled(*unhindered.lives.T).mean() / keys.max_live_groups
        slots = keys.batch_size * unhindered.episode / self.slots
        fastest = max(unhindered.g, unhindered.t)
        return fastest * (1 - masked) / max(fastest, slots, live, waits / (self.bound + 0.5))


SETTINGS = [
    *(Settings(slots, bound) for slots, bound in product((64, 256), (0, 4, 8, 16, 32))),
    *(Settings(256, bound, budget) for bound, budget in product((4, 16), (0.05, 0.15))),
    *(Settings(256, bound, target=target) for bound, target in product((4, 16), (1.0, 2.0, 4.0))),
    *(Settings(256, *row) for row in product((4, 16), (0.01, 0.15), ("auto",), [*DEADLINES][1:])),
]


class Figures(msgspec.Struct, frozen=True):
    """Figures of a run. T is in seconds."""

    t: float
    masked: float
    lags: np.ndarray  # tokens by lag
    limit: float  # on live groups, the mean

    @classmethod
    def of(cls, steps: list[SimulatedStep], batch: float) -> Figures:
        useful = sum(step.tokens for step in steps)
        seconds = sum(step.seconds for step in steps)
        lags = np.sum([step.lags for step in steps], 0)
        total = sum(step.tokens / (1 - step.masked) for step in steps)
        limit = statistics.mean(step.limit for step in steps)
        return cls(seconds * batch / useful, 1 - useful / total, lags, limit)


def _figures(job: tuple[str, Settings, int, int]) -> Figures:
    name, settings, steps, seed = job
    return Figures.of(settings.run(TAILS[name], steps, seed), alone(TAILS[name]).batch)


def _beginning(job: tuple[str, float, int]) -> list[Figures]:
    """Of a run's first steps, with another QUICK_GAIN."""
    name, flow_control.QUICK_GAIN, seed = job
    run = Simulation(BEGIN[name], seed).run(FIRST[-1])
    return [Figures.of(run[:steps], alone(BEGIN[name]).batch) for steps in FIRST]


def beginnings_table(seeds: int, pool: ProcessPoolExecutor) -> str:
    """Compare runs without quick growth -> with quick growth: means over the seeds."""
    gains = (0.0, flow_control.QUICK_GAIN)
    header = [f"{measure}, first {steps} steps" for measure in ("speed", "masked", "lag") for steps in FIRST]
    jobs = [(name, gain, seed) for name in BEGIN for gain in gains for seed in range(1, seeds + 1)]

    results = iter(pool.map(_beginning, jobs))
    lines = []
    for name, work in BEGIN.items():
        fastest = max(alone(work).g, alone(work).t)
        arms = [[next(results) for _ in range(seeds)] for _ in gains]
        columns = [[[run[at] for run in runs] for runs in arms] for at in range(len(FIRST))]
        means = [
            " → ".join(form.format(statistics.mean(map(of, runs))) for runs in column)
            for form, of in (
                ("{:.2f}", lambda figures, fastest=fastest: fastest / figures.t),
                ("{:.1%}", lambda figures: figures.masked),
                ("{:.1f}", lambda figures: np.average(np.arange(figures.lags.size), weights=figures.lags)),
            )
            for column in columns
        ]

        lines.append([name, *means])

    return table(["workload", *header], lines)


def _ending(job: tuple[str, int, bool, int]) -> tuple[float, float, float, float]:
    """Play a run of so many steps. Give its speed, seconds of its last step in g, share of masked tokens, and
    groups that it dropped at its end, in batches. `spares`: with groups beyond those that it trains."""
    name, steps, spares, seed = job
    run = Simulation(BEGIN[name], seed)
    workload = alone(BEGIN[name])
    size = run.buffer.config.groups_per_batch
    run.buffer.total_groups = steps * size
    if not spares:
        run.flow_control.first_level = run.flow_control.max_level
    done = run.run(steps)
    figures = Figures.of(done, workload.batch)
    return (
        max(workload.g, workload.t) / figures.t,
        done[-1].seconds / workload.g,
        figures.masked,
        run.buffer.next_group / size - steps,
    )


def endings_table(seeds: int, pool: ProcessPoolExecutor) -> str:
    """Compare runs without groups beyond the trained ones -> with spare groups: means over the seeds."""
    header = ["speed", "last step, in g", "masked", "dropped at the end, in batches"]
    jobs = list(product(BEGIN, FIRST[:2], (False, True), range(1, seeds + 1)))

    results = iter(pool.map(_ending, jobs))
    lines = []
    for name, steps in product(BEGIN, FIRST[:2]):
        arms = [zip(*(next(results) for _ in range(seeds)), strict=True) for _ in range(2)]
        means = zip(*([statistics.mean(column) for column in arm] for arm in arms), strict=True)
        forms = ("{:.2f}", "{:.1f}", "{:.1%}", "{:.1f}")
        cells = [" → ".join(map(form.format, both)) for form, both in zip(forms, means, strict=True)]
        lines.append([name, str(steps), *cells])

    return table(["workload", "steps", *header], lines)


def settings_table(name: str, steps: int, seeds: int, pool: ProcessPoolExecutor) -> str:
    """Return a workload's row for each setting: means over the seeds."""
    jobs = [(name, row, steps, seed) for row in SETTINGS for seed in range(1, seeds + 1)]
    results = iter(pool.map(_figures, jobs))
    sync: dict[int, float] = {}
    return table(HEADER, [_line(name, row, [next(results) for _ in range(seeds)], sync) for row in SETTINGS])


def _line(name: str, row: Settings, runs: list[Figures], sync: dict[int, float]) -> list[str]:
    """`sync`: T of synchronous runs, by slots."""
    t, masked, limit = (
        statistics.mean(column) for column in zip(*((r.t, r.masked, r.limit) for r in runs), strict=True)
    )
    sync.setdefault(row.slots, t)
    unhindered = alone(replace(TAILS[name], slots=row.slots))
    tokens = np.sum([run.lags for run in runs], 0)
    lags = np.arange(tokens.size)
    return [
        *(f"{row.slots}", f"{row.bound}", f"{row.budget:.0%}", f"{row.target}", row.deadline),
        f"{max(unhindered.g, unhindered.t) / t:.2f}",
        f"{row.ceiling(TAILS[name], masked, t):.2f}" if row.bound else "–",
        *(f"{sync[row.slots] / t:.1f}", f"{masked:.2%}"),
        f"{np.average(lags, weights=tokens):.2f}, {quantile(lags, tokens, 0.99):.0f}",
        f"{limit:.1f}",
    ]


HEADER = ["slots", "η", "budget", "target", "deadline", "max(g, t)/T", "at most", "T_sync/T", "masked",
          "lag mean, p99", "live limit"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=0, help="150, with --settings 300")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--budget", type=float, default=0.01)
    parser.add_argument("--settings", nargs="*", choices=TAILS, help="of these workloads, or all of these")
    parser.add_argument("--begin", action="store_true", help="how runs begin, without and with quick growth")
    parser.add_argument("--end", action="store_true", help="how runs end, without and with spare groups")
    options = parser.parse_args()

    if options.begin or options.end:
        with ProcessPoolExecutor(2) as pool:
            print((beginnings_table if options.begin else endings_table)(options.seeds, pool))
        return

    if options.settings is not None:
        with ProcessPoolExecutor(2) as pool:
            for name in options.settings or TAILS:
                text = settings_table(name, options.steps or 300, options.seeds, pool)
                print(f"\n{name}\n\n{text}", flush=True)
        return

    lines = []
    for name, workload in WORKLOADS.items():
        runs = [
            Simulation(with_keys(workload, stale_budget=options.budget), seed).run(options.steps or 150)
            for seed in range(1, options.seeds + 1)
        ]
        lines.append([name, *figures(runs)])

    print(table(["workload", "tokens/s", "masked", "lag", "live limit"], lines))


def figures(runs: list[list[SimulatedStep]]) -> list[str]:
    """Return the means over the runs; masked tokens and lag are means over their steps."""
    speeds = [sum(s.tokens for s in run) / sum(s.seconds for s in run) for run in runs]
    steps = [(step.masked, step.lag, step.limit) for run in runs for step in run]
    masked, lag, limit = (statistics.mean(values) for values in zip(*steps, strict=True))
    return [f"{statistics.mean(speeds):.0f}", f"{masked:.2%}", f"{lag:.2f}", f"{limit:.1f}"]


if __name__ == "__main__":
    main()
