"""Finds what is wrong with a run in its metrics and its status; alerts.yaml says what to do about it. Pure.

The coordinator writes what is found into status.json, which the console and `asyncrl status` show. The page
finds the same in the files of a run, also of one that is over. Advice is given only where nothing is wrong: a
trainer that waits because all attempts fail needs no faster sampling. There is one hint at a time, and none
about learning while held-out success rises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import msgspec

from asyncrl.buffer.records import LOSSES
from asyncrl.config import ValidationConfig, taught
from asyncrl.observe import metrics as metric
from asyncrl.observe.held_out import SuccessShare, clearly_below, mean_clearly_below
from asyncrl.observe.metrics import Row, clock, matching
from asyncrl.observe.summary import flow_of, mean
from asyncrl.types import FailReason

WINDOW = 10  # steps that a rule looks back on, and before which no advice is given
SETTLED = 2 * WINDOW  # steps before which none is about learning
YOUNG = 4 * WINDOW  # steps up to which the reward in training shows that a run learns, without a validation
SHORT = 300.0  # seconds: a run that takes less needs no advice on its speed
# shares from which on it is "nearly all", and worth an advice
MOST = 0.9
SOME = 0.25
# success from which on a run is solved, and nothing to learn is no fault
SOLVED = 0.95
MOSTLY = 0.8
COLLAPSED = 0.05  # nats a token, and a tenth of what it was at the beginning
# nats a token, and times what it was at the beginning
GAP = 0.02
GROWN = 3.0
# of all tokens, and of those of a length
MASKED = 0.2
TAIL = 0.5
BY_LENGTH = "staleness/by_length/*/masked_frac"
# share of the attempts, or of the tool calls; failed attempts that are no alert yet
FAILING = 0.2
FEW = 8
LIMITING = 0.5  # of the time
# seconds without a step or an episode, and times what a step takes
SILENT = 300.0
SLOWER = 6.0
CONNECTING = 60.0  # seconds that workers may come after the first one
LOWEST = "rollout/score/min"
HIGHEST = "rollout/score/max"
FAILED = "rollout/attempts_failed/"
LIMITS = ("length", "max_turns", "max_calls", "max_rows", "timeout")  # ends

Level = Literal["bad", "warn", "good", "advice"]


class Alert(msgspec.Struct, frozen=True):
    """Says what is wrong and what to do. `keys`: those to change, with their values. `step`: the newest that
    rules have read. `link`: what to change in the page's address to see the evidence."""

    name: str
    level: Level
    what: str
    do: str
    step: int = 0
    keys: dict[str, str] = {}
    link: dict[str, str] = {}

    @property
    def line(self) -> str:
        keys = ", ".join(f"{key}={value}" for key, value in self.keys.items())
        return f"{self.name}: {self.what}; {self.do}{keys and f' ({keys})'}"


class HeldOutSuccess(NamedTuple):
    """Holds the success of a validation, of sampled answers where there are some."""

    step: float
    success: float
    questions: float

    @property
    def share(self) -> SuccessShare:
        return SuccessShare(self.success, self.questions)


class Seen(NamedTuple):
    """Holds what rules read: the first and the last steps (before any is over, what has landed so far), the
    validations, the status, and all keys of the configuration."""

    first: Sequence[Row]
    last: Sequence[Row]
    validations: Sequence[Row]
    status: Mapping[str, Any]
    keys: Mapping[str, Any]

    @property
    def now(self) -> Row:
        """Return the newest gauges."""
        return self.status.get("gauges") or (self.last[-1] if self.last else {})

    @property
    def highest(self) -> float:
        return max((row[HIGHEST] for row in self.last if HIGHEST in row), default=0.0)

    @property
    def landed(self) -> float:
        return sum(row.get("rollout/landed", 0.0) for row in self.last)

    @property
    def judged(self) -> list[HeldOutSuccess]:
        """Return the success of each validation. Empty while only the untrained model was validated."""
        successes = [
            HeldOutSuccess(
                step=row["training/step"],
                success=row.get(metric.SAMPLED, row.get(metric.GREEDY, 0.0)),
                questions=row.get(metric.ASKED, 0.0),
            )
            for row in self.validations
        ]
        return successes if successes and (successes[-1].step or not self.last) else []

    @property
    def success(self) -> float:
        """Return the newest held-out success. Without one: the mean score as a share of the highest, if the
        highest counts as a success; a lower one may be what the right format alone earns."""
        if self.judged:
            return self.judged[-1].success
        counts = len(self.last) == WINDOW and self.highest >= self.keys.get("validation.success", 1.0)
        return self.mean(metric.REWARD) / self.highest if counts else 0.0

    @property
    def rising(self) -> bool:
        """Tell whether the run learns: the newest held-out success is above an earlier one, from before half
        of the steps, by more than chance. In a young run that was not validated since its start: the mean
        score in training is. Not where that score has fallen since the first steps."""
        before, now = (
            [row[metric.REWARD] for row in rows if metric.REWARD in row] for rows in (self.first, self.last)
        )
        if before and now and fmean(now) < fmean(before):
            return False
        if self.judged:
            newest = self.judged[-1]
            earlier = [one for one in self.judged if one.step < newest.step / 2]
            return bool(earlier) and clearly_below(earlier[-1].share, newest.share)
        step = self.last[-1].get("training/step", 0.0) if self.last else 0.0
        return SETTLED <= step <= YOUNG and mean_clearly_below(before, now)

    def mean(self, name: str) -> float:
        return mean(self.last, name) or 0.0

    def grown(self, name: str) -> float:
        """Return by how much a counter grew in the last steps; in a young run, since its start."""
        return self.now.get(name, 0.0) - (self.last[0].get(name, 0.0) if len(self.last) == WINDOW else 0.0)

    @property
    def settled(self) -> float:
        """Count the training episodes that got a reward in the last steps."""
        names = ("trained", "filtered", "dropped", "taken", "ready")
        return sum(self.grown(metric.FLOW + name) for name in names)


class Found(NamedTuple):
    """Says what is wrong. `cause`: one that alerts.yaml has advice for."""

    what: str
    cause: str = ""
    mild: bool = False  # it is over: shown as advice only


class Advice(msgspec.Struct, frozen=True):
    do: str
    keys: list[str] = []


class RuleText(Advice, frozen=True, kw_only=True):
    """Holds the entry of an alert in alerts.yaml."""

    level: Level
    link: dict[str, str] = {}
    scores: bool = False
    causes: dict[str, Advice] = {}


@cache
def rules() -> dict[str, RuleText]:
    return msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes(), type=dict[str, RuleText])


def ends(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that rules read: the first and the last steps, and all validations."""
    steps = [at for at, row in enumerate(rows) if metric.STEP_SECONDS in row]
    kept = {*steps[:WINDOW], *steps[-WINDOW:]}
    return [row for at, row in enumerate(rows) if at in kept or metric.SAMPLED in row]


def alerts(rows: Sequence[Row], status: Mapping[str, Any], keys: Mapping[str, Any]) -> list[Alert]:
    """Find the alerts of the last WINDOW steps, or of what has landed so far, the worst first. `rows`: in
    order; `status`: the newest one; `keys`: those of the configuration, with their values."""
    steps = [row for row in rows if metric.STEP_SECONDS in row]
    now = status.get("gauges", {})
    last = steps[-WINDOW:] or ([now] if HIGHEST in now else [])
    seen = Seen(steps[:WINDOW], last, [row for row in rows if metric.SAMPLED in row], status, keys)
    batch = keys.get("buffer.groups_per_batch", 1) * keys.get("buffer.episodes_per_group", 1)
    supervised = any(metric.NLL in row for row in last)
    trains = keys.get("total_steps", 1) > 0
    scored = trains and not supervised and (len(steps) >= WINDOW or seen.landed >= 2 * batch)
    scored = scored and not seen.rising
    step = int(steps[-1]["training/step"]) if steps else 0
    found: list[Alert] = []
    for name, find in RULES.items():
        rule = rules()[name]
        solved = any(alert.level == "good" for alert in found)
        if rule.level == "advice" and len(steps) < (SETTLED if rule.scores else WINDOW):
            continue
        if (rule.scores and (solved or not scored)) or (rule.level == "good" and (supervised or not trains)):
            continue
        if one := find(seen):
            advice = rule.causes.get(one.cause) or Advice(rule.do, rule.keys)
            known = {key: str(keys[key]) for key in advice.keys if key in keys}
            mild = one.mild or (rule.scores and seen.success >= MOSTLY)
            level: Level = "advice" if mild else rule.level
            found.append(Alert(name, level, one.what, advice.do, step, known, rule.link))
    wrong = [alert for level in ("bad", "warn") for alert in found if alert.level == level]
    good = [alert for alert in found if alert.level == "good"]
    hints = [alert for alert in found if alert.level == "advice"]
    return [*good, *wrong] if good or wrong else hints[:1]


def newest_cause(failed: str) -> str:
    """Return the newest cause that the line of failed attempts ends with."""
    return failed.partition("the newest: ")[2]


def unless_quoted(failed: str, shown: Sequence[Alert]) -> str:
    """Return the line of failed attempts; '' where an alert quotes its newest cause."""
    cause = newest_cause(failed)
    return "" if cause and any(cause in alert.what for alert in shown) else failed


def _solved(seen: Seen) -> Found | None:
    """Find that held-out success stays high, or, without validations, the score in training."""
    if seen.success < SOLVED:
        return None
    if not seen.judged:
        return Found(f"mean score {seen.mean(metric.REWARD):.3g} in training, which counts as a success")
    low = next((at for at in reversed(range(len(seen.judged))) if seen.judged[at].success < SOLVED), -1)
    idle = seen.mean(metric.ZERO_ADVANTAGE)
    rest = f"; {idle:.0%} of the episodes teach nothing more" if idle >= SOME else ""
    return Found(f"held-out success {seen.success:.0%}, since step {seen.judged[low + 1].step:.0f}{rest}")


def _unsaved(seen: Seen) -> Found | None:
    why = seen.status.get("checkpoint_problem")
    return Found(str(why)) if why else None


def _fell(seen: Seen) -> Found | None:
    """Find that the newest validation is below the best one by more than chance."""
    if not seen.judged:
        return None
    best = max(seen.judged, key=lambda one: one.success)
    now = seen.judged[-1]
    if not clearly_below(now.share, best.share):
        return None
    before = f"from {best.success:.0%} at step {best.step:.0f}"
    return Found(f"{before} to {now.success:.0%} at step {now.step:.0f}")


def _failing(seen: Seen) -> Found | None:
    counts = {str(reason): seen.grown(FAILED + reason) for reason in FailReason if reason not in LOSSES}
    failed = sum(counts.values())
    if failed < max(FEW, FAILING * (failed + seen.settled)):
        return None
    worst = max(counts, key=lambda reason: counts[reason])
    newest = newest_cause(str(seen.status.get("failed", "")))
    why = f": {newest}" if newest else ""
    return Found(f"{failed:,.0f} of {failed + seen.settled:,.0f}, most with {worst}{why}", worst)


def _stalled(seen: Seen) -> Found | None:
    """Find that no step ended for long after the start: after 300 s where steps took 20 s, after 600 s where
    they took 100 s. Nothing is found during a validation, which may take all engines."""
    status = seen.status
    waits = seen.status.get("waits", ())
    if status.get("phase") != "running" or any("validation" in wait for wait in waits):
        return None
    why = f": {'; '.join(waits[:2])}" if waits else ""
    steps = [row for row in seen.last if metric.STEP_SECONDS in row]
    usual = median(row[metric.STEP_SECONDS] for row in steps) if steps else 0.0
    since = status.get("seconds", 0.0) - (steps[-1].get("time_s", 0.0) if steps else 0.0)
    silent = min(since, status.get("running", since))
    if silent < max(SILENT, SLOWER * usual) or (not steps and seen.settled):
        return None
    return Found(f"no {'step' if steps else 'episode has ended'} for {clock(silent)}{why}")


def _lost(seen: Seen) -> Found | None:
    wanted = seen.keys.get("rollout.workers", 0)
    there = seen.now.get("async/workers", wanted)
    late = seen.status.get("running", CONNECTING) >= CONNECTING
    missing = seen.status.get("phase") == "running" and there < wanted and late
    names = [f"{FAILED}{name}_lost" for name in ("worker", "engine")]
    texts = [f"{there:.0f} of {wanted} workers are connected"] if missing else []
    for name, of in zip(names, ("a worker", "a server"), strict=True):
        if lost := seen.now.get(name, 0.0):
            texts.append(f"{lost:,.0f} attempts were lost with {of}, and begun again")
    if newest := seen.status.get("lost"):
        texts.append(f"the newest: {newest}")
    recent = missing or any(seen.grown(name) for name in names)
    return Found(", ".join(texts), mild=not recent) if texts else None


def _account(seen: Seen) -> Found | None:
    flow = flow_of(seen.now)
    return None if flow.conserved else Found(f"{flow.issued:,} episodes issued are not the sum of all states")


def _constant(seen: Seen) -> Found | None:
    values = {row[name] for row in seen.last for name in (LOWEST, HIGHEST) if name in row}
    count = f"{seen.landed:,.0f} " * (seen.landed > 0)
    return Found(f"all {count}episodes scored {values.pop():g}") if len(values) == 1 else None


def _cut_off(seen: Seen) -> Found | None:
    for end in LIMITS:
        if (share := seen.mean(f"rollout/end/{end}")) >= MOST:
            return Found(f"{share:.0%} of the episodes ended with {end}", end)
    return _often("response_length/clip_ratio", "of the episodes were cut off by a limit")(seen)


def _often(name: str, what: str, least: float = MOST) -> Callable[[Seen], Found | None]:
    """Finds that the mean of a share is `least` or more."""
    return lambda seen: Found(f"{share:.0%} {what}") if (share := seen.mean(name)) >= least else None


def _by_rewards(find: Callable[[Seen], Found | None]) -> Callable[[Seen], Found | None]:
    """A teacher teaches, whatever the rewards are."""
    return lambda seen: None if taught(seen.keys) else find(seen)


def _nothing_taught(seen: Seen) -> Found | None:
    share = seen.mean(metric.ZERO_ADVANTAGE)
    score = seen.mean(metric.REWARD)
    scores = f"mean score {score:.3g}, highest {seen.highest:.3g}"
    return Found(f"{share:.0%} of the trained episodes have advantage 0; {scores}") if share >= MOST else None


def _little_taught(seen: Seen) -> Found | None:
    share = seen.mean(metric.ZERO_ADVANTAGE)
    what = f"{share:.0%} of the trained episodes have advantage 0 and teach nothing"
    return Found(what) if SOME <= share < MOST else None


def _collapse(seen: Seen) -> Found | None:
    before, now = (mean(rows, metric.ENTROPY) for rows in (seen.first, seen.last))
    if before is None or now is None or now > min(COLLAPSED, before / 10):
        return None
    return Found(f"entropy fell from {before:.3g} to {now:.3g} nats a token")


def _gap(seen: Seen) -> Found | None:
    name = "rollout_corr/logprob_diff_mean"  # of tokens that one version sampled and trains
    before = mean(seen.first, name)
    now = mean(seen.last, name)
    if before is None or now is None or now < max(GAP, GROWN * before):
        return None
    return Found(f"trainer and engine differ by {now:.3g} nats a token, {before:.3g} at the beginning")


def _skipped(seen: Seen) -> Found | None:
    count = int(sum(row.get("actor/skipped_steps", 0.0) for row in seen.last))
    return Found(f"{count} of the last {len(seen.last)} were skipped") if count else None


def _masked(seen: Seen) -> Found | None:
    """Find that many tokens are masked, of all or of long episodes, which then teach less."""
    every = seen.mean(metric.MASKED)
    if every >= MASKED:
        return Found(f"{every:.0%} of the tokens were too old to be trained")
    lengths = matching(BY_LENGTH, set[str]().union(*seen.last))
    share, length = max(((seen.mean(name), length) for length, name in lengths.items()), default=(0.0, ""))
    what = f"{share:.0%} of the tokens of episodes of {length} tokens and more were too old to be trained"
    return Found(f"{what}, {every:.1%} of all tokens") if share >= TAIL else None


def _beyond(seen: Seen) -> Found | None:
    """Find scores beyond `validation.success` where the key is left at its default."""
    highest = max((row.get(metric.HIGHEST, 0.0) for row in seen.validations), default=0.0)
    default = ValidationConfig().success
    if seen.keys.get("validation.success") != default or highest <= default * (1 + 1e-6):
        return None
    return Found(f"scores go up to {highest:g}, and {default:g} counts as a success, by default")


def _side_requests(seen: Seen) -> Found | None:
    """Find that episodes of an unknown agent, a `command` or a function, have more than one row, and that no
    request is named as a side one. For coding agents with a name that is set where it is needed."""
    rows = seen.mean("rollout/rows/mean")
    names = [key.removeprefix("rollout.agent.") for key in seen.keys if key.startswith("rollout.agent.")]
    is_unknown = seen.keys.get("rollout.agent") or any(
        ":" in name or name.startswith("command.") for name in names
    )
    if not is_unknown or seen.keys.get("rollout.untrained_agents") or rows < 1 + SOME:
        return None
    return Found(f"{rows:.1f} rows per episode, all trained with the episode's reward")


def _limited(seen: Seen) -> Found | None:
    """Find what limits the run: the longest part of an episode where the trainer waits, the trainer where the
    engines wait. For example, a reward of 12 s is 80% of an episode of 15 s. Nothing is found in a short
    run."""
    whole_run = seen.mean(metric.STEP_SECONDS) * seen.keys.get("total_steps", math.inf)
    if whole_run < SHORT:
        return None
    trainer = seen.mean(metric.TRAINER_IDLE)
    rollout = seen.mean(metric.ROLLOUT_IDLE)
    if trainer < 1 - MOST < LIMITING <= rollout:
        return Found(f"by the trainer: it waits {trainer:.0%} of the time, the engines {rollout:.0%}")
    whole, reward = (mean(seen.last, f"timing_s/{name}/mean") for name in ("episode", "reward"))
    if trainer < LIMITING or not whole or reward is None:
        return None
    tools = seen.mean("timing_s/tools/mean")
    parts = {"the reward function": reward, "tools": tools, "sampling": whole - tools - reward}
    most = max(parts, key=lambda name: parts[name])
    if parts[most] < LIMITING * whole:
        return None
    share = f"{parts[most]:.3g} s of an episode's {whole:.3g} s"
    return Found(f"by {most}: it takes {share}, and the trainer waits {trainer:.0%} of the time", most)


RULES: dict[str, Callable[[Seen], Found | None]] = {
    "solved": _solved,
    "checkpoints are not written": _unsaved,
    "held-out success fell": _fell,
    "attempts fail": _failing,
    "no progress": _stalled,
    "account is not exact": _account,
    "constant reward": _by_rewards(_constant),
    "everything truncated": _cut_off,
    "all groups filtered": _often("rollout/discarded_group_frac", "of the groups were filtered or dropped"),
    "nothing to learn": _by_rewards(_nothing_taught),
    "a process was lost": _lost,
    "tools fail": _often("rollout/tool_failed_frac", "of the calls raised or ran out of time", FAILING),
    "tools decline": _often(
        "rollout/tool_declined_frac", "of the calls were answered with an error by the tool"
    ),
    "entropy collapse": _collapse,
    "growing log-prob gap": _gap,
    "skipped optimizer steps": _skipped,
    "many tokens masked": _masked,
    "success is set low": _beyond,
    "limited": _limited,
    "rows beside the main one": _side_requests,
    "little to learn": _by_rewards(_little_taught),
}
