"""Keys of frozen models that score turns and episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from asyncrl.config.base import PathText, Positive, Section, texts
from asyncrl.config.episodes import RolloutConfig

ScorerName = Annotated[str, Meta(pattern=r"^(reference|reward|teacher(_[a-z0-9_]+)?)$")]


ENGINES_URL = "engines"  # stands for the run's engines in place of a URL
TEACHER_COEF = 0.5  # kl.coef from which kl.reference is a teacher; published penalties are smaller


class ScorerConfig(Section, frozen=True):
    """A frozen model on SGLang servers of its own: `reference` for the KL; `teacher` (or several,
    `teacher_NAME`) for distillation, both with the policy's vocabulary; `reward` for a reward model or judge
    in `rollout.reward`. The settings in `engine` also apply to the servers that the run starts."""

    path: PathText = ""
    """Model directory or hub repository from which servers are started; with `urls`, the path is only
    compared with the model on the servers."""
    urls: list[str] = []
    """Attach to these servers instead of starting any. `[engines]`: the run's engines score with the base
    model of their adapters."""
    servers: Positive = 1
    """Number of servers to start."""
    tp: Positive = 1
    """Tensor-parallel size of a server (GPUs per server)."""
    sources: list[str] = []
    """Teachers: data sources whose episodes this teacher scores; empty: all data sources that no other
    teacher names."""

    @property
    def server_count(self) -> int:
        return 0 if ENGINES_URL in self.urls else len(self.urls) or self.servers


def loss_has_teacher(keys: Mapping[str, Any]) -> bool:
    """Tell whether the loss leads to a teacher, by all keys of a configuration: a scorer named `teacher`, a
    prompt for the reference, or a reference with a coefficient too large for a penalty."""
    coef = keys.get("kl.coef", 0.0) if str(keys.get("kl.where")).startswith("loss") else 0.0
    has_teacher = keys.get("kl.prompt") or any(key.startswith("scorers.teacher") for key in keys)
    return bool(coef and has_teacher) or bool(coef >= TEACHER_COEF and keys.get("kl.reference"))


def scorers_named_by(reward: Any) -> set[str]:
    """Return the scorers that `rollout.reward` names."""
    return {text.removeprefix("scorer:") for text in texts(reward) if text.startswith("scorer:")}


def scorer_refusals(
    scorers: Mapping[str, ScorerConfig], rollout: RolloutConfig, reference: str, adapters_apart: bool
) -> dict[str, bool]:
    """Return refusals of scorers that would read nothing, or the same as other scorers, or at another
    temperature, or with changing weights."""
    teachers = [name for name in scorers if name.startswith("teacher")]
    scored_sources = [source for name in teachers for source in scorers[name].sources or [""]]
    without_model = [name for name, scorer in scorers.items() if not (scorer.path or scorer.urls)]
    asked_scorers = scorers_named_by(rollout.reward)
    unknown_scorers = asked_scorers - {*scorers}
    on_engines = {name: scorer for name, scorer in scorers.items() if ENGINES_URL in scorer.urls}

    return {
        f"scorers.{', '.join(on_engines)}: urls=[engines] cannot be combined with other URLs, path, "
        "servers or tp, and cannot serve a reward; remove these settings, or use separate servers": bool(
            {*on_engines} & (asked_scorers | {"reward"})
        )
        or any(
            scorer.path or len(scorer.urls) > 1 or scorer.servers * scorer.tp > 1
            for scorer in on_engines.values()
        ),
        f"scorers.{', '.join(on_engines)}: urls=[engines] needs engines that hold the base model and its "
        "adapters separately; set model.lora_rank and weights.adapters=true, or remove the scorer": (
            bool(on_engines) and not adapters_apart
        ),
        f"rollout.reward uses scorer:{', '.join(sorted(unknown_scorers))}, but scorers does not define "
        "that name; add the scorer": bool(unknown_scorers),
        f"scorers.{', '.join(without_model)}: neither a model nor servers are set; set path or urls": bool(
            without_model
        ),
        "scorers: only teachers take sources, because the reference scores all turns and "
        "rollout.reward calls the reward model; remove the other sources": any(
            scorer.sources for name, scorer in scorers.items() if name not in teachers
        ),
        f"scorers: {' and '.join(teachers)} score the same data source; give each teacher its own sources": (
            len({*scored_sources}) < len(scored_sources)
        ),
        f"rollout.temperature ({rollout.temperature:g}): servers score turns only at temperature 1; set "
        "rollout.temperature=1, or remove scorers.reference and teachers": (
            rollout.temperature != 1 and bool({*scorers} - {"reward"})
        ),
        "kl.reference, scorers.reference and teachers are alternatives; keep only one of them": (
            bool(reference) + ("reference" in scorers) + bool(teachers) > 1
        ),
    }
