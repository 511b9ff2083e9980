"""What is printed of a run at its end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.markup import escape
from rich.table import Table

from asyncrl.observe.summary import failures_line, identity_line, success_line


class PipeSafeTerminal(Terminal):
    """A terminal for `asyncrl train | head`, and one that may be closed: rich would end the program."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()  # discards all output from here on

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*objects, **options)


def print_summary(summary: Mapping[str, Any], run_dir: Path, terminal: Terminal | None = None) -> None:
    """The table before and after, the numbers that are known, the conservation identity, and where model and
    run are."""
    terminal = terminal or PipeSafeTerminal()
    terminal.print(_before_and_after(summary, run_dir.name))
    for label, key, form in (
        ("steps", "steps", "d"),
        ("optimizer steps skipped", "skipped_steps", "d"),
        ("seconds", "seconds", ".1f"),
        ("tokens trained", "tokens_trained", ",d"),
        ("tokens/s", "tokens_per_s", ",.0f"),
        ("episodes with advantage 0", "zero_advantage_frac", ".1%"),
        ("lag mean", "lag_mean", ".2f"),
        ("lag max", "lag_max", ".0f"),
        ("tokens masked", "masked_token_frac", ".2%"),
        ("trajectories of several versions", "trajectories_multi_version", ".1%"),
        ("trainer idle", "trainer_idle_frac", ".0%"),
        ("rollout idle", "rollout_idle_frac", ".0%"),
        ("trainer and all workers busy at once", "busy_at_once", ".0%"),
        ("weights: the trainer's wait, mean s", "weights_stall_s_mean", ".4f"),
        ("weights: the trainer's wait, share of time", "weights_stall_frac", ".2%"),
        ("log-prob gap of one version, max", "logprob_diff_max_same_version", ".1e"),
        ("engine mismatch of one version, k3", "k3_same_version", ".1e"),
        ("tokens compared for these", "logprob_tokens_compared", ",d"),
        ("log-prob gap of the fixed probe, max", "probe_logprob_diff_max", ".1e"),
        ("tokens compared for that", "probe_tokens_compared", ",d"),
        ("log-prob gap by rounding alone, on that probe, max", "probe_noise_floor", ".1e"),
    ):
        if summary.get(key) is not None:
            terminal.print(f"  {label}: {shown(summary[key], form)}", highlight=False)
    for line in (
        success_line(summary.get("validation_score_max"), summary.get("success_threshold")),
        failures_line(summary.get("attempts_failed", {}), summary.get("newest_failure", "")),
    ):
        if line:
            terminal.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    terminal.print(identity_line(summary["flow"], summary["conserved"]), highlight=False, soft_wrap=True)
    checkpoints = Path(summary.get("checkpoints") or run_dir.absolute() / "checkpoints")
    export = checkpoints / f"step-{summary['steps']}" / "hf"
    if export.is_dir():
        terminal.print(f"model: {export}", highlight=False, soft_wrap=True)
    terminal.print(f"run: {run_dir.absolute()}", highlight=False, soft_wrap=True)


def _before_and_after(summary: Mapping[str, Any], name: str) -> Table:
    """Training reward, and what validations found; `≥`: the threshold that makes an episode a success."""
    threshold = shown(summary.get("success_threshold"), "g")
    table = Table("", "before", "after", title=f"{name}: {summary.get('outcome', '')}")
    if summary.get("nll_first") is None:
        table.add_row("reward (training)", *_pair(summary, "reward_first", "reward_last", ".3f"))
    else:
        table.add_row("loss per token (training)", *_pair(summary, "nll_first", "nll_last", ".4f"))
    if summary.get("nll_held_out_before") is not None or summary.get("nll_held_out_after") is not None:
        pair = _pair(summary, "nll_held_out_before", "nll_held_out_after", ".4f")
        table.add_row("loss per token (held out)", *pair)
    for mode, success, score in (
        ("sampled", "success", "score"),
        ("greedy", "greedy", "greedy_score"),
    ):
        if summary.get(f"{success}_before") is None and summary.get(f"{success}_after") is None:
            continue
        pair = _pair(summary, f"{success}_before", f"{success}_after", ".1%")
        table.add_row(f"success, {mode} (held out, ≥ {threshold})", *pair)
        pair = _pair(summary, f"{score}_before", f"{score}_after", ".3f")
        table.add_row(f"score, {mode} (held out)", *pair)
    return table


def _pair(summary: Mapping[str, Any], before: str, after: str, form: str) -> tuple[str, str]:
    return shown(summary.get(before), form), shown(summary.get(after), form)


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
