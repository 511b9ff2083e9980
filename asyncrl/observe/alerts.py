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
SETTLED_STEPS = 2 * WINDOW  # steps before which none is about learning
YOUNG_STEPS = (
    4 * WINDOW
)  # steps up to which the reward in training shows that a run learns, without a validation
SHORT_SECONDS = 300.0  # seconds: a run that takes less needs no advice on its speed
# shares from which on it is "nearly all", and worth an advice
NEARLY_ALL = 0.9
WORTH_ADVICE = 0.25
# success from which on a run is solved, and nothing to learn is no fault
SOLVED_SUCCESS = 0.95
MOSTLY_SOLVED = 0.8
COLLAPSED_ENTROPY = 0.05  # nats a token, and a tenth of what it was at the beginning
# nats a token, and times what it was at the beginning
LARGE_GAP = 0.02
GAP_GROWTH = 3.0
# of all tokens, and of those of a length
MASKED_SHARE = 0.2
MASKED_TAIL_SHARE = 0.5
MASKED_BY_LENGTH = "staleness/by_length/*/masked_frac"
# share of the attempts, or of the tool calls; failed attempts that are no alert yet
FAILING_SHARE = 0.2
FEW_FAILURES = 8
LIMITING_SHARE = 0.5  # of the time
# seconds without a step or an episode, and times what a step takes
SILENT_SECONDS = 300.0
SLOWER_FACTOR = 6.0
CONNECTING_SECONDS = 60.0  # seconds that workers may come after the first one
LOWEST_SCORE = "rollout/score/min"
HIGHEST_SCORE = "rollout/score/max"
FAILED_PREFIX = "rollout/attempts_failed/"
LIMIT_ENDS = ("length", "max_turns", "max_calls", "max_rows", "timeout")  # ends

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


class Evidence(NamedTuple):
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
        return max((row[HIGHEST_SCORE] for row in self.last if HIGHEST_SCORE in row), default=0.0)

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
        score_counts = len(self.last) == WINDOW and self.highest >= self.keys.get("validation.success", 1.0)
        return self.mean(metric.REWARD) / self.highest if score_counts else 0.0

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
            earlier = [success for success in self.judged if success.step < newest.step / 2]
            return bool(earlier) and clearly_below(earlier[-1].share, newest.share)

        step = self.last[-1].get("training/step", 0.0) if self.last else 0.0
        return SETTLED_STEPS <= step <= YOUNG_STEPS and mean_clearly_below(before, now)

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


class Finding(NamedTuple):
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
def rule_texts() -> dict[str, RuleText]:
    return msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes(), type=dict[str, RuleText])


def ends(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that rules read: the first and the last steps, and all validations."""
    steps = [index for index, row in enumerate(rows) if metric.STEP_SECONDS in row]
    edge_steps = {*steps[:WINDOW], *steps[-WINDOW:]}
    return [row for index, row in enumerate(rows) if index in edge_steps or metric.SAMPLED in row]


def alerts(rows: Sequence[Row], status: Mapping[str, Any], keys: Mapping[str, Any]) -> list[Alert]:
    """Find the alerts of the last WINDOW steps, or of what has landed so far, the worst first. `rows`: in
    order; `status`: the newest one; `keys`: those of the configuration, with their values."""
    steps = [row for row in rows if metric.STEP_SECONDS in row]
    gauges = status.get("gauges", {})
    last_steps = steps[-WINDOW:] or ([gauges] if HIGHEST_SCORE in gauges else [])
    evidence = Evidence(
        steps[:WINDOW], last_steps, [row for row in rows if metric.SAMPLED in row], status, keys
    )
    batch_episodes = keys.get("buffer.groups_per_batch", 1) * keys.get("buffer.episodes_per_group", 1)
    is_supervised = any(metric.NLL in row for row in last_steps)
    trains = keys.get("total_steps", 1) > 0
    judges_learning = (
        trains and not is_supervised and (len(steps) >= WINDOW or evidence.landed >= 2 * batch_episodes)
    )
    judges_learning = judges_learning and not evidence.rising
    step = int(steps[-1]["training/step"]) if steps else 0
    found_alerts: list[Alert] = []

    for name, find_problem in ALERT_RULES.items():
        rule = rule_texts()[name]
        is_solved = any(alert.level == "good" for alert in found_alerts)
        if rule.level == "advice" and len(steps) < (SETTLED_STEPS if rule.scores else WINDOW):
            continue
        if (rule.scores and (is_solved or not judges_learning)) or (
            rule.level == "good" and (is_supervised or not trains)
        ):
            continue

        if finding := find_problem(evidence):
            advice = rule.causes.get(finding.cause) or Advice(rule.do, rule.keys)
            advised_keys = {key: str(keys[key]) for key in advice.keys if key in keys}
            is_mild = finding.mild or (rule.scores and evidence.success >= MOSTLY_SOLVED)
            level: Level = "advice" if is_mild else rule.level
            found_alerts.append(Alert(name, level, finding.what, advice.do, step, advised_keys, rule.link))

    problems = [alert for level in ("bad", "warn") for alert in found_alerts if alert.level == level]
    good = [alert for alert in found_alerts if alert.level == "good"]
    hints = [alert for alert in found_alerts if alert.level == "advice"]

    return [*good, *problems] if good or problems else hints[:1]


def newest_cause(failed: str) -> str:
    """Return the newest cause that the line of failed attempts ends with."""
    return failed.partition("the newest: ")[2]


def unless_quoted(failed: str, current_alerts: Sequence[Alert]) -> str:
    """Return the line of failed attempts; '' where an alert quotes its newest cause."""
    cause = newest_cause(failed)
    return "" if cause and any(cause in alert.what for alert in current_alerts) else failed


def _find_solved(evidence: Evidence) -> Finding | None:
    """Find that held-out success stays high, or, without validations, the score in training."""
    if evidence.success < SOLVED_SUCCESS:
        return None
    if not evidence.judged:
        return Finding(
            f"mean score {evidence.mean(metric.REWARD):.3g} in training, which counts as a success"
        )

    last_unsolved = next(
        (
            index
            for index in reversed(range(len(evidence.judged)))
            if evidence.judged[index].success < SOLVED_SUCCESS
        ),
        -1,
    )

    idle_share = evidence.mean(metric.ZERO_ADVANTAGE)
    idle_note = f"; {idle_share:.0%} of the episodes teach nothing more" if idle_share >= WORTH_ADVICE else ""
    return Finding(
        f"held-out success {evidence.success:.0%}, since step {evidence.judged[last_unsolved + 1].step:.0f}{idle_note}"
    )


def _find_unsaved(evidence: Evidence) -> Finding | None:
    problem = evidence.status.get("checkpoint_problem")
    return Finding(str(problem)) if problem else None


def _find_fall(evidence: Evidence) -> Finding | None:
    """Find that the newest validation is below the best one by more than chance."""
    if not evidence.judged:
        return None

    best = max(evidence.judged, key=lambda validation: validation.success)
    newest = evidence.judged[-1]
    if not clearly_below(newest.share, best.share):
        return None

    change_from = f"from {best.success:.0%} at step {best.step:.0f}"
    return Finding(f"{change_from} to {newest.success:.0%} at step {newest.step:.0f}")


def _find_failing(evidence: Evidence) -> Finding | None:
    counts = {
        str(reason): evidence.grown(FAILED_PREFIX + reason) for reason in FailReason if reason not in LOSSES
    }
    failed = sum(counts.values())
    if failed < max(FEW_FAILURES, FAILING_SHARE * (failed + evidence.settled)):
        return None

    worst_reason = max(counts, key=lambda reason: counts[reason])
    newest = newest_cause(str(evidence.status.get("failed", "")))
    newest_cause_text = f": {newest}" if newest else ""

    return Finding(
        f"{failed:,.0f} of {failed + evidence.settled:,.0f}, most with {worst_reason}{newest_cause_text}",
        worst_reason,
    )


def _find_stall(evidence: Evidence) -> Finding | None:
    """Find that no step ended for long after the start: after 300 s where steps took 20 s, after 600 s where
    they took 100 s. Nothing is found during a validation, which may take all engines."""
    status = evidence.status
    waits = evidence.status.get("waits", ())
    if status.get("phase") != "running" or any("validation" in wait for wait in waits):
        return None

    waits_text = f": {'; '.join(waits[:2])}" if waits else ""
    steps = [row for row in evidence.last if metric.STEP_SECONDS in row]
    usual_seconds = median(row[metric.STEP_SECONDS] for row in steps) if steps else 0.0
    step_age = status.get("seconds", 0.0) - (steps[-1].get("time_s", 0.0) if steps else 0.0)
    silent_seconds = min(step_age, status.get("running", step_age))
    if silent_seconds < max(SILENT_SECONDS, SLOWER_FACTOR * usual_seconds) or (
        not steps and evidence.settled
    ):
        return None

    return Finding(f"no {'step' if steps else 'episode has ended'} for {clock(silent_seconds)}{waits_text}")


def _find_loss(evidence: Evidence) -> Finding | None:
    expected_workers = evidence.keys.get("rollout.workers", 0)
    connected = evidence.now.get("async/workers", expected_workers)
    is_late = evidence.status.get("running", CONNECTING_SECONDS) >= CONNECTING_SECONDS
    is_missing = evidence.status.get("phase") == "running" and connected < expected_workers and is_late
    names = [f"{FAILED_PREFIX}{name}_lost" for name in ("worker", "engine")]
    texts = [f"{connected:.0f} of {expected_workers} workers are connected"] if is_missing else []

    for name, process in zip(names, ("a worker", "a server"), strict=True):
        if lost_attempts := evidence.now.get(name, 0.0):
            texts.append(f"{lost_attempts:,.0f} attempts were lost with {process}, and begun again")

    if newest := evidence.status.get("lost"):
        texts.append(f"the newest: {newest}")

    is_recent = is_missing or any(evidence.grown(name) for name in names)
    return Finding(", ".join(texts), mild=not is_recent) if texts else None


def _find_wrong_account(evidence: Evidence) -> Finding | None:
    account = flow_of(evidence.now)
    return (
        None
        if account.conserved
        else Finding(f"{account.issued:,} episodes issued are not the sum of all states")
    )


def _find_constant_reward(evidence: Evidence) -> Finding | None:
    values = {row[name] for row in evidence.last for name in (LOWEST_SCORE, HIGHEST_SCORE) if name in row}
    count = f"{evidence.landed:,.0f} " * (evidence.landed > 0)
    return Finding(f"all {count}episodes scored {values.pop():g}") if len(values) == 1 else None


def _find_cut_off(evidence: Evidence) -> Finding | None:
    for end in LIMIT_ENDS:
        if (share := evidence.mean(f"rollout/end/{end}")) >= NEARLY_ALL:
            return Finding(f"{share:.0%} of the episodes ended with {end}", end)
    return _find_often("response_length/clip_ratio", "of the episodes were cut off by a limit")(evidence)


def _find_often(
    name: str, description: str, threshold: float = NEARLY_ALL
) -> Callable[[Evidence], Finding | None]:
    """Finds that the mean of a share is `least` or more."""
    return lambda evidence: (
        Finding(f"{share:.0%} {description}") if (share := evidence.mean(name)) >= threshold else None
    )


def _unless_taught(find: Callable[[Evidence], Finding | None]) -> Callable[[Evidence], Finding | None]:
    """A teacher teaches, whatever the rewards are."""
    return lambda evidence: None if taught(evidence.keys) else find(evidence)


def _find_nothing_taught(evidence: Evidence) -> Finding | None:
    share = evidence.mean(metric.ZERO_ADVANTAGE)
    score = evidence.mean(metric.REWARD)
    scores = f"mean score {score:.3g}, highest {evidence.highest:.3g}"

    return (
        Finding(f"{share:.0%} of the trained episodes have advantage 0; {scores}")
        if share >= NEARLY_ALL
        else None
    )


def _find_little_taught(evidence: Evidence) -> Finding | None:
    share = evidence.mean(metric.ZERO_ADVANTAGE)
    description = f"{share:.0%} of the trained episodes have advantage 0 and teach nothing"
    return Finding(description) if WORTH_ADVICE <= share < NEARLY_ALL else None


def _find_collapse(evidence: Evidence) -> Finding | None:
    before, now = (mean(rows, metric.ENTROPY) for rows in (evidence.first, evidence.last))
    if before is None or now is None or now > min(COLLAPSED_ENTROPY, before / 10):
        return None
    return Finding(f"entropy fell from {before:.3g} to {now:.3g} nats a token")


def _find_gap(evidence: Evidence) -> Finding | None:
    name = "rollout_corr/logprob_diff_mean"  # of tokens that one version sampled and trains
    before = mean(evidence.first, name)
    now = mean(evidence.last, name)
    if before is None or now is None or now < max(LARGE_GAP, GAP_GROWTH * before):
        return None
    return Finding(f"trainer and engine differ by {now:.3g} nats a token, {before:.3g} at the beginning")


def _find_skipped(evidence: Evidence) -> Finding | None:
    count = int(sum(row.get("actor/skipped_steps", 0.0) for row in evidence.last))
    return Finding(f"{count} of the last {len(evidence.last)} were skipped") if count else None


def _find_masked(evidence: Evidence) -> Finding | None:
    """Find that many tokens are masked, of all or of long episodes, which then teach less."""
    masked_share = evidence.mean(metric.MASKED)
    if masked_share >= MASKED_SHARE:
        return Finding(f"{masked_share:.0%} of the tokens were too old to be trained")

    lengths = matching(MASKED_BY_LENGTH, set[str]().union(*evidence.last))
    share, length = max(
        ((evidence.mean(name), length) for length, name in lengths.items()), default=(0.0, "")
    )
    description = (
        f"{share:.0%} of the tokens of episodes of {length} tokens and more were too old to be trained"
    )

    return Finding(f"{description}, {masked_share:.1%} of all tokens") if share >= MASKED_TAIL_SHARE else None


def _find_scores_beyond(evidence: Evidence) -> Finding | None:
    """Find scores beyond `validation.success` where the key is left at its default."""
    highest = max((row.get(metric.HIGHEST, 0.0) for row in evidence.validations), default=0.0)
    default = ValidationConfig().success
    if evidence.keys.get("validation.success") != default or highest <= default * (1 + 1e-6):
        return None
    return Finding(f"scores go up to {highest:g}, and {default:g} counts as a success, by default")


def _find_side_requests(evidence: Evidence) -> Finding | None:
    """Find that episodes of an unknown agent, a `command` or a function, have more than one row, and that no
    request is named as a side one. For coding agents with a name that is set where it is needed."""
    rows = evidence.mean("rollout/rows/mean")
    names = [key.removeprefix("rollout.agent.") for key in evidence.keys if key.startswith("rollout.agent.")]
    is_unknown = evidence.keys.get("rollout.agent") or any(
        ":" in name or name.startswith("command.") for name in names
    )
    if not is_unknown or evidence.keys.get("rollout.untrained_agents") or rows < 1 + WORTH_ADVICE:
        return None

    return Finding(f"{rows:.1f} rows per episode, all trained with the episode's reward")


def _find_limit(evidence: Evidence) -> Finding | None:
    """Find what limits the run: the longest part of an episode where the trainer waits, the trainer where the
    engines wait. For example, a reward of 12 s is 80% of an episode of 15 s. Nothing is found in a short
    run."""
    run_seconds = evidence.mean(metric.STEP_SECONDS) * evidence.keys.get("total_steps", math.inf)
    if run_seconds < SHORT_SECONDS:
        return None

    trainer_idle = evidence.mean(metric.TRAINER_IDLE)
    rollout_idle = evidence.mean(metric.ROLLOUT_IDLE)
    if trainer_idle < 1 - NEARLY_ALL < LIMITING_SHARE <= rollout_idle:
        return Finding(
            f"by the trainer: it waits {trainer_idle:.0%} of the time, the engines {rollout_idle:.0%}"
        )

    episode_seconds, reward_seconds = (
        mean(evidence.last, f"timing_s/{name}/mean") for name in ("episode", "reward")
    )
    if trainer_idle < LIMITING_SHARE or not episode_seconds or reward_seconds is None:
        return None

    tool_seconds = evidence.mean("timing_s/tools/mean")
    parts = {
        "the reward function": reward_seconds,
        "tools": tool_seconds,
        "sampling": episode_seconds - tool_seconds - reward_seconds,
    }

    longest_part = max(parts, key=lambda name: parts[name])
    if parts[longest_part] < LIMITING_SHARE * episode_seconds:
        return None

    share = f"{parts[longest_part]:.3g} s of an episode's {episode_seconds:.3g} s"
    return Finding(
        f"by {longest_part}: it takes {share}, and the trainer waits {trainer_idle:.0%} of the time",
        longest_part,
    )


ALERT_RULES: dict[str, Callable[[Evidence], Finding | None]] = {
    "solved": _find_solved,
    "checkpoints are not written": _find_unsaved,
    "held-out success fell": _find_fall,
    "attempts fail": _find_failing,
    "no progress": _find_stall,
    "account is not exact": _find_wrong_account,
    "constant reward": _unless_taught(_find_constant_reward),
    "everything truncated": _find_cut_off,
    "all groups filtered": _find_often(
        "rollout/discarded_group_frac", "of the groups were filtered or dropped"
    ),
    "nothing to learn": _unless_taught(_find_nothing_taught),
    "a process was lost": _find_loss,
    "tools fail": _find_often(
        "rollout/tool_failed_frac", "of the calls raised or ran out of time", FAILING_SHARE
    ),
    "tools decline": _find_often(
        "rollout/tool_declined_frac", "of the calls were answered with an error by the tool"
    ),
    "entropy collapse": _find_collapse,
    "growing log-prob gap": _find_gap,
    "skipped optimizer steps": _find_skipped,
    "many tokens masked": _find_masked,
    "success is set low": _find_scores_beyond,
    "limited": _find_limit,
    "rows beside the main one": _find_side_requests,
    "little to learn": _unless_taught(_find_little_taught),
}
