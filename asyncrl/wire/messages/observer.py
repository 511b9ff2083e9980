"""Coordinator and the launcher's console, control channel."""

from __future__ import annotations

from asyncrl.wire.messages.shared import WireMessage


class ObserverHello(WireMessage, frozen=True):
    """The launcher's console wants status."""


class Status(WireMessage, frozen=True):
    """The state of the run, a few times a second. `gauges` use the names of metrics.jsonl."""

    phase: str
    step: int
    total_steps: int
    gauges: dict[str, float]
    waits: tuple[str, ...]  # who waits for what
    failed: str = ""  # failed attempts and the newest cause, to be shown
    alert: str = ""  # why nothing can be learned, likewise


class StepReport(WireMessage, frozen=True):
    """The metrics row of one committed step, or of a validation. `values`: of single episodes that landed
    since the step before, by metric, for histograms."""

    step: int
    metrics: dict[str, float]
    values: dict[str, list[float]] = {}


class Replace(WireMessage, frozen=True):
    """The processes of a role hang, or that of one `incarnation`: end them, and start others."""

    role: str
    reason: str
    incarnation: str = ""


class RunEnd(WireMessage, frozen=True):
    """Last message: how the run ended. `error` is empty for a completed or stopped run."""

    outcome: str  # completed | stopped | failed
    error: str = ""
