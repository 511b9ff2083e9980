"""Keys of frozen models that score turns and episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from asyncrl.config.base import PathText, Positive, Section, texts
from asyncrl.config.episodes import RolloutConfig

ScorerName = Annotated[str, Meta(pattern=r"^(reference|reward|teacher(_[a-z0-9_]+)?)$")]


ENGINES = "engines"  # in place of a URL
TEACHES = 0.5  # kl.coef from which kl.reference is a teacher; published penalties are below


class ScorerConfig(Section, frozen=True):
    """Names a frozen model on SGLang servers of its own: `reference` for the KL, `teacher` (or several,
    `teacher_NAME`) for distillation, both with the policy's vocabulary; `reward` for `rollout.reward`.
    Started servers take the settings of `engine`, too."""

    path: PathText = ""
    """Model directory or hub repository. The run starts servers with it; with `urls` it is only compared."""
    urls: list[str] = []
    """Attach to these servers instead of starting any. `[engines]`: the run's engines score, with the base of
    their adapters."""
    servers: Positive = 1
    """Servers to start."""
    tp: Positive = 1
    """Tensor-parallel size of a server (GPUs per server)."""
    sources: list[str] = []
    """Teachers: data sources whose episodes it scores; empty: all that no other teacher names."""

    @property
    def keepers(self) -> int:
        return 0 if ENGINES in self.urls else len(self.urls) or self.servers


def taught(keys: Mapping[str, Any]) -> bool:
    """Return whether the loss leads to a teacher, by all keys of a configuration: a scorer of that name, a
    prompt that says more, or a reference with a coefficient that is no penalty's."""
    coef = keys.get("kl.coef", 0.0) if str(keys.get("kl.where")).startswith("loss") else 0.0
    named = keys.get("kl.prompt") or any(key.startswith("scorers.teacher") for key in keys)
    return bool(coef and named) or bool(coef >= TEACHES and keys.get("kl.reference"))


def asked_by(reward: Any) -> set[str]:
    """Return the scorers that `rollout.reward` names."""
    return {text.removeprefix("scorer:") for text in texts(reward) if text.startswith("scorer:")}


def scorer_refusals(
    scorers: Mapping[str, ScorerConfig], rollout: RolloutConfig, reference: str, adapters_apart: bool
) -> dict[str, bool]:
    """Find scorers that would read nothing, or the same as others, or at another temperature, or with weights
    that change."""
    teachers = [name for name in scorers if name.startswith("teacher")]
    named = [source for name in teachers for source in scorers[name].sources or [""]]
    lacking = [name for name, one in scorers.items() if not (one.path or one.urls)]
    asked = asked_by(rollout.reward)
    lent = {name: one for name, one in scorers.items() if ENGINES in one.urls}
    return {
        f"scorers.{', '.join(lent)}: urls=[engines] takes no other URL, path, servers or tp, and is for no "
        "reward; leave these out, or give it servers of its own": bool({*lent} & (asked | {"reward"}))
        or any(one.path or len(one.urls) > 1 or one.servers * one.tp > 1 for one in lent.values()),
        f"scorers.{', '.join(lent)}: urls=[engines] needs engines that hold the base and its adapters "
        "apart; set model.lora_rank and weights.adapters=true, or leave the scorer out": (
            bool(lent) and not adapters_apart
        ),
        f"rollout.reward asks scorer:{', '.join(sorted(asked - {*scorers}))}, which is not among scorers; "
        "add it there": bool(asked - {*scorers}),
        f"scorers.{', '.join(lacking)}: neither a model nor servers; set path, or urls": bool(lacking),
        "scorers: sources are for teachers; the reference scores all turns, and rollout.reward asks the "
        "reward model": any(one.sources for name, one in scorers.items() if name not in teachers),
        f"scorers: {' and '.join(teachers)} score the same data source; give each its own in sources": (
            len({*named}) < len(named)
        ),
        f"rollout.temperature ({rollout.temperature:g}): servers give log-probs of what they read at "
        "temperature 1 only; set 1, or leave out scorers.reference and teachers": (
            rollout.temperature != 1 and bool({*scorers} - {"reward"})
        ),
        "kl.reference, scorers.reference and teachers are two references or more; leave all but one out": (
            bool(reference) + ("reference" in scorers) + bool(teachers) > 1
        ),
    }
