"""Finds problems of a run in the run's metrics and status; alerts.yaml holds the advice. Pure.

The coordinator writes the alerts into status.json, which the console and `asyncrl status` show. The page
finds the same alerts in the files of a run, also after the run's end. Advice is given only for a run without
problems: a trainer that waits because all attempts fail needs no faster sampling. At most one piece of advice
is given at a time, and none about learning while held-out success rises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from asyncrl.buffer.records import LOSSES
from asyncrl.config import ValidationConfig, loss_has_teacher
from asyncrl.observe import metrics as metric
from asyncrl.observe.drifts import DRIFTS, find_carrier, find_drift, find_fall, find_lag
from asyncrl.observe.evidence import (
    HIGHEST_SCORE,
    LIMIT_ENDS,
    LOWEST_SCORE,
    SETTLED_STEPS,
    SOLVED_SUCCESS,
    WINDOW_STEPS,
    Evidence,
    Finding,
    gather_evidence,
)
from asyncrl.observe.metrics import Row, clock_text, names_matching
from asyncrl.observe.summary import account_of, mean
from asyncrl.types import FailReason

SHORT_SECONDS = 300.0  # seconds: a run that takes less needs no advice on its speed
NEARLY_ALL = 0.9  # fraction that counts as nearly all
WORTH_ADVICE = 0.25  # fraction from which advice is given
MOSTLY_SOLVED = 0.8  # success from which a lack of learning is no fault
COLLAPSED_ENTROPY = 0.05  # nats a token; entropy must also have fallen to a tenth of the first steps'
LARGE_GAP = 0.02  # nats a token
GAP_GROWTH = 3.0  # growth of the gap since the first steps
MASKED_SHARE = 0.2  # fraction of all tokens
MASKED_TAIL_SHARE = 0.5  # fraction of the tokens of long episodes
DROPPED_BY_CORRECTION = "rollout_corr/rollout_rs_masked_fraction"  # share of the tokens that are not too old
MASKED_BY_LENGTH = "staleness/by_length/*/masked_frac"
FAILING_SHARE = 0.2  # fraction of the attempts, or of the tool calls
FEW_FAILURES = 8  # fewer failed attempts are no alert
LIMITING_SHARE = 0.5  # fraction of the time
SILENT_SECONDS = 300.0  # seconds without a step or an episode
SLOWER_FACTOR = 6.0  # times the usual seconds of a step
CONNECTING_SECONDS = 60.0  # seconds after the first worker in which the others may connect
FAILED_PREFIX = "rollout/attempts_failed/"

Level = Literal["bad", "warn", "good", "advice"]


class Alert(msgspec.Struct, frozen=True):
    """Describes a problem and the advice. `keys`: keys to change, with their values. `step`: the newest step
    that rules have read. `link`: changes to the page's address that show the evidence."""

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
        return f"{self.name}: {self.what}; {self.do}{keys and f' (now {keys})'}"


class Advice(msgspec.Struct, frozen=True):
    """Holds what to do about a problem, and the keys to change."""

    do: str
    keys: list[str] = []


class RuleText(Advice, frozen=True, kw_only=True):
    """Holds the entry of an alert in alerts.yaml. `scores`: the alert is about learning, so a run that is
    solved or learns has none."""

    level: Level
    link: dict[str, str] = {}
    scores: bool = False
    causes: dict[str, Advice] = {}


@cache
def rule_texts() -> dict[str, RuleText]:
    return msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes(), type=dict[str, RuleText])


def find_alerts(rows: Sequence[Row], status: Mapping[str, Any], keys: Mapping[str, Any]) -> list[Alert]:
    """Find the alerts of the last WINDOW_STEPS steps, or of the episodes landed so far, the worst first.
    `rows`: in order; `status`: the newest; `keys`: all keys of the configuration, with their values."""
    steps = [row for row in rows if metric.STEP_SECONDS in row]
    evidence = gather_evidence(rows, status, keys)

    # Rules about scores need enough episodes, and are silent while the run learns.
    batch_episodes = keys.get("buffer.groups_per_batch", 1) * keys.get("buffer.episodes_per_group", 1)
    trains = keys.get("total_steps", 1) > 0
    has_enough = len(steps) >= WINDOW_STEPS or evidence.landed_episodes >= 2 * batch_episodes
    judges_learning = trains and not evidence.is_supervised and has_enough and not evidence.is_rising

    step = int(steps[-1]["training/step"]) if steps else 0
    found_alerts: list[Alert] = []

    for name, find_problem in ALERT_RULES.items():
        rule = rule_texts()[name]
        is_solved = any(alert.level == "good" for alert in found_alerts)
        if rule.level == "advice" and len(steps) < (SETTLED_STEPS if rule.scores else WINDOW_STEPS):
            continue
        if rule.scores and (is_solved or not judges_learning):
            continue
        if rule.level == "good" and (evidence.is_supervised or not trains):
            continue

        if finding := find_problem(evidence):
            advice = rule.causes.get(finding.cause) or Advice(rule.do, rule.keys)
            advised_keys = {key: str(keys[key]) for key in advice.keys if key in keys}
            is_mild = finding.is_mild or (rule.scores and evidence.newest_success >= MOSTLY_SOLVED)
            level: Level = "advice" if is_mild else rule.level
            found_alerts.append(
                Alert(
                    name=name,
                    level=level,
                    what=finding.description,
                    do=advice.do,
                    step=step,
                    keys=advised_keys,
                    link={**rule.link, **finding.link},
                )
            )

    problems = [alert for level in ("bad", "warn") for alert in found_alerts if alert.level == level]
    good = [alert for alert in found_alerts if alert.level == "good"]
    hints = [alert for alert in found_alerts if alert.level == "advice"]

    return [*good, *problems] if good or problems else hints[:1]


def newest_cause(failed: str) -> str:
    """Return the newest cause, with which the line of failed attempts ends."""
    return failed.partition("; latest: ")[2]


def unless_quoted(failed: str, current_alerts: Sequence[Alert]) -> str:
    """Return the line of failed attempts; '' if an alert quotes the newest cause."""
    cause = newest_cause(failed)
    return "" if cause and any(cause in alert.what for alert in current_alerts) else failed


def _find_solved(evidence: Evidence) -> Finding | None:
    """Find that held-out success stays high, or, without validations, the score in training."""
    if evidence.newest_success < SOLVED_SUCCESS:
        return None
    if not evidence.held_out_successes:
        return Finding(
            f"the mean training score is {evidence.mean_of(metric.REWARD):.3g}, which counts as a success"
        )

    last_unsolved = next(
        (
            index
            for index in reversed(range(len(evidence.held_out_successes)))
            if evidence.held_out_successes[index].success < SOLVED_SUCCESS
        ),
        -1,
    )

    idle_share = evidence.mean_of(metric.ZERO_ADVANTAGE)
    idle_note = f"; {idle_share:.0%} of the episodes teach nothing new" if idle_share >= WORTH_ADVICE else ""
    solved_since = evidence.held_out_successes[last_unsolved + 1].step
    return Finding(
        f"held-out success is {evidence.newest_success:.0%}, and the task has been solved since step "
        f"{solved_since:.0f}{idle_note}"
    )


def _find_unsaved(evidence: Evidence) -> Finding | None:
    problem = evidence.status.get("checkpoint_problem")
    return Finding(str(problem)) if problem else None


def _find_failing(evidence: Evidence) -> Finding | None:
    counts = {
        str(reason): evidence.growth_of(FAILED_PREFIX + reason)
        for reason in FailReason
        if reason not in LOSSES
    }
    failed = sum(counts.values())
    if failed < max(FEW_FAILURES, FAILING_SHARE * (failed + evidence.settled_episodes)):
        return None

    worst_reason = max(counts, key=lambda reason: counts[reason])
    newest = newest_cause(str(evidence.status.get("failed", "")))
    newest_cause_text = f": {newest}" if newest else ""

    attempts = failed + evidence.settled_episodes
    return Finding(
        f"{failed:,.0f} of {attempts:,.0f}, mostly {worst_reason}{newest_cause_text}", worst_reason
    )


def _find_stall(evidence: Evidence) -> Finding | None:
    """Find that no step has ended for long: for 300 s if steps take 20 s, for 600 s if steps take 100 s.
    Nothing is found during a validation, which may take all engines."""
    status = evidence.status
    waits = status.get("waits", ())
    if status.get("phase") != "running" or any("validation" in wait for wait in waits):
        return None

    waits_text = f": {'; '.join(waits[:2])}" if waits else ""
    steps = [row for row in evidence.last_steps if metric.STEP_SECONDS in row]
    usual_seconds = median(row[metric.STEP_SECONDS] for row in steps) if steps else 0.0
    step_age = status.get("seconds", 0.0) - (steps[-1].get("time_s", 0.0) if steps else 0.0)
    silent_seconds = min(step_age, status.get("running", step_age))
    if silent_seconds < max(SILENT_SECONDS, SLOWER_FACTOR * usual_seconds) or (
        not steps and evidence.settled_episodes
    ):
        return None

    return Finding(
        f"no {'step' if steps else 'episode'} has finished for {clock_text(silent_seconds)}{waits_text}"
    )


def _find_loss(evidence: Evidence) -> Finding | None:
    expected_workers = evidence.keys.get("rollout.workers", 0)
    connected = evidence.newest_gauges.get("async/workers", expected_workers)
    is_late = evidence.status.get("running", CONNECTING_SECONDS) >= CONNECTING_SECONDS
    is_missing = evidence.status.get("phase") == "running" and connected < expected_workers and is_late
    names = [f"{FAILED_PREFIX}{name}_lost" for name in ("worker", "engine")]
    connected_text = f"{connected:.0f} of {expected_workers} workers {'is' if connected == 1 else 'are'}"
    texts = [f"only {connected_text} connected"] if is_missing else []

    for name, process in zip(names, ("a worker", "a server"), strict=True):
        if lost_attempts := evidence.newest_gauges.get(name, 0.0):
            lost_text = "attempt was" if lost_attempts == 1 else "attempts were"
            texts.append(f"{lost_attempts:,.0f} {lost_text} lost with {process} and restarted")

    if newest := evidence.status.get("lost"):
        texts.append(f"latest: {newest}")

    is_recent = is_missing or any(evidence.growth_of(name) for name in names)
    return Finding(", ".join(texts), is_mild=not is_recent) if texts else None


def _find_wrong_account(evidence: Evidence) -> Finding | None:
    account = account_of(evidence.newest_gauges)
    if account.conserved:
        return None
    return Finding(
        f"{account.issued:,} episodes were issued, but the other counts add up to a different number"
    )


def _find_constant_reward(evidence: Evidence) -> Finding | None:
    scores = {
        row[name] for row in evidence.last_steps for name in (LOWEST_SCORE, HIGHEST_SCORE) if name in row
    }
    if len(scores) != 1:
        return None

    count = f"{evidence.landed_episodes:,.0f} " if evidence.landed_episodes > 0 else ""
    return Finding(f"all {count}episodes scored {scores.pop():g}")


def _find_cut_off(evidence: Evidence) -> Finding | None:
    for end in LIMIT_ENDS:
        if (share := evidence.mean_of(f"rollout/end/{end}")) >= NEARLY_ALL:
            return Finding(f"{share:.0%} of the episodes ended with {end}", end)
    return _find_often("response_length/clip_ratio", "of the episodes were cut off by a limit")(evidence)


def _find_often(
    name: str, description: str, threshold: float = NEARLY_ALL
) -> Callable[[Evidence], Finding | None]:
    """Make a rule that finds the mean of a fraction to be `threshold` or more."""
    return lambda evidence: (
        Finding(f"{share:.0%} {description}") if (share := evidence.mean_of(name)) >= threshold else None
    )


def _unless_taught(find: Callable[[Evidence], Finding | None]) -> Callable[[Evidence], Finding | None]:
    """Make a rule that finds nothing in a run with a teacher, which teaches whatever the rewards are."""
    return lambda evidence: None if loss_has_teacher(evidence.keys) else find(evidence)


def _find_nothing_taught(evidence: Evidence) -> Finding | None:
    share = evidence.mean_of(metric.ZERO_ADVANTAGE)
    if share < NEARLY_ALL:
        return None

    score = evidence.mean_of(metric.REWARD)
    scores = f"mean score {score:.3g}, highest score {evidence.highest_score:.3g}"
    return Finding(f"{share:.0%} of the episodes trained on have an advantage of 0 ({scores})")


def _find_little_taught(evidence: Evidence) -> Finding | None:
    share = evidence.mean_of(metric.ZERO_ADVANTAGE)
    description = f"{share:.0%} of the episodes trained on have an advantage of 0 and teach nothing"
    return Finding(description) if WORTH_ADVICE <= share < NEARLY_ALL else None


def _find_collapse(evidence: Evidence) -> Finding | None:
    before = mean(evidence.first_steps, metric.ENTROPY)
    now = mean(evidence.last_steps, metric.ENTROPY)
    if before is None or now is None or now > min(COLLAPSED_ENTROPY, before / 10):
        return None
    return Finding(f"entropy fell from {before:.3g} to {now:.3g} nats per token")


def _find_mismatch(evidence: Evidence) -> Finding | None:
    newest = evidence.status.get("mismatch")
    count = evidence.newest_gauges.get("weights/mismatches", 0.0)
    return Finding(f"{newest} (failed comparisons so far: {count:.0f})") if newest else None


def _find_gap(evidence: Evidence) -> Finding | None:
    name = "rollout_corr/logprob_diff_mean"  # only of tokens sampled and trained by the same version
    before = mean(evidence.first_steps, name)
    now = mean(evidence.last_steps, name)
    if before is None or now is None or now < max(LARGE_GAP, GAP_GROWTH * before):
        return None
    return Finding(
        f"the trainer and the engine differ by {now:.3g} nats per token ({before:.3g} at the start)"
    )


def _find_skipped(evidence: Evidence) -> Finding | None:
    count = int(sum(row.get("actor/skipped_steps", 0.0) for row in evidence.last_steps))
    verb = "was" if count == 1 else "were"
    return Finding(f"{count} of the last {len(evidence.last_steps)} steps {verb} skipped") if count else None


def _find_masked(evidence: Evidence) -> Finding | None:
    """Find that many tokens of all episodes are masked, by age or by the correction, or of long episodes,
    which then teach less."""
    masked_share = evidence.mean_of(metric.MASKED)
    dropped_share = evidence.mean_of(DROPPED_BY_CORRECTION)
    if masked_share + dropped_share >= MASKED_SHARE:
        dropped_text = (
            f", and the correction dropped {dropped_share:.0%} of the others" if dropped_share else ""
        )
        return Finding(f"{masked_share:.0%} of the tokens were too old to train on{dropped_text}")

    lengths = names_matching(MASKED_BY_LENGTH, set[str]().union(*evidence.last_steps))
    share, length = max(
        ((evidence.mean_of(name), length) for length, name in lengths.items()), default=(0.0, "")
    )
    description = f"{share:.0%} of the tokens in episodes of {length} or more tokens were too old to train on"

    return (
        Finding(f"{description} ({masked_share:.1%} of all tokens)") if share >= MASKED_TAIL_SHARE else None
    )


def _find_scores_beyond(evidence: Evidence) -> Finding | None:
    """Find scores beyond `validation.success` where the key is left at its default."""
    highest = max((row.get(metric.HIGHEST, 0.0) for row in evidence.validations), default=0.0)
    default = ValidationConfig().success
    if evidence.keys.get("validation.success") != default or highest <= default * (1 + 1e-6):
        return None
    return Finding(f"scores reach {highest:g}, but by default a score of {default:g} counts as a success")


def _find_side_requests(evidence: Evidence) -> Finding | None:
    """Find that episodes of an unknown agent, a `command` or a function, have more than one row, although no
    side requests are configured. For coding agents with a name side requests are known."""
    rows = evidence.mean_of("rollout/rows/mean")
    names = [key.removeprefix("rollout.agent.") for key in evidence.keys if key.startswith("rollout.agent.")]
    is_unknown = evidence.keys.get("rollout.agent") or any(
        ":" in name or name.startswith("command.") for name in names
    )
    if not is_unknown or evidence.keys.get("rollout.untrained_agents") or rows < 1 + WORTH_ADVICE:
        return None

    return Finding(f"{rows:.1f} rows per episode, all trained with the episode's reward")


def _find_limit(evidence: Evidence) -> Finding | None:
    """Find the bottleneck: the longest part of an episode if the trainer waits, the trainer if the engines
    wait. For example, a reward of 12 s is 80% of an episode of 15 s. Nothing is found in a short run."""
    run_seconds = evidence.mean_of(metric.STEP_SECONDS) * evidence.keys.get("total_steps", math.inf)
    if run_seconds < SHORT_SECONDS:
        return None

    trainer_idle = evidence.mean_of(metric.TRAINER_IDLE)
    rollout_idle = evidence.mean_of(metric.ROLLOUT_IDLE)
    if trainer_idle < 1 - NEARLY_ALL < LIMITING_SHARE <= rollout_idle:
        return Finding(
            f"the trainer (waiting {trainer_idle:.0%} of the time, while the engines wait {rollout_idle:.0%})"
        )

    episode_seconds = mean(evidence.last_steps, "timing_s/episode/mean")
    reward_seconds = mean(evidence.last_steps, "timing_s/reward/mean")
    if trainer_idle < LIMITING_SHARE or not episode_seconds or reward_seconds is None:
        return None

    tool_seconds = evidence.mean_of("timing_s/tools/mean")
    parts = {
        "the reward function": reward_seconds,
        "tools": tool_seconds,
        "sampling": episode_seconds - tool_seconds - reward_seconds,
    }

    longest_part = max(parts, key=lambda name: parts[name])
    if parts[longest_part] < LIMITING_SHARE * episode_seconds:
        return None

    share = f"{parts[longest_part]:.3g} s of the {episode_seconds:.3g} s that an episode takes"
    return Finding(
        f"{longest_part} ({share}; the trainer waits {trainer_idle:.0%} of the time)",
        longest_part,
    )


ALERT_RULES: dict[str, Callable[[Evidence], Finding | None]] = {
    "solved": _find_solved,
    "checkpoints are not written": _find_unsaved,
    "held-out success fell": find_fall,
    "attempts fail": _find_failing,
    "no progress": _find_stall,
    "episode counts do not add up": _find_wrong_account,
    "tools fail": _find_often(
        "rollout/tool_failed_frac", "of the calls raised an exception or timed out", FAILING_SHARE
    ),
    "constant reward": _unless_taught(_find_constant_reward),
    "everything truncated": _find_cut_off,
    "all groups filtered": _find_often(
        "rollout/discarded_group_frac", "of the groups were filtered or dropped"
    ),
    "nothing to learn": _unless_taught(_find_nothing_taught),
    "a process was lost": _find_loss,
    "tools decline": _find_often(
        "rollout/tool_declined_frac", "of the calls returned an error from the tool"
    ),
    "entropy collapse": _find_collapse,
    "engine mismatch": _find_mismatch,
    "growing log-prob gap": _find_gap,
    "skipped optimizer steps": _find_skipped,
    "many tokens masked": _find_masked,
    "held-out success lags behind the reward": _unless_taught(find_lag),
    "one component carries the reward": _unless_taught(find_carrier),
    **{name: _unless_taught(partial(find_drift, drift)) for name, drift in DRIFTS.items()},
    "success threshold is low": _find_scores_beyond,
    "bottleneck": _find_limit,
    "extra rows per episode": _find_side_requests,
    "little to learn": _unless_taught(_find_little_taught),
}
