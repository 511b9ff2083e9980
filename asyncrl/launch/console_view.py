"""What the console shows of a run: a picture of the terminal's size, or one line. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace
from rich.console import Console as Terminal
from rich.console import Group
from rich.text import Text

from asyncrl.observe.progress import BATCH, Progress, sparkline
from asyncrl.observe.summary import (
    FILTERED,
    GREEDY,
    GREEDY_SCORE,
    NLL,
    NLL_HELD_OUT,
    REWARD,
    SAMPLED,
    SAMPLED_SCORE,
    ZERO_ADVANTAGE,
)
from asyncrl.observe.table import shown
from asyncrl.observe.transcripts import Transcript
from asyncrl.wire.messages.observer import Status

LAG, ENTROPY, LENGTH = "staleness/lag/mean", "actor/entropy", "rollout/response_length/mean"
TRACED = {  # metrics with a small curve: label and format
    REWARD: ("reward", ".3f"),
    NLL: ("loss", ".4f"),
    LAG: ("lag", ".2f"),
    ENTROPY: ("entropy", ".3f"),
    LENGTH: ("length", ".0f"),
}
GAP = 3  # columns between figures
LEAST_BAR, MOST_BAR, MOST_CURVE = 8, 60, 120  # columns
WAITS, FAILED = 4, 3  # lines of the picture, at most
KEYS = "g: newest good transcript, b: newest bad one"
WIDEST = 160  # characters of a plain line
WRAPPING = Terminal(width=80)  # its width does not matter


@dataclass
class ConsoleState:
    """What was last reported of a run."""

    title: str
    status: Status
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)  # of `TRACED`, a value for each step
    transcript: Transcript | None = None  # that is shown in place of the figures
    progress: Progress = field(default_factory=lambda: Progress(time.monotonic()))

    @property
    def times(self) -> str:
        return self.progress.line(self.status.total_steps, time.monotonic())

    @property
    def steps(self) -> str:
        """Of the first batch, its share: until it is done, that is all that moves."""
        step, share = self.status.step, self.status.gauges.get(BATCH, 0.0)
        first = f" ({share:.0%} of the first batch)" if not step and share else ""
        return f"step {step}/{self.status.total_steps}{first}"

    def committed(self, step: int, metrics: dict[str, float]) -> None:
        """A step with its row, which is newer than the gauges."""
        gauges = {name: value for name, value in self.status.gauges.items() if name not in metrics}
        self.status, self.metrics = replace(self.status, step=step, gauges=gauges), metrics
        self.progress.update(step, True, time.monotonic())
        for name in TRACED.keys() & metrics.keys():
            self.history.setdefault(name, []).append(metrics[name])

    def get(self, name: str) -> float | None:
        """A gauge or a metric, whichever is newer."""
        for source in (self.status.gauges, self.metrics, self.validation):
            if name in source:
                return source[name]
        return None


FIGURES = (
    ("reward", REWARD, ".3f"),
    ("filtered", FILTERED, ".0%"),
    ("loss per token", NLL, ".4f"),
    ("loss per token (held out)", NLL_HELD_OUT, ".4f"),
    ("success (sampled)", SAMPLED, ".1%"),
    ("success (greedy)", GREEDY, ".1%"),
    ("score (sampled)", SAMPLED_SCORE, ".3f"),
    ("score (greedy)", GREEDY_SCORE, ".3f"),
    ("advantage 0", ZERO_ADVANTAGE, ".0%"),
    ("lag mean", LAG, ".2f"),
    ("tool calls/episode", "tool_call_counts/mean", ".2f"),
    ("response length", LENGTH, ".0f"),
    ("entropy", ENTROPY, ".3f"),
    ("tokens/s", "rollout/tokens_per_s", ",.0f"),
    ("trainer idle", "async/trainer_idle_frac", ".0%"),
    ("rollout idle", "async/rollout_idle_frac", ".0%"),
    ("lag p50", "staleness/lag/p50", ".0f"),
    ("lag p95", "staleness/lag/p95", ".0f"),
    ("lag max", "staleness/lag/max", ".0f"),
    ("ready", "async/ready", ".0f"),
    ("running", "async/running", ".0f"),
    ("credits", "async/credits", ".0f"),
    ("version pushed", "weights/pushed", ".0f"),
    ("version acked", "weights/acked", ".0f"),
    ("workers", "async/workers", ".0f"),
)


def render(state: ConsoleState, width: int = 120, height: int = 40, keys: bool = False) -> Group:
    """The live view, at most `width` columns and `height` lines: progress; then curves, figures, failures and
    who waits on whom, or a transcript. What has no room is left out line by line. `keys`: there is a
    keyboard."""
    top = _progress(state, width)[:height]
    room = height - len(top)
    if state.transcript is not None:
        return Group(*top, *_transcript(state.transcript, width, room))
    status = state.status
    failed = _wrapped(filter(None, (status.alert, status.failed)), width, FAILED, "red")
    waits = _wrapped(status.waits, width, WAITS, "yellow")
    below = [*failed, *([Text("waiting:"), *waits] if waits else []), *([Text(KEYS, "dim")] if keys else [])]
    curves = _curves(state, width)
    cells = [
        f"{label} {shown(value, form)}"
        for label, name, form in _figures(state)
        if name not in state.history and (value := state.get(name)) is not None
    ]
    figures = _grid(cells, width)[: max(0, room - len(curves) - len(below))]
    return Group(*top, *[*curves, *figures, *below][:room])


def _progress(state: ConsoleState, width: int) -> list[Text]:
    """Name and phase; bar, steps and times, on two lines where one has no room for them."""
    name = Text(f"{state.title}  {state.status.phase}", "bold", no_wrap=True)
    name.truncate(width, overflow="ellipsis")
    steps, times = state.steps, state.times
    words = [f"{steps} {times}"]
    if len(words[0]) + 1 + LEAST_BAR > width:
        words = [steps, times]
    if len(words[0]) + 1 + LEAST_BAR > width:
        return [name, *_wrapped(words, width)]
    bar = max(LEAST_BAR, min(MOST_BAR, width - len(words[0]) - 1))
    share = min(1.0, state.progress.steps / max(1, state.status.total_steps))
    done = round(bar * share)
    first = Text.assemble(("━" * done, "green"), ("─" * (bar - done), "dim"), f" {words[0]}")
    return [name, first, *map(Text, words[1:])]


def _curves(state: ConsoleState, width: int) -> list[Text]:
    """Label, curve of all steps so far, newest value."""
    lines = []
    for name, (label, form) in TRACED.items():
        if values := state.history.get(name):
            last = shown(values[-1], form)
            curve = sparkline(values, max(1, min(MOST_CURVE, width - 8 - len(last) - 1)))
            lines.append(Text.assemble((f"{label:<8}", "dim"), (curve, "cyan"), f" {last}"))
    return lines


def _grid(cells: Sequence[str], width: int) -> list[Text]:
    """In columns of one width, as many as fit."""
    if not cells:
        return []
    each = max(map(len, cells)) + GAP
    columns = max(1, (width + GAP) // each)
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    return [Text("".join(f"{cell:<{each}}" for cell in row).rstrip()) for row in rows]


def _transcript(found: Transcript, width: int, room: int) -> list[Text]:
    """Its title, and of its text what fits, up to the end: that is where the answer is."""
    title = _wrapped([found.title], width, 2, "bold")
    lines = _wrapped(found.text.splitlines(), width)
    shown_lines = lines[len(lines) - max(0, room - len(title) - 1) :] if room > len(title) + 1 else []
    return [*title, *shown_lines, Text("any other key: back", "dim")][:room]


def _wrapped(texts: Iterable[str], width: int, most: int | None = None, style: str = "") -> list[Text]:
    """Lines of at most `width` columns, broken between words; of what a model or a tool wrote without control
    characters. Of more than `most` lines the first."""
    lines: list[Text] = []
    for text in texts:
        plain = "".join(one if one.isprintable() else " " for one in text)
        lines += [Text(line.plain.rstrip(), style) for line in Text(plain).wrap(WRAPPING, width)]
    return lines[:most]


def plain_line(state: ConsoleState, waits: bool = True) -> str:
    """The same on one line of at most WIDEST characters: figures that are unknown, or beyond that, are left
    out. `waits`: with failures and who waits for what."""
    status, line = state.status, f"[{state.status.phase}] {state.steps} | {state.times}"
    line += f" | {status.alert.partition(';')[0]}" if status.alert else ""
    known = [
        f"{label} {shown(value, form)}"
        for label, name, form in (_figures(state) if status.phase != "starting" else ())
        if (value := state.get(name)) is not None and not name.startswith("val-core/")
    ]
    named = f"waits: {'; '.join(status.waits)}" if status.waits else ""
    texts = (status.failed, named) if waits else ()
    ends = list(filter(None, texts))
    each = 2 * (WIDEST - len(line)) // (2 * len(ends) + bool(known) or 1) - 3  # twice the figures' share
    kept = sum(min(len(text), each) + 3 for text in ends)
    for at, figure in enumerate(known):
        longer = f"{line}{', ' if at else ' | '}{figure}"
        line = longer if len(longer) + kept <= WIDEST else line
    each = (WIDEST - len(line)) // (len(ends) or 1) - 3
    return line + "".join(f" | {text if len(text) <= each else text[: each - 1] + '…'}" for text in ends)


def _figures(state: ConsoleState) -> list[tuple[str, str, str]]:
    """Those of this kind of run: a supervised one has a loss, all others rewards."""
    other = (REWARD, ZERO_ADVANTAGE) if NLL in state.metrics else (NLL, NLL_HELD_OUT)
    return [figure for figure in FIGURES if figure[1] not in other]
