"""Makes columns for charts of a run's metrics, and finds alerts in them, each with what to do. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncrl.observe.metrics import GREEDY, LAG_TOKENS, REWARD, SAMPLED, Row
from asyncrl.observe.summary import lags, mean

POINTS = 2000  # rows that a page is sent; a longer run is thinned
Z = 1.96  # of a 95% interval


def series(rows: Sequence[Row]) -> dict[str, Any]:
    """`columns`: of each metric a value or None for each step; `step`, `seconds` and `tokens` (trained so
    far) are what charts have as x. `lags`: tokens taken by lag, of all steps."""
    merged = _by_step(rows)
    tokens, so_far = [], 0.0
    for row in merged:
        so_far += row.get("trainer/model_tokens", 0.0)
        tokens.append(so_far)
    every, last = math.ceil(len(merged) / POINTS) or 1, len(merged) - 1  # and all that have a validation
    kept = [at for at, row in enumerate(merged) if at % every == 0 or at == last or SAMPLED in row]
    names = sorted({name for index in kept for name in merged[index]})
    columns: dict[str, list[float | None]] = {
        name: [merged[index].get(name) for index in kept] for name in names if not name.startswith(LAG_TOKENS)
    }
    played = [(row, row.get("val-aux/episodes", 0.0)) for row in (merged[index] for index in kept)]
    of_mode = [
        count / max(1, (SAMPLED in row) + (GREEDY in row)) for row, count in played
    ]  # held-out episodes
    for name in (SAMPLED, GREEDY):
        if name in columns:
            pairs = [wilson(*one) for one in zip(columns[name], of_mode, strict=True)]
            columns[f"{name}/low"], columns[f"{name}/high"] = ([pair[at] for pair in pairs] for at in (0, 1))
    return {
        "step": [merged[index]["training/step"] for index in kept],
        "seconds": [merged[index].get("time_s", 0.0) for index in kept],
        "tokens": [tokens[index] for index in kept],
        "columns": columns,
        "lags": lags(merged),
    }


def _by_step(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Returns a row per step: a step that was repeated after a crash counts as it was last, with the
    validation that judged it."""
    merged: dict[float, dict[str, float]] = {}
    for row in rows:
        old = merged.get(row["training/step"], {})
        merged[row["training/step"]] = {**old, **row} if "timing_s/step" in row else {**row, **old}
    return [merged[step] for step in sorted(merged)]


def wilson(share: float | None, count: float) -> tuple[float | None, float | None]:
    """Wilson's 95% interval of a share of `count` episodes: 5 of 10 lie between 0.24 and 0.76."""
    if share is None or count <= 0:
        return None, None
    centre = share + Z * Z / (2 * count)
    width = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    whole = 1 + Z * Z / count
    return (centre - width) / whole, (centre + width) / whole


WINDOW = 10  # steps that an alert looks back on; with fewer there is none
MOST = 0.9  # the share from which on it is "nearly all"
COLLAPSED = 0.05  # nats a token, and a tenth of what it was at the beginning
GAP, GROWN = 0.02, 3.0  # nats a token, and times what it was at the beginning
MASKED = 0.2
LOWEST, HIGHEST = "rollout/score/min", "rollout/score/max"


class Alert(msgspec.Struct, frozen=True):
    """`step`: the last one that was looked at."""

    name: str
    step: int
    what: str
    do: str


class _Rule(NamedTuple):
    """`found` says what is wrong in the first and the last rows of a run, '' if nothing is."""

    name: str
    found: Callable[[Sequence[Row], Sequence[Row]], str]
    do: str


def alerts(rows: Sequence[Row], early: str = "") -> list[Alert]:
    """Find those of the last WINDOW steps; `rows` are metrics in their order. `early`: that of the run's
    status, which is there before."""
    steps = [row for row in rows if "timing_s/step" in row]
    if len(steps) < WINDOW:
        return [Alert(RULES[0].name, len(steps), early, RULES[0].do)] if early else []
    first, last, step = steps[:WINDOW], steps[-WINDOW:], int(steps[-1]["training/step"])
    found = ((rule, rule.found(first, last)) for rule in RULES)
    return [Alert(rule.name, step, what, rule.do) for rule, what in found if what]


def _constant_reward(first: Sequence[Row], last: Sequence[Row]) -> str:
    known = [row for row in last if LOWEST in row and HIGHEST in row]
    values = {row[name] for row in known for name in (LOWEST, HIGHEST)}
    return f"every episode scored {values.pop():g}" if len(values) == 1 else ""


def _often(name: str, what: str, least: float = MOST) -> Callable[[Sequence[Row], Sequence[Row]], str]:
    """Finds that the mean of a share is `least` or more."""
    return lambda first, last: f"{share:.0%} {what}" if (share := mean(last, name) or 0.0) >= least else ""


def _nothing_taught(first: Sequence[Row], last: Sequence[Row]) -> str:
    share, score = mean(last, "critic/zero_advantage_frac") or 0.0, mean(last, REWARD) or 0.0
    if share < MOST:
        return ""
    highest = max((row[HIGHEST] for row in last if HIGHEST in row), default=score)
    return (
        f"{share:.0%} of the trained episodes have advantage 0; mean score {score:.3g}, highest {highest:.3g}"
    )


def _collapse(first: Sequence[Row], last: Sequence[Row]) -> str:
    before, now = (mean(rows, "actor/entropy") for rows in (first, last))
    if before is None or now is None or now > min(COLLAPSED, before / 10):
        return ""
    return f"entropy fell from {before:.3g} to {now:.3g} nats a token"


def _gap(first: Sequence[Row], last: Sequence[Row]) -> str:
    name = "rollout_corr/logprob_diff_mean"  # of tokens that one version sampled and trains
    before, now = mean(first, name), mean(last, name)
    if before is None or now is None or now < max(GAP, GROWN * before):
        return ""
    return f"trainer and engine differ by {now:.3g} nats a token, {before:.3g} at the beginning"


def _skipped(first: Sequence[Row], last: Sequence[Row]) -> str:
    count = int(sum(row.get("actor/skipped_steps", 0.0) for row in last))
    return f"{count} of the last {len(last)} optimizer steps were skipped" if count else ""


RULES = (
    _Rule(
        "constant reward",
        _constant_reward,
        "look at transcripts: the task is too easy or too hard, or the reward reads no answer; "
        "`asyncrl regrade` tries another reward on the same episodes",
    ),
    _Rule(
        "all groups filtered",
        _often("rollout/discarded_group_frac", "of the groups were filtered or dropped"),
        "use samples that are sometimes solved, or a larger buffer.episodes_per_group",
    ),
    _Rule(
        "nothing to learn",
        _nothing_taught,
        "where that is the score of a solved sample use harder ones, or stop; else easier ones, or a larger "
        "buffer.episodes_per_group",
    ),
    _Rule(
        "entropy collapse",
        _collapse,
        "lower trainer.lr, raise algorithm.entropy_coef, or stop here if held-out success is what you want",
    ),
    _Rule(
        "growing log-prob gap",
        _gap,
        "compare dtypes of engine and trainer (model.dtype, model.fp32_head), and look at weights/acked_lag; "
        "for a mixture of experts set trainer.router_replay",
    ),
    _Rule(
        "everything truncated",
        _often("response_length/clip_ratio", "of the episodes were cut off by a limit"),
        "raise rollout.max_new_tokens or rollout.max_tokens, or shape length (algorithm.shaping)",
    ),
    _Rule(
        "skipped optimizer steps",
        _skipped,
        "gradients spike or are not finite: `asyncrl replay --step` repeats one; lower trainer.lr",
    ),
    _Rule(
        "much is masked",
        _often("staleness/masked_token_frac", "of the tokens were too old to be trained", MASKED),
        "lower buffer.target_staleness, or raise buffer.max_staleness",
    ),
)
