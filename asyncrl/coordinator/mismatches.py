"""Decides what happens to an engine whose log-probs are not the trainer's, by `weights.on_mismatch`."""

from __future__ import annotations

from collections import Counter

from asyncrl.config import RunConfig
from asyncrl.coordinator.state import log
from asyncrl.wire.messages.shared import Loaded, ProbeGap, Replace

# An engine may differ from the trainer by this multiple of the trainer's own rounding. That both round, each
# in its own way, explains a factor of 1.4.
ROUNDING_MULTIPLE = 3.0
MIN_GAP_LIMIT = 1e-3  # nats; honest engines in float32 differ by 1e-5
MIN_TOKENS = 64  # tokens of training, of one version, over which a mean gap is judged


def gap_limit(rounding: float) -> float:
    """Return the largest mean gap, in nats, that `rounding` explains."""
    return max(MIN_GAP_LIMIT, ROUNDING_MULTIPLE * rounding)


class Mismatches:
    """Judges the gaps between engines and trainer, of probes and of trained tokens.

    `count`: mismatches so far. `newest`: the newest one, for the alert. `replacements`: processes to be
    replaced. `fatal`: why the run must stop; '' otherwise.
    """

    def __init__(self, config: RunConfig) -> None:
        self._action = config.weights.on_mismatch
        self._replaced: Counter[str] = Counter()  # by name of the engine
        self._rounding: float | None = None  # nats, of the newest probe
        self.count = 0
        self.newest = ""
        self.replacements: list[Replace] = []
        self.fatal = ""

    def judge_probe(self, peer: bytes, name: str, message: Loaded) -> bool:
        """Return True if the engine may sample. Otherwise its process is to be replaced (the first time), or
        the run to stop."""
        gap = message.probe_gap
        if gap is None:
            return True

        self._rounding = gap.rounding
        if gap.mean <= gap_limit(gap.rounding):
            return True

        self.count += 1
        self.newest = describe_gap(name, message.ref.version.step, gap)
        log.error("%s", self.newest)
        if self._action == "warn":
            return True

        if self._action == "replace" and not self._replaced[name]:
            self._replaced[name] += 1
            role, _, incarnation = peer.decode().split("/")
            self.replacements.append(Replace(role, self.newest, incarnation))
        else:
            again = " again, after it was replaced" if self._replaced[name] else ""
            self.fatal = f"{self.newest}{again}; {ADVICE}"
        return False

    def judge_tokens(self, step: int, mean_gap: float, tokens: float) -> None:
        """Judge the gap of a batch's tokens that the trained version itself has sampled."""
        if self._rounding is None or tokens < MIN_TOKENS or mean_gap <= gap_limit(self._rounding):
            return

        self.count += 1
        self.newest = (
            f"the log-probs that engines reported for {tokens:,.0f} tokens of step {step} differ from the "
            f"trainer's by {mean_gap:.3g} nats on average; rounding explains {gap_limit(self._rounding):.2g}"
        )
        if self._action == "stop":
            self.fatal = f"{self.newest}; {ADVICE}"


ADVICE = (
    "check that the engines serve the model of model.path in model.dtype; to train on their samples all the "
    "same, for example if the engines are quantized on purpose, set weights.on_mismatch=warn"
)


def describe_gap(name: str, step: int, gap: ProbeGap) -> str:
    """Describe an engine's mismatch, with its size."""
    return (
        f"{name} computes a different model from the trainer: its log-probs of v{step} differ by "
        f"{gap.mean:.3g} nats on average (at most {gap.largest:.3g}) over {gap.tokens} tokens of the probe; "
        f"rounding explains {gap_limit(gap.rounding):.2g}"
    )
