"""Prints the table and the numbers at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.markup import escape
from rich.table import Table

from asyncrl.observe.metrics import duration_text, formatted
from asyncrl.observe.summary import HELD_OUT_RESULTS, identity_line, outcome_line, summary_notes
from asyncrl.values import printable

SUMMARY_NUMBERS = (  # label, key of the summary, format; in the order of the page's overview
    ("lag mean", "lag_mean", ".2f"),
    ("tokens masked", "masked_token_frac", ".2%"),
    ("episodes with advantage 0", "zero_advantage_frac", ".1%"),
    ("trainer idle", "trainer_idle_frac", ".0%"),
    ("rollout idle", "rollout_idle_frac", ".0%"),
    ("time", "seconds", ""),
    ("tokens trained", "tokens_trained", ",d"),
    ("tokens/s", "tokens_per_s", ",.0f"),
)
DIAGNOSTICS = (  # printed by `asyncrl runs show --all`
    ("steps", "steps", "d"),
    ("optimizer steps skipped", "skipped_steps", "d"),
    ("tokens of attempts that were given up", "tokens_abandoned", ",d"),
    ("lag max", "lag_max", ".0f"),
    ("trajectories of several versions", "trajectories_multi_version", ".1%"),
    ("trainer and all workers busy at once", "busy_at_once", ".0%"),
    ("weights: the trainer's wait, mean s", "weights_stall_s_mean", ".4f"),
    ("weights: the trainer's wait, share of time", "weights_stall_frac", ".2%"),
    ("log-prob gap of one version, max", "logprob_diff_max_same_version", ".1e"),
    ("engine mismatch of one version, k3", "k3_same_version", ".1e"),
    ("tokens compared for these", "logprob_tokens_compared", ",d"),
    ("log-prob gap of the fixed probe, max", "probe_logprob_diff_max", ".1e"),
    ("tokens compared for that", "probe_tokens_compared", ",d"),
    ("log-prob gap by rounding alone, on that probe, max", "probe_noise_floor", ".1e"),
)
ROUNDING_NOTE = (
    " (bfloat16 rounds: 0.1 to 0.6 is usual, several times `by rounding alone` is not; docs/sglang.md)"
)
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
    outcome = outcome_line(summary, str(summary.get("outcome", "completed")))
    terminal.print(escape(f"{run_dir.name}: {outcome}"), style="bold", highlight=False, soft_wrap=True)

    for line in summary.get("alerts", []):
        terminal.print(f"  {escape(line)}", highlight=False, soft_wrap=True)

    table = Table("", "before", "after")
    for row in before_and_after(summary):
        table.add_row(*(escape(printable(cell)) for cell in row))  # names of rewards, which agents may choose

    terminal.print(table)
    lines = [f"{label}: {number}" for label, number in summary_numbers(summary, everything)]

    for line in (*lines, *summary_notes(summary)):
        terminal.print(f"  {escape(line)}", highlight=False, soft_wrap=True)

    terminal.print(identity_line(summary["flow"], summary["conserved"]), highlight=False, soft_wrap=True)
    checkpoints = Path(summary.get("checkpoints") or run_dir.absolute() / "checkpoints")
    export_directory = checkpoints / f"step-{summary['steps']}" / "hf"
    if summary.get("agents"):
        merge_command = f"adapters: asyncrl merge {run_dir.name} OUT --adapters apart"
        terminal.print(merge_command, highlight=False, soft_wrap=True)
    elif export_directory.is_dir():
        terminal.print(f"model: {export_directory}", highlight=False, soft_wrap=True)

    terminal.print(f"run: {run_dir.absolute()}", highlight=False, soft_wrap=True)
    if not everything:
        more_commands = f"more: asyncrl view {run_dir.name}; asyncrl runs show {run_dir.name} --all"
        terminal.print(more_commands, highlight=False, soft_wrap=True)


def summary_numbers(summary: Mapping[str, Any], everything: bool = False) -> Iterator[tuple[str, str]]:
    """Yield label and value of the known numbers; `everything`: diagnostics, too."""
    entries = (*SUMMARY_NUMBERS, *DIAGNOSTICS) if everything else SUMMARY_NUMBERS
    for label, key, form in entries:
        if (value := summary.get(key)) is not None:
            text = duration_text(value) if key == "seconds" else formatted(value, form)
            if key == "probe_logprob_diff_max" and value > 1e-3:
                text += ROUNDING_NOTE
            yield label, text


def before_and_after(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, before, after) of held-out results, of the training reward or loss, and of components of
    rewards; `≥` marks the threshold that makes an episode a success."""
    threshold = f", ≥ {formatted(summary.get('success_threshold'), 'g')}"
    value_of = summary.get
    rows = list[tuple[str, float | None, float | None]]()

    for key, (label, _) in HELD_OUT_RESULTS.items():
        held_out = f"held out{threshold}" if label.startswith("success") else "held out"
        rows.append((f"{label} ({held_out})", value_of(f"{key}_before"), value_of(f"{key}_after")))

    label = "reward"
    key = "reward"
    if value_of("nll_first") is not None:
        label = "loss per token"
        key = "nll"
    rows.append((f"{label} (training)", value_of(f"{key}_first"), value_of(f"{key}_last")))
    rows.append(("KL to the reference (training)", value_of("kl_loss_first"), value_of("kl_loss_last")))

    for name, (first, last, before, after) in [*value_of("components", {}).items()][:MAX_COMPONENTS]:
        rows += [(f"{name} (training)", first, last), (f"{name} (held out)", before, after)]

    def text(label: str, value: float | None) -> str:
        return formatted(value, ".1%" if label.startswith("success") else ".3g")

    return [
        (name, text(name, before_value), text(name, after_value))
        for name, before_value, after_value in rows
        if (before_value, after_value) != (None, None)
    ]
