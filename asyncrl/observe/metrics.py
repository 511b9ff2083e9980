"""Reads the catalogue of metrics, metrics.yaml (label, format and meaning), and defines the charts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

Row = Mapping[str, float]

SAMPLED = "val-core/all/sampled/success"  # share of episodes
GREEDY = "val-core/all/greedy/success"  # share of episodes
SAMPLED_SCORE = "val-core/all/sampled/mean@1"
GREEDY_SCORE = "val-core/all/greedy/mean@1"
NLL = "actor/nll"  # per token, in supervised runs, which have no reward
NLL_HELD_OUT = "val-core/all/nll"  # per token
REWARD = "rollout/score/mean"  # of all landed episodes: filtering leaves `critic/score` only mixed groups
COMPONENT = "rollout/component/*/mean"  # of all landed episodes, as for REWARD
COMPONENT_HELD_OUT = "val-aux/all/sampled/*/mean@1"
FILTERED = "flow/filtered_frac"  # of groups
ZERO_ADVANTAGE = "critic/zero_advantage_frac"
HIGHEST = "val-aux/score/max"  # highest score that a validation compared with `validation.success`
VALIDATED = "val-aux/policy_version"
ASKED = "val-aux/samples"
STEP_SECONDS = "timing_s/step"
UPDATE = "timing_s/update_weights"  # the trainer's time for a new version, in which nothing is trained
LAG = "staleness/lag/mean"
LAG_P95 = "staleness/lag/p95"
LAG_MAX = "staleness/lag/max"
MODEL_TOKENS = "trainer/model_tokens"
KL_LOSS = "actor/kl_loss"
LAG_TOKENS = "staleness/lag_tokens/"  # + lag: tokens taken at that lag
MASKED = "staleness/masked_token_frac"
ENTROPY = "actor/entropy"
LENGTH = "rollout/response_length/mean"
TRAINER_IDLE = "async/trainer_idle_frac"
ROLLOUT_IDLE = "async/rollout_idle_frac"
FLOW = "flow/"  # + the name of a counter
BATCH = "async/batch_share"  # a gauge, 0 to 1: progress of the step under way, see `Reporter.batch_fraction`

OF_STEP = (STEP_SECONDS, REWARD, FILTERED, LAG, MASKED, TRAINER_IDLE, ROLLOUT_IDLE)  # in `asyncrl status`
TRACED = (REWARD, NLL, LAG, ENTROPY, LENGTH)  # shown with a small curve in the console
FIGURES = (  # shown in the console, the least important last
    *(SAMPLED, GREEDY, SAMPLED_SCORE, GREEDY_SCORE, NLL_HELD_OUT, REWARD, FILTERED, NLL, LAG, ZERO_ADVANTAGE),
    *("tool_call_counts/mean", LENGTH, ENTROPY, "rollout/tokens_per_s", TRAINER_IDLE, ROLLOUT_IDLE),
    *("staleness/lag/p50", LAG_P95, LAG_MAX, "async/ready", "async/running", "async/credits"),
    *("weights/pushed", "weights/acked", "async/workers"),
)
HELD_OUT = (SAMPLED, SAMPLED_SCORE, GREEDY, GREEDY_SCORE, NLL_HELD_OUT)  # of a validation
PHASES = (  # phases of the trainer in their order, without overlap
    *("timing_s/wait_data", "timing_s/read_images", "timing_s/ref", "timing_s/values", "timing_s/adv"),
    *("timing_s/update_actor", "timing_s/update_critic", UPDATE, "timing_s/save_checkpoint"),
    *("timing_s/rest", "timing_s/wait_devices", "timing_s/wake"),
)
CHARTS: dict[str, dict[str, Sequence[str]]] = {  # group → title → metrics; the text for a `*` is the label
    "learning": {
        "Reward, before shaping": (REWARD,),
        "Held-out success": (SAMPLED, GREEDY),
        "Loss per token (supervised)": (NLL, NLL_HELD_OUT),
        "Held-out score": (SAMPLED_SCORE, GREEDY_SCORE),
        "Reward components": (COMPONENT,),
        "Held-out components": (COMPONENT_HELD_OUT,),
        "Reward of the episodes trained on": ("critic/score/mean",),
        "Episodes or groups with nothing to learn from, share": (ZERO_ADVANTAGE, FILTERED),
        "Entropy, nats per token": (ENTROPY,),
        "Policy loss": ("actor/pg_loss",),
        "Gradient norm": ("actor/grad_norm",),
        "KL, nats per token": ("rollout_corr/kl", "actor/ppo_kl", KL_LOSS),
    },
    "staleness": {
        "Lag, in steps": (LAG,),
        "Masked tokens, share": (MASKED, "rollout_corr/rollout_rs_masked_fraction"),
        "Effective sample size, share": (
            "rollout_corr/rho_eff_sample_size",
            "rollout_corr/rho_seq_eff_sample_size",
        ),
        "Log-prob gap in one version": ("rollout_corr/logprob_diff_mean", "rollout_corr/logprob_diff_max"),
    },
    "speed": {
        "Tokens per second": ("rollout/tokens_per_s", "perf/throughput"),
        "Seconds per step": (STEP_SECONDS, "timing_s/wait_data", "timing_s/update_actor", UPDATE),
        "Waiting, share of time": (TRAINER_IDLE, ROLLOUT_IDLE),
        "Seconds per episode": ("timing_s/episode/mean", "timing_s/tools/mean"),
    },
    "memory": {
        "Memory, GB": ("perf/cpu_memory_used_gb", "perf/max_memory_allocated_gb"),
    },
    "data": {
        "Response length, tokens": (LENGTH,),
        "Episode endings, share": ("rollout/end/*",),
        "Answers that may game the reward, share": (
            "rollout/answer/same_frac",
            "rollout/answer/empty_frac",
            "rollout/answer/refusal_frac",
            "rollout/repeated_frac/mean",
        ),
        "Episode flow": ("flow/issued", "flow/trained", "flow/filtered", "flow/dropped", "flow/failed"),
        "Unfinished episodes": ("flow/in_flight", "flow/ready", "flow/taken"),
        "Tool calls per episode": ("tool_call_counts/mean",),
        "Failed attempts": ("rollout/attempts_failed/*",),
    },
}
LARGE_CHARTS = 2  # the first charts of a group are large
QUANTILES = (("min", "max"), ("p05", "p95"), ("p25", "p75"))  # bands around a mean, the widest first


class Metric(msgspec.Struct, frozen=True, array_like=True):
    """Holds a row of the catalogue. `verl`: the name in verl, or "same"; '' without an equivalent."""

    names: str
    verl: str
    label: str
    form: str
    meaning: str


@cache
def sections() -> dict[str, list[Metric]]:
    """Return the rows, by heading."""
    return msgspec.yaml.decode(
        Path(__file__).with_name("metrics.yaml").read_bytes(), type=dict[str, list[Metric]]
    )


@cache
def catalogue() -> dict[str, Metric]:
    """Return the rows by name; a `<text>` in a name stands for any text."""
    return {name: row for rows in sections().values() for row in rows for name in expand_names(row.names)}


def expand_names(names: str) -> list[str]:
    """Return the names for which `a/{b,c}, d` stands: a/b, a/c and d."""
    if ", " in names:
        return [name for group in names.split(", ") for name in expand_names(group)]

    before, _, after_brace = names.partition("{")
    alternatives, _, after = after_brace.partition("}")
    return (
        [name for part in alternatives.split(",") for name in expand_names(before + part + after)]
        if after_brace
        else [names]
    )


def label(name: str) -> str:
    """Return the label of a metric: the only wording of the metric for people."""
    return catalogue()[name].label


def formatted(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def value_of(name: str, value: float) -> str:
    """Return the value of a metric in its format."""
    return formatted(value, catalogue()[name].form)


def figures(names: Iterable[str], metrics: Row) -> Iterator[str]:
    """Return label and value of the metrics that are known."""
    return (f"{label(name)} {value_of(name, metrics[name])}" for name in names if name in metrics)


class Chart(msgspec.Struct):
    """Describes a chart. `metrics`: name → label. `percent`: the metrics are shares."""

    group: str
    title: str
    metrics: dict[str, str]
    large: bool
    percent: bool


def known_charts(names: Collection[str], happened: Collection[str]) -> Iterator[Chart]:
    """Yield the charts with known metrics. `happened`: names whose values are not always 0; except in the
    group `learning`, other names are left out."""
    for group, patterns_by_title in CHARTS.items():
        large_charts_left = LARGE_CHARTS
        for title, patterns in patterns_by_title.items():
            lines = dict[str, str]()
            for pattern in patterns:
                if "*" in pattern:
                    lines |= {name: text for text, name in names_matching(pattern, names).items()}
                elif pattern in names:
                    lines[pattern] = label(pattern)

            lines = {name: text for name, text in lines.items() if name in happened or group == "learning"}
            if lines:
                percent = "share" in title or all(metric_name in (SAMPLED, GREEDY) for metric_name in lines)
                yield Chart(group, title, lines, large_charts_left > 0, percent)
                large_charts_left -= 1


def names_matching(pattern: str, names: Iterable[str]) -> dict[str, str]:
    """Find the names that match a pattern: the text in place of the `*` → name."""
    head, _, tail = pattern.partition("*")
    fitting = (name for name in sorted(names) if name.startswith(head) and name.endswith(tail))
    return {name[len(head) : len(name) - len(tail)]: name for name in fitting}


def duration_text(seconds: float) -> str:
    """Write a duration in words, in a suitable unit: 40 s, 5.5 minutes, 3.2 hours, 20 days."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / size:.{0 if unit == 's' or seconds / size >= 10 else 1}f} {unit}"
    return f"{seconds / 86400:,.{0 if seconds >= 864_000 else 1}f} days"


def clock_text(seconds: float) -> str:
    """Write a duration as hours, minutes and seconds: 1:02:03."""
    minutes, seconds_left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds_left:02}"
