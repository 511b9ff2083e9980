"""What composes, and what is refused before a process starts."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.algorithms.recipe import Recipe, compose, with_group_policy
from asyncrl.config import parse
from asyncrl.errors import ConfigError

PARTIAL = {"group_policy": "partial"}
SYNC = {"max_staleness": 0}
UNFILTERED = {"filter_zero_variance": False}
PP = {"advantage": "reinforce_pp"}
GAE = {"advantage": "gae", "normalise": "none"}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return compose(parse({"name": "t", "model": {"path": "m"}, "data": {"train": "x"}, **sections}))


def test_the_default_streams_one_step_with_masked_and_truncated_rho() -> None:
    composed_recipe = recipe()
    assert (composed_recipe.barrier, composed_recipe.optimizer_steps, composed_recipe.prox) == (
        False,
        1,
        "current",
    )
    assert [rule.kind for rule in composed_recipe.rules] == ["mask", "weight"]
    assert not (composed_recipe.critic or composed_recipe.reference)


@pytest.mark.parametrize(
    ("sections", "barrier", "prox"),
    [
        ({"algorithm": {"loss": "ppo", "epochs": 2}}, True, "recompute"),
        ({"algorithm": {"loss": "ppo", "epochs": 2, "prox": "loglinear"}}, True, "loglinear"),
        ({"algorithm": {"prox": "recompute"}}, True, "recompute"),
        ({"algorithm": {"loss": "ppo", "prox": "mu"}}, False, "mu"),
        ({"algorithm": {"loss": "gspo", "prox": "mu"}, "buffer": SYNC}, False, "mu"),
        ({"algorithm": {"loss": "ppo", "prox": "mu", "epochs": 2}}, True, "mu"),
        ({"algorithm": {"loss": "m2po"}}, True, "recompute"),  # it masks by the whole batch
        ({"algorithm": {"advantage": "optimal_token_baseline"}}, True, "recompute"),
        ({"algorithm": {"advantage": "reinforce_pp"}, "buffer": UNFILTERED}, True, "current"),  # whitened
        ({"algorithm": {**PP, "normalise": "whiten_running"}, "buffer": UNFILTERED}, False, "current"),
        ({"algorithm": {"normalise": "batch_std"}}, False, "current"),  # divided at the end of the stream
        ({"algorithm": {"normalise": "batch_std", "entropy_coef": 0.1}}, True, "current"),
        ({"kl": {"where": "loss"}}, False, "current"),
        ({"algorithm": {"normalise": "batch_std", "loss": "dro"}}, True, "current"),  # not linear in A
        ({"kl": {"where": "reward"}, "buffer": UNFILTERED}, True, "current"),  # siblings' rewards change
        ({"kl": {"where": "reward"}, "algorithm": GAE, "buffer": UNFILTERED}, False, "current"),
        ({"algorithm": GAE, "buffer": UNFILTERED}, False, "current"),
    ],
)
def test_a_barrier_is_where_something_needs_the_whole_batch(
    sections: dict[str, Any], barrier: bool, prox: str
) -> None:
    composed_recipe = recipe(**sections)
    assert (composed_recipe.barrier, composed_recipe.prox) == (barrier, prox)


def test_models_are_there_for_what_asks_for_them() -> None:
    assert recipe(algorithm=GAE, buffer=UNFILTERED).critic
    assert recipe(kl={"where": "loss"}).kl_estimator == "k2"
    assert recipe(kl={"where": "reward"}, buffer=UNFILTERED).kl_estimator == "k1"
    assert recipe(algorithm={"loss": "tba"}, buffer=UNFILTERED).reference


def test_without_a_word_a_loss_is_corrected_at_its_own_level() -> None:
    assert recipe(algorithm={"loss": "cispo_scalerl"}).rules == []
    (weight,) = recipe(algorithm={"loss": "gspo", "epochs": 2}).rules
    assert weight.kind == "weight" and weight.of.keywords["level"] == "geometric"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"algorithm": {"loss": "pppo"}}, r"algorithm\.loss: unknown loss 'pppo'; did you mean"),
        ({"algorithm": {"loss": {"ppo": {"clip": 1}}}}, r"algorithm\.loss\.ppo: unknown option 'clip'"),
        ({"algorithm": {"advantage": {"rloo": {"gamma": 1}}}}, r"algorithm\.advantage\.rloo: unknown"),
        (
            {"algorithm": {"loss": {"ppo": {}, "dro": {}}}},
            r"algorithm\.loss: .* not 2 \(ppo, dro\)",
        ),
        ({"algorithm": {"loss": "gpg"}}, r"unknown loss 'gpg'; write reinforce instead"),
        ({"algorithm": {"loss": {"aipo": {"cap": 4}}}}, r"write \{cispo_scalerl: \{cap: 2\}\} instead"),
        (
            {"algorithm": {"loss": "decoupled_ppo"}},
            r"write \{ppo: \{dual_clip: 0\}\} instead",
        ),
        (
            {"algorithm": {"loss": {"ppo": {"dual_clip": 0.5}}, "epochs": 2}},
            "to 1 or more, or to 0 to turn it off",
        ),
        ({"algorithm": {"correction": {"mask": {"lo": 1}}}}, r"algorithm\.correction\.mask"),
        ({"algorithm": {"correction": {}}}, "stale data would be used without correction"),
        ({"algorithm": {"correction": {"mask": {}}}}, "stale data would be used without correction"),
        ({"algorithm": {"correction": {"truncate": {}, "ratio": {}}}}, "two weights"),
        ({"algorithm": {"loss": "cispo_scalerl", "correction": {"truncate": {}}}}, "apply the ratio twice"),
        ({"algorithm": {"correction": {"batch_mean": {}}}, "buffer": SYNC}, "no rule sets any"),
        (
            {
                "algorithm": {"correction": {"truncate": {}, "batch_mean": {}}},
                "kl": {"where": "loss"},
            },
            "would also scale",
        ),
        ({"algorithm": {"loss": "ppo"}}, "never clips"),
        ({"algorithm": {"loss": "ppo", "epochs": 2, "prox": "current"}}, "never clips"),
        ({"algorithm": {"steps_per_batch": 2}}, "no trust region"),
        ({"algorithm": {"advantage": "grpo"}, "buffer": PARTIAL}, "biased"),
        (
            {"algorithm": {"advantage": "rloo", "aggregation": "prompt_mean"}, "buffer": PARTIAL},
            "needs complete groups",
        ),
        ({"algorithm": {"advantage": "optimal_token_baseline"}, "buffer": PARTIAL}, "biased|complete groups"),
        (
            {"algorithm": {"normalise": "whiten_running"}, "buffer": PARTIAL | UNFILTERED},
            "leaves out late members",
        ),
        ({"buffer": PARTIAL | SYNC}, "late members arrive after their batch"),
        ({"kl": {"where": "reward"}, "buffer": {"on_stale": "drop"}}, "must be in the batch"),
        ({"algorithm": {"loss": "tba", "advantage": "rloo"}, "buffer": PARTIAL}, "loss 'tba' needs complete"),
        ({"algorithm": {"loss": "tba"}, "buffer": {"on_stale": "drop"}}, "removes members of groups"),
        ({"algorithm": {"loss": "tba"}}, "would discard groups that the loss 'tba' learns from"),
        (
            {"buffer": {"episodes_per_group": 1}},
            "compares siblings, so the policy would learn nothing",
        ),
        ({"algorithm": {"loss": "m2po", "prox": "loglinear"}}, "at the start of the batch; use auto"),
        ({"algorithm": {"prox": "loglinear"}}, "the same as pi with one optimizer step"),
        (
            {"algorithm": {"mask_truncated": True, "shaping": {"overlong": {}}}},
            "penalises episodes that mask_truncated keeps out of the loss",
        ),
        ({"algorithm": {"loss": "m2po", "prox": "mu"}}, "at the start of the batch; use auto"),
        ({"algorithm": {"prox": "mu"}}, "'reinforce' does not use a ratio to prox; use auto"),
        ({"algorithm": {"loss": "cispo_scalerl", "prox": "mu"}}, "does not use a ratio to prox"),
        ({"algorithm": {"loss": "gspo", "prox": "mu"}}, "too tight for stale data when centred on mu"),
        (
            {"algorithm": {"loss": "ppo", "prox": "mu", "correction": {"truncate": {}}}},
            "apply the ratio twice",
        ),
        ({"kl": {"coef": 0.5}}, "have no effect"),
        ({"critic": {"warmup_steps": 3}}, "has no critic"),
        ({"kl": {"where": "loss", "estimator": "k1"}}, "expectation zero"),
        (
            {"kl": {"where": "reward"}, "algorithm": {"advantage": "gdpo"}},
            "reads the reward components",
        ),
        ({"algorithm": {"advantage": "reinforce_pp_baseline"}}, "would bias"),
        (
            {"algorithm": {"advantage": {"grpo_turn": {"turn_gamma": 0.9}}}},
            "turn_gamma the timing of rewards matters",
        ),
        (
            {"algorithm": {"aggregation": "prompt_mean"}, "buffer": {"on_stale": "drop"}},
            "removes members of groups",
        ),
        ({"algorithm": GAE}, "would discard groups that the advantage 'gae' learns from"),
        ({"kl": {"where": "reward"}}, "compares rewards without the KL"),
        (
            {"kl": {"where": "loss", "reference": "t", "coef": 1.0}},
            r"learns from these groups through its teacher \(kl.reference, kl.prompt, scorers\)",
        ),
        (
            {"kl": {"where": "loss", "coef": 1e-3}, "scorers": {"teacher_a": {"path": "t"}}},
            "through its teacher",
        ),
        ({"kl": {"where": "loss", "coef": 1e-3, "prompt": "Think."}}, "through its teacher"),
        (
            {"kl": {"where": "loss", "coef": 1.0}},
            "without a teacher would only pull the policy back to its start",
        ),
        (
            {
                "kl": {"where": "reward", "coef": 1.0},
                "buffer": {"group_policy": "complete", "filter_zero_variance": False},
            },
            "without a teacher would only pull the policy back to its start",
        ),
        (
            {"kl": {"where": "loss", "coef": 1.0}, "scorers": {"reference": {"path": "m"}}},
            "without a teacher would only pull the policy back",
        ),
        (
            {
                "algorithm": {"loss": "sft", "advantage": "constant"},
                "kl": {"where": "loss"},
                "scorers": {"reference": {"path": "m"}},
                "buffer": UNFILTERED | {"episodes_per_group": 1},
            },
            "scorers score only sampled",
        ),
        ({"kl": {"where": "reward", "estimator": "js"}, "buffer": UNFILTERED}, "use kl.where=loss, or k1"),
        (
            {"kl": {"where": "loss", "prompt": "P"}, "rollout": {"agent": "codex"}, "buffer": UNFILTERED},
            "remove rollout.agent",
        ),
        (
            {
                "kl": {"where": "loss", "prompt": "Think."},
                "trainer": {"sequence_parallel": 2, "ranks": 2},
                "buffer": UNFILTERED,
            },
            "set trainer.sequence_parallel=1, or move the teacher to scorers.teacher",
        ),
        (
            {"kl": {"where": "loss", "top_k": 8}},
            "kl.top_k applies only to divergences, but kl.estimator is k2",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(sections: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        recipe(**sections)
    assert "\n" not in str(caught.value)


def test_a_penalty_leaves_the_filter_on_and_a_teacher_learns_from_ties() -> None:
    assert recipe(kl={"where": "loss", "reference": "t", "coef": 0.1}).reference
    assert recipe(kl={"where": "loss", "coef": 0.2}).reference
    assert recipe(kl={"where": "loss", "coef": 0.2}, scorers={"reference": {"path": "m"}}).reference
    assert recipe(kl={"where": "loss", "estimator": "reverse", "coef": 0.01}).divergence == "reverse"
    taught = recipe(kl={"where": "loss", "reference": "t", "coef": 1.0}, buffer=UNFILTERED)
    assert not taught.skips_inert and not taught.divergence and taught.scores_reference


def test_without_staleness_no_correction_is_needed() -> None:
    assert recipe(algorithm={"correction": {}}, buffer=SYNC).rules == []


@pytest.mark.parametrize(
    ("sections", "policy"),
    [
        ({}, "partial"),
        ({"algorithm": {"advantage": "rloo"}}, "partial"),
        ({"algorithm": {"advantage": "grpo"}}, "complete"),
        ({"algorithm": {"aggregation": "prompt_mean"}}, "complete"),
        ({"algorithm": GAE, "buffer": UNFILTERED}, "complete"),  # compares with nobody
        ({"buffer": SYNC}, "complete"),
        ({"buffer": {"on_stale": "hold"}}, "complete"),
        ({"buffer": {"group_policy": "complete"}}, "complete"),
        ({"algorithm": {"loss": "nonsense"}}, "complete"),  # refused by name later
    ],
)
def test_groups_are_partial_where_that_is_unbiased(sections: dict[str, Any], policy: str) -> None:
    config = parse({"name": "t", "model": {"path": "m"}, "data": {"train": "x"}, **sections})
    assert with_group_policy(config).buffer.group_policy == policy
