"""From names in the configuration to one composed objective, or the reason why it cannot be.

Every component says what it needs; what cannot work together is refused here, before any process starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.algorithms.advantages import Advantage, Scale, advantages
from asyncrl.algorithms.aggregation import Rule as Aggregation
from asyncrl.algorithms.aggregation import aggregations
from asyncrl.algorithms.correction import Rule, select_rules
from asyncrl.algorithms.losses import Loss, losses
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError

DEFAULT_RULES: dict[str, dict[str, str | int | float | bool]] = {"mask": {}, "truncate": {}}


@dataclass(frozen=True)
class Recipe:
    """The components of a run, options bound.

    `barrier`: the whole batch must be in hand before the first backward. `optimizer_steps`: per batch.
    `prox`: how log prox comes about. `critic`, `reference`: whether the model is needed.
    """

    advantage: Advantage
    scale: Scale
    loss: Loss
    rules: Sequence[Rule]
    aggregate: Aggregation
    optimizer_steps: int
    prox: str
    barrier: bool
    critic: bool
    reference: bool

    @property
    def weighted(self) -> bool:
        """A correction weight is in force."""
        return any(rule.kind == "weight" for rule in self.rules)


def compose(config: RunConfig) -> Recipe:
    """Resolve and check. Raises ConfigError naming the key, what clashes and what to do."""
    algorithm, kl = config.algorithm, config.kl
    credit = advantages.load(algorithm.advantage).bound(algorithm.advantage_args, "$.algorithm.advantage_args")
    loss = losses.load(algorithm.loss).bound(algorithm.loss_args, "$.algorithm.loss_args")
    named = algorithm.correction
    if named is None:
        named = DEFAULT_RULES if loss.ratio == "prox" else {}
    scale: Scale = credit.scale if algorithm.normalise == "auto" else algorithm.normalise
    steps = algorithm.steps_per_batch * algorithm.epochs
    prox = algorithm.prox if algorithm.prox != "auto" else ("recompute" if steps > 1 else "current")
    recipe = Recipe(
        advantage=credit,
        scale=scale,
        loss=loss,
        rules=select_rules(named, "$.algorithm.correction"),
        aggregate=aggregations.load(algorithm.aggregation),
        optimizer_steps=steps,
        prox=prox,
        barrier=(
            steps > 1
            or prox == "recompute"
            or scale == "whiten"
            or credit.whole_group
            or loss.prepare is not None
            or (kl.where == "reward" and credit.siblings)
        ),
        critic=credit.critic,
        reference=loss.reference or kl.where != "none",
    )
    _check(config, recipe)
    return recipe


def _check(config: RunConfig, recipe: Recipe) -> None:
    """Refuse what each key allows but together is wrong."""
    algorithm, buffer = config.algorithm, config.buffer
    partial = buffer.group_policy == "partial"
    refusals = {
        f"$.algorithm.loss {algorithm.loss!r} contains pi/mu itself; a weight in $.algorithm.correction would count "
        "it twice; keep masks only": recipe.loss.ratio == "mu" and recipe.weighted,
        "$.algorithm.correction has no weight with max_staleness > 0: stale data would be trained uncorrected; add "
        "truncate, or set max_staleness=0": (
            recipe.loss.ratio == "prox" and not recipe.weighted and buffer.max_staleness > 0
        ),
        f"$.algorithm.loss {algorithm.loss!r} with one optimizer step per batch never clips (pi = prox); use reinforce, "
        "or steps_per_batch or epochs > 1": recipe.loss.clips and recipe.optimizer_steps == 1,
        f"$.algorithm.loss {algorithm.loss!r} with several optimizer steps per batch has no trust region; use one that "
        "clips": algorithm.loss == "reinforce" and recipe.optimizer_steps > 1,
        f"$.algorithm.advantage {algorithm.advantage!r} is biased with group_policy=partial; use rloo": (
            partial and recipe.advantage.siblings and not recipe.advantage.late
        ),
        "$.algorithm.aggregation prompt_mean needs whole groups; use token_mean with group_policy=partial": (
            partial and algorithm.aggregation == "prompt_mean"
        ),
    }
    for message, refused in refusals.items():
        if refused:
            raise ConfigError(message)
