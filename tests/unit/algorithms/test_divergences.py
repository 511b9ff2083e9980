"""What distils: gradients of every estimator and divergence, summed over all that a small policy can do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.correction import CorrectionInput, correct_states, select_rules
from asyncrl.algorithms.kl import DIVERGENCES, divergence, kl_tokens, lumped
from asyncrl.trainer.teacher import Teacher, TeacherScores, distances
from tests.fakes.enumeration import (
    ENDED,
    PI,
    REFERENCE,
    TURN,
    error,
    older,
    table,
    token_logp,
    true_gradient,
)

EXACT = 1e-10
TEACHER = REFERENCE.log_softmax(-1)


def plain(p: Tensor, t: Tensor, name: str) -> Tensor:
    """As in the textbook, and differentiated by autograd."""
    m = (p.exp() + t.exp()) / 2
    parts = {
        "forward": t.exp() * (t - p),
        "reverse": p.exp() * (p - t),
        "js": (t.exp() * (t - m.log()) + p.exp() * (p - m.log())) / 2,
    }
    return parts[name].sum(-1)


def visited(language: Any = ENDED, behaviour: Tensor = PI) -> Tensor:
    """How often each state is visited, [13]."""
    chance = token_logp(language, behaviour).sum(1).exp()
    live = language.live
    return torch.zeros(13, dtype=torch.float64).index_add(
        0, language.prefix[live], chance[:, None].expand(live.shape)[live]
    )


def of_states(name: str, behaviour: Tensor = PI) -> Tensor:
    """∇ Σ_s d(s)·D(s), the states fixed: what distillation descends, [39]."""
    logits = PI.clone().requires_grad_()
    total = (visited(behaviour=behaviour) * plain(logits.log_softmax(-1), TEACHER, name)).sum()
    return torch.autograd.grad(total, logits)[0].flatten()


def of_samples(estimator: str) -> Tensor:
    """∇ of the estimator in the loss, over all sequences."""
    logits = PI.clone().requires_grad_()
    logp = token_logp(ENDED, logits)
    chance = logp.detach().sum(1, keepdim=True).exp()
    distance = kl_tokens(logp, token_logp(ENDED, REFERENCE), estimator)
    total = (chance * torch.where(ENDED.live, distance, 0.0)).sum()
    return torch.autograd.grad(total, logits)[0].flatten()


def of_rewards(gamma: float) -> Tensor:
    """−∇ of the policy gradient of rewards −k1, discounted by gamma, over all sequences."""
    logits = PI.clone().requires_grad_()
    logp = token_logp(ENDED, logits)
    reward = -kl_tokens(logp.detach(), token_logp(ENDED, REFERENCE), "k1")
    gain = torch.zeros_like(reward)
    for t in reversed(range(reward.shape[1])):
        after = gain[:, t + 1] if t + 1 < reward.shape[1] else 0.0
        gain[:, t] = reward[:, t] + gamma * after
    chance = logp.detach().sum(1, keepdim=True).exp()
    return -torch.autograd.grad((chance * gain * logp).sum(), logits)[0].flatten()


def test_k2_in_the_loss_is_k1_in_the_reward_without_a_future_and_the_kl_of_each_state() -> None:
    wanted = of_states("reverse")
    assert wanted.norm() > 0.1
    for found in (of_samples("k2"), of_samples("straight_through"), of_rewards(gamma=0)):
        assert error(found, wanted) < EXACT


def test_they_are_the_same_on_every_sample() -> None:
    logp = token_logp(ENDED, PI).detach().requires_grad_()
    reference = token_logp(ENDED, REFERENCE)
    in_loss = torch.autograd.grad(kl_tokens(logp, reference, "k2").sum(), logp)[0]
    advantage = -kl_tokens(logp.detach(), reference, "k1")
    in_reward = torch.autograd.grad(-(advantage * logp).sum(), logp)[0]
    assert torch.equal(in_loss, in_reward)


def test_k1_in_the_reward_with_all_of_the_future_is_the_kl_of_whole_episodes() -> None:
    wanted = true_gradient(ENDED) - true_gradient(ENDED, beta=1)
    assert error(of_rewards(gamma=1), wanted) < EXACT
    assert error(of_states("reverse"), wanted) > 0.1  # which states are visited moves, too


def test_k3_in_the_loss_is_the_kl_the_other_way_round_and_k1_nothing() -> None:
    assert error(of_samples("k3"), of_states("forward")) < EXACT
    assert of_samples("k1").norm() < EXACT


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_has_the_textbook_s_value_and_gradient(name: str) -> None:
    logits = torch.stack([PI, 3 * table(8)]).requires_grad_()
    teacher = torch.stack([TEACHER, table(9).log_softmax(-1)])
    logp = logits.log_softmax(-1)
    values = [f(logp, teacher, name) for f in (divergence, plain)]
    found, wanted = (torch.autograd.grad(v.sum(), logits, retain_graph=True)[0] for v in values)
    assert torch.allclose(*values, atol=1e-14) and error(found, wanted) < EXACT
    assert divergence(teacher[0], teacher[0], name).abs().max() < 1e-14


@pytest.mark.parametrize("name", DIVERGENCES)
def test_what_a_model_excludes_leaves_everything_finite(name: str) -> None:
    logits = torch.tensor([[0.0, -math.inf, 2.0], [5.0, 0.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[0.0, 1.0, -math.inf], [-math.inf, 0.0, 1.0]]).log_softmax(-1)
    value = divergence(logits.log_softmax(-1), teacher, name)
    (slope,) = torch.autograd.grad(value.sum(), logits)
    assert value.isfinite().all() and (value > 0.1).all() and slope.isfinite().all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_teacher_s_bad_number_is_seen_and_spoils_no_gradient(name: str) -> None:
    """As the objective leaves its token out."""
    logits = torch.randn(2, 5, requires_grad=True)
    teacher = torch.randn(2, 5).log_softmax(-1)
    teacher[1, 3] = math.nan
    value = divergence(logits.log_softmax(-1), teacher, name)
    (slope,) = torch.autograd.grad(torch.where(value.isfinite(), value, 0.0).sum(), logits)
    assert value.isfinite().tolist() == [True, False]
    assert slope.isfinite().all() and slope[0].any() and not slope[1].any()


# -- classes of tokens -------------------------------------------------------------------------------------

WORDS = 12


def classes(logp: Tensor, teacher: Tensor, k: int, sampled: Tensor) -> list[Tensor]:
    """Both by the teacher's k, the sampled token and all others."""
    ids = teacher.topk(k).indices
    at = sampled[:, None]
    return [lumped(one.gather(1, ids), one.gather(1, at)[:, 0], ids == at) for one in (logp, teacher)]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_over_classes_it_is_at_most_that_over_tokens(name: str) -> None:
    """And grows with k; with all tokens but one named it is the whole."""
    torch.manual_seed(0)
    logits = torch.randn(40, WORDS, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)
    teacher = torch.randn(40, WORDS, dtype=torch.float64).log_softmax(-1)
    sampled = torch.randint(0, WORDS, (40,))
    whole = plain(logp, teacher, name)
    before = torch.zeros(40, dtype=torch.float64)
    for k in (1, 3, 6, WORDS - 1):
        divergences = divergence(*classes(logp, teacher, k, sampled), name)
        assert (divergences >= before - 1e-12).all() and (divergences <= whole + 1e-12).all()
        assert k == WORDS - 1 or (divergences < whole - 1e-4).any()
        before = divergences.detach()
    slopes = [torch.autograd.grad(v.sum(), logits, retain_graph=True)[0] for v in (divergences, whole)]
    assert torch.allclose(divergences, whole, atol=1e-12) and error(*slopes) < EXACT


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_gradient_over_classes_is_that_of_what_is_computed(name: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(9, WORDS, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(9, WORDS, dtype=torch.float64).log_softmax(-1)
    sampled = torch.arange(9)
    p, t = classes(logits.log_softmax(-1), teacher, 3, sampled)
    mine, wanted = (
        torch.autograd.grad(f(p.clamp(min=-50), t.clamp(min=-50), name).sum(), logits, retain_graph=True)[0]
        for f in (divergence, plain)
    )
    assert error(mine, wanted) < EXACT


def test_the_sampled_token_is_a_class_once_and_a_small_rest_is_not_lost() -> None:
    top = torch.tensor([[0.5, 0.25], [0.5, 0.25]], dtype=torch.float64).log()
    sampled = torch.tensor([0.25, 0.25 - 1e-6], dtype=torch.float64).log()
    twice = torch.tensor([[False, True], [False, False]])
    divergences = lumped(top, sampled, twice).exp()
    assert divergences[0].tolist() == pytest.approx([0.5, 0.0, 0.25, 0.25])
    assert divergences[1].tolist() == pytest.approx([0.5, 0.25, 0.25 - 1e-6, 1e-6], rel=1e-6)
    assert divergences.sum(-1).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("ids", "label", "classes_of_top"),
    [
        pytest.param([2, 7, -1], 1, {0: 2}, id="lacking"),
        pytest.param([0, 3, 0], 1, {1: 3}, id="repeated"),
        pytest.param([1, 3, 2], 1, {1: 3, 2: 2}, id="sampled"),
        pytest.param([0, 3, 0], 0, {1: 3}, id="repeated and sampled"),
    ],
)
def test_ids_that_the_policy_lacks_or_that_are_repeated_or_sampled_are_no_classes_of_their_own(
    ids: list[int], label: int, classes_of_top: dict[int, int]
) -> None:
    """`classes_of_top`: token of the policy by position among the teacher's likeliest. The sampled token is a
    class, and all others are the last one."""
    table = torch.arange(5.0, dtype=torch.float64).log_softmax(-1)[None]
    top = [0.3, 0.2, 0.1]
    teacher_scores = TeacherScores(
        torch.tensor([ids]),
        torch.tensor([top], dtype=torch.float64).log(),
        torch.tensor([0.25], dtype=torch.float64).log(),
    )

    divergences = distances(table, torch.tensor([label]), teacher_scores, Teacher("forward", 3))["divergence"]

    policy = table[0].exp().tolist()
    teacher_classes = [*(top[position] for position in classes_of_top), 0.25]
    policy_classes = [*(policy[token] for token in classes_of_top.values()), policy[label]]
    teacher_classes.append(1 - sum(teacher_classes))
    policy_classes.append(1 - sum(policy_classes))
    wanted = sum(t * math.log(t / p) for t, p in zip(teacher_classes, policy_classes, strict=True))
    assert divergences.item() == pytest.approx(wanted)


# -- states that an older policy visited -------------------------------------------------------------------


def off_policy(name: str, rules: dict[str, Any], lag: float = 1.0) -> Tensor:
    """∇ of a divergence in the loss, weighted as in training, over all sequences of an older policy."""
    logits = PI.clone().requires_grad_()
    live = ENDED.live
    prefix = ENDED.prefix
    mu = token_logp(ENDED, older(lag))
    logp = token_logp(ENDED, PI)
    row = torch.arange(len(live))[:, None].expand(live.shape)[live]
    turn = TURN.expand(live.shape)[live]
    rho = (logp - mu)[live]
    advantage = torch.linspace(-1, 1, len(rho), dtype=torch.float64)  # must not matter
    given = CorrectionInput(rho, rho, advantage, row, turn, torch.ones_like(row, dtype=torch.bool))
    weight = correct_states(select_rules(rules, "rules"), given).weight
    chance = mu.sum(1).exp()[row]
    values = divergence(logits.log_softmax(-1)[prefix[live]], TEACHER[prefix[live]], name)
    return torch.autograd.grad((chance * weight * values).sum(), logits)[0].flatten()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_ratio_of_what_led_to_a_state_makes_it_the_policy_s_own(name: str) -> None:
    """The sampled token itself, and what follows, need no weight."""
    divergences = off_policy(name, {"ratio": {"level": "sequence"}})
    assert error(divergences, of_states(name)) < EXACT
    assert error(off_policy(name, {"ratio": {"level": "turn"}}), of_states(name)) > 1e-3


@pytest.mark.parametrize(
    "rules", [{}, {"truncate": {}}, {"mask": {}, "truncate": {}}, {"mask": {}, "ratio": {}}]
)
def test_a_weight_of_single_tokens_leaves_the_states_as_they_were_visited(rules: dict[str, Any]) -> None:
    for name in DIVERGENCES:
        assert error(off_policy(name, rules), of_states(name, behaviour=older(1.0))) < EXACT


def test_turns_of_several_agents_between_each_other_go_on() -> None:
    rho = torch.tensor([0, 0.1, 0, 0.1, 0, 0.1], dtype=torch.float64)
    row = torch.tensor([0, 0, 1, 1, 0, 0])
    turn = torch.tensor([0, 0, 1, 1, 2, 2])
    given = CorrectionInput(rho, rho, rho, row, turn, torch.ones(6, dtype=torch.bool))
    found = correct_states(select_rules({"ratio": {"level": "sequence"}}, "rules"), given).weight
    assert found.log().tolist() == pytest.approx([0, 0, 0, 0, 0.1, 0.1])


def test_prefixes_are_truncated_and_masks_of_episodes_hold() -> None:
    """Two episodes, of two turns and of one; log-ratios are powers of two, one token is stale."""
    log2 = math.log(2)
    rho = torch.tensor([1, 2, -1, 0, 3, -9], dtype=torch.float64) * log2
    fresh = torch.tensor([True, True, True, True, True, False])
    given = CorrectionInput(
        rho, rho, -torch.ones(6), torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 0, 0]), fresh
    )

    def weights(**rules: Any) -> list[float]:
        return correct_states(select_rules(rules, "rules"), given).weight.tolist()

    assert weights(ratio={"level": "sequence"}) == pytest.approx([1, 2, 8, 4, 1, 8])
    assert weights(truncate={"level": "sequence"}) == pytest.approx([1, 2, 5, 4, 1, 5])
    assert weights(truncate={"level": "turn"}) == pytest.approx([1, 2, 1, 0.5, 1, 5])
    assert weights(truncate={"level": "geometric"}, mask={}) == [1.0] * 6
    assert weights(veto={"least": 0.6}, truncate={}) == pytest.approx([0, 0, 0, 0, 1, 1])
