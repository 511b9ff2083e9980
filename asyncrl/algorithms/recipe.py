"""From names in the configuration to one composed objective, or a ConfigError with the reason.

Every component declares what it needs; what cannot work together is refused here, before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from asyncrl.algorithms import batch_losses, token_losses  # noqa: F401  they register their losses
from asyncrl.algorithms.advantages import configured_advantage, load_named_files
from asyncrl.algorithms.aggregation import Aggregation, aggregations
from asyncrl.algorithms.correction import Rule, select_rules
from asyncrl.algorithms.credit import Advantage, Scale
from asyncrl.algorithms.losses import Loss, losses
from asyncrl.config import (
    DIVERGENCE_NAMES,
    CriticConfig,
    KLConfig,
    Options,
    RunConfig,
    leaves,
    loss_has_teacher,
)
from asyncrl.errors import ConfigError
from asyncrl.registry import name_and_options

END_SCALARS = ("batch_std", "nonzero")


@dataclass(frozen=True)
class Recipe:
    """The components of a run, options bound.

    `barrier`: the whole batch must have arrived before the first backward. `optimizer_steps`: per batch.
    `prox`: how log prox is computed. `critic`, `reference`: whether the model is needed.
    `skips_inert`: episodes whose advantages are 0 change nothing: the whole gradient is proportional to the
    advantages, and neither their ratios nor their distance from a reference change the step.
    """

    advantage_name: str
    advantage: Advantage
    scale: Scale
    loss_name: str
    loss: Loss
    rules: Sequence[Rule]
    aggregate: Aggregation
    optimizer_steps: int
    prox: str
    barrier: bool
    critic: bool
    reference: bool
    kl_estimator: str
    skips_inert: bool

    @property
    def divergence(self) -> str:
        """Name the divergence in the loss; empty: the estimator reads sampled tokens alone."""
        return self.kl_estimator if self.kl_estimator in DIVERGENCE_NAMES else ""

    @property
    def scores_reference(self) -> bool:
        """The reference's log-probs are wanted before the policy's forward."""
        return self.reference and (not self.divergence or self.loss.reference)

    @property
    def batch_mean_weight(self) -> bool:
        """Correction weights are divided by their mean over the batch."""
        return any(rule.kind == "scale" for rule in self.rules)

    @property
    def weighted(self) -> bool:
        """A correction weight is used."""
        return any(rule.kind == "weight" for rule in self.rules)


def compose(config: RunConfig) -> Recipe:
    """Resolve and check. Raises ConfigError naming the key, what clashes and what to do."""
    loss = loss_of(config)
    algorithm = config.algorithm
    kl_config = config.kl
    advantage = configured_advantage(config)
    if algorithm.prox == "mu":
        loss = replace(loss, ratio="mu")  # u = pi/mu
    aggregate = aggregations.load(algorithm.aggregation, "algorithm.aggregation")
    named_rules = default_rules(loss) if algorithm.correction is None else algorithm.correction
    rules = select_rules(named_rules, "algorithm.correction")
    scale: Scale = advantage.scale if algorithm.normalise == "auto" else algorithm.normalise
    optimizer_steps = algorithm.steps_per_batch * algorithm.epochs
    batch_wide = advantage.whole_group or loss.prepare is not None
    prox = algorithm.prox if algorithm.prox != "auto" else ("recompute" if optimizer_steps > 1 else "current")
    only_policy_loss = loss.linear and not (kl_config.in_loss or algorithm.entropy_coef > 0)
    recipe = Recipe(
        advantage_name=name_and_options(algorithm.advantage)[0],
        advantage=advantage,
        scale=scale,
        loss_name=name_and_options(algorithm.loss)[0],
        loss=loss,
        rules=rules,
        aggregate=aggregate.bound({"length": config.rollout.max_tokens}, "algorithm.aggregation"),
        optimizer_steps=optimizer_steps,
        prox="recompute" if batch_wide and algorithm.prox == "auto" else prox,
        barrier=(
            batch_wide
            or optimizer_steps > 1
            or prox == "recompute"
            or scale == "whiten"
            or (kl_config.where == "reward" and advantage.siblings)
            # Advantages are divided at the end of a streamed batch only if the gradient holds nothing else.
            or (scale in END_SCALARS and not only_policy_loss)
        ),
        critic=advantage.critic,
        reference=loss.reference or kl_config.where != "none",
        kl_estimator=kl_config.estimator
        if kl_config.estimator != "auto"
        else {"reward": "k1"}.get(kl_config.where, "k2"),
        skips_inert=only_policy_loss
        and not (advantage.critic or algorithm.ess_lr or kl_config.where != "none")
        and all(rule.kind != "scale" for rule in rules),
    )

    for message, refused in _refusals(config, recipe).items():
        if refused:
            raise ConfigError(message)

    return recipe


def loss_of(config: RunConfig) -> Loss:
    """The loss, options bound, once all named files are imported."""
    load_named_files(config)
    name, options = name_and_options(config.algorithm.loss, "algorithm.loss")
    return losses.load(name, "algorithm.loss").bound(options, f"algorithm.loss.{name}")


def imitates(config: RunConfig) -> bool:
    """The run learns from conversations of its data instead of sampled ones: its loss says so."""
    return loss_of(config).demonstrations


def with_group_policy(config: RunConfig) -> RunConfig:
    """With `partial` or `complete` in place of `auto`: partial where episodes are compared with siblings, the
    algorithm stays unbiased with those that land late, and tokens that get too old are masked one by one."""
    if config.buffer.group_policy != "auto":
        return config
    complete, partial = (
        msgspec.structs.replace(config, buffer=msgspec.structs.replace(config.buffer, group_policy=policy))
        for policy in ("complete", "partial")
    )

    try:
        unbiased = compose(partial).advantage.siblings and config.buffer.on_stale == "mask"
    except ConfigError:
        unbiased = False

    return partial if unbiased else complete


def default_rules(loss: Loss) -> Mapping[str, Options]:
    """The correction of a loss where the configuration has none: no rules for a loss with pi/mu."""
    if loss.ratio == "mu":
        return {}
    return {"mask": {}, "truncate": {}} if loss.level == "token" else {"truncate": {"level": loss.level}}


def _refusals(config: RunConfig, recipe: Recipe) -> dict[str, bool]:
    """Combinations of valid values that are wrong: message → whether it applies."""
    parts = (
        _ratio_refusals,
        _group_refusals,
        _filter_refusals,
        _demonstration_refusals,
        _unused_setting_refusals,
    )
    return {message: applies for part in parts for message, applies in part(config, recipe).items()}


def _ratio_refusals(config: RunConfig, recipe: Recipe) -> dict[str, bool]:
    """Ratios counted twice or not at all, and trust regions without effect."""
    algorithm = config.algorithm
    kl = config.kl
    loss = recipe.loss
    has_other_terms = kl.in_loss or algorithm.entropy_coef > 0
    several_steps = recipe.optimizer_steps > 1
    name = f"algorithm.loss {recipe.loss_name!r}"
    dual_clip = getattr(loss.of, "keywords", {})["dual_clip"] if recipe.loss_name == "ppo" else 0

    return {
        "algorithm.loss.ppo.dual_clip must not be between 0 and 1; set it to 1 or more, or to 0 to "
        "turn it off": (0 < dual_clip < 1),
        f"{name} already contains pi/mu, so a weight in algorithm.correction would apply the ratio "
        "twice; keep only masks": loss.ratio == "mu" and recipe.weighted,
        "algorithm.correction has no weight, but max_staleness > 0, so stale data would be used "
        "without correction; add truncate, or set max_staleness=0": (
            loss.ratio == "prox" and not recipe.weighted and config.buffer.max_staleness > 0
        ),
        "algorithm.correction: batch_mean normalises the weights, but no rule sets any; add truncate, "
        "or remove batch_mean": recipe.batch_mean_weight and not recipe.weighted,
        "algorithm.correction: batch_mean would also scale the terms added to the policy loss; remove "
        "batch_mean, or remove both the KL in the loss and the entropy bonus": (
            recipe.batch_mean_weight and has_other_terms
        ),
        f"{name} never clips with one optimizer step per batch (pi = prox); use reinforce or prox=mu, "
        "or raise steps_per_batch or epochs above 1": loss.clips
        and not several_steps
        and recipe.prox != "mu",
        f"{name} never clips with prox=current (pi = prox); use recompute or loglinear": (
            loss.clips and several_steps and recipe.prox == "current"
        ),
        f"{name} has no trust region, which several optimizer steps per batch need; use a loss that clips": (
            loss.ratio == "prox" and not loss.trusts and several_steps
        ),
        f"algorithm.prox {algorithm.prox!r}: the loss or the advantage needs the policy at the start of "
        "the batch; use auto": algorithm.prox in ("current", "loglinear", "mu")
        and (recipe.advantage.whole_group or loss.prepare is not None),
        f"algorithm.prox mu: {name} does not use a ratio to prox; use auto": (
            recipe.prox == "mu" and not loss.trusts
        ),
        f"algorithm.prox mu: the clip bounds of {name} are far too tight for stale data when centred on "
        "mu; use auto, or max_staleness=0": recipe.prox == "mu"
        and loss.level != "token"
        and config.buffer.max_staleness > 0,
        "kl.estimator k1 has a gradient with expectation zero in the loss; use k2 or straight_through": (
            kl.in_loss and recipe.kl_estimator == "k1"
        ),
        f"kl.estimator {kl.estimator} compares whole distributions, but kl.where=reward uses one number per "
        "token; use kl.where=loss, or k1": kl.where == "reward" and bool(recipe.divergence),
    }


def _group_refusals(config: RunConfig, recipe: Recipe) -> dict[str, bool]:
    """Members that a baseline, a loss or a normaliser would miss."""
    algorithm = config.algorithm
    buffer = config.buffer
    loss = recipe.loss
    advantage = recipe.advantage
    partial = buffer.group_policy == "partial"
    name = f"algorithm.advantage {recipe.advantage_name!r}"

    return {
        f"{name} is biased with group_policy=partial, because it compares an episode with a group that "
        "includes the episode, but a late episode with a group that does not; use dr_grpo, rloo or "
        "opo_loo, or group_policy=complete": (partial and advantage.siblings and not advantage.late),
        f"algorithm.normalise ({recipe.scale}) subtracts the batch mean, which leaves out late members "
        "of a group with group_policy=partial; use none or batch_std": (
            partial and recipe.scale in ("whiten", "whiten_running")
        ),
        "buffer.max_staleness is 0, but with group_policy=partial late members arrive after their "
        "batch, too stale to train on; use group_policy=complete": partial and buffer.max_staleness == 0,
        f"{name} needs complete groups; set group_policy=complete": (
            partial and (advantage.whole_group or advantage.greedy)
        ),
        f"algorithm.loss {recipe.loss_name!r} needs complete groups; set group_policy=complete": (
            partial and loss.whole_group
        ),
        f"algorithm.aggregation {algorithm.aggregation!r} needs complete groups; use token_mean with "
        "group_policy=partial": partial and recipe.aggregate.whole_group,
        "buffer.on_stale drop removes members of groups, but the loss, advantage or aggregation needs "
        "complete groups; use mask or hold": buffer.on_stale == "drop"
        and (advantage.whole_group or loss.whole_group or recipe.aggregate.whole_group),
        f"buffer.episodes_per_group is 1, but the advantage {recipe.advantage_name!r} compares "
        "siblings, so the policy would learn nothing; use more episodes, or reinforce_pp, gae or remax": (
            advantage.siblings and buffer.episodes_per_group == 1
        ),
        "kl.where reward changes the baseline that siblings provide, so all siblings must be in the batch; "
        "use group_policy=complete and on_stale=mask or hold, or kl.where=loss": config.kl.where == "reward"
        and advantage.siblings
        and (partial or buffer.on_stale == "drop"),
        f"{name} reads the reward components, which algorithm.shaping and kl.where=reward do not "
        "change; remove these settings, or use kl.where=loss": (
            advantage.components and (bool(algorithm.shaping) or config.kl.where == "reward")
        ),
    }


def _filter_refusals(config: RunConfig, recipe: Recipe) -> dict[str, bool]:
    """Groups that the zero-variance filter removes although a component learns from them."""
    advantage = recipe.advantage
    kl_config = config.kl
    key = "buffer.filter_zero_variance"
    filters_groups = config.buffer.filter_zero_variance

    return {
        f"{key} would discard groups that the advantage {recipe.advantage_name!r} learns from; set it "
        "to false": (filters_groups and not (advantage.siblings or advantage.greedy)),
        f"{key} would discard groups that the loss {recipe.loss_name!r} learns from; set it to false": (
            filters_groups and recipe.loss.whole_group
        ),
        f"{key} compares undiscounted rewards, but with turn_gamma the timing of rewards matters; set "
        "it to false": (filters_groups and bool(advantage.siblings and advantage.discount != 1)),
        f"algorithm.normalise ({recipe.scale}) subtracts a batch mean, which "
        "buffer.filter_zero_variance would bias; turn one of the two off": filters_groups
        and recipe.scale in ("whiten", "whiten_running"),
        f"{key} compares rewards without the KL that kl.where=reward subtracts; set it to false, or use "
        "kl.where=loss": filters_groups and kl_config.where == "reward",
        f"{key} would discard groups with equal rewards, but the policy still learns from these groups "
        "through its teacher (kl.reference, kl.prompt, scorers); set it to false": filters_groups
        and loss_has_teacher(dict(leaves(msgspec.to_builtins(config)))),
    }


def _demonstration_refusals(config: RunConfig, recipe: Recipe) -> dict[str, bool]:
    """Name the keys that make no sense for conversations that nobody has sampled and that earn nothing."""
    demonstrations = recipe.loss.demonstrations
    name = f"algorithm.loss {recipe.loss_name!r}"
    size = config.buffer.episodes_per_group
    temperature = config.rollout.temperature

    return {
        f"buffer.episodes_per_group: {name} would train on each conversation {size} times; set it to 1": (
            demonstrations and size != 1
        ),
        f"rollout.temperature ({temperature}): {name} uses the likelihood at temperature 1; set it to 1": (
            demonstrations and temperature != 1
        ),
        f"{name} ignores the reward; remove algorithm.shaping and kl.where=reward (kl.where=loss works)": (
            demonstrations and (bool(config.algorithm.shaping) or config.kl.where == "reward")
        ),
        f"{name}: scorers score only sampled turns, so every turn would be skipped; use kl.reference": (
            demonstrations and config.scored_reference
        ),
    }


def _unused_setting_refusals(config: RunConfig, recipe: Recipe) -> dict[str, bool]:
    """Settings without effect."""
    teachers = [name for name in config.scorers if name.startswith("teacher")]
    return {
        "algorithm.shaping overlong penalises episodes that mask_truncated keeps out of the loss; "
        "remove one of the two": (config.algorithm.mask_truncated and "overlong" in config.algorithm.shaping),
        "algorithm.prox loglinear is the same as pi with one optimizer step per batch; use auto": (
            config.algorithm.prox == "loglinear" and recipe.optimizer_steps == 1
        ),
        "kl.coef of 1 or more without a teacher would only pull the policy back to its start; set "
        "kl.reference, kl.prompt or scorers.teacher, or a kl.coef below 1": config.kl.where != "none"
        and config.kl.coef >= 1
        and not (config.kl.reference or config.kl.prompt or teachers),
        "kl.prompt works only for episodes played turn by turn; remove rollout.agent or kl.prompt": bool(
            config.kl.prompt and (config.rollout.agent or recipe.loss.demonstrations)
        ),
        "kl.prompt makes the teacher's rows longer, so ranks would split these rows at different "
        "positions; set trainer.sequence_parallel=1, or move the teacher to scorers.teacher": bool(
            config.kl.prompt
        )
        and config.trainer.sequence_parallel > 1
        and not config.scored_reference,
        f"kl.top_k applies only to divergences, but kl.estimator is {recipe.kl_estimator}; use "
        f"{', '.join(DIVERGENCE_NAMES)}, or remove kl.top_k": config.kl.top_k > 0 and not recipe.divergence,
        "the other kl keys have no effect, because kl.where is none; set kl.where, or leave the others "
        "at their defaults": not recipe.reference and config.kl != KLConfig(),
        f"kl.estimator {recipe.kl_estimator} compares the whole vocabulary, but scorers return only the most "
        "likely tokens; set kl.top_k, or use kl.reference": bool(recipe.divergence)
        and config.scored_reference
        and not config.kl.top_k,
        "scorers: a reference or teacher has no effect with kl.where=none; set kl.where": (
            config.scored_reference and not recipe.reference
        ),
        f"the critic keys have no effect, because the advantage {recipe.advantage_name!r} has no "
        "critic; use gae, or remove these keys": not recipe.critic and config.critic != CriticConfig(),
    }
