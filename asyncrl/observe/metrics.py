"""The catalogue of metrics, metrics.yaml: label, format and meaning of each; and the charts made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

Row = Mapping[str, float]

SAMPLED, GREEDY = "val-core/all/sampled/success", "val-core/all/greedy/success"  # shares of episodes
SAMPLED_SCORE, GREEDY_SCORE = "val-core/all/sampled/mean@1", "val-core/all/greedy/mean@1"
NLL, NLL_HELD_OUT = "actor/nll", "val-core/all/nll"  # per token; a supervised run has no reward
REWARD = "rollout/score/mean"  # of all landed episodes: filtering leaves `critic/score` only mixed groups
COMPONENT = "rollout/component/*/mean"  # of all landed episodes, likewise
COMPONENT_HELD_OUT = "val-aux/all/sampled/*/mean@1"
FILTERED = "flow/filtered_frac"  # of groups
ZERO_ADVANTAGE = "critic/zero_advantage_frac"
HIGHEST = "val-aux/score/max"  # of what a validation compared with `validation.success`
VALIDATED = "val-aux/policy_version"
STEP_SECONDS = "timing_s/step"
UPDATE = "timing_s/update_weights"  # the trainer's time for a new version: it trains nothing meanwhile
LAG, LAG_P95, LAG_MAX = "staleness/lag/mean", "staleness/lag/p95", "staleness/lag/max"
LAG_TOKENS = "staleness/lag_tokens/"  # + lag: tokens taken at that lag
MASKED = "staleness/masked_token_frac"
ENTROPY, LENGTH = "actor/entropy", "rollout/response_length/mean"
TRAINER_IDLE, ROLLOUT_IDLE = "async/trainer_idle_frac", "async/rollout_idle_frac"
FLOW = "flow/"  # + the name of a counter
BATCH = "async/batch_share"  # a gauge: of the step under way, 0 to 1, see `Reporter.batch_share`

OF_STEP = (STEP_SECONDS, REWARD, FILTERED, LAG, MASKED, TRAINER_IDLE, ROLLOUT_IDLE)  # of `asyncrl status`
TRACED = (REWARD, NLL, LAG, ENTROPY, LENGTH)  # with a small curve in the console
FIGURES = (  # of the console, the least important ones last
    *(SAMPLED, GREEDY, SAMPLED_SCORE, GREEDY_SCORE, NLL_HELD_OUT, REWARD, FILTERED, NLL, LAG, ZERO_ADVANTAGE),
    *("tool_call_counts/mean", LENGTH, ENTROPY, "rollout/tokens_per_s", TRAINER_IDLE, ROLLOUT_IDLE),
    *("staleness/lag/p50", LAG_P95, LAG_MAX, "async/ready", "async/running", "async/credits"),
    *("weights/pushed", "weights/acked", "async/workers"),
)
HELD_OUT = (SAMPLED, SAMPLED_SCORE, GREEDY, GREEDY_SCORE, NLL_HELD_OUT)  # of a validation
PHASES = (  # of the trainer, in the order in which they happen; they do not overlap
    *("timing_s/wait_data", "timing_s/ref", "timing_s/values", "timing_s/adv", "timing_s/update_actor"),
    *("timing_s/update_critic", UPDATE, "timing_s/save_checkpoint"),
)
CHARTS: dict[str, Sequence[str]] = {  # by title; the text for which a `*` stands is in the label
    "Reward, before shaping": (REWARD, "critic/score/mean"),
    "Success, held out": (SAMPLED, GREEDY),
    "Score, held out": (SAMPLED_SCORE, GREEDY_SCORE),
    "Components of the reward": (COMPONENT, COMPONENT_HELD_OUT),
    "Loss per token (supervised)": (NLL, NLL_HELD_OUT),
    "Lag, in steps": (LAG, LAG_P95, LAG_MAX),
    "Masked tokens, share": (MASKED, "rollout_corr/rollout_rs_masked_fraction"),
    "Idle, share of time": (TRAINER_IDLE, ROLLOUT_IDLE),
    "Flow, episodes": ("flow/issued", "flow/trained", "flow/filtered", "flow/dropped", "flow/failed"),
    "Not over, episodes": ("flow/in_flight", "flow/ready", "flow/taken"),
    "Attempts that failed": ("rollout/attempts_failed/*",),
    "Tokens per second": ("rollout/tokens_per_s", "perf/throughput"),
    "Seconds per step": (STEP_SECONDS, "timing_s/wait_data", "timing_s/update_actor", UPDATE),
    "Policy loss": ("actor/pg_loss",),
    "Gradient norm": ("actor/grad_norm",),
    "Entropy, nats per token": (ENTROPY,),
    "KL, nats per token": ("rollout_corr/kl", "actor/ppo_kl", "actor/kl_loss"),
    "Effective sample size, share": (
        "rollout_corr/rho_eff_sample_size",
        "rollout_corr/rho_seq_eff_sample_size",
    ),
    "Log-prob gap of one version": ("rollout_corr/logprob_diff_mean", "rollout_corr/logprob_diff_max"),
    "Response, tokens": (LENGTH, "rollout/response_length/max"),
    "Ends, share": ("rollout/end/*",),
}
COUNTED = ("rollout/attempts_failed/", "rollout/end/")  # of which a chart leaves out what did not happen


class Metric(msgspec.Struct, frozen=True, array_like=True):
    """A row of the catalogue. `verl`: its name there, or "same"; '' without one."""

    names: str
    verl: str
    label: str
    form: str
    meaning: str


@cache
def sections() -> dict[str, list[Metric]]:
    """The rows, by heading."""
    return msgspec.yaml.decode(
        Path(__file__).with_name("metrics.yaml").read_bytes(), type=dict[str, list[Metric]]
    )


@cache
def catalogue() -> dict[str, Metric]:
    """The rows by name; a name may have a `<text>` that stands for any."""
    return {name: row for rows in sections().values() for row in rows for name in spread(row.names)}


def spread(names: str) -> list[str]:
    """Return the names for which `a/{b,c}, d` stands: a/b, a/c and d."""
    if ", " in names:
        return [name for one in names.split(", ") for name in spread(one)]
    before, _, rest = names.partition("{")
    parts, _, after = rest.partition("}")
    return [name for part in parts.split(",") for name in spread(before + part + after)] if rest else [names]


def label(name: str) -> str:
    return catalogue()[name].label


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def value_of(name: str, value: float) -> str:
    """The value of a metric in its format."""
    return shown(value, catalogue()[name].form)


def figures(names: Iterable[str], metrics: Row) -> Iterator[str]:
    """Label and value of those that are known."""
    return (f"{label(name)} {value_of(name, metrics[name])}" for name in names if name in metrics)


def charts(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """The charts of which something is known: title → metric → label."""
    names = sorted(set[str]().union(*rows))
    happened = {name for row in rows for name in row if name.startswith(COUNTED) and row[name]}
    found: dict[str, dict[str, str]] = {}
    for title, patterns in CHARTS.items():
        lines = found.setdefault(title, {})
        for pattern in patterns:
            if "*" not in pattern:
                lines |= {pattern: label(pattern)} if pattern in names else {}
                continue
            more = ", held out" * (pattern == COMPONENT_HELD_OUT)
            for text, name in matching(pattern, names).items():
                lines |= {name: text + more} if name in happened or not name.startswith(COUNTED) else {}
    return {title: lines for title, lines in found.items() if lines}


def matching(pattern: str, names: Iterable[str]) -> dict[str, str]:
    """Find the names that fit a pattern: the text in place of its `*` → name."""
    head, _, tail = pattern.partition("*")
    fitting = (name for name in sorted(names) if name.startswith(head) and name.endswith(tail))
    return {name[len(head) : len(name) - len(tail)]: name for name in fitting}


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
