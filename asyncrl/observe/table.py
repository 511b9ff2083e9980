"""Prints the table and the numbers at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console as Terminal
from rich.markup import escape
from rich.table import Table

from asyncrl.observe import metrics as metric
from asyncrl.observe.metrics import duration_text, formatted, label
from asyncrl.observe.summary import (
    HELD_OUT_RESULTS,
    SUCCESS_KEYS,
    TRAINING_RESULTS,
    identity_line,
    outcome_line,
    summary_notes,
)
from asyncrl.observe.wrapping import fit_terminal
from asyncrl.values import printable


class SummaryNumber(NamedTuple):
    """Describes a number of the summary. `metric_name`: the metric that the number is made of, whose label is
    shown; '' if the number is made of no metric. `words`: follow the label of a sum or share; the whole
    label of a number without a metric."""

    key: str
    metric_name: str
    form: str
    words: str = ""


SUMMARY_NUMBERS = (  # in the order of the page's overview
    SummaryNumber("lag_mean", metric.LAG, ".2f"),
    SummaryNumber("masked_token_frac", metric.MASKED, ".2%"),
    SummaryNumber("zero_advantage_frac", metric.ZERO_ADVANTAGE, ".1%"),
    SummaryNumber("trainer_idle_frac", metric.TRAINER_IDLE, ".0%"),
    SummaryNumber("rollout_idle_frac", metric.ROLLOUT_IDLE, ".0%"),
    SummaryNumber("seconds", "time_s", ""),
    SummaryNumber("tokens_trained", metric.MODEL_TOKENS, ",d"),
    SummaryNumber("tokens_per_s", metric.MODEL_TOKENS, ",.0f", words="/s"),
)
DIAGNOSTICS = (  # printed by `asyncrl runs show --all`
    SummaryNumber("steps", "training/step", "d"),
    SummaryNumber("skipped_steps", "actor/skipped_steps", "d"),
    SummaryNumber("tokens_abandoned", "rollout/abandoned_tokens", ",d"),
    SummaryNumber("lag_max", metric.LAG_MAX, ".0f"),
    SummaryNumber("trajectories_multi_version", "rollout/multi_version_frac", ".1%"),
    SummaryNumber("busy_at_once", "", ".0%", words="trainer and all workers busy at once"),
    SummaryNumber("weights_stall_s_mean", "weights/stall_s", ".4f", words=", mean"),
    SummaryNumber("weights_stall_frac", metric.UPDATE, ".2%", words=", share of time"),
    SummaryNumber("logprob_diff_max_same_version", "rollout_corr/logprob_diff_max", ".1e"),
    SummaryNumber("k3_same_version", "rollout_corr/k3_kl_same_version", ".1e"),
    SummaryNumber("logprob_tokens_compared", "rollout_corr/logprob_diff_tokens", ",d"),
    SummaryNumber("probe_logprob_diff_max", "weights/probe_logprob_diff_max", ".1e"),
    SummaryNumber("probe_tokens_compared", "weights/probe_tokens", ",d"),
    SummaryNumber("probe_noise_floor", "weights/probe_noise_floor", ".1e"),
)
ROUNDING_NOTE = (
    " (with bfloat16 rounding, a gap of 0.1 to 1.2 is normal, but several times the value `by rounding "
    "alone` is not; see docs/guides/gpus.md)"
)
ASYNCHRONY_TEXTS = {  # the numbers of docs/dev/promises.md
    "lag_max": "lag ≤ {:.0f}",
    "trajectories_multi_version": "{:.0%} of episodes span several versions",
    "logprob_diff_max_same_version": "log-prob gap ≤ {:.1g}",
    "probe_logprob_diff_max": "weights gap ≤ {:.1g}",
    "weights_stall_s_mean": "a weight push stalls the trainer for {:.2g} s",
}
MAX_ROUNDED_GAP = 1e-3  # nats: a larger gap is rounding of bfloat16, or a fault
MAX_COMPONENTS = 8  # components of a reward that are printed


class PipeSafeTerminal(Terminal):
    """Prints to a terminal or pipe that may be closed, as in `asyncrl train | head`, where rich would end the
    program. Texts may come from programs of an episode, so control characters are shown, not obeyed."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()  # discards all output from here on

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(
                *(printable(text) if isinstance(text, str) else text for text in objects), **options
            )


def print_summary(
    summary: Mapping[str, Any], run_dir: Path, terminal: Terminal | None = None, everything: bool = False
) -> None:
    """Print a run's results in the order of the page's overview: outcome, alerts, before and after, numbers
    (`everything`: diagnostics, too), the conservation identity, paths of model and run."""
    terminal = terminal or PipeSafeTerminal()

    def print_line(text: str, style: str = "") -> None:
        lines = fit_terminal(printable(text), terminal.file)
        terminal.print(escape(lines), style=style, highlight=False, soft_wrap=True)

    def print_command(text: str) -> None:
        """Print a line to copy, which only the terminal wraps."""
        terminal.print(escape(printable(text)), highlight=False, soft_wrap=True)

    outcome = outcome_line(summary, str(summary.get("outcome", "completed")))
    print_line(f"{run_dir.name}: {outcome}", style="bold")

    for line in summary.get("alerts", []):
        print_line(f"  {line}")

    table = Table("", "before", "after")
    for row in before_and_after(summary):
        table.add_row(*(escape(printable(cell)) for cell in row))  # names of rewards, which agents may choose

    terminal.print(table)
    lines = [f"{name}: {number}" for name, number in summary_numbers(summary, everything)]

    if line := asynchrony_line(summary):
        lines.append(line)

    for line in (*lines, *summary_notes(summary)):
        print_line(f"  {line}")

    print_line(identity_line(summary["flow"], summary["conserved"]))
    checkpoints = Path(summary.get("checkpoints") or run_dir.absolute() / "checkpoints")
    export_directory = checkpoints / f"step-{summary['steps']}" / "hf"
    if summary.get("agents"):
        print_command(f"adapters: asyncrl merge {run_dir.name} OUT --adapters apart")
    elif export_directory.is_dir():
        print_line(f"model: {export_directory}")

    print_line(f"run: {run_dir.absolute()}")
    if not everything:
        print_command(f"more: asyncrl view {run_dir.name}; asyncrl runs show {run_dir.name} --all")


def asynchrony_line(summary: Mapping[str, Any]) -> str:
    """Return how asynchronous the run was and how exact it stayed: the numbers of docs/dev/promises.md, as
    far as the run has measured them; '' if it has measured none."""
    numbers = {key: summary[key] for key in ASYNCHRONY_TEXTS if summary.get(key) is not None}
    texts = [ASYNCHRONY_TEXTS[key].format(number) for key, number in numbers.items()]
    gaps = (numbers.get("logprob_diff_max_same_version", 0.0), numbers.get("probe_logprob_diff_max", 0.0))
    note = ROUNDING_NOTE if max(gaps) > MAX_ROUNDED_GAP else ""
    return f"asynchrony: {', '.join(texts)}{note}" if texts else ""


def summary_numbers(summary: Mapping[str, Any], everything: bool = False) -> Iterator[tuple[str, str]]:
    """Yield label and value of the known numbers; `everything`: diagnostics, too."""
    entries = (*SUMMARY_NUMBERS, *DIAGNOSTICS) if everything else SUMMARY_NUMBERS
    for key, metric_name, form, words in entries:
        if (value := summary.get(key)) is not None:
            text = duration_text(value) if key == "seconds" else formatted(value, form)
            if key == "probe_logprob_diff_max" and value > MAX_ROUNDED_GAP:
                text += ROUNDING_NOTE
            yield (label(metric_name) if metric_name else "") + words, text


def before_and_after(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, before, after) of held-out results, of the training reward or loss, and of components of
    rewards; `≥` marks the threshold that makes an episode a success."""
    value_of = summary.get
    rows = list[tuple[str, str, float | None, float | None]]()  # label, format, before, after

    for key, name in HELD_OUT_RESULTS.items():
        row_label = label(name)
        form = ".3g"
        if key in SUCCESS_KEYS:
            row_label += f", ≥ {formatted(value_of('success_threshold'), 'g')}"
            form = ".1%"
        rows.append((row_label, form, value_of(f"{key}_before"), value_of(f"{key}_after")))

    key = "reward" if value_of("nll_first") is None else "nll"
    for training_key in (key, "kl_loss"):
        row_label = f"{label(TRAINING_RESULTS[training_key])} (training)"
        rows.append((row_label, ".3g", value_of(f"{training_key}_first"), value_of(f"{training_key}_last")))

    for name, (first, last, before, after) in [*value_of("components", {}).items()][:MAX_COMPONENTS]:
        rows.append((f"{name} (training)", ".3g", first, last))
        rows.append((f"{name} (held out)", ".3g", before, after))

    return [
        (row_label, formatted(before, form), formatted(after, form))
        for row_label, form, before, after in rows
        if (before, after) != (None, None)
    ]
